"""TFRA's operations that partition and stitch tensors, by TensorFlow's own."""

from typing import Any

import tensorflow as tf

__all__ = ["dynamic_partition", "dynamic_stitch"]


def dynamic_partition(
    data: Any, partitions: Any, num_partitions: int, name: str | None = None
) -> list[tf.Tensor]:
    """Partitions `data` as `tf.dynamic_partition` does.

    Args:
      data: partitions.shape + any.
      partitions: int32 in [0, num_partitions).

    Returns:
      num_partitions tensors, in the order of `data`.

    Raises:
      tf.errors.InvalidArgumentError: a number out of range.
    """
    return tf.dynamic_partition(data, partitions, num_partitions, name)


def dynamic_stitch(
    indices: Any, data: Any, use_fast: bool = True, name: str | None = None
) -> tf.Tensor:
    """Merges tensors as `tf.dynamic_stitch` does, the inverse of `dynamic_partition`.

    Args:
      indices: list of int32 tensors: the place of each element. The last element of a repeated
        index wins.
      data: as many tensors, each of its indices' shape + any.
      use_fast: no effect; it selects a kernel on TFRA's GPU.

    Returns:
      (1 + the largest index, ...).
    """
    return tf.dynamic_stitch(indices, data, name)
