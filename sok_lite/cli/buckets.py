"""Keys of several sources side by side, whatever order they are in and however many there are.

Records go into temporary files by the hash of their key. Equal keys come into one file, and each
file has room in memory.
"""

import os
import tempfile
from collections.abc import Iterator

import numpy as np

from sok_lite.engine.hashing import hash_keys, seed_of_process

# Of the records of all sides that are in memory together, or a few times as much.
BUCKET_BYTES = 32 << 20
# For two terabytes. Of more, each has more in memory.
_MOST_BUCKETS = 1 << 16


class Buckets:
    """Records of several sides, in a temporary folder ($TMPDIR) until it is closed.

    Args:
      dtypes: of the records of each side, structured, with a field "key" of int64.
      counts: about how many each side has.
    """

    def __init__(self, dtypes: list[np.dtype], counts: list[int]) -> None:
        self._dtypes = dtypes
        num_bytes = sum(d.itemsize * count for d, count in zip(dtypes, counts, strict=True))
        # The counts are what somebody has written into a manifest.
        self._num_buckets = min(max(1, -(-num_bytes // BUCKET_BYTES)), _MOST_BUCKETS)
        self._waiting: list[list[np.ndarray]] = [[] for _ in dtypes]
        self._folder = tempfile.TemporaryDirectory(prefix="sok-lite-")

    def close(self) -> None:
        """Removes the temporary folder."""
        self._folder.cleanup()

    @property
    def folder(self) -> str:
        """The temporary folder, for files of other names than a number has."""
        return self._folder.name

    def add(self, side: int, records: np.ndarray) -> None:
        """Keeps some records of a side."""
        self._waiting[side].append(records)
        # Many together: so each file is opened a few times only, however many files there are.
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
        """Yields the records of every side, bucket by bucket, each by key and then as added."""
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
    """Returns which of ascending keys differ from the one before, bool."""
    is_first = np.ones(keys.size, bool)
    is_first[1:] = keys[1:] != keys[:-1]
    return is_first
