"""Tables as Keras layers: `model.fit` trains them, `model.save` saves them.

The names below belong to `tf.keras`. For tf_keras beside Keras 3, call `classes_for(tf_keras)`.
"""

from sok_lite.keras.classes import (
    AllRanks,
    Checkpoint,
    Embedding,
    Embeddings,
    Expire,
    Table,
    TableMetrics,
    classes_for,
)
from sok_lite.keras.data_sharding import equal_steps, shard
from sok_lite.keras.features import Feature

__all__ = [
    "AllRanks",
    "Checkpoint",
    "Embedding",
    "Embeddings",
    "Expire",
    "Feature",
    "Table",
    "TableMetrics",
    "classes_for",
    "equal_steps",
    "shard",
]
