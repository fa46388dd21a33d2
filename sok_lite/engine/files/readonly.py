"""`open_readonly`: lookups in the files of a checkpoint, without loading its tables.

Files are mapped into memory, so a lookup reads only the rows that it returns, and processes that
serve one checkpoint share the pages that they have read. It needs neither TensorFlow nor a GPU.
"""

import mmap
import os
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from sok_lite.engine.dtypes import (
    bfloat16_to_float32,
    instead_of_key,
    is_integer,
    key_dtype,
    number_in,
    row_dtype,
)
from sok_lite.engine.files import manifest
from sok_lite.engine.files.key_index import (
    MAX_KEYS,
    KeyIndex,
    make_index,
    make_index_of_rows,
)
from sok_lite.engine.files.manifest import Manifest, Shard, TableFacts, path_of
from sok_lite.engine.files.saved_file import newest_rows
from sok_lite.engine.files.table_file import open_shard
from sok_lite.engine.local_path import local_path
from sok_lite.engine.table.choosing import warn_of_repeated

__all__ = ["ReadonlyTable", "ReadonlyTables", "open_readonly"]


class _MappedShard:
    """The keys and rows of a table in one mapped file. They stay readable when the file is removed.

    The header of the file is checked when it is opened, keys and rows by `check_keys` and
    `check_rows`.

    Args:
      facts: of the table.
      shard: the part of it.
      folder: of the checkpoint.

    Attributes:
      keys: (n,) of the key type.
      rows: (k, dim) in storage format, of the first k keys.
      reader: of the file, which may have been removed.

    Raises:
      OSError: the file cannot be read. ValueError: it is corrupt.
    """

    def __init__(self, facts: TableFacts, shard: Shard, folder: str) -> None:
        path, self._chunk_bytes = path_of(folder, shard), shard.written.chunk_bytes
        self.reader = open_shard(facts, shard, folder)
        self.reader.forget()
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        try:
            self._map = mmap.mmap(self._file, 0, access=mmap.ACCESS_READ)
        except OSError as error:  # its own names no file
            raise OSError(error.errno, error.strerror, path) from error
        if hasattr(mmap, "MADV_RANDOM"):
            # Else the system reads 128 KiB or more around each row.
            self._map.madvise(mmap.MADV_RANDOM)
        self.keys, self.rows = self._tensor("keys"), self._tensor("values")
        self._is_checked = np.zeros(len(shard.written.crcs), bool)

    def _tensor(self, name: str) -> np.ndarray:
        tensor, begin = self.reader.tensors[name], self.reader.place(name)
        data = np.frombuffer(self._map, np.uint8)[begin : begin + tensor.num_bytes]
        return data.view(tensor.storage).reshape(tensor.shape)

    def check_keys(self) -> None:
        """Raises ValueError if the chunks of the keys are not what was written. It reads them."""
        begin, size = self.reader.place("keys"), self._chunk_bytes
        self._check(np.arange(begin // size, -(-(begin + self.keys.nbytes) // size)))

    def check_rows(self, numbers: np.ndarray) -> None:
        """Raises ValueError if the chunks of some rows are not what was written.

        Each chunk is read as a whole, once.

        Args:
          numbers: (k,) int64, of the rows.
        """
        width, size = self.reader.tensors["values"].row_bytes, self._chunk_bytes
        first = self.reader.place("values") + numbers * width
        reached = np.zeros(self._is_checked.size, bool)
        reached[first // size] = True
        # A row may end in the chunk behind, or be longer than a chunk.
        for further in range(size, width + size, size):
            reached[(first + min(further, width - 1)) // size] = True
        self._check(np.flatnonzero(reached))

    def _check(self, numbers: np.ndarray) -> None:
        # Two threads that come here together may check a chunk twice, which does no harm.
        size = self._chunk_bytes
        for number in numbers[~self._is_checked[numbers]].tolist():
            # The file that is mapped, read in one piece where the map would come page by page.
            self.reader.check(number, os.pread(self._file, size, number * size))
            self._is_checked[number] = True


class ReadonlyTable:
    """A table of a checkpoint, with the rows that all ranks wrote. Threads may share it.

    The first lookup reads all keys and makes an index of them, 6 to 8 bytes a key in memory.
    `prepare` does it ahead. A key that several ranks wrote has the row of the lowest of them, as
    after a load; the logger `sok_lite` says of how many.

    Attributes:
      name: of the table.
      dim: length of a row.
      key_type: "int64", "int32" or "uint64".
      dtype: NumPy's, of the rows that lookups return: that of the table, for bfloat16 float32.
    """

    def __init__(self, facts: TableFacts, folder: str, check_rows: bool) -> None:
        self.name, self.dim, self.key_type = facts.name, facts.dim, facts.key_type
        self._row_dtype, self._key_dtype = row_dtype(facts.dtype), key_dtype(facts.key_type)
        is_bfloat16 = facts.dtype == "bfloat16"
        self.dtype = np.dtype(np.float32) if is_bfloat16 else self._row_dtype.storage
        self._num_keys = sum(shard.rows for shard in facts.shards)
        num_rows = sum(part.num_rows for shard in facts.shards for part in shard.chain)
        if num_rows >= MAX_KEYS:
            raise ValueError(
                f"open_readonly takes tables of fewer than {MAX_KEYS:,} rows. Received: "
                f"{num_rows:,} in table {self.name!r}, increments included. Load it on several "
                "ranks."
            )
        self._chains = [  # the newest file of each has all keys of its rank
            [_MappedShard(facts, part, folder) for part in reversed(shard.chain)]
            for shard in facts.shards
        ]
        self._files = [file for chain in self._chains for file in chain]
        # Of all rows together, where those of each file begin.
        self._starts = np.cumsum([0, *(len(file.rows) for file in self._files)])
        self._check_rows = check_rows
        self._index: KeyIndex | None = None
        self._making = threading.Lock()

    def __len__(self) -> int:
        """Keys of all files."""
        return self._num_keys

    def __contains__(self, key: object) -> bool:
        """Returns whether an integer is a key."""
        limits, key = np.iinfo(self._key_dtype.dtype), number_in(key)
        if not is_integer(key):
            raise TypeError(
                f"`in` asks {self.name!r} for one key, an integer. Received: {key!r}. "
                f"{instead_of_key(key, 'contains(keys)')}"
            )
        return limits.min <= int(key) <= limits.max and bool(self.contains(key))  # type: ignore

    def __repr__(self) -> str:
        return (
            f"<ReadonlyTable {self.name!r} keys={self._num_keys} dim={self.dim} "
            f"key_type={self.key_type} dtype={self._row_dtype.name}>"
        )

    def keys(self) -> np.ndarray:
        """Returns all keys in the order of the files, (n,) of the key type. It reads them all."""
        self.prepare()
        return np.concatenate([chain[0].keys for chain in self._chains])

    def contains(self, keys: Any) -> np.ndarray:
        """Returns which keys there are, bool.

        Args:
          keys: integers of any shape.

        Raises:
          TypeError, ValueError: they are no integers, or do not fit the key type; a file is
            corrupt.
        """
        wanted = self._key_dtype.to_int64(np, keys)
        return self._mask(wanted, self._places(wanted)[0])

    def lookup(self, keys: Any, default: Any = 0) -> np.ndarray:
        """Returns the rows of keys.

        Args:
          keys: integers of any shape.
          default: the row of a missing key: a number, or (dim,).

        Returns:
          keys.shape + (dim,) of `dtype`, writable: a copy.

        Raises:
          TypeError, ValueError: keys are no integers, or do not fit the key type; the default is no
            row; a file is corrupt.
        """
        return self.find(keys, default)[0]

    def find(self, keys: Any, default: Any = 0) -> tuple[np.ndarray, np.ndarray]:
        """Returns the rows of keys as `lookup` does, and which are there, bool of keys.shape."""
        wanted = self._key_dtype.to_int64(np, keys)
        row = np.asarray(default)
        if row.shape not in ((), (self.dim,)) or row.dtype.kind not in "iuf":
            raise ValueError(
                f"`default` must be a number or a row of {self.dim}. Received: {default!r}."
            )
        with np.errstate(over="ignore", invalid="ignore"):
            stored = row.astype(self.dtype)
        is_same = (
            stored == row if self.dtype.kind == "i" else np.isfinite(stored) | ~np.isfinite(row)
        )
        if not is_same.all():
            raise ValueError(
                f"`default` must fit {self.dtype.name}, as the rows. Received: {default!r}."
            )
        found, places = self._places(wanted)
        rows = np.empty((wanted.size, self.dim), self.dtype)
        if found.size < wanted.size:
            rows[:] = row
        for file, which, numbers in _by_file(self._files, self._starts, places):
            if self._check_rows:
                file.check_rows(numbers)
            rows[found[which]] = self._decode(file.rows[numbers])
        return rows.reshape(*wanted.shape, self.dim), self._mask(wanted, found)

    def prepare(self) -> None:
        """Builds the index of the keys now instead of in the first lookup.

        Raises:
          ValueError: a file is corrupt.
        """
        with self._making:
            if self._index is None:
                for file in self._files:
                    file.check_keys()
                self._index = self._make_index()

    def _make_index(self) -> KeyIndex:
        parts = [
            (self._int64(chain[0].keys), [self._int64(f.keys[: len(f.rows)]) for f in chain])
            for chain in self._chains
        ]
        if len(parts) > 1:
            all_keys = np.sort(np.concatenate([keys for keys, _ in parts]))
            warn_of_repeated(self.name, int(np.count_nonzero(all_keys[1:] == all_keys[:-1])))
        if len(self._files) == len(self._chains):  # each file has the rows of its keys
            return make_index([keys for keys, _ in parts])
        index = make_index_of_rows(parts, self._key_at)
        if isinstance(index, KeyIndex):
            return index
        keys, rows = parts[index]
        corrupt = self._chains[index][0].reader.corrupt
        newest_rows(keys, rows, corrupt)
        raise corrupt("one of its keys is there twice")

    def _int64(self, keys: np.ndarray) -> np.ndarray:
        return self._key_dtype.to_int64(np, keys)

    def _places(self, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns which of some keys exist, and the positions of their rows among all rows."""
        if self._index is None:
            self.prepare()
        assert self._index is not None
        return self._index.find(wanted.reshape(-1), self._key_at)

    def _key_at(self, places: np.ndarray) -> np.ndarray:
        keys = np.empty(places.size, np.int64)
        for file, which, numbers in _by_file(self._files, self._starts, places):
            keys[which] = self._key_dtype.to_int64(np, file.keys[numbers])
        return keys

    def _decode(self, stored: np.ndarray) -> np.ndarray:
        if self._row_dtype.name == "bfloat16":
            return bfloat16_to_float32(np, stored)
        return stored

    def _mask(self, wanted: np.ndarray, found: np.ndarray) -> np.ndarray:
        mask = np.zeros(wanted.size, bool)
        mask[found] = True
        return mask.reshape(wanted.shape)


def _by_file(
    files: Sequence[_MappedShard], starts: np.ndarray, places: np.ndarray
) -> Iterator[tuple[_MappedShard, Any, np.ndarray]]:
    """Yields each file, which of some positions are in it, and their numbers there."""
    if len(files) == 1:
        yield files[0], slice(None), places.astype(np.int64, copy=False)
        return
    of_place = np.searchsorted(starts, places, side="right") - 1
    for i, file in enumerate(files):
        which = np.flatnonzero(of_place == i)
        if which.size:
            yield file, which, places[which].astype(np.int64) - starts[i]


class ReadonlyTables(Mapping[str, ReadonlyTable]):
    """A mapping of names to the `ReadonlyTable`s of a checkpoint."""

    def __init__(self, folder: str, tables: dict[str, ReadonlyTable]) -> None:
        self._folder, self._tables = folder, tables

    def __getitem__(self, name: str) -> ReadonlyTable:
        if name not in self._tables:
            names = ", ".join(map(repr, sorted(self._tables))) or "none"
            raise KeyError(
                f"The checkpoint at {self._folder} has no table {name!r}. It has: {names}."
            )
        return self._tables[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)

    def __repr__(self) -> str:
        return f"<ReadonlyTables {self._folder!r} {list(self._tables.values())}>"


def open_readonly(path: str | os.PathLike[str], *, check_rows: bool = False) -> ReadonlyTables:
    """Opens a checkpoint for lookups in its files, without TensorFlow and without loading it.

    The manifest and the header of each file are read and checked at once, the keys of a table in
    its first lookup or by `prepare`. If a dump replaces the checkpoint, an open one still reads the
    old files: they are removed, and their space is freed when no process has them mapped. Open the
    checkpoint again for the new one.

    Args:
      path: of the folder that `sok.dump` wrote, on any number of ranks; of that of a
        sok_lite.keras.Checkpoint its newest save is opened.
      check_rows: whether rows are checked too: each chunk of 8 MiB of a file, before a row of it is
        returned for the first time. The whole chunk is read for that, so soon all rows are.

    Returns:
      A mapping of names to tables.

    Raises:
      OSError: a file cannot be read, or there is no checkpoint. ValueError: the path is no local
        one, or a file is corrupt.
    """
    given = os.path.abspath(local_path(path))
    before: tuple[str, Manifest] | None = None
    while True:
        folder = manifest.newest_at(given)
        found = manifest.read(folder)
        try:
            tables = {
                name: ReadonlyTable(facts, folder, check_rows)
                for name, facts in found.tables.items()
            }
            return ReadonlyTables(folder, tables)
        except FileNotFoundError:
            if (folder, found) == before:
                raise
            before = folder, found  # a dump may have replaced the checkpoint in between
