"""SOK's module of this name: sparse gradients and times."""

from datetime import datetime, timezone

import numpy as np
import tensorflow as tf

__all__ = ["SOK_IndexedSlices", "get_nano_time"]


def SOK_IndexedSlices() -> type[tf.IndexedSlices]:
    """Returns TensorFlow's class of sparse gradients."""
    return tf.IndexedSlices


def get_nano_time(datetime_str: str) -> np.uint64:
    """Returns the nanoseconds from 1970 to a time of UTC, such as "2024-02-29 12:00:00".

    Raises:
      ValueError: the text is no such time.
    """
    time = datetime.strptime(datetime_str, "%Y-%m-%d %H:%M:%S").replace(tzinfo=timezone.utc)
    return np.uint64(int(time.timestamp()) * 10**9)
