"""Rows that travel: what a collective takes, the form in which it sends it, and what comes."""

import itertools
import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

# One line per collective on standard error; the way to see which rank is ahead in a deadlock.
TRACE_VARIABLE = "SOK_LITE_COMM_TRACE"
_REDUCE = {"sum": np.add, "max": np.maximum, "min": np.minimum}

_MAX_ROWS = 2**31 - 1
_SUPPORTED = frozenset(
    np.dtype(name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64"),
    )
)
_FEW = 256  # splits that Python adds faster than NumPy begins to


class Gathered(NamedTuple):
    """The rows received by this rank, and how many of them from each rank.

    Attributes:
      rows: (m, ...), the rows of rank 0 first, then those of rank 1, and so on.
      recv_splits: (size,) int32, number of rows from each rank; they sum to m.
    """

    rows: np.ndarray
    recv_splits: np.ndarray

    def by_rank(self) -> list[np.ndarray]:
        """Returns the rows of each rank, views of `rows`."""
        ends = split_offsets(self.recv_splits).tolist()
        return [self.rows[start:end] for start, end in itertools.pairwise(ends)]

    def like(self, array: np.ndarray) -> "Gathered":
        """Returns rows that were `flat` in the trailing shape and dtype of an array."""
        shape = (self.rows.shape[0], *array.shape[1:])
        rows = np.empty(shape, array.dtype) if 0 in shape[1:] else self.rows.reshape(shape)
        return Gathered(rows, self.recv_splits)


def split_offsets(splits: Sequence[int] | np.ndarray) -> np.ndarray:
    """Returns (size + 1,) int64: where each rank's rows start, and the end of the last."""
    if type(splits) is np.ndarray and splits.size > _FEW:
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(splits, dtype=np.int64)])
    # NumPy takes longer to begin than Python to add so few.
    numbers = splits.tolist() if type(splits) is np.ndarray else splits
    return np.array(list(itertools.accumulate(numbers, initial=0)), np.int64)


def checked_array(x: Any, caller: str) -> np.ndarray:
    """Returns an array of the host whose dtype travels.

    Args:
      caller: name of the collective, for errors.

    Raises:
      TypeError: it is on a GPU, or its dtype does not travel.
    """
    if hasattr(x, "__cuda_array_interface__"):
        raise TypeError(
            f"`{caller}` takes arrays in host memory. Received: {type(x).__module__}."
            f"{type(x).__name__}. Use the backend's `to_host` first."
        )
    array = np.asarray(x)
    if array.dtype not in _SUPPORTED:
        hint = " View it as uint16." if array.dtype.name == "bfloat16" else ""
        raise TypeError(
            f"`{caller}` takes booleans, integers of 8 to 64 bits and floats of 16 to 64 bits. "
            f"Received: dtype={array.dtype}.{hint}"
        )
    return array


def checked_operand(x: Any, op: str) -> np.ndarray:
    """Returns an array for `allreduce`.

    Raises:
      ValueError: unknown op, or a sum of booleans. TypeError: as of `checked_array`.
    """
    if op not in _REDUCE:
        raise ValueError(f"`op` must be one of {sorted(_REDUCE)}. Received: op={op!r}.")
    array = checked_array(x, "allreduce")
    if op == "sum" and array.dtype == np.bool_:
        raise ValueError(
            "`allreduce` cannot sum booleans. Received: dtype=bool. Give integers to count, "
            "or use op='max' for any and op='min' for all."
        )
    return array


def checked_rows(rows: Any, caller: str) -> np.ndarray:
    """Returns rows as `checked_array` does.

    Raises:
      ValueError: it is a scalar, or there are too many. TypeError: as of `checked_array`.
    """
    array = checked_array(rows, caller)
    if array.ndim == 0:
        raise ValueError(
            f"`{caller}` takes rows, an array of at least one dimension. Received: a scalar of "
            f"dtype {array.dtype}. Give `x[None]` to send it as one row."
        )
    if len(array) > _MAX_ROWS:
        raise ValueError(f"`{caller}` takes at most {_MAX_ROWS} rows. Received: {len(array)}.")
    return array


def checked_splits(splits: Any, size: int, name: str) -> np.ndarray:
    """Returns splits as (size,) int64, so that their sum cannot wrap.

    Raises:
      ValueError: they have another length, or one is negative or too large. TypeError: they are no
        integers.
    """
    array = np.asarray(splits)
    if array.ndim != 1 or array.shape[0] != size:
        raise ValueError(
            f"`{name}` must have one entry per rank, shape ({size},). "
            f"Received: shape {array.shape}."
        )
    if array.dtype.kind not in "iu":
        raise TypeError(f"`{name}` must be integers. Received: dtype={array.dtype}.")
    if (array < 0).any() or (array > _MAX_ROWS).any():
        raise ValueError(
            f"`{name}` must be 0 to {_MAX_ROWS} rows a rank. Received: {name}={array.tolist()}."
        )
    return array.astype(np.int64)


def flat(rows: np.ndarray) -> np.ndarray:
    """Returns rows as contiguous (n, k), k > 0; rows without content become one byte each."""
    num_rows = rows.shape[0]
    if int(np.prod(rows.shape[1:], dtype=np.int64)) == 0:
        return np.zeros((num_rows, 1), np.uint8)
    return np.ascontiguousarray(rows).reshape(num_rows, int(np.prod(rows.shape[1:])))


def reduced(stacked: np.ndarray, op: str) -> np.ndarray:
    """Reduces (size, k) to (k,), rank 0 first: a fixed order, so that floats repeat.

    Args:
      op: "sum", "max" or "min".
    """
    result: np.ndarray = stacked[0].copy()
    for other in stacked[1:]:
        _REDUCE[op](result, other, out=result)
    return result


def trace(rank: int, name: str, array: np.ndarray | None, splits: np.ndarray | None = None) -> None:
    """Prints a line about a collective of this rank, where that is asked for.

    Args:
      array: what is sent; None: nothing.
      splits: (size,) rows of it for each rank; None: all of them for all.
    """
    if not os.environ.get(TRACE_VARIABLE):
        return
    what = "" if array is None else f" {array.dtype}{list(array.shape)}"
    where = "" if splits is None else f" -> {splits.tolist()}"
    print(f"r{rank} | {name}{what}{where}", file=sys.stderr, flush=True)
