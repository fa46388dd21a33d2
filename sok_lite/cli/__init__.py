"""The command line, `sok-lite`: looks at checkpoints and makes others of them, without tables."""
