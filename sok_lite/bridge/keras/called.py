"""The inputs of models that do not declare them.

A subclassed model has no `inputs`. tf_keras keeps specs of the first call; Keras 3 keeps only
shapes, so the first calls of its models are recorded here.
"""

import contextlib
import threading
import weakref
from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.bridge.tf_private import SCRATCH_GRAPHS, graphs_around

_ROUTED = ("training", "mask")  # passed by Keras itself
# Model -> specs of the first call, positional and by name.
_called: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
# Models of Keras 3 that were called, with any arguments.
_models: weakref.WeakSet[Any] = weakref.WeakSet()
_noting = threading.Lock()


def record_call(call: Any, self: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Wraps calls of Keras 3 models: records the first of each."""
    with _noting:  # the set must not change while another thread iterates over it
        _models.add(self)
    if self not in _called and not is_built_by_shapes():
        # Arguments that TensorFlow cannot describe are left to the model.
        with contextlib.suppress(TypeError, ValueError):
            _note(self, args, kwargs)
    return call(self, *args, **kwargs)


def _note(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    by_name = {name: each for name, each in kwargs.items() if name not in _ROUTED}
    specs, named = tf.nest.map_structure(_spec_of, (args, by_name))
    named = {name: each for name, each in named.items() if _is_complete(each)}
    if _is_complete((specs, named)):
        _called[model] = specs, named


def first_call_specs(model: Any) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Returns the specs of a model's first call, for any batch size; None without tensors."""
    if not hasattr(model, "save_spec"):
        return _called.get(model)
    specs = model.save_spec()
    if specs is None or not _is_complete(specs):
        return None
    return tuple(specs[0]), dict(specs[1])


def models_of_keras_3() -> list[Any]:
    """Returns the live models of Keras 3 that were called."""
    with _noting:
        return list(_models)


def is_built_by_shapes() -> bool:
    """Whether a Keras is building a model from shapes; its placeholders for ids may be float32."""
    if tf.executing_eagerly():
        return False
    # A tf.function of the model is traced in a graph of its own, within that one.
    names = [str(getattr(graph, "name", "")) for graph in graphs_around()]
    return any(name.startswith(tuple(SCRATCH_GRAPHS.values())) for name in names)


def as_keys(ids: Any, key_dtype: str) -> Any:
    """Returns ids; converts the float placeholders of a Keras that builds a model to keys."""
    if not (getattr(ids.dtype, "is_floating", False) and is_built_by_shapes()):
        return ids
    return tf.as_string(ids) if key_dtype == "string" else tf.cast(ids, key_dtype)


def _is_complete(specs: Any) -> bool:
    """Whether there are specs, and none is None."""
    flat = tf.nest.flatten(specs)
    return bool(flat) and None not in flat


def _spec_of(value: Any) -> Any:
    """Returns the spec of a tensor, array or Keras 3 input, for any batch size; else None."""
    if isinstance(value, tf.RaggedTensor):
        of_rows = value.row_splits.dtype
        return tf.RaggedTensorSpec(_any_batch(value.shape), value.dtype, value.ragged_rank, of_rows)
    if isinstance(value, tf.SparseTensor):
        return tf.SparseTensorSpec(_any_batch(value.shape), value.dtype)
    if isinstance(value, np.ndarray):
        # Keras converts floats to the dtype of its layers.
        dtype = tf.float32 if value.dtype.kind == "f" else tf.as_dtype(value.dtype)
        return tf.TensorSpec(_any_batch(value.shape), dtype)
    if tf.is_tensor(value):
        return tf.TensorSpec(_any_batch(value.shape), value.dtype)
    return None


def _any_batch(shape: Any) -> tf.TensorShape:
    dims = tf.TensorShape(shape)
    return dims if not dims.rank else tf.TensorShape([None, *dims[1:]])
