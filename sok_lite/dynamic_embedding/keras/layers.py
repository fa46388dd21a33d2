"""Layers of dynamic embeddings: `Embedding`, `SquashedEmbedding`, `FieldWiseEmbedding`, ...

They are layers of `tf.keras`. A program that uses tf_keras beside Keras 3 has those of tf_keras by
`layers_for(tf_keras)`.
"""

import sys
from types import SimpleNamespace, new_class
from typing import Any

import tensorflow as tf

from sok_lite.bridge import keras_guard
from sok_lite.dynamic_embedding.keras import parts
from sok_lite.dynamic_embedding.optimizer import DynamicEmbeddingOptimizer
from sok_lite.dynamic_embedding.saved_optimizer import PACKAGE, register

__all__ = [
    "BasicEmbedding",
    "Embedding",
    "FieldWiseEmbedding",
    "HvdAllToAllEmbedding",
    "SquashedEmbedding",
    "layers_for",
]

_made: dict[str, SimpleNamespace] = {}


def layers_for(package: Any) -> SimpleNamespace:
    """Returns the layers as classes of a Keras, which also knows them by name then.

    Args:
      package: `keras`, `tf_keras` or `tf.keras`.

    Raises:
      TypeError: it is none of them.
    """
    root = root_of(package)
    if root not in _made:
        _made[root] = _layers_of(sys.modules[root])
    return _made[root]


def root_of(package: Any) -> str:
    """Returns the name of the Keras that a package is, or has the classes of.

    Raises:
      TypeError: it is none.
    """
    layer = getattr(getattr(package, "layers", None), "Layer", None)
    root = "" if layer is None else layer.__module__.split(".")[0]
    if root not in keras_guard.PACKAGES:
        raise TypeError(f"`package` must be keras, tf_keras or tf.keras. Received: {package!r}.")
    return root


def _layers_of(package: Any) -> SimpleNamespace:
    register(package, DynamicEmbeddingOptimizer)
    base = package.layers.Layer
    if package.__name__ == "keras":
        base = _listing(base)

    def made(name: str, part: type, above: type = base) -> Any:
        def fill(namespace: dict[str, Any]) -> None:
            namespace |= {"__module__": __name__, "__doc__": part.__doc__, "package": package}

        cls = new_class(name, (part, above), {}, fill)
        return package.saving.register_keras_serializable(PACKAGE, name)(cls)

    embedding = made("Embedding", parts.EmbeddingPart)
    return SimpleNamespace(
        Embedding=embedding,
        BasicEmbedding=embedding,
        SquashedEmbedding=made("SquashedEmbedding", parts.SquashedEmbeddingPart, embedding),
        FieldWiseEmbedding=made("FieldWiseEmbedding", parts.FieldWiseEmbeddingPart, embedding),
        HvdAllToAllEmbedding=made(
            "HvdAllToAllEmbedding", parts.HvdAllToAllEmbeddingPart, embedding
        ),
    )


def _listing(layer: Any) -> Any:
    """Returns a layer class of Keras 3 that lists its shadow among the weights.

    Keras 3 lists variables of its own class only.
    """

    class ListingLayer(layer):
        """A layer whose attribute `shadow` is among its weights."""

        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.supports_jit = False  # of "auto": XLA cannot call the host

        def _with_shadow(self, variables: list[Any]) -> list[Any]:
            shadow = getattr(self, "shadow", None)
            return variables if shadow is None else [*variables, shadow]

        @property
        def variables(self) -> list[Any]:
            return self._with_shadow(super().variables)

        @property
        def weights(self) -> list[Any]:
            return self._with_shadow(super().weights)

        @property
        def trainable(self) -> bool:
            return super().trainable

        @trainable.setter
        def trainable(self, value: bool) -> None:
            layer.trainable.fset(self, value)
            if getattr(self, "shadow", None) is not None:
                self.shadow.is_frozen = not value

        def compute_output_spec(self, *args: Any, **kwargs: Any) -> Any:
            if args and tf.as_dtype(getattr(args[0], "dtype", tf.int64)).is_floating:
                # A Sequential without an Input builds itself so, then calls its layers as they are.
                raise NotImplementedError(
                    f"{self.name!r} looks up keys, which are {self.params.key_dtype.name}. "
                    f"Received: {args[0].dtype}. Give keras.Input(..., dtype="
                    f"{self.params.key_dtype.name!r})."
                )
            # Not by `compute_output_shape`, which knows neither dtype nor raggedness.
            return super(layer, self).compute_output_spec(*args, **kwargs)

    return ListingLayer


_of_program = layers_for(tf.keras)
Embedding = _of_program.Embedding
BasicEmbedding = _of_program.BasicEmbedding
SquashedEmbedding = _of_program.SquashedEmbedding
FieldWiseEmbedding = _of_program.FieldWiseEmbedding
HvdAllToAllEmbedding = _of_program.HvdAllToAllEmbedding
# A program that has imported tf_keras as well may load a model with it.
for _name in keras_guard.PACKAGES:
    if hasattr(sys.modules.get(_name), "layers"):
        layers_for(sys.modules[_name])
