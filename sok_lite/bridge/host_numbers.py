"""Numbers that cross between a graph and Python on the host, however the call between is placed.

A py_function on a GPU has all that it takes and gives in the GPU's memory: Python would wait for
the GPU to read a length, and TensorFlow to read one that Python has counted. Shapes are always on
the host. So such numbers cross as the shape of a tensor without elements: [0, first, second, ...].
What is known while a graph is made does not cross at all.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from sok_lite.bridge.tf_private import SHAPE_OF_EAGER

_MOST = 250  # numbers of one shape: TensorFlow allows 254 dimensions
_ZERO = np.zeros(1, np.int64)


class HostNumbers(NamedTuple):
    """An input of `host_call` that Python reads as numbers.

    Attributes:
      values: (n,) int64, none of them negative, or float64: a tensor, or an array of what is known
        while the graph is made.
    """

    values: Any


def crossing_inputs(
    inputs: Sequence[Any], by_shape: bool
) -> tuple[list[Any], Callable[[Sequence[tf.Tensor]], list[Any]] | None]:
    """Returns the tensors that cross, and a function that gives Python its inputs from these.

    None in its place: they are the inputs. The function holds no tensor: TensorFlow keeps host
    calls for ever.

    Args:
      inputs: of `host_call`, in a graph.
      by_shape: whether numbers cross as shapes.
    """
    tensors: list[Any] = []
    arguments: list[Any] = [None] * len(inputs)  # with what is known
    plain: list[tuple[int, int]] = []
    shaped: list[tuple[int, slice, bool]] = []
    for place, each in enumerate(inputs):
        values = each.values if isinstance(each, HostNumbers) else each
        if isinstance(each, HostNumbers) and not tf.is_tensor(values):
            arguments[place] = np.asarray(values)
        elif isinstance(each, HostNumbers) and by_shape and values.shape.is_fully_defined():
            begin = len(tensors)
            tensors += _as_shapes(values)
            shaped.append((place, slice(begin, len(tensors)), values.dtype is tf.float64))
        else:
            plain.append((place, len(tensors)))
            tensors.append(values)

    if len(plain) == len(inputs):
        return tensors, None

    def given_of(crossed: Sequence[tf.Tensor]) -> list[Any]:
        given = [*arguments]
        for place, number in plain:
            given[place] = crossed[number]
        for place, where, is_float in shaped:
            numbers = numbers_of(crossed[where])
            given[place] = numbers.astype(np.uint32).view(np.float64) if is_float else numbers
        return given

    return tensors, given_of


def numbers_of(tensors: Sequence[tf.Tensor]) -> np.ndarray:
    """Returns the numbers, (n,) int64, that are the shapes of eager tensors without elements."""
    shapes = [getattr(tensor, SHAPE_OF_EAGER)() for tensor in tensors]
    return np.array([number for shape in shapes for number in shape[1:]], np.int64)


def zigzag(numbers: np.ndarray) -> np.ndarray:
    """Returns numbers that are not negative for int64 numbers from -2**62 to 2**62 - 1."""
    return numbers * 2 ^ (numbers >> 63)


def unzigzag(numbers: np.ndarray) -> np.ndarray:
    """Returns the numbers of `zigzag`."""
    return (numbers >> 1) ^ -(numbers & 1)


def _as_shapes(numbers: tf.Tensor) -> list[tf.Tensor]:
    """Returns tensors without elements, whose shapes have numbers; of float64 their 32-bit words.

    Args:
      numbers: (n,) int64 or float64, n known.
    """
    with tf.device("CPU:0"):
        if numbers.dtype is tf.float64:
            numbers = tf.reshape(tf.cast(tf.bitcast(numbers, tf.uint32), tf.int64), [-1])
        begins = range(0, numbers.shape[0], _MOST)
        shapes = [tf.concat([_ZERO, numbers[begin : begin + _MOST]], 0) for begin in begins]
    # Where the py_function is. A reshape moves nothing, and takes the shape on the host.
    return [tf.reshape(tf.zeros([0], tf.int64), shape) for shape in shapes]


def num_shapes(count: int) -> int:
    """Returns how many tensors `with_shapes` gives for so many numbers."""
    return -(-count // _MOST)


def with_shapes(numbers: np.ndarray, count: int, device: str | None) -> list[tf.Tensor]:
    """Returns eager tensors without elements, whose shapes have numbers (n,) int64, none negative.

    Args:
      count: how many tensors; `num_shapes(n)` or more.
      device: TensorFlow's name of that on which they are; None: the host.
    """
    device = device or "CPU:0"
    tensors: list[tf.Tensor] = []
    for begin in range(0, _MOST * count, _MOST):
        with tf.device("CPU:0"):  # where a reshape takes its shape
            shape = tf.constant(np.append(_ZERO, numbers[begin : begin + _MOST]))
        with tf.device(device):
            tensors.append(tf.raw_ops.Reshape(tensor=no_elements(device), shape=shape))
    return tensors


@functools.cache
def no_elements(device: str | None) -> tf.Tensor:
    """Returns (0,) int64 on a device, the same each time; None: on the host."""
    with tf.device(device or "CPU:0"):
        return tf.zeros([0], tf.int64)


def from_shapes(tensors: Sequence[tf.Tensor], count: int) -> tf.Tensor:
    """Returns (count,) int64 on the host, in a graph, of what `with_shapes` gave."""
    shapes = []
    for i, tensor in enumerate(tensors):
        tensor.set_shape([0] + [None] * min(_MOST, count - i * _MOST))
        shapes.append(tf.shape(tensor, tf.int64))  # where the tensor is: it moves nothing
    with tf.device("CPU:0"):
        numbers = [shape[1:] for shape in shapes]
        return numbers[0] if len(numbers) == 1 else tf.concat(numbers, 0)
