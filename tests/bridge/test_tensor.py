"""Tensors become arrays and back without a copy."""

import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf

from sok_lite.backend import get_backend
from sok_lite.bridge.tensor import empty, to_array, to_tensor

CPU = get_backend("cpu")
DTYPES = [tf.int32, tf.int64, tf.uint64, tf.float32, tf.float16, tf.bfloat16]


def address(tensor):
    # Flat, in the same memory: NumPy takes no scalar of bfloat16.
    return np.asarray(tf.reshape(tensor, [-1])).ctypes.data


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_a_tensor_is_read_where_it_lies(dtype):
    tensor = tf.cast(tf.reshape(tf.range(12), [3, 4]), dtype)
    array = to_array(tensor, CPU)
    assert array.ctypes.data == address(tensor)
    assert array.dtype == (np.uint16 if dtype == tf.bfloat16 else dtype.as_numpy_dtype)
    np.testing.assert_array_equal(array.view(dtype.as_numpy_dtype), tensor.numpy())


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
@pytest.mark.parametrize("shape", [(), (0, 3), (1, 1), (33, 3), (7,)])
def test_a_result_is_given_away_where_it_lies(dtype, shape):
    array = empty(shape, dtype, CPU)
    bits = np.arange(array.size, dtype=np.uint16).reshape(shape) % 1000
    array[...] = bits if dtype == tf.bfloat16 else bits.astype(array.dtype)
    expected = array.copy().view(dtype.as_numpy_dtype)
    tensor = to_tensor(array, dtype, CPU)
    assert tensor.dtype == dtype
    assert tuple(tensor.shape) == shape
    if array.size:
        assert address(tensor) == array.ctypes.data
    del array
    np.testing.assert_array_equal(tensor.numpy(), expected)


def test_memory_that_was_given_away_is_freed_with_the_tensor():
    array = empty((1000, 64), tf.float32, CPU)
    base = array
    while isinstance(base.base, np.ndarray):
        base = base.base
    watched = weakref.ref(base)
    tensor = to_tensor(array, tf.float32, CPU)
    del array, base
    gc.collect()
    assert watched() is not None
    del tensor
    gc.collect()
    assert watched() is None


@pytest.mark.parametrize(
    "array",
    [
        np.arange(100, dtype=np.float32)[1::2],
        np.arange(100, dtype=np.float32)[1:],
        np.broadcast_to(np.float32(3), (4, 4)),
        np.zeros((0, 5), np.float32),
    ],
    ids=["strided", "unaligned", "read-only", "empty"],
)
def test_what_tensorflow_cannot_take_is_copied(array):
    tensor = to_tensor(array, tf.float32, CPU)
    np.testing.assert_array_equal(tensor.numpy(), array)
    # TensorFlow's kernels read 64 aligned bytes at a time.
    assert array.size == 0 or address(tensor) % 64 == 0
    assert array.size == 0 or address(tensor) != array.ctypes.data
