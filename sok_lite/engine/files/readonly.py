"""`open_readonly`: lookups in the files of a checkpoint, without loading its tables.

Files are mapped into memory, so a lookup reads only the rows that it returns, and processes that
serve one checkpoint share the pages that they have read. It needs neither TensorFlow nor a GPU.

What is open of a checkpoint is a `_Version`, which nobody changes: a lookup takes the newest one
and keeps it until it is done. A refresh makes the next one, beside it. Of an increment that is what
has changed, in a small index that is asked before the large one. When nobody has an older version
any more, the small index is written into the large one, and goes: so the large one is never copied,
and a lookup sees the old content or the new one.
"""

import logging
import numbers
import os
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from sok_lite.backend.arguments import address_of
from sok_lite.engine.dtypes import (
    as_float,
    bfloat16_to_float32,
    instead_of_key,
    is_integer,
    key_dtype,
    number_in,
    row_dtype,
)
from sok_lite.engine.files import manifest
from sok_lite.engine.files.manifest import Manifest, Shard, TableFacts
from sok_lite.engine.files.mapped_shard import MappedShard
from sok_lite.engine.files.saved_file import without_row
from sok_lite.engine.files.served_index import MAX_RANKS, KeysOfFile, ServedIndex
from sok_lite.engine.files.store import Store, is_in_store
from sok_lite.engine.local_path import local_path
from sok_lite.engine.table.content import warn_of_repeated

__all__ = ["Following", "ReadonlyTable", "ReadonlyTables", "open_readonly"]

_log = logging.getLogger("sok_lite")


class _Content:
    """What a version has of a table.

    Args:
      facts: of the table.
      chains: of each rank its files, the newest first, which has all keys.

    Attributes:
      facts, chains: the arguments.
      index: where rows are; None: nobody has asked yet.
      small: what is newer, and asked first; None: there is nothing.
      has_repeated: whether several ranks have a key.
    """

    def __init__(self, facts: TableFacts, chains: list[list[MappedShard]]) -> None:
        self.facts, self.chains = facts, chains
        self.num_keys = sum(shard.rows for shard in facts.shards)
        self.index: ServedIndex | None = None
        self.small: ServedIndex | None = None
        self.has_repeated = False

    @classmethod
    def opened(cls, facts: TableFacts, folder: str) -> "_Content":
        """Maps all files of a table."""
        if len(facts.shards) > MAX_RANKS:
            raise ValueError(
                f"open_readonly takes what at most {MAX_RANKS:,} ranks wrote. Received: "
                f"{len(facts.shards):,}, of table {facts.name!r}. Write it on fewer: sok-lite "
                "reshard."
            )
        return cls(
            facts,
            [
                [MappedShard(facts, part, folder) for part in reversed(shard.chain)]
                for shard in facts.shards
            ],
        )

    @cached_property
    def files(self) -> list[MappedShard]:
        """All files that have rows, in the order in which these lie in memory."""
        files = [file for chain in self.chains for file in chain if file.rows.size]
        return sorted(files, key=lambda file: address_of(file.rows))

    @cached_property
    def _starts(self) -> np.ndarray:
        return np.array([address_of(file.rows) for file in self.files], np.uint64)

    def check_rows(self, places: np.ndarray) -> None:
        """Raises ValueError if a row is in a chunk that is not what was written.

        Args:
          places: (n,) uint64, addresses of rows; 0 is none.
        """
        places = places[places != 0]
        numbers = np.searchsorted(self._starts, places, side="right") - 1
        for number in np.unique(numbers):
            file = self.files[number]
            inside = (places[numbers == number] - self._starts[number]).astype(np.int64)
            file.check_rows(inside // file.rows[0].nbytes)

    def make_index(self) -> None:
        """Makes the index, from all keys of all files.

        Raises:
          ValueError: a file is corrupt.
        """
        if self.index is not None:
            return
        for chain in self.chains:
            for file in chain:
                file.check_keys()
        index, num_repeated = ServedIndex(self.num_keys), 0
        for rank, (newest, *older) in enumerate(self.chains):
            of_others, twice, left = index.begin(KeysOfFile(newest.keys, newest.rows, rank))
            if twice and older:
                raise newest.reader.corrupt("one of its keys is there twice")
            num_repeated += of_others + twice
            for file in older:
                left -= index.go_on(KeysOfFile(file.keys[: len(file.rows)], file.rows, rank))
            if left:
                raise newest.reader.corrupt(without_row(left))
        warn_of_repeated(f"table {self.facts.name!r}", num_repeated)
        self.has_repeated, self.index = num_repeated > 0, index

    def continued(self, facts: TableFacts, folder: str) -> "_Content":
        """Returns the content of a newer checkpoint, which shares what is the same with this one.

        Raises:
          OSError, ValueError: as `open_readonly`.
        """
        if facts.shards == self.facts.shards:
            return self
        added = _added(self.facts.shards, facts.shards)
        if added is None:
            made, is_noted = _Content.opened(facts, folder), False
        else:
            new = [[MappedShard(facts, part, folder) for part in parts] for parts in added]
            chains = [[*its[::-1], *old] for its, old in zip(new, self.chains, strict=True)]
            made = _Content(facts, chains)
            is_noted = self.index is not None and self._note(made, new, added)
        if self.index is not None and not is_noted:
            made.make_index()  # now, and not in a lookup
        return made

    def _note(
        self,
        made: "_Content",
        new: Sequence[Sequence[MappedShard]],
        added: Sequence[Sequence[Shard]],
    ) -> bool:
        """Notes increments in a small index. False: all keys have to be read, to see which have
        gone."""
        assert self.index is not None
        parts, expected = [], []
        for rank, (files, shards) in enumerate(zip(new, added, strict=True)):
            num_keys = self.facts.shards[rank].rows
            for file, shard in zip(files, shards, strict=True):
                file.check_keys(len(file.rows))
                parts.append(KeysOfFile(file.keys[: len(file.rows)], file.rows, rank))
                if file.removed is not None:
                    parts.append(KeysOfFile(file.removed, None, rank))
                expected.append((num_keys, shard.rows, file.removed is not None))
                num_keys = shard.rows
        if self.has_repeated:
            return False
        small, counts = self.index.noted(parts, self.small)
        found = iter(counts)
        sizes = iter(parts)
        for before, after, has_gone in expected:
            its, of_others = next(found)
            num_new = next(sizes).num_keys - its - of_others
            num_gone = 0
            if has_gone:
                num_gone, others_gone = next(found)
                next(sizes)
                of_others += others_gone
            if of_others or before + num_new - num_gone != after:
                return False
        made.index, made.small = self.index, small
        if self.index.has_room_for < small.num_new:
            made.index, made.small = self.index.grown(small), None
        return True

    def merged(self) -> "_Content":
        """Returns the same content with what was in the small index in the large one.

        Nobody may look up in an older content than this one any more.
        """
        if self.small is None:
            return self
        assert self.index is not None
        self.index.merge(self.small)
        made = _Content(self.facts, self.chains)
        made.index = self.index
        return made


def _added(old: Sequence[Shard], new: Sequence[Shard]) -> list[tuple[Shard, ...]] | None:
    """Returns the increments that files of ranks have got, the oldest first; None: not these."""
    if len(old) != len(new):
        return None
    added: list[tuple[Shard, ...]] = []
    for before, after in zip(old, new, strict=True):
        count = len(before.chain)
        files = [part.file for part in after.chain]
        if files[:count] != [part.file for part in before.chain]:
            return None
        added.append(after.chain[count:])
    return added


class _Version:
    """A checkpoint as it is open.

    Attributes:
      folder: of the checkpoint.
      text: of its manifest.
      published: when that was written, seconds since 1970.
      contents: of the tables, by name.
    """

    def __init__(
        self, folder: str, text: bytes, published: float, contents: dict[str, _Content]
    ) -> None:
        self.folder, self.text, self.published, self.contents = folder, text, published, contents


class _Opened:
    """What the tables of one `open_readonly` share.

    Args:
      place: of the checkpoint, or of saves: a folder, or the store from which it is brought here.
      check_rows: whether rows are checked before they are returned.

    Attributes:
      check_rows: the argument.
      version: the newest; it is replaced, never changed.
    """

    # How long a refresh waits for lookups that began before it, to put what is new into the large
    # index; the next refresh does it otherwise.
    _seconds_for_older = 1.0

    def __init__(self, place: str | Store, check_rows: bool) -> None:
        self._place, self.check_rows = place, check_rows
        # While what is newer is looked for and brought here, which may take long; and while what
        # lookups use is changed.
        self._refreshing, self._changing = threading.Lock(), threading.Lock()
        # All older ones that somebody may still look up in.
        self._older: list[weakref.ref[_Version]] = []
        self._one_is_gone = threading.Event()
        self.version = self._read(None)

    def prepared(self, name: str) -> _Version:
        """Returns the newest version, which has the index of a table."""
        with self._changing:
            version = self.version
            version.contents[name].make_index()
            return version

    def refresh(self, ends: threading.Event | None = None) -> bool:
        """Opens what is newer, and returns whether anything was.

        Args:
          ends: when it is set, calls of a store that fail are not made again.
        """
        with self._refreshing:
            if isinstance(self._place, Store):
                self._place.ends = ends or threading.Event()
            newest = self._read(self.version)
            is_newer = newest is not self.version
            with self._changing:
                if is_newer:
                    self._set(newest)
                del newest
                self._merge(self._seconds_for_older if is_newer else 0.0)
            return is_newer

    def _set(self, version: _Version) -> None:
        gone = self._one_is_gone
        self._older.append(weakref.ref(self.version, lambda _: gone.set()))
        self.version = version

    def _merge(self, seconds: float) -> None:
        """Puts small indexes into the large ones, once nobody has an older version any more.

        Args:
          seconds: to wait for that; the next refresh does it otherwise.
        """
        version = self.version
        if all(content.small is None for content in version.contents.values()):
            return
        end = time.monotonic() + seconds
        while True:
            self._one_is_gone.clear()
            self._older = [older for older in self._older if older() is not None]
            if not self._older:
                break
            if not self._one_is_gone.wait(max(0.0, end - time.monotonic())):
                return
        merged = {name: content.merged() for name, content in version.contents.items()}
        self._set(_Version(version.folder, version.text, version.published, merged))

    def _read(self, old: _Version | None) -> _Version:
        """Returns the newest version: the old one where there is no newer."""
        before: tuple[str, bytes] | None = None
        while True:
            place = self._place
            folder = manifest.newest_at(place) if isinstance(place, str) else place.brought()
            text, published = manifest.text_of(folder)
            if old is not None and (folder, text) == (old.folder, old.text):
                return old
            found = manifest.from_text(text, os.path.join(folder, manifest.NAME))
            try:
                with self._changing:
                    contents = _contents(found, folder, old)
                return _Version(folder, text, published, contents)
            except FileNotFoundError:
                if (folder, text) == before:
                    raise
                before = folder, text  # a dump may have replaced the checkpoint in between


def _contents(found: Manifest, folder: str, old: _Version | None) -> dict[str, _Content]:
    if old is None:
        return {name: _Content.opened(facts, folder) for name, facts in found.tables.items()}
    for name, content in old.contents.items():
        kinds = [
            None if facts is None else (facts.dim, facts.dtype, facts.key_type)
            for facts in (content.facts, found.tables.get(name))
        ]
        if kinds[0] != kinds[1]:
            raise ValueError(
                f"A newer checkpoint must have table {name!r} as the one that is open: dim, dtype "
                f"and key_type {kinds[0]}. Received: {kinds[1]}, in {folder}. What was open stays "
                "so. Open the new one by open_readonly."
            )
    return {
        name: content.continued(found.tables[name], folder)
        for name, content in old.contents.items()
    }


class ReadonlyTable:
    """A table of a checkpoint, with the rows that all ranks wrote. Threads may share it.

    The first lookup reads all keys and makes an index of them, 24 bytes a key in memory; `prepare`
    does it ahead. A lookup is one call that lets go of Python's lock, and waits for nobody. A key
    that several ranks wrote has the row of the lowest of them, as after a load; the logger
    `sok_lite` says of how many.

    Attributes:
      name: of the table.
      dim: length of a row.
      key_type: "int64", "int32" or "uint64".
      dtype: NumPy's, of the rows that lookups return: that of the table, for bfloat16 float32.
    """

    def __init__(self, facts: TableFacts, opened: _Opened) -> None:
        self.name, self.dim, self.key_type = facts.name, facts.dim, facts.key_type
        self._row_dtype, self._key_dtype = row_dtype(facts.dtype), key_dtype(facts.key_type)
        self._is_bfloat16 = facts.dtype == "bfloat16"
        self.dtype = np.dtype(np.float32) if self._is_bfloat16 else self._row_dtype.storage
        self._zeros = np.zeros(self.dim, self._row_dtype.storage)
        # What keys need no conversion.
        self._as_it_is = np.dtype(np.int64) if self.key_type == "int64" else None
        self._opened = opened

    def __len__(self) -> int:
        """Keys of all files."""
        return self._opened.version.contents[self.name].num_keys

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
            f"<ReadonlyTable {self.name!r} keys={len(self)} dim={self.dim} "
            f"key_type={self.key_type} dtype={self._row_dtype.name}>"
        )

    def keys(self) -> np.ndarray:
        """Returns all keys in the order of the files, (n,) of the key type. It reads them all.

        Raises:
          ValueError: a file is corrupt.
        """
        newest = [chain[0] for chain in self._prepared().contents[self.name].chains]
        for file in newest:
            file.check_keys()
        return np.concatenate([file.keys for file in newest])

    def contains(self, keys: Any) -> np.ndarray:
        """Returns which keys there are, bool.

        Args:
          keys: integers of any shape.

        Raises:
          TypeError, ValueError: they are no integers, or do not fit the key type; a file is
            corrupt.
        """
        wanted = self._key_dtype.to_int64(np, keys)
        version = self._prepared()
        content = version.contents[self.name]
        assert content.index is not None
        return (content.index.places(wanted, content.small) != 0).reshape(wanted.shape)

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
        """Returns the rows of keys as `lookup` does, and which are there, bool of keys.shape."""
        rows, found = self._read(keys, default, True)
        assert found is not None
        return rows, found

    def _read(
        self, keys: Any, default: Any, wants_found: bool
    ) -> tuple[np.ndarray, np.ndarray | None]:
        if type(keys) is np.ndarray and keys.dtype is self._as_it_is and keys.flags.c_contiguous:
            wanted = keys  # of 20 keys all else takes as long as the lookup
        else:
            wanted = self._key_dtype.to_int64(np, keys)
        is_zero = type(default) is int and default == 0
        missing = None if is_zero else self._checked_default(default)
        version = self._prepared()  # nothing that this call reads goes while it has that
        content = version.contents[self.name]
        assert content.index is not None
        if self._opened.check_rows:
            content.check_rows(content.index.places(wanted, content.small))
        rows = np.empty((*wanted.shape, self.dim), self._zeros.dtype)
        found = np.empty(wanted.shape, np.bool_) if wants_found else None
        # A row that bfloat16 does not have is written below.
        stored = self._zeros if missing is None or self._is_bfloat16 else missing
        content.index.read(wanted, content.small, stored, rows, found)
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
        self._prepared()

    def _prepared(self) -> _Version:
        """Returns the newest version, which has the index of this table."""
        version = self._opened.version
        if version.contents[self.name].index is None:
            return self._opened.prepared(self.name)
        return version

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

    The names stay: a refresh changes what lookups in these tables give, in all of them at once. A
    lookup that has begun gives what was there before, as a whole.
    """

    def __init__(self, opened: _Opened) -> None:
        self._opened = opened
        contents = opened.version.contents
        self._tables = {name: ReadonlyTable(c.facts, opened) for name, c in contents.items()}

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
        """The folder of the checkpoint that is open; of one at an address the copy of it here."""
        return self._opened.version.folder

    @property
    def _shown(self) -> str:
        """The folder, or where that is a copy the address."""
        place = self._opened._place
        return place.address if isinstance(place, Store) else self.path

    @property
    def published(self) -> float:
        """When the checkpoint that is open was published, seconds since 1970: the time that its
        manifest was last changed."""
        return self._opened.version.published

    @property
    def age(self) -> float:
        """Seconds since `published`, by the clock of this machine, at least 0."""
        return max(0.0, time.time() - self.published)

    def refresh(self) -> bool:
        """Opens what was dumped since, and returns whether anything was.

        Where the files that are open were continued by increments, these alone are read: the rows
        that have changed when they are looked up, and the keys of these rows at once. To know which
        keys were removed, an increment has to name them (`sok.log_removals`); otherwise the keys of
        all files are read anew where some are gone, as after a whole dump. Lookups go on meanwhile
        with what was open, and this is what stays open if anything raises. Any thread may call it.

        Raises:
          OSError: a file cannot be read, or there is no checkpoint any more. ValueError: a file is
            corrupt, or a table is missing or of another kind now.
        """
        return self._opened.refresh()

    def follow(self, every: float = 10.0) -> "Following":
        """Refreshes the tables again and again, in a thread that ends with them or the process.

        What `refresh` raises goes to the logger `sok_lite` as a warning, once until it is something
        else, and the thread tries again; `age` tells how old what is served has become.

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
        # The thread must not keep the tables.
        which = weakref.ref(tables, lambda _: is_over.set())
        name, arguments = f"follows {tables._shown}", (which, seconds, is_over)
        self._thread: threading.Thread = threading.Thread(
            None, _follow, name, arguments, daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread, after the refresh that it is at; a store that cannot be reached is not
        waited for."""
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
            tables._opened.refresh(is_over)
            said = ""
        except Exception as error:
            if f"{error}" != said and not is_over.is_set():
                said = f"{error}"
                _log.warning("%s stays as it was, %.0f s old: %s", tables._shown, tables.age, said)
        del tables


def open_readonly(path: str | os.PathLike[str], *, check_rows: bool = False) -> ReadonlyTables:
    """Opens a checkpoint for lookups in its files, without TensorFlow and without loading it.

    The manifest and the header of each file are read and checked at once, the keys of a table in
    its first lookup or by `prepare`. If a dump replaces the checkpoint, an open one still reads the
    old files: they are removed, and their space is freed when no process has them mapped. `refresh`
    opens what is new, `follow` does it in a thread.

    Args:
      path: of the folder that `sok.dump` wrote, on any number of ranks; of that of a
        sok_lite.keras.Checkpoint its newest save is opened. What is at an address, such as
        s3://bucket/ck, is brought to a folder of this machine, which its processes share; a
        refresh brings what that does not have.
      check_rows: whether rows are checked too: each chunk of 8 MiB of a file, before a row of it is
        returned for the first time. The whole chunk is read for that, so soon all rows are.

    Returns:
      A mapping of names to tables.

    Raises:
      OSError: a file cannot be read, or there is no checkpoint. ValueError: there is no package for
        the address, or a file is corrupt.
    """
    place: str | Store
    if is_in_store(path):
        place = Store(path, level=logging.INFO)  # what a refresh raises is logged
    else:
        place = os.path.abspath(local_path(path))
    return ReadonlyTables(_Opened(place, check_rows))
