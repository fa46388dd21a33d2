"""Tensors of all tables of a call as one: joined before a host call, cut apart after it.

A result of its own for each table costs 20 microseconds a table, and one result that TensorFlow's
Split cuts next to nothing: Split shares memory where every piece begins on a line of 64 bytes, so
each table's rows begin on one. Keys are joined because the engine works on the keys of all tables.
Float rows towards Python are joined for a GPU only, where each tensor that crosses is waited for:
on a CPU a tensor more costs 5 microseconds, and joining 26 x 8,192 rows of 64 bytes 650.
"""

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.backend import Array, Backend
from sok_lite.bridge.tensor import empty, to_array, to_tensor
from sok_lite.engine.pieces import LINE, Pieces, Shape, up_to_line

# Lengths and sizes, int64: an np.ndarray where they are known now, else a tf.Tensor.
Numbers = Any


# ---- towards Python ------------------------------------------------------------------------------


def as_int64(keys: tf.Tensor) -> tf.Tensor:
    """Returns integers as int64; of uint64 the bits."""
    if keys.dtype is tf.uint64:
        return tf.bitcast(keys, tf.int64)
    return keys if keys.dtype is tf.int64 else tf.cast(keys, tf.int64)


def from_int64(keys: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Returns int64 keys as those of another type; as uint64 their bits."""
    return tf.bitcast(keys, dtype) if dtype == tf.uint64 else tf.cast(keys, dtype)


def joining(tensors: Sequence[Any]) -> Any:
    """Enters the device on which tensors are joined, so that few cross to another one.

    In a graph TensorFlow would choose the GPU where there is one, and copy each of them there. Most
    ids come from an input pipeline on the host, which then copies one tensor for all tables.
    """
    if len(tensors) == 1:
        return contextlib.nullcontext()
    if tf.executing_eagerly():
        places = {tensor.backing_device for tensor in tensors}
    else:
        places = {tensor.device for tensor in tensors}  # "" unless the program has said it
    (place,) = places if len(places) == 1 else ("",)
    return tf.device(place or "CPU:0")


def join(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the elements of (n,) tensors of one dtype, one tensor after the other."""
    return tensors[0] if len(tensors) == 1 else tf.concat(tensors, 0)


def joined_weights(weights: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the weights of all tables, each (n,), as one tensor; none where there are none."""
    if not weights:
        return []
    with joining(weights):
        return [join(weights)]


def shapes_of(tensors: Sequence[tf.Tensor]) -> Numbers:
    """Returns all dimensions of tensors of one dtype and known rank, one after the other."""
    known = [length for tensor in tensors for length in tensor.shape.as_list()]
    if None not in known:
        return np.array(known, np.int64)
    # Where the tensors are: no more than their shapes goes to the host. TensorFlow puts a `shape`
    # beside its tensor by itself, but no `shape_n`.
    if len(tensors) == 1:
        return tf.shape(tensors[0], tf.int64)
    return join_numbers(tf.shape_n(tensors, tf.int64))


def join_numbers(numbers: Sequence[Numbers]) -> Numbers:
    """Returns (n,) numbers, one after the other."""
    if all(isinstance(each, np.ndarray) for each in numbers):
        return np.concatenate(numbers)
    with tf.device("CPU:0"):
        return join(numbers)


def listed(numbers: Numbers) -> list[int]:
    """Returns numbers that have come to the host."""
    return np.asarray(numbers).tolist()


def joins_rows(backend: Backend) -> bool:
    """Whether float rows cross as one tensor, and their shapes have to be told."""
    return backend.name != "cpu"


def joined_rows(tensors: Sequence[tf.Tensor], backend: Backend) -> list[tf.Tensor]:
    """Returns float32 tensors as they cross to `rows_of`: as one, flat, or as they are."""
    if not joins_rows(backend):
        return list(tensors)
    return [join([tf.reshape(tensor, [-1]) for tensor in tensors])]


def rows_of(
    tensors: Sequence[tf.Tensor], shapes: Sequence[Shape], backend: Backend
) -> Sequence[Array]:
    """Returns arrays of what `joined_rows` gave.

    Args:
      tensors: eager.
      shapes: what each array was; not looked at where they are not joined.

    Raises:
      ValueError: they are joined, and have other than the numbers of these shapes.
    """
    if not joins_rows(backend):
        return [np.asarray(tensor) for tensor in tensors]  # as `to_array`, of float32
    whole, expected = to_array(tensors[0], backend), sum(map(math.prod, shapes))
    if whole.size != expected:
        raise ValueError(
            f"Rows of the shapes {', '.join(map(str, shapes))} have {expected:,} numbers in all. "
            f"Received: {whole.size:,}, such as of a gradient in another shape than its output."
        )
    return Pieces.of(whole, shapes)


# ---- towards TensorFlow --------------------------------------------------------------------------


class ResultBuffer:
    """Gives memory for float32 results that `cut_rows` takes apart; see engine/pieces.py.

    Attributes:
      whole: all of it, flat, once it is known.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.whole: Array

    def __call__(self, shapes: Sequence[Shape]) -> Pieces:
        pieces = Pieces.on_lines(shapes, lambda size: empty((size,), tf.float32, self._backend))
        self.whole = pieces.whole
        return pieces


def cut_rows(joined: tf.Tensor, lengths: Numbers, dims: Sequence[int]) -> list[tf.Tensor]:
    """Returns the results that lie in a `ResultBuffer`, without a copy where they fill whole lines.

    Args:
      joined: all of it, flat.
      lengths: (len(dims),), rows of each.
      dims: length of their rows.
    """
    joined.set_shape([None])
    if len(set(dims)) == 1 and dims[0] % LINE == 0:  # then one tensor has the rows of all
        rows = tf.reshape(joined, np.array([-1, dims[0]], np.int32))
        return cut(rows, lengths, len(dims))
    with tf.device("CPU:0"):  # where Split and Slice want their sizes on any machine
        sizes = lengths * np.array(dims, np.int64)
        places = up_to_line(sizes)
        # Of those that may end within a line: a slice that is the whole is no copy either.
        ends = {i: sizes[i : i + 1] for i, dim in enumerate(dims) if dim % LINE}
    results = cut(joined, places, len(dims))
    for i, end in ends.items():
        results[i] = tf.slice(results[i], np.zeros(1, np.int64), end)
    # Of a list TensorFlow would make a tensor in 25 microseconds.
    shapes = {dim: np.array([-1, dim], np.int32) for dim in set(dims)}
    return [tf.reshape(rows, shapes[dim]) for rows, dim in zip(results, dims, strict=True)]


def joined_tensor(arrays: Sequence[Array], dtype: tf.DType, backend: Backend) -> tf.Tensor:
    """Returns the elements of (n,) arrays, one array after the other, as an eager tensor."""
    if len(arrays) == 1:
        return to_tensor(arrays[0], dtype, backend)
    whole = empty((sum(array.size for array in arrays),), dtype, backend)
    backend.xp.concatenate(arrays, out=whole)
    return to_tensor(whole, dtype, backend)


def cut(joined: tf.Tensor, lengths: Numbers, count: int) -> list[tf.Tensor]:
    """Returns `count` tensors (n, ...) that follow each other, of the given lengths."""
    return [joined] if count == 1 else tf.split(joined, lengths, num=count)
