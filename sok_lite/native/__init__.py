"""The library of TensorFlow's operations on tables: found, loaded, and how it enters Python."""
