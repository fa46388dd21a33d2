"""Classes of our layers for Keras 3 and tf_keras, or both in one program."""

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

# Keys of a serialized Keras object, and the key that marks shared objects.
_OBJECT = {"class_name", "config"}
_SHARED = "shared_object_id"
# While a model is created from its config: objects shared by several layers, by number or name.
_made: ContextVar[dict[Any, Any] | None] = ContextVar("made_of_a_config", default=None)


def root_of(package: Any) -> Any:
    """Returns the Keras that a package is, or whose classes it has; else raises TypeError."""
    layer = getattr(getattr(package, "layers", None), "Layer", None)
    root = "" if layer is None else layer.__module__.split(".")[0]
    if root not in held.PACKAGES:
        raise TypeError(f"`package` must be keras, tf_keras or tf.keras. Received: {package!r}.")
    return sys.modules[root]


def layer_class(package: Any) -> Any:
    """Returns the base class of a Keras for layers with a table."""
    base = package.layers.Layer
    return _make_listing_class(base) if package.__name__ == "keras" else base


def register_as_layer(
    registered: str, name: str, part: type, base: type, members: Mapping[str, Any]
) -> Any:
    """Creates a class of a Keras, as `made_class`, and registers it there for deserialization."""
    if "__init__" in vars(part):  # Python's error for a missing argument shows this name
        inspect.unwrap(vars(part)["__init__"]).__qualname__ = f"{name}.__init__"
    cls = made_class(name, part, base, **members)
    saving = SimpleNamespace(**members).package.saving
    return saving.register_keras_serializable(registered, name)(cls)


def made_class(name: str, part: type, base: type, **members: Any) -> Any:
    """Creates a class from `part`, with the methods, and `base`, a class of a Keras."""

    def fill(namespace: dict[str, Any]) -> None:
        namespace |= {"__module__": part.__module__, "__doc__": part.__doc__, **members}

    return new_class(name, (part, base), {}, fill)


def object_of(config: Any, package: Any) -> Any:
    """Deserializes an object of Keras; returns other values unchanged."""
    if isinstance(config, dict) and config.keys() >= _OBJECT:
        return package.saving.deserialize_keras_object(config)
    return config


def says_what_is_shared(package: Any) -> bool:
    """Whether configs made now mark shared objects, as those of `save` do."""
    probe = _probe_of(package)
    configs = [package.saving.serialize_keras_object(probe) for _ in range(2)]
    return _SHARED in configs[1]


def share_in_copies(name: str, package: Any) -> None:
    """Makes models that a Keras creates from configs share objects marked as shared."""
    for cls in (package.Model, package.Sequential):
        hooks.around(cls, "from_config", _share_objects)


def _share_objects(call: Any, cls: Any, /, *args: Any, **kwargs: Any) -> Any:
    with of_one_config({} if _made.get() is None else _made.get()):
        return call(cls, *args, **kwargs)


def of_one_config(made: dict[Any, Any] | None) -> AbstractContextManager[None]:
    """A `with` block in which `made_so_far` returns `made`."""
    return set_within(_made, made)


def made_so_far() -> dict[Any, Any] | None:
    """Returns the shared objects, by number or name, of the model being made from a config.

    None if no model is being created from a config.
    """
    return _made.get()


@functools.cache
def _probe_of(package: Any) -> Any:
    return package.initializers.Zeros()  # kept, because Keras identifies it by its address


def _make_listing_class(layer: Any) -> Any:
    """Returns a layer class that lists a table's variable: Keras 3 lists only its own class."""

    class ListingLayer(layer):
        """A layer with `listed` among its weights, unless None."""

        listed: Any = None

        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.supports_jit = False  # with jit_compile="auto": XLA cannot call the host

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
                # A Sequential without an Input builds itself this way, then calls its layers
                # directly.
                raise NotImplementedError(
                    f"{self.name!r} looks up keys, which are {self.key_dtype_name}. Received: "
                    f"{args[0].dtype}. Give keras.Input(..., dtype={self.key_dtype_name!r})."
                )
            # Not by `compute_output_shape`, which knows neither dtype nor raggedness.
            return super(layer, self).compute_output_spec(*args, **kwargs)

    return ListingLayer
