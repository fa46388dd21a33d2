"""`open_readonly`: lookups in the files of a checkpoint, without loading its tables.

Files are memory-mapped: a lookup reads only the rows that it returns, and processes that serve the
same checkpoint share its pages. Needs neither TensorFlow nor a GPU.

An open checkpoint is an immutable `_Snapshot`. A lookup takes the newest one and keeps it until it
is done; a refresh makes the next one beside it. The changes of an increment go into a small delta
index, which lookups ask before the base index. When no lookup uses an older snapshot any more, the
delta is compacted into the base: the base is never copied, and a lookup sees the old content or the
new one, never a mix.
"""

import logging
import numbers
import os
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from sok_lite.backend.arguments import address_of
from sok_lite.engine.dtypes import (
    as_float,
    bfloat16_to_float32,
    is_integer,
    key_advice,
    key_dtype,
    row_dtype,
    unwrap_scalar,
)
from sok_lite.engine.files import manifest
from sok_lite.engine.files.manifest import Manifest, Shard, TableFacts
from sok_lite.engine.files.mapped_shard import MappedShard
from sok_lite.engine.files.saved_file import missing_rows
from sok_lite.engine.files.served_index import MAX_RANKS, FileKeys, ServedIndex
from sok_lite.engine.files.store import Store, is_in_store
from sok_lite.engine.local_path import local_path
from sok_lite.engine.table.content import warn_of_repeated

__all__ = ["Following", "ReadonlyTable", "ReadonlyTables", "open_readonly"]

_log = logging.getLogger("sok_lite")


class _TableSnapshot:
    """A table of a checkpoint. Only building the index changes it.

    Args:
      facts: the manifest's entry of the table.
      chains: the files of each rank, newest first. The newest has all keys of the rank.

    Attributes:
      index: the base index; None until it is built.
      delta: index of newer increments, asked before `index`; None if there are none.
      has_duplicates: whether several ranks have the same key.
    """

    def __init__(self, facts: TableFacts, chains: list[list[MappedShard]]) -> None:
        self.facts, self.chains = facts, chains
        self.num_keys = sum(shard.rows for shard in facts.shards)
        self.index: ServedIndex | None = None
        self.delta: ServedIndex | None = None
        self.has_duplicates = False

    @classmethod
    def open(cls, facts: TableFacts, folder: str) -> "_TableSnapshot":
        """Maps all files of a table."""
        if len(facts.shards) > MAX_RANKS:
            raise ValueError(
                f"open_readonly takes what at most {MAX_RANKS:,} ranks wrote. Received: "
                f"{len(facts.shards):,}, of table {facts.name!r}. Write it on fewer: sok-lite "
                "reshard."
            )
        chains = [
            [MappedShard(facts, part, folder) for part in reversed(shard.chain)]
            for shard in facts.shards
        ]
        return cls(facts, chains)

    @cached_property
    def _files(self) -> list[MappedShard]:
        """All files that have rows, by the address of their rows."""
        files = [file for chain in self.chains for file in chain if file.rows.size]
        return sorted(files, key=lambda file: address_of(file.rows))

    @cached_property
    def _starts(self) -> np.ndarray:
        return np.array([address_of(file.rows) for file in self._files], np.uint64)

    def check_rows(self, addresses: np.ndarray) -> None:
        """Raises ValueError if a row is in a chunk with a wrong checksum.

        Args:
          addresses: (n,) uint64, of rows; zeros are skipped.
        """
        addresses = addresses[addresses != 0]
        numbers = np.searchsorted(self._starts, addresses, side="right") - 1
        for number in np.unique(numbers):
            file = self._files[number]
            offsets = (addresses[numbers == number] - self._starts[number]).astype(np.int64)
            file.check_rows(offsets // file.rows[0].nbytes)

    def build_index(self) -> None:
        """Builds the index from the keys of all files, unless it is there.

        Raises:
          ValueError: a file is corrupt.
        """
        if self.index is not None:
            return
        for chain in self.chains:
            for file in chain:
                file.check_keys()
        index, num_duplicates = ServedIndex(self.num_keys), 0
        for rank, (newest, *older) in enumerate(self.chains):
            keys = FileKeys(newest.keys, newest.rows, rank)
            in_other_ranks, repeated, without = index.add_newest(keys)
            if repeated and older:
                raise newest.reader.corrupt("one of its keys is there twice")
            num_duplicates += in_other_ranks + repeated
            for file in older:
                without -= index.add_older_rows(
                    FileKeys(file.keys[: len(file.rows)], file.rows, rank)
                )
            if without:
                raise newest.reader.corrupt(missing_rows(without))
        warn_of_repeated(f"table {self.facts.name!r}", num_duplicates)
        self.has_duplicates, self.index = num_duplicates > 0, index

    def successor(self, facts: TableFacts, folder: str) -> "_TableSnapshot":
        """Returns the table of a newer checkpoint, which shares unchanged files with this one.

        Raises:
          OSError, ValueError: as `open_readonly`.
        """
        if facts.shards == self.facts.shards:
            return self
        added = _added_increments(self.facts.shards, facts.shards)
        if added is None:
            made, has_delta = _TableSnapshot.open(facts, folder), False
        else:
            new = [[MappedShard(facts, part, folder) for part in parts] for parts in added]
            made = _TableSnapshot(
                facts, [[*its[::-1], *old] for its, old in zip(new, self.chains, strict=True)]
            )
            has_delta = self._make_delta(made, new, added)
        if self.index is not None and not has_delta:
            made.build_index()  # now, rather than in a lookup
        return made

    def _make_delta(
        self,
        made: "_TableSnapshot",
        new: Sequence[Sequence[MappedShard]],
        added: Sequence[Sequence[Shard]],
    ) -> bool:
        """Indexes increments in a delta index of `made`.

        Args:
          new, added: of each rank its new files, oldest first, and their manifest entries.

        Returns:
          False if this cannot tell which keys were removed: all keys have to be indexed again.
        """
        if self.index is None or self.has_duplicates:
            return False
        parts, num_keys = [], []  # of each file: its rows, then its removals
        for rank, (files, shards) in enumerate(zip(new, added, strict=True)):
            before = self.facts.shards[rank].rows
            for file, shard in zip(files, shards, strict=True):
                file.check_keys(len(file.rows))
                removed = file.keys[:0] if file.removed is None else file.removed
                parts.append(FileKeys(file.keys[: len(file.rows)], file.rows, rank))
                parts.append(FileKeys(removed, None, rank))
                num_keys.append((before, shard.rows))
                before = shard.rows
        delta, known = self.index.make_delta(parts, self.delta)
        for i, (before, after) in enumerate(num_keys):
            (updated, foreign), (removed, foreign_removed) = known[2 * i : 2 * i + 2]
            inserted = parts[2 * i].num_keys - updated - foreign
            if foreign or foreign_removed or before + inserted - removed != after:
                return False
        made.index, made.delta = self.index, delta
        if self.index.num_free < delta.num_new:
            made.index, made.delta = self.index.grown(delta), None
        return True

    def compacted(self) -> "_TableSnapshot":
        """Returns the same content, after merging the delta index into the base index.

        No lookup may use a snapshot older than this one any more.
        """
        if self.delta is None:
            return self
        assert self.index is not None
        self.index.merge(self.delta)
        made = _TableSnapshot(self.facts, self.chains)
        made.index = self.index
        return made


def _added_increments(old: Sequence[Shard], new: Sequence[Shard]) -> list[tuple[Shard, ...]] | None:
    """Returns each rank's new increments, oldest first; None if `new` does not continue `old`."""
    if len(old) != len(new):
        return None
    added: list[tuple[Shard, ...]] = []
    for before, after in zip(old, new, strict=True):
        count = len(before.chain)
        if [part.file for part in after.chain[:count]] != [part.file for part in before.chain]:
            return None
        added.append(after.chain[count:])
    return added


@dataclass(frozen=True, eq=False)
class _Snapshot:
    """An open checkpoint.

    Attributes:
      text: of its manifest.
      published: when the manifest was written, seconds since 1970.
    """

    folder: str
    text: bytes
    published: float
    tables: dict[str, _TableSnapshot]


class _OpenCheckpoint:
    """The state that the tables of one `open_readonly` share.

    Args:
      place: folder or store of the checkpoint, or of the saves of a `sok_lite.keras.Checkpoint`.
      check_rows: whether the checksums of rows are checked before they are returned.

    Attributes:
      snapshot: the newest; replaced, never changed.
    """

    # How long a refresh waits for lookups that began before it, to compact the delta indexes.
    # After that the next refresh does it.
    _compaction_timeout = 1.0

    def __init__(self, place: str | Store, check_rows: bool) -> None:
        self.place, self.check_rows = place, check_rows
        # `_refreshing` is held for a whole refresh, which may download for long; `_changing` only
        # while something that lookups use changes.
        self._refreshing, self._changing = threading.Lock(), threading.Lock()
        # Older snapshots that lookups may still use.
        self._older: list[weakref.ref[_Snapshot]] = []
        self._one_is_gone = threading.Event()
        self.snapshot = self._read_newest(None)

    def indexed(self, name: str) -> _Snapshot:
        """Returns the newest snapshot, after building the index of a table if need be."""
        snapshot = self.snapshot
        if snapshot.tables[name].index is None:
            with self._changing:
                snapshot = self.snapshot
                snapshot.tables[name].build_index()
        return snapshot

    def refresh(self, ends: threading.Event | None = None) -> bool:
        """Opens a newer checkpoint, if there is one; returns whether there was.

        Args:
          ends: once it is set, failed calls of a store are not retried.
        """
        with self._refreshing:
            if isinstance(self.place, Store):
                self.place.ends = ends or threading.Event()
            newest = self._read_newest(self.snapshot)
            is_newer = newest is not self.snapshot
            with self._changing:
                if is_newer:
                    self._replace(newest)
                del newest
                self._compact(self._compaction_timeout if is_newer else 0.0)
            return is_newer

    def _replace(self, snapshot: _Snapshot) -> None:
        gone = self._one_is_gone
        self._older.append(weakref.ref(self.snapshot, lambda _: gone.set()))
        self.snapshot = snapshot

    def _compact(self, timeout: float) -> None:
        """Compacts the delta indexes, once no lookup uses an older snapshot.

        Args:
          timeout: seconds to wait for that; afterwards the next refresh does it.
        """
        snapshot = self.snapshot
        if all(table.delta is None for table in snapshot.tables.values()):
            return
        end = time.monotonic() + timeout
        while True:
            self._one_is_gone.clear()
            self._older = [older for older in self._older if older() is not None]
            if not self._older:
                break
            if not self._one_is_gone.wait(max(0.0, end - time.monotonic())):
                return
        tables = {name: table.compacted() for name, table in snapshot.tables.items()}
        self._replace(replace(snapshot, tables=tables))

    def _read_newest(self, old: _Snapshot | None) -> _Snapshot:
        """Returns the newest snapshot, which is `old` if nothing is newer."""
        before: tuple[str, bytes] | None = None
        while True:
            place = self.place
            folder = (
                manifest.newest_at(place) if isinstance(place, str) else place.download_newest()
            )
            text, published = manifest.text_of(folder)
            if old is not None and (folder, text) == (old.folder, old.text):
                return old
            found = manifest.from_text(text, os.path.join(folder, manifest.NAME))
            try:
                with self._changing:
                    tables = _open_tables(found, folder, old)
                return _Snapshot(folder, text, published, tables)
            except FileNotFoundError:
                if (folder, text) == before:
                    raise
                before = folder, text  # a dump may have replaced the checkpoint in between


def _open_tables(found: Manifest, folder: str, old: _Snapshot | None) -> dict[str, _TableSnapshot]:
    if old is None:
        return {name: _TableSnapshot.open(facts, folder) for name, facts in found.tables.items()}
    for name, table in old.tables.items():
        kinds = [
            None if facts is None else (facts.dim, facts.dtype, facts.key_type)
            for facts in (table.facts, found.tables.get(name))
        ]
        if kinds[0] != kinds[1]:
            raise ValueError(
                f"A newer checkpoint must have table {name!r} as the one that is open: dim, dtype "
                f"and key_type {kinds[0]}. Received: {kinds[1]}, in {folder}. What was open stays "
                "so. Open the new one by open_readonly."
            )
    return {name: table.successor(found.tables[name], folder) for name, table in old.tables.items()}


class ReadonlyTable:
    """A table of a checkpoint, with the rows that all ranks wrote. Threads may share it.

    The first lookup, or `prepare`, reads all keys and builds an index of 24 bytes a key in memory.
    A lookup is one call that releases the GIL, and never waits for a refresh. A key that several
    ranks wrote has the row of the lowest rank, as after a load; the logger `sok_lite` warns how
    many there are.

    Attributes:
      name: of the table.
      dim: length of a row.
      key_type: "int64", "int32" or "uint64".
      dtype: NumPy dtype of the rows that lookups return: that of the table, float32 for bfloat16.
    """

    def __init__(self, facts: TableFacts, checkpoint: _OpenCheckpoint) -> None:
        self.name, self.dim, self.key_type = facts.name, facts.dim, facts.key_type
        self._row_dtype, self._key_dtype = row_dtype(facts.dtype), key_dtype(facts.key_type)
        self._is_bfloat16 = facts.dtype == "bfloat16"
        self.dtype = np.dtype(np.float32) if self._is_bfloat16 else self._row_dtype.storage
        self._zeros = np.zeros(self.dim, self._row_dtype.storage)
        # The dtype of keys that need no conversion.
        self._fast_dtype = np.dtype(np.int64) if self.key_type == "int64" else None
        self._checkpoint = checkpoint

    def __len__(self) -> int:
        """Returns the number of keys of all ranks."""
        return self._checkpoint.snapshot.tables[self.name].num_keys

    def __contains__(self, key: object) -> bool:
        """Returns whether an integer is a key."""
        limits, key = np.iinfo(self._key_dtype.dtype), unwrap_scalar(key)
        if not is_integer(key):
            raise TypeError(
                f"`in` asks {self.name!r} for one key, an integer. Received: {key!r}. "
                f"{key_advice(key, 'contains(keys)')}"
            )
        return limits.min <= int(key) <= limits.max and bool(self.contains(key))  # type: ignore

    def __repr__(self) -> str:
        return (
            f"<ReadonlyTable {self.name!r} keys={len(self)} dim={self.dim} "
            f"key_type={self.key_type} dtype={self._row_dtype.name}>"
        )

    def keys(self) -> np.ndarray:
        """Returns all keys in the order of the files, (n,) of the key type. Reads them all.

        Raises:
          ValueError: a file is corrupt.
        """
        table = self._checkpoint.indexed(self.name).tables[self.name]
        newest = [chain[0] for chain in table.chains]
        for file in newest:
            file.check_keys()
        return np.concatenate([file.keys for file in newest])

    def contains(self, keys: Any) -> np.ndarray:
        """Returns which keys the table has, bool of keys.shape.

        Args:
          keys: integers of any shape.

        Raises:
          TypeError, ValueError: they are no integers, or do not fit the key type; a file is
            corrupt.
        """
        wanted = self._key_dtype.to_int64(np, keys)
        snapshot = self._checkpoint.indexed(self.name)
        table = snapshot.tables[self.name]
        assert table.index is not None
        return (table.index.find_rows(wanted, table.delta) != 0).reshape(wanted.shape)

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
        return self._read(keys, default, self._is_bfloat16)[0]

    def find(self, keys: Any, default: Any = 0) -> tuple[np.ndarray, np.ndarray]:
        """Returns the rows of keys as `lookup` does, and which keys exist, bool of keys.shape."""
        rows, found = self._read(keys, default, True)
        assert found is not None
        return rows, found

    def _read(
        self, keys: Any, default: Any, wants_found: bool
    ) -> tuple[np.ndarray, np.ndarray | None]:
        if type(keys) is np.ndarray and keys.dtype is self._fast_dtype and keys.flags.c_contiguous:
            wanted = keys  # converting 20 keys would take as long as looking them up
        else:
            wanted = self._key_dtype.to_int64(np, keys)
        is_zero = type(default) is int and default == 0
        missing = None if is_zero else self._checked_default(default)
        snapshot = self._checkpoint.indexed(self.name)  # keeps all that this call reads alive
        table = snapshot.tables[self.name]
        assert table.index is not None
        if self._checkpoint.check_rows:
            table.check_rows(table.index.find_rows(wanted, table.delta))
        rows = np.empty((*wanted.shape, self.dim), self._zeros.dtype)
        found = np.empty(wanted.shape, np.bool_) if wants_found else None
        # A default that bfloat16 cannot represent is written below.
        stored = self._zeros if missing is None or self._is_bfloat16 else missing
        table.index.read(wanted, table.delta, stored, rows, found)
        if self._is_bfloat16:
            rows = bfloat16_to_float32(np, rows)
            if missing is not None:
                assert found is not None
                rows[~found] = missing
        return rows, found

    def prepare(self) -> None:
        """Builds the index of the keys now instead of in the first lookup.

        Raises:
          ValueError: a file is corrupt.
        """
        self._checkpoint.indexed(self.name)

    def _checked_default(self, default: Any) -> np.ndarray:
        """Returns the row of a missing key, (dim,) of `dtype`."""
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
        return np.array(np.broadcast_to(stored, (self.dim,)))


class ReadonlyTables(Mapping[str, ReadonlyTable]):
    """A mapping of names to the `ReadonlyTable`s of a checkpoint, which can be refreshed.

    The tables stay: a refresh changes the content of all of them at once. A lookup that has begun
    returns the old content throughout.
    """

    def __init__(self, checkpoint: _OpenCheckpoint) -> None:
        self._checkpoint = checkpoint
        self._tables = {
            name: ReadonlyTable(table.facts, checkpoint)
            for name, table in checkpoint.snapshot.tables.items()
        }

    def __getitem__(self, name: str) -> ReadonlyTable:
        if name not in self._tables:
            names = ", ".join(map(repr, sorted(self._tables))) or "none"
            raise KeyError(f"The checkpoint at {self.path} has no table {name!r}. It has: {names}.")
        return self._tables[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)

    def __repr__(self) -> str:
        return f"<ReadonlyTables {self.path!r} {list(self._tables.values())}>"

    @property
    def path(self) -> str:
        """The folder of the open checkpoint: for an address, the local copy."""
        return self._checkpoint.snapshot.folder

    @property
    def _shown(self) -> str:
        """The path or address to show to people."""
        place = self._checkpoint.place
        return place.address if isinstance(place, Store) else self.path

    @property
    def published(self) -> float:
        """When the open checkpoint was published, seconds since 1970: the modification time of its
        manifest."""
        return self._checkpoint.snapshot.published

    @property
    def age(self) -> float:
        """Seconds since `published`, by the clock of this machine, at least 0."""
        return max(0.0, time.time() - self.published)

    def refresh(self) -> bool:
        """Opens a newer checkpoint, if there is one; returns whether there was.

        If increments continue the open files, only these are read: the keys of changed rows at
        once, the rows when they are looked up. Removed keys must be named by the increment
        (`sok.log_removals`); otherwise, if some are gone, the keys of all files are read again, as
        after a complete dump. Lookups go on with the old content meanwhile, which also stays open
        if this raises. Any thread may call it.

        Raises:
          OSError: a file cannot be read, or there is no checkpoint any more. ValueError: a file is
            corrupt, or a table is missing or of another kind now.
        """
        return self._checkpoint.refresh()

    def follow(self, every: float = 10.0) -> "Following":
        """Refreshes the tables periodically, in a thread that ends with them or the process.

        Errors of `refresh` are logged to `sok_lite` as warnings, the same text once in a row, and
        the thread tries again; `age` tells how old the content is.

        Args:
          every: seconds from the end of a refresh to the next one, above 0.

        Raises:
          TypeError, ValueError: `every` is no such number.
        """
        return Following(self, every)


class Following:
    """A thread that refreshes tables. `stop()` ends it, and so does the end of a `with` block."""

    def __init__(self, tables: ReadonlyTables, every: float) -> None:
        if not isinstance(every, numbers.Real) or isinstance(every, bool):
            raise TypeError(f"`every` must be a number of seconds. Received: every={every!r}.")
        seconds = as_float(every)
        if not 0 < seconds <= threading.TIMEOUT_MAX:
            raise ValueError(f"`every` must be above 0 seconds. Received: every={every!r}.")
        is_over = threading.Event()
        self._is_over: threading.Event = is_over
        # The thread must not keep the tables alive.
        which = weakref.ref(tables, lambda _: is_over.set())
        name, arguments = f"follows {tables._shown}", (which, seconds, is_over)
        self._thread: threading.Thread = threading.Thread(
            None, _follow, name, arguments, daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after its current refresh, without waiting for an unreachable store."""
        self._is_over.set()
        self._thread.join()

    def __enter__(self) -> "Following":
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


def _follow(which: "weakref.ref[ReadonlyTables]", every: float, is_over: threading.Event) -> None:
    said = ""
    while not is_over.wait(every):
        tables = which()
        if tables is None:
            return
        try:
            tables._checkpoint.refresh(is_over)
            said = ""
        except Exception as error:
            if f"{error}" != said and not is_over.is_set():
                said = f"{error}"
                _log.warning("%s stays as it was, %.0f s old: %s", tables._shown, tables.age, said)
        del tables


def open_readonly(path: str | os.PathLike[str], *, check_rows: bool = False) -> ReadonlyTables:
    """Opens a checkpoint for lookups in its files, without TensorFlow and without loading it.

    The manifest and the header of each file are read and checked at once, the keys of a table in
    its first lookup or by `prepare`. If a dump replaces the checkpoint, the tables still read the
    old files: these are removed, and their space is freed when no process has them mapped.
    `refresh` opens a newer checkpoint, `follow` does so in a thread.

    Args:
      path: the folder that `sok.dump` wrote, on any number of ranks, or that of a
        sok_lite.keras.Checkpoint, whose newest save is opened. An address such as s3://bucket/ck is
        downloaded to a folder that the processes of this machine share; a refresh downloads what
        that lacks.
      check_rows: whether to check the checksums of rows too: of each chunk of 8 MiB of a file,
        before a row of it is first returned. This reads whole chunks, so soon all rows.

    Returns:
      A mapping of names to tables.

    Raises:
      OSError: a file cannot be read, or there is no checkpoint. ValueError: there is no package for
        the address, or a file is corrupt.
    """
    place: str | Store
    if is_in_store(path):
        place = Store(path, level=logging.INFO)  # `follow` warns of what a refresh raises
    else:
        place = os.path.abspath(local_path(path))
    return ReadonlyTables(_OpenCheckpoint(place, check_rows))
