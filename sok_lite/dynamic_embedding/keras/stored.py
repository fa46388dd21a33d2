"""A table as Keras' files have it: named arrays of numbers in the store of its layer.

They are what `tf.train.Checkpoint` saves of a table, see bridge/checkpoint.py. HDF5 knows neither
bfloat16 nor texts as NumPy has them, so that these are written as what they are made of: bfloat16
by its bits (uint16), and texts as their bytes (uint8) one after the other, with their lengths.
"""

import contextlib
import itertools
from collections.abc import Iterator, Mapping, MutableMapping
from contextvars import ContextVar
from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.bridge.checkpoint import saved_dtypes

_BYTES, _LENGTHS = "_bytes", "_lengths"
_all_ranks_save: ContextVar[bool] = ContextVar("all_ranks_save", default=False)


@contextlib.contextmanager
def all_ranks_save() -> Iterator[None]:
    """Within it the other ranks save their tables as well."""
    token = _all_ranks_save.set(True)
    try:
        yield
    finally:
        _all_ranks_save.reset(token)


def do_all_ranks_save() -> bool:
    """Whether it is within `all_ranks_save`."""
    return _all_ranks_save.get()


def save_rows(params: Any, store: MutableMapping[str, Any]) -> None:
    """Writes rows, states and status of a `Variable` to a store.

    Args:
      params: the variable.
      store: takes arrays by name.
    """
    for prefix, table in _tables(params).items():
        for name, tensor in table.saved_tensors().items():
            for part, array in _arrays(prefix + name, tensor).items():
                store[part] = array


def load_rows(params: Any, store: Mapping[str, Any]) -> None:
    """Makes a `Variable` what `save_rows` wrote. Other keys go.

    Raises:
      ValueError: something is missing or is not of such a variable; it is as it was.
    """
    tables = _tables(params)
    tensors = {
        prefix: {
            name: _tensor(params, prefix + name, dtype, store)
            for name, dtype in _saved_dtypes(table).items()
        }
        for prefix, table in tables.items()
    }
    for prefix, table in tables.items():
        table.restore_tensors(tensors[prefix])


def _tables(params: Any) -> dict[str, Any]:
    """Returns the tables of a variable, each by what its names begin with."""
    if not params.checkpoint:
        return {}
    policy = params.restrict_policy
    status = {} if policy is None else {"status_": policy.status.rows}
    return {"rows_": params.rows, **status}


def _saved_dtypes(table: Any) -> dict[str, tf.DType]:
    texts = {"texts": tf.string} if table.key_dtype == tf.string else {}
    return saved_dtypes(table.key_type, table.dtype) | texts


def _arrays(name: str, tensor: tf.Tensor) -> dict[str, np.ndarray]:
    if tensor.dtype == tf.string:
        texts = np.asarray(tensor.numpy(), object).reshape(-1).tolist()
        return {
            name + _BYTES: np.frombuffer(b"".join(texts), np.uint8),
            name + _LENGTHS: np.array([len(text) for text in texts], np.int64),
        }
    if tensor.dtype == tf.bfloat16:
        return {name: tensor.numpy().view(np.uint16)}
    return {name: tensor.numpy()}


def _tensor(params: Any, name: str, dtype: tf.DType, store: Mapping[str, Any]) -> tf.Tensor:
    """Returns a tensor from the arrays of a store; texts are a list of them, or one."""
    if dtype == tf.string:
        data = _array(params, name + _BYTES, np.uint8, store).tobytes()
        lengths = _array(params, name + _LENGTHS, np.int64, store).tolist()
        ends = itertools.accumulate(lengths)
        texts = [data[end - n : end] for end, n in zip(ends, lengths, strict=True)]
        if name.endswith("texts"):
            return tf.constant(np.array(texts, object), tf.string, [len(texts)])
        return tf.constant(texts[0])
    if dtype == tf.bfloat16:
        bits = _array(params, name, np.uint16, store)
        return tf.constant(bits.view(tf.bfloat16.as_numpy_dtype))
    return tf.constant(_array(params, name, dtype.as_numpy_dtype, store))


def _array(params: Any, name: str, dtype: Any, store: Mapping[str, Any]) -> np.ndarray:
    if name not in list(store.keys()):
        raise ValueError(
            f"What was saved has no {name!r} for {params.name!r}. It was saved of another layer, "
            "or of one with another restrict_policy or key_dtype."
        )
    array = np.asarray(store[name])
    if array.dtype != np.dtype(dtype):
        raise ValueError(
            f"What was saved of {params.name!r} has {name!r} as {array.dtype}; the variable needs "
            f"{np.dtype(dtype).name}. Make it with the key_dtype and value_dtype that were saved."
        )
    return array
