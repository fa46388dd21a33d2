"""Dynamic embeddings in Keras: layers, saving, callbacks."""

from sok_lite.dynamic_embedding.keras import callbacks, layers, models
from sok_lite.dynamic_embedding.keras.callbacks import callbacks_for
from sok_lite.dynamic_embedding.keras.layers import layers_for

__all__ = ["callbacks", "callbacks_for", "layers", "layers_for", "models"]
