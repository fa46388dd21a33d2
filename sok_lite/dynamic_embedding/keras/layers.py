"""Layers of dynamic embeddings: `Embedding`, `SquashedEmbedding`, `FieldWiseEmbedding`, ...

Beside them `LayerNormalization`, which is that of Keras and takes ragged rows as well.

They are layers of `tf.keras`. A program that uses tf_keras beside Keras 3 has those of tf_keras by
`layers_for(tf_keras)`.
"""

import functools
import sys
from types import SimpleNamespace
from typing import Any

import tensorflow as tf

from sok_lite.bridge.keras import held
from sok_lite.bridge.keras.classes import layer_class, register_as_layer, root_of
from sok_lite.dynamic_embedding.keras import field_wise, parts
from sok_lite.dynamic_embedding.optimizer import DynamicEmbeddingOptimizer

__all__ = [
    "BasicEmbedding",
    "Embedding",
    "FieldWiseEmbedding",
    "HvdAllToAllEmbedding",
    "LayerNormalization",
    "SquashedEmbedding",
    "layers_for",
]

_PACKAGE = "sok_lite.dynamic_embedding"  # of what Keras saves by name


def layers_for(package: Any) -> SimpleNamespace:
    """Returns the layers as classes of a Keras, which also knows them by name then.

    Args:
      package: `keras`, `tf_keras` or `tf.keras`.

    Raises:
      TypeError: it is none of them.
    """
    return _layers_of(root_of(package))


@functools.cache
def _layers_of(package: Any) -> SimpleNamespace:
    _read_old_optimizers(package)
    base = layer_class(package)

    def made(name: str, part: type, above: type = base) -> Any:
        members = {"__module__": __name__, "package": package}
        return register_as_layer(_PACKAGE, name, part, above, members)

    embedding = made("Embedding", parts.EmbeddingPart)
    return SimpleNamespace(
        Embedding=embedding,
        BasicEmbedding=embedding,
        SquashedEmbedding=made("SquashedEmbedding", parts.SquashedEmbeddingPart, embedding),
        FieldWiseEmbedding=made("FieldWiseEmbedding", field_wise.FieldWiseEmbeddingPart, embedding),
        HvdAllToAllEmbedding=made(
            "HvdAllToAllEmbedding", parts.HvdAllToAllEmbeddingPart, embedding
        ),
        LayerNormalization=made(
            "LayerNormalization", parts.LayerNormalizationPart, package.layers.LayerNormalization
        ),
    )


def _read_old_optimizers(package: Any) -> None:
    """Has a Keras read optimizers in files of sok_lite before 2026-11-27, as it saved them then."""

    def from_config(made: type, config: dict[str, Any], custom_objects: Any = None) -> Any:
        plain = package.saving.deserialize_keras_object(config["optimizer"], custom_objects)
        return DynamicEmbeddingOptimizer(plain, synchronous=config["synchronous"])

    name = "DynamicEmbeddingOptimizer"
    members = {"get_config": dict, "from_config": classmethod(from_config)}
    package.saving.register_keras_serializable(_PACKAGE, name)(type(name, (), members))


_of_program = layers_for(tf.keras)
Embedding = _of_program.Embedding
BasicEmbedding = _of_program.BasicEmbedding
SquashedEmbedding = _of_program.SquashedEmbedding
FieldWiseEmbedding = _of_program.FieldWiseEmbedding
HvdAllToAllEmbedding = _of_program.HvdAllToAllEmbedding
LayerNormalization = _of_program.LayerNormalization
# A program that has imported tf_keras as well may load a model with it.
for _name in held.PACKAGES:
    if hasattr(sys.modules.get(_name), "layers"):
        layers_for(sys.modules[_name])
