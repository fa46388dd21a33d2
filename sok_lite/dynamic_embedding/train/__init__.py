"""TFRA's `train`: checkpoints with the rows of dynamic embeddings in files beside them."""

from sok_lite.dynamic_embedding.train.checkpoint import DECheckpoint, DEHvdSaver

Checkpoint = DECheckpoint

__all__ = ["Checkpoint", "DECheckpoint", "DEHvdSaver"]
