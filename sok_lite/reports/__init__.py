"""Reports of tables: numbers, and how they are shown. No TensorFlow."""
