"""Layers of ours as classes of a Keras: of Keras 3, of tf_keras, or of both in one program."""

import functools
import inspect
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from types import SimpleNamespace, new_class
from typing import Any

import tensorflow as tf

from sok_lite.bridge.keras import held, hooks
from sok_lite.bridge.set_within import set_within

# What a dict of Keras has that stands for an object, and what more where it says which are one.
_OBJECT = {"class_name", "config"}
_SHARED = "shared_object_id"
# While a model is made of its config: what of it was made that several layers share, by its number
# or name.
_made: ContextVar[dict[Any, Any] | None] = ContextVar("made_of_a_config", default=None)


def root_of(package: Any) -> Any:
    """Returns the Keras that a package is, or has the classes of.

    Raises:
      TypeError: it is none.
    """
    layer = getattr(getattr(package, "layers", None), "Layer", None)
    root = "" if layer is None else layer.__module__.split(".")[0]
    if root not in held.PACKAGES:
        raise TypeError(f"`package` must be keras, tf_keras or tf.keras. Received: {package!r}.")
    return sys.modules[root]


def layer_class(package: Any) -> Any:
    """Returns the class that a layer with a table derives from, beside what it does itself."""
    base = package.layers.Layer
    return _listing(base) if package.__name__ == "keras" else base


def register_as_layer(
    registered: str, name: str, part: type, base: type, members: Mapping[str, Any]
) -> Any:
    """Makes a class of a Keras, which Keras also knows by name then.

    Args:
      registered: the name of the package that Keras is to know it by.
      name: of the class.
      part: the class with its methods.
      base: a class of that Keras.
      members: attributes of the class; `package` among them, the Keras.
    """
    if "__init__" in vars(part):  # whose name Python says where an argument is missing
        inspect.unwrap(vars(part)["__init__"]).__qualname__ = f"{name}.__init__"
    cls = made_class(name, part, base, **members)
    saving = SimpleNamespace(**members).package.saving
    return saving.register_keras_serializable(registered, name)(cls)


def made_class(name: str, part: type, base: type, **members: Any) -> Any:
    """Makes a class of a Keras.

    Args:
      name: of the class.
      part: the class with its methods.
      base: a class of that Keras.
      members: attributes of the class; `package` among them, the Keras.
    """

    def fill(namespace: dict[str, Any]) -> None:
        namespace |= {"__module__": part.__module__, "__doc__": part.__doc__, **members}

    return new_class(name, (part, base), {}, fill)


def object_of(config: Any, package: Any) -> Any:
    """Returns the object that Keras has written; what it has not written as it is.

    Args:
      package: keras or tf_keras.
    """
    if isinstance(config, dict) and config.keys() >= _OBJECT:
        return package.saving.deserialize_keras_object(config)
    return config


def says_what_is_shared(package: Any) -> bool:
    """Whether configs made now say which of them are of one object: those of `save` do.

    Args:
      package: keras or tf_keras.
    """
    probe = _probe_of(package)
    configs = [package.saving.serialize_keras_object(probe) for _ in range(2)]
    return _SHARED in configs[1]


def share_in_copies(name: str, package: Any) -> None:
    """Has models that a Keras makes of their configs share what the configs say is shared."""
    for cls in (package.Model, package.Sequential):
        hooks.around(cls, "from_config", _sharing)


def _sharing(call: Any, cls: Any, /, *args: Any, **kwargs: Any) -> Any:
    with of_one_config({} if _made.get() is None else _made.get()):
        return call(cls, *args, **kwargs)


def of_one_config(made: dict[Any, Any] | None) -> AbstractContextManager[None]:
    """A `with` block: `made_so_far` gives `made`, for what is made of configs within it."""
    return set_within(_made, made)


def made_so_far() -> dict[Any, Any] | None:
    """Returns what several layers share of the model that is being made of its config.

    It is by the number that configs have for it, or by its name. None: no model is being made so.
    """
    return _made.get()


@functools.cache
def _probe_of(package: Any) -> Any:
    return package.initializers.Zeros()  # it stays, for Keras knows it by its address


def _listing(layer: Any) -> Any:
    """Returns a layer class of Keras 3 that lists its table's variable among the weights.

    Keras 3 lists variables of its own class only.
    """

    class ListingLayer(layer):
        """A layer whose `listed` is among its weights; None: it has none."""

        listed: Any = None

        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.supports_jit = False  # of "auto": XLA cannot call the host

        def _with_listed(self, variables: list[Any]) -> list[Any]:
            listed = self.listed
            return variables if listed is None else [*variables, listed]

        @property
        def variables(self) -> list[Any]:
            return self._with_listed(super().variables)

        @property
        def weights(self) -> list[Any]:
            return self._with_listed(super().weights)

        @property
        def trainable(self) -> bool:
            return super().trainable

        @trainable.setter
        def trainable(self, value: bool) -> None:
            layer.trainable.fset(self, value)
            if self.listed is not None:
                self.listed.is_frozen = not value

        def compute_output_spec(self, *args: Any, **kwargs: Any) -> Any:
            if args and tf.as_dtype(getattr(args[0], "dtype", tf.int64)).is_floating:
                # A Sequential without an Input builds itself so, then calls its layers as they are.
                raise NotImplementedError(
                    f"{self.name!r} looks up keys, which are {self.key_dtype_name}. Received: "
                    f"{args[0].dtype}. Give keras.Input(..., dtype={self.key_dtype_name!r})."
                )
            # Not by `compute_output_shape`, which knows neither dtype nor raggedness.
            return super(layer, self).compute_output_spec(*args, **kwargs)

    return ListingLayer
