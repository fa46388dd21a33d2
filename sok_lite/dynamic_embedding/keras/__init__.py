"""Dynamic embeddings in Keras: layers, saving, callbacks."""

from sok_lite.dynamic_embedding.keras import layers
from sok_lite.dynamic_embedding.keras.layers import layers_for

__all__ = ["layers", "layers_for"]
