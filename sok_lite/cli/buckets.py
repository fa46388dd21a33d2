"""Groups keys of several sources, in any order and number, with bounded memory.

Records go into temporary files by the hash of their key, so equal keys meet in one file, which fits
in memory.
"""

import os
import tempfile
from collections.abc import Iterator

import numpy as np

from sok_lite.engine.hashing import hash_keys, seed_of_process

# Bytes of records of all sides in memory at once, up to a small factor.
BUCKET_BYTES = 32 << 20
# For two terabytes; beyond that buckets grow.
_MOST_BUCKETS = 1 << 16


class Buckets:
    """Records of several sides, in a temporary folder ($TMPDIR) until closed.

    Args:
      dtypes: of each side's records, structured, with a field "key" of int64.
    """

    def __init__(self, dtypes: list[np.dtype], counts: list[int]) -> None:
        self._dtypes = dtypes
        num_bytes = sum(d.itemsize * count for d, count in zip(dtypes, counts, strict=True))
        # The counts come from a manifest, which may be wrong.
        self._num_buckets = min(max(1, -(-num_bytes // BUCKET_BYTES)), _MOST_BUCKETS)
        self._waiting: list[list[np.ndarray]] = [[] for _ in dtypes]
        self._folder = tempfile.TemporaryDirectory(prefix="sok-lite-")

    def close(self) -> None:
        self._folder.cleanup()

    @property
    def folder(self) -> str:
        """The temporary folder; other files there must not have numbers as names."""
        return self._folder.name

    def add(self, side: int, records: np.ndarray) -> None:
        """Adds records of a side."""
        self._waiting[side].append(records)
        # In batches, so each file is opened a few times only, however many there are.
        if sum(some.nbytes for some in self._waiting[side]) >= BUCKET_BYTES:
            self._write(side)

    def _write(self, side: int) -> None:
        if not self._waiting[side]:
            return
        records = np.concatenate(self._waiting[side])
        self._waiting[side].clear()
        # The high half: 2**32 buckets are more than enough, and products fit.
        high = hash_keys(np.ascontiguousarray(records["key"]), seed_of_process()) >> np.uint64(32)
        numbers = ((high * np.uint64(self._num_buckets)) >> np.uint64(32)).astype(np.int64)
        order = np.argsort(numbers, kind="stable")
        ends = np.searchsorted(numbers[order], np.arange(self._num_buckets + 1))
        for number in range(self._num_buckets):
            some = order[ends[number] : ends[number + 1]]
            if some.size:
                with open(self._path(side, number), "ab") as file:
                    file.write(records[some].data)

    def __iter__(self) -> Iterator[list[np.ndarray]]:
        """Yields the records of all sides per bucket, sorted by key, then in the order added."""
        for side in range(len(self._dtypes)):
            self._write(side)
        for number in range(self._num_buckets):
            sides = []
            for side, dtype in enumerate(self._dtypes):
                path = self._path(side, number)
                records = np.empty(0, dtype)
                if os.path.exists(path):
                    records = np.fromfile(path, dtype)
                    os.remove(path)
                sides.append(records[np.argsort(records["key"], kind="stable")])
            yield sides

    def _path(self, side: int, number: int) -> str:
        return os.path.join(self._folder.name, f"{side}-{number}")


def firsts(keys: np.ndarray) -> np.ndarray:
    """Returns a bool mask of where ascending keys change."""
    is_first = np.ones(keys.size, bool)
    is_first[1:] = keys[1:] != keys[:-1]
    return is_first
