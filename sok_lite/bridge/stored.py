"""Tables in Keras' files: named arrays of numbers in the store of a layer.

The arrays are those of a `tf.train.Checkpoint`, see checkpoint.py. HDF5 has neither bfloat16 nor
NumPy texts: bfloat16 is stored as its bits (uint16), texts as joined bytes (uint8) with their
lengths.
"""

import io
import itertools
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.bridge.checkpoint import as_arrays
from sok_lite.comm import Communicator
from sok_lite.engine.table import EmbeddingTable
from sok_lite.engine.table.content import concatenate, owned_by, owns
from sok_lite.engine.table.named_arrays import from_named_arrays, named_arrays

_BYTES, _LENGTHS = "_bytes", "_lengths"


def write_tensors(
    store: MutableMapping[str, Any], tensors: Mapping[str, tf.Tensor], prefix: str = ""
) -> None:
    """Writes eager tensors to a store, which takes arrays by name, with a prefix."""
    for name, tensor in tensors.items():
        for part, array in _arrays(prefix + name, tensor).items():
            store[part] = array


def read_tensors(
    store: Mapping[str, Any], dtypes: Mapping[str, tf.DType], whose: str, prefix: str = ""
) -> dict[str, tf.Tensor]:
    """Returns `write_tensors`' tensors; raises ValueError if one is missing or of another dtype."""
    return {name: _tensor(whose, prefix + name, dtype, store) for name, dtype in dtypes.items()}


def _arrays(name: str, tensor: tf.Tensor) -> dict[str, np.ndarray]:
    if tensor.dtype == tf.string:
        texts = np.asarray(tensor.numpy(), object).reshape(-1).tolist()
        return {
            name + _BYTES: np.frombuffer(b"".join(texts), np.uint8),
            name + _LENGTHS: np.array([len(text) for text in texts], np.int64),
        }
    array = np.asarray(tensor)  # numpy() would copy
    return {name: array.view(np.uint16) if tensor.dtype == tf.bfloat16 else array}


def _tensor(whose: str, name: str, dtype: tf.DType, store: Mapping[str, Any]) -> tf.Tensor:
    """Returns a tensor from the arrays of a store; texts as a list, or one scalar."""
    if dtype == tf.string:
        data = _array(whose, name + _BYTES, np.uint8, store).tobytes()
        lengths = _array(whose, name + _LENGTHS, np.int64, store).tolist()
        ends = itertools.accumulate(lengths)
        texts = [data[end - n : end] for end, n in zip(ends, lengths, strict=True)]
        if name.endswith("texts"):
            return tf.constant(np.array(texts, object), tf.string, [len(texts)])
        return tf.constant(texts[0])
    if dtype == tf.bfloat16:
        bits = _array(whose, name, np.uint16, store)
        return tf.constant(bits.view(tf.bfloat16.as_numpy_dtype))
    return tf.constant(_array(whose, name, dtype.as_numpy_dtype, store))


def _array(whose: str, name: str, dtype: Any, store: Mapping[str, Any]) -> np.ndarray:
    if name not in list(store.keys()):
        raise ValueError(
            f"What was saved has no {name!r} for {whose!r}. It was saved of another layer, or of "
            "one with another restrict_policy or key type."
        )
    array = np.asarray(store[name])
    if array.dtype != np.dtype(dtype):
        raise ValueError(
            f"What was saved of {whose!r} has {name!r} as {array.dtype}; the variable needs "
            f"{np.dtype(dtype).name}. Make it with the types of keys and rows that were saved."
        )
    return array


def parts_of_all(comm: Communicator, arrays: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """Returns the arrays of each rank. Every rank must call it."""
    file = io.BytesIO()
    np.savez(file, **arrays)  # type: ignore[arg-type]
    gathered = comm.allgatherv(np.frombuffer(file.getvalue(), np.uint8), call="Table.save")
    return [dict(np.load(io.BytesIO(part.tobytes()))) for part in gathered.by_rank()]


Tensors = Mapping[str, tf.Tensor]


def part_of_rank(
    parts: Sequence[Tensors], table: EmbeddingTable, rank: int, size: int
) -> dict[str, tf.Tensor]:
    """Returns a rank's own keys from the parts that ranks saved by `checkpoint.serialized`.

    Raises ValueError if a part is corrupt, or two have a key in common.
    """
    whose, are_own = f"table {table.name!r}", owns(table, rank, size)
    contents = (from_named_arrays(as_arrays(part), whose) for part in parts)
    whole = concatenate([owned_by(each, are_own) for each in contents], whose)
    return {name: tf.constant(array) for name, array in named_arrays(whole).items()}
