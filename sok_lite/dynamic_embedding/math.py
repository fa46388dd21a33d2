"""TFRA's operations on sparse tensors, by TensorFlow's own."""

from typing import Any

import tensorflow as tf

__all__ = ["sparse_fill_empty_rows", "sparse_reshape", "sparse_segment_sum"]


def sparse_segment_sum(
    data: Any, indices: Any, segment_ids: Any, name: str | None = None, num_segments: Any = None
) -> tf.Tensor:
    """Sums the given rows of each segment, as `tf.sparse.segment_sum` does.

    Args:
      data: (n, ...) numbers.
      indices: (m,) int32 or int64, rows of `data`.
      segment_ids: (m,) int32 or int64, sorted and >= 0: the output row of each.
      num_segments: number of output rows; None: derived from `segment_ids`.

    Returns:
      (num_segments, ...), 0 for a segment without rows.

    Raises:
      tf.errors.InvalidArgumentError: an index out of range, or unsorted segments.
    """
    return tf.sparse.segment_sum(data, indices, segment_ids, num_segments, name)


def sparse_fill_empty_rows(
    sp_input: tf.SparseTensor, default_value: Any, name: str | None = None
) -> tuple[tf.SparseTensor, tf.Tensor]:
    """Fills each empty row of a SparseTensor (rows, columns) with a scalar.

    As `tf.sparse.fill_empty_rows`. Returns (the filled sparse tensor, ordered by index; (rows,)
    bool, whether a row was empty). TypeError: `sp_input` is no SparseTensor.
    """
    return tf.sparse.fill_empty_rows(sp_input, default_value, name)


def sparse_reshape(sp_input: tf.SparseTensor, shape: Any, name: str | None = None) -> Any:
    """Reshapes a SparseTensor, as `tf.sparse.reshape` does; one -1 in the shape is inferred.

    Raises:
      TypeError: `sp_input` is no SparseTensor. ValueError: the shape does not match its size.
    """
    return tf.sparse.reshape(sp_input, shape, name)
