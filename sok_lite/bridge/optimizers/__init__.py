"""The step of an optimizer: what a wrapped one stands for, and the host's half of an update."""
