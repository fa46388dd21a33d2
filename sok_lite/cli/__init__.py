"""The command line `sok-lite`: inspects, verifies and converts checkpoints, without tables."""
