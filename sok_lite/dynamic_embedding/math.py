"""The operations on sparse tensors that TFRA has, by TensorFlow's own."""

from typing import Any

import tensorflow as tf

__all__ = ["sparse_fill_empty_rows", "sparse_reshape", "sparse_segment_sum"]


def sparse_segment_sum(
    data: Any, indices: Any, segment_ids: Any, name: str | None = None, num_segments: Any = None
) -> tf.Tensor:
    """Sums the named rows of each segment, as `tf.sparse.segment_sum` does.

    Args:
      data: (n, ...) of numbers.
      indices: (m,) int32 or int64, rows of `data`.
      segment_ids: (m,) int32 or int64, sorted, not negative; of one row of the result each.
      name: of the operation.
      num_segments: rows of the result; None: as many as `segment_ids` ask for.

    Returns:
      (num_segments, ...), 0 where a segment has no row.

    Raises:
      tf.errors.InvalidArgumentError: a row that `data` does not have, or segments out of order.
    """
    return tf.sparse.segment_sum(data, indices, segment_ids, num_segments, name)


def sparse_fill_empty_rows(
    sp_input: tf.SparseTensor, default_value: Any, name: str | None = None
) -> tuple[tf.SparseTensor, tf.Tensor]:
    """Puts one value into each empty row, as `tf.sparse.fill_empty_rows` does.

    Args:
      sp_input: a (rows, columns) sparse tensor.
      default_value: a scalar of its type.
      name: of the operation.

    Returns:
      (the filled sparse tensor, in the order of its indices; (rows,) bool, whether it was empty).

    Raises:
      TypeError: `sp_input` is no SparseTensor.
    """
    return tf.sparse.fill_empty_rows(sp_input, default_value, name)


def sparse_reshape(sp_input: tf.SparseTensor, shape: Any, name: str | None = None) -> Any:
    """Returns a sparse tensor in another shape, as `tf.sparse.reshape` does.

    Args:
      sp_input: a sparse tensor.
      shape: of the result, as many elements; one -1 is worked out.
      name: of the operation.

    Raises:
      TypeError: `sp_input` is no SparseTensor.
      ValueError: `shape` has another number of elements, or more than one -1.
    """
    return tf.sparse.reshape(sp_input, shape, name)
