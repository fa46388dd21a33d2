"""The engine: arrays in, arrays out, no TensorFlow."""
