"""The two operations that part tensors and put them together again, by TensorFlow's own."""

from typing import Any

import tensorflow as tf

__all__ = ["dynamic_partition", "dynamic_stitch"]


def dynamic_partition(
    data: Any, partitions: Any, num_partitions: int, name: str | None = None
) -> list[tf.Tensor]:
    """Parts `data` by number, as `tf.dynamic_partition` does.

    Args:
      data: partitions.shape + any.
      partitions: int32, from 0 to num_partitions - 1.
      num_partitions: how many parts there are.
      name: of the operation.

    Returns:
      num_partitions tensors, each with what has its number, in the order of `data`.

    Raises:
      tf.errors.InvalidArgumentError: a number that is not in range.
    """
    return tf.dynamic_partition(data, partitions, num_partitions, name)


def dynamic_stitch(
    indices: Any, data: Any, use_fast: bool = True, name: str | None = None
) -> tf.Tensor:
    """Puts tensors together, as `tf.dynamic_stitch` does: the way back from `dynamic_partition`.

    Args:
      indices: a list of int32 tensors: where each element goes. Of one that is named twice the last
        element counts.
      data: as many tensors, each of its indices' shape + any.
      use_fast: changes nothing: TensorFlow chooses how. TFRA's GPU has a faster way.
      name: of the operation.

    Returns:
      (1 + the greatest index, ...).
    """
    return tf.dynamic_stitch(indices, data, name)
