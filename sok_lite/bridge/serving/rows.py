"""Rows by number as an exported model has them: as they are, as halves, or as bytes."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

QUANTIZED = (None, "float16", "int8")
# Scales below this are flushed to 0 by many processors.
_LEAST_SCALE = np.finfo(np.float32).tiny
_STEPS = 127


def check_quantize(quantize: Any) -> None:
    """Raises ValueError for another `quantize`."""
    if quantize not in QUANTIZED:
        raise ValueError(
            f"`quantize` must be None, 'float16' or 'int8'. Received: quantize={quantize!r}."
        )


class ServedRows:
    """Rows that are read by number.

    "float16" rounds rows of float32 and float64 to it: an element is off by at most 2**-11 of its
    size, or by 2**-25 where that is more. "int8" has one scale for each row of floats: an element
    is off by at most 1/254 of the largest of its row, or by 2e-36 where that is more. Then it is
    rounded to the rows' dtype. Integers stay as they are.

    Args:
      name: of the table, for errors.
      rows: (n, dim), of an array type that TensorFlow has.
      quantize: "float16", "int8" or None.
      make_variable: takes a name and an array, and gives a variable of it.

    Raises:
      ValueError: an element does not fit.
    """

    def __init__(
        self, name: str, rows: np.ndarray, quantize: str | None, make_variable: Callable[..., Any]
    ) -> None:
        self._name = name
        self._dtype = tf.as_dtype(rows.dtype)
        self._scales = None
        if quantize == "float16" and self._dtype in (tf.float32, tf.float64):
            rows = self._halves(rows)
        elif quantize == "int8" and self._dtype.is_floating:
            rows, scales = self._bytes(rows)
            self._scales = make_variable("scales", scales)
        self._rows = make_variable("rows", rows)
        self.variables = [self._rows] + ([] if self._scales is None else [self._scales])

    def gather(self, numbers: tf.Tensor) -> tf.Tensor:
        """Returns rows, numbers.shape + [dim], of their dtype before the export."""
        rows = tf.gather(self._rows, numbers)
        if self._scales is None:
            return rows if rows.dtype == self._dtype else tf.cast(rows, self._dtype)
        scales = tf.gather(self._scales, numbers)
        return tf.cast(tf.cast(rows, tf.float32) * scales[..., tf.newaxis], self._dtype)

    def _halves(self, rows: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            halves = rows.astype(np.float16)
        self._check(bool(np.isfinite(halves).all()), rows, float(np.finfo(np.float16).max))
        return halves

    def _bytes(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns (n, dim) int8 and (n,) float32, whose product the rows are."""
        wide = rows.astype(np.float64 if self._dtype == tf.float64 else np.float32)
        largest = np.abs(wide).max(axis=1, initial=0)
        limit = float(np.finfo(np.float32).max)
        self._check(bool((largest <= limit).all()), wide, limit)
        scales = (largest / _STEPS).astype(np.float32)
        scales = np.where(scales < _LEAST_SCALE, np.float32(0), scales)
        divisors = np.where(scales == 0, np.float32(np.inf), scales)
        return np.rint(wide / divisors[:, None]).astype(np.int8), scales

    def _check(self, fits: bool, rows: np.ndarray, limit: float) -> None:
        if not fits:
            largest = np.abs(rows.astype(np.float64)).max()
            raise ValueError(
                f"Rows of {self._name!r} cannot be quantised: elements must be at most {limit:g} "
                f"in size. Received: {largest:g}. Leave `quantize` out, or try another."
            )
