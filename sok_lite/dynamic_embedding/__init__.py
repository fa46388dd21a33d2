"""TFRA's face: its words, argument checks and error texts on the bridge."""
