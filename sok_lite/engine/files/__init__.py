"""The engine's checkpoints: their files, how they are written, and how they come back."""
