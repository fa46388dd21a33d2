"""Optimizers that train tables, as Keras builds and saves them.

The class of such an optimizer is made from its own class. It differs where Keras would ask about
tables: no dense states are made for them, and what `model.save` writes of the optimizer becomes one
that trains tables again.
"""

import sys
from collections.abc import Callable, Sequence
from types import new_class
from typing import Any

from sok_lite.bridge.optimizers.copies import AROUND, own_class
from sok_lite.dynamic_embedding.trainable import TrainableWrapper

PACKAGE = "sok_lite.dynamic_embedding"
NAME = "DynamicEmbeddingOptimizer"
# By the class of the optimizer. There are few, and programs keep them.
_classes: dict[type, type] = {}

Wrap = Callable[..., Any]


def known_to_keras(optimizer: Any, wrap: Wrap, synchronous: bool) -> None:
    """Makes an optimizer one whose tables Keras knows of. Its class changes, under the same name.

    Args:
      optimizer: of Keras 3 or tf_keras.
      wrap: makes another optimizer train tables; takes it and `synchronous`.
      synchronous: goes with what is saved.
    """
    cls = type(optimizer)
    if AROUND not in vars(cls):
        if cls not in _classes:
            _classes[cls] = _class_around(cls, wrap)
        # Optimizers of tf_keras have a __setattr__ that looks for settings.
        object.__setattr__(optimizer, "__class__", _classes[cls])
    object.__setattr__(optimizer, "_synchronous", synchronous)


def register(package: Any, wrap: Wrap) -> None:
    """Lets `load_model` of a Keras make what `model.save` has written, in any process.

    Args:
      package: keras or tf_keras.
      wrap: see `known_to_keras`.
    """
    _register(package, _class_around(package.optimizers.SGD, wrap))


def _register(package: Any, cls: type) -> None:
    package.saving.register_keras_serializable(PACKAGE, NAME)(cls)


def _class_around(cls: Any, wrap: Wrap) -> type:
    def build(self: Any, variables: Sequence[Any]) -> None:
        cls.build(self, [each for each in variables if not isinstance(each, TrainableWrapper)])

    def get_config(self: Any) -> dict[str, Any]:
        # Another one, of the class itself: only of such do Keras' functions know the class.
        own = own_class(self)
        plain = own.from_config(own.get_config(self))
        optimizer = package_of(cls).saving.serialize_keras_object(plain)
        return {"optimizer": optimizer, "synchronous": self._synchronous}

    def from_config(made: type, config: dict[str, Any], custom_objects: Any = None) -> Any:
        if AROUND not in vars(made):
            raise TypeError(
                f"{made.__name__} is made from an optimizer that trains tables, and would not. "
                "Wrap it last: de.DynamicEmbeddingOptimizer(hvd.DistributedOptimizer(optimizer))."
            )
        saving = package_of(cls).saving
        plain = saving.deserialize_keras_object(config["optimizer"], custom_objects)
        return wrap(plain, synchronous=config["synchronous"])

    members = {
        "__module__": cls.__module__,
        "__doc__": cls.__doc__,
        AROUND: True,
        "get_config": get_config,
        "from_config": classmethod(from_config),
    }
    if hasattr(cls, "build"):
        members["build"] = build
    around = new_class(cls.__name__, (cls,), {}, lambda namespace: namespace.update(members))
    _register(package_of(cls), around)
    return around


def package_of(cls: type) -> Any:
    """Returns the Keras that a class of optimizers, layers or models is of."""
    modules = (base.__module__.split(".")[0] for base in cls.__mro__)
    return sys.modules[next(name for name in modules if name in ("keras", "tf_keras"))]
