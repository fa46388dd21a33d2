"""Reports of tables and of profiles: numbers, and how they are shown. No TensorFlow."""
