"""Models for serving: a SavedModel of plain TensorFlow operations, which needs no sok_lite."""
