"""The differences between two tables: keys, rows, and the other columns of each key."""

from collections.abc import Iterator
from contextlib import closing
from typing import NamedTuple

import numpy as np

from sok_lite.cli.buckets import Buckets, firsts
from sok_lite.cli.wrapped import plain
from sok_lite.engine.dtypes import key_dtype
from sok_lite.engine.files.source import Source, column_of

_NUM_EXAMPLES = 5


class Difference(NamedTuple):
    """How a column differs.

    Attributes:
      only: how many keys only one has, of each.
      both: how many keys both have.
      differing: of those, how many have other rows.
      largest: the largest difference of two elements; NaN where one is NaN and the other is not.
      examples: some keys: only in the first, only in the second, with other rows.
    """

    only: tuple[int, int]
    both: int
    differing: int
    largest: float
    examples: tuple[list[int], list[int], list[int]]


def difference(
    sources: tuple[Source, Source], columns: tuple[str, str], tolerance: float
) -> Difference:
    """Compares a column of two tables of one key type. Of a key that repeats the first counts.

    Args:
      sources: the tables.
      columns: the name of the column in each; with rows of as many elements.
      tolerance: elements may differ by so much; NaN is as NaN.

    Raises:
      OSError, ValueError: a table cannot be read, or there is no room for temporary files, which
        have the bytes of the keys and the column of both.
    """
    kinds = [column_of(*pair) for pair in zip(sources, columns, strict=True)]
    dtypes = [
        np.dtype([("key", np.int64), ("row", kind.dtype, (1 if kind.dim is None else kind.dim,))])
        for kind in kinds
    ]
    only, both, differing, largest = [0, 0], 0, 0, 0.0
    examples: tuple[list[int], list[int], list[int]] = ([], [], [])
    with closing(Buckets(dtypes, [source.num_keys for source in sources])) as buckets:
        for side, (source, column) in enumerate(zip(sources, columns, strict=True)):
            for records in _records(source, column, dtypes[side]):
                buckets.add(side, records)
        for sides in buckets:
            first, second = (side[firsts(side["key"])] for side in sides)
            keys, at_first, at_second = np.intersect1d(
                first["key"], second["key"], assume_unique=True, return_indices=True
            )
            both += keys.size
            for side, records in enumerate((first, second)):
                alone = np.setdiff1d(records["key"], keys, assume_unique=True)
                only[side] += alone.size
                _show(examples[side], alone, sources[0].key_type)
            rows = [
                plain(source, column, records["row"][at])
                for source, column, records, at in zip(
                    sources, columns, (first, second), (at_first, at_second), strict=True
                )
            ]
            is_other, distance = _compare_rows(rows[0], rows[1], tolerance)
            differing += int(np.count_nonzero(is_other))
            largest = float(np.maximum(largest, distance))
            _show(examples[2], keys[is_other], sources[0].key_type)
    return Difference((only[0], only[1]), both, differing, largest, examples)


def _records(source: Source, column: str, dtype: np.dtype) -> Iterator[np.ndarray]:
    kind = key_dtype(source.key_type)
    for keys, rows in zip(source.read("keys"), source.read(column), strict=True):
        records = np.empty(keys.size, dtype)
        records["key"] = kind.to_int64(np, keys)
        records["row"] = rows.reshape(records["row"].shape)
        yield records


def _compare_rows(
    first: np.ndarray, second: np.ndarray, tolerance: float
) -> tuple[np.ndarray, np.floating]:
    """Returns which rows differ, and the largest difference of two elements."""
    with np.errstate(invalid="ignore", over="ignore"):
        is_equal = first == second
        if first.dtype.kind == "f" or second.dtype.kind == "f":
            is_equal |= (first != first) & (second != second)
        distances = np.abs(first.astype(np.float64) - second.astype(np.float64))
        distances[is_equal] = 0
    is_near = is_equal | ((distances <= tolerance) & (tolerance > 0))
    return ~is_near.all(axis=1), np.max(distances, initial=0.0)


def _show(examples: list[int], keys: np.ndarray, key_type: str) -> None:
    some = key_dtype(key_type).from_int64(np, keys[: _NUM_EXAMPLES - len(examples)])
    examples.extend(some.tolist())
