"""Writes checkpoints: several tables, on all ranks, into one folder; also in the background.

The folder has a manifest and, for each dump, a folder of files. A dump writes its files beside
those of the previous one, then replaces the manifest atomically, and only then removes old files
that the new manifest does not name: an increment names those that it continues. So whenever a dump
ends, however it ends, the folder has a complete checkpoint: the old one, or the new one. Files of
an interrupted dump are never read, and the next dump removes them.

A dump to an address (store.py) writes into a staging folder of each rank, as above. Each rank
uploads its files once the tables are unlocked, and rank 0 the manifest when all have.

A background dump goes on while the tables are in use again. Each rank copies its part of the tables
to the host under their locks, and a thread writes the copy. So the host needs memory for the whole
content of the tables, which is freed as it is written, and the tables are locked while it is
copied. The thread makes no collective call, which could interleave with those of the program: the
ranks agree in `wait`, which all of them call.
"""

import atexit
import importlib
import json
import os
import secrets
import shutil
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, TypeVar

import numpy as np

from sok_lite.comm.header import save_by
from sok_lite.comm.protocol import Communicator, allgather_texts
from sok_lite.engine.agreement import check_equal_on_all_ranks
from sok_lite.engine.callers import warn
from sok_lite.engine.failure import together
from sok_lite.engine.files import manifest
from sok_lite.engine.files.disk import sync_path
from sok_lite.engine.files.increment import shards_to_continue
from sok_lite.engine.files.item import Item, ItemOrTable, items_of, tables_of
from sok_lite.engine.files.lock import Lock
from sok_lite.engine.files.manifest import Manifest, Shard, TableFacts
from sok_lite.engine.files.progress import Progress, Report
from sok_lite.engine.files.shard import CHUNK_BYTES
from sok_lite.engine.files.store import Store, is_in_store, make_folder
from sok_lite.engine.files.table_file import ShardContent, copy_to_host, write_content
from sok_lite.engine.foreign_keys import refuse_keys_on_several_ranks
from sok_lite.engine.local_path import local_path
from sok_lite.engine.optimizer_states import drop_orphaned_states
from sok_lite.engine.static_table import AnyTable
from sok_lite.engine.table.locking import with_lock, with_locks
from sok_lite.engine.texts import prune_texts
from sok_lite.engine.work_counters import DUMPS

T = TypeVar("T")

# By connection of ranks and by folder. The ranks of a connection start and finish them together.
_pending: "weakref.WeakKeyDictionary[Communicator, dict[str, BackgroundDump]]" = (
    weakref.WeakKeyDictionary()
)


def dump(
    path: str | os.PathLike[str],
    tables: Sequence[ItemOrTable],
    comm: Communicator,
    extra: Mapping[str, Any] | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    report: Report | None = None,
    incremental: bool = False,
    prepare: Callable[[], None] | None = None,
    published: Callable[[], None] | None = None,
    beside: Sequence[str] = (),
) -> None:
    """Writes the whole content of tables to a folder. Every rank must call it; it returns together.

    All ranks must see the same folder, or give the same address (store.py). An existing checkpoint
    is replaced when the new one is complete. The tables are locked while files are written. Memory
    is needed for a few chunks, whatever the size of the tables.

    An incremental dump keeps the existing files, and writes the rows and states that have changed
    since, with all keys. If it is not known what has changed it writes everything, and rank 0
    warns.

    Args:
      path: of the folder, or its address; it is made if missing. A background dump of these ranks
        into the folder is waited for.
      tables: with different names, the same on all ranks.
      extra: values that JSON knows, returned by `load`. Those of rank 0 count.
      chunk_bytes: bytes that are written together, and have one checksum.
      report: called with the bytes of this rank's files written so far, and of all of them.
      prepare: called on every rank before the tables are locked, once the folder is; it may
        communicate, and what it writes stays.
      published: called on rank 0, by any thread, as soon as the checkpoint is complete.
      beside: names of folders that `prepare` writes there, to be uploaded to an address too.

    Raises:
      TypeError: an item is no table with keys of its own.
      ValueError: there is no package for the address, a name repeats, a rank has other tables, or a
        key has rows on several ranks.
      RuntimeError: another thread has restored a table meanwhile.
      BlockingIOError: another dump writes into the folder; on several ranks an OSError.
      OSError, MemoryError: the files of a rank cannot be written. The old checkpoint is unchanged.
    """
    begun = _Dump(path, tables, comm, extra, incremental, prepare, published, beside)

    def write() -> list[Shard]:
        shards = begun.with_parts(
            chunk_bytes, lambda parts: begun.write(parts, chunk_bytes, report)
        )
        begun.upload()
        return shards

    begun.write_and_publish(write)


class _Dump:
    """A dump that all ranks have begun. Arguments and errors are those of `dump`.

    Attributes:
      folder: of the checkpoint; for an address the staging folder of this rank.
      store: of the address, or None.
      data: name of the folder of this dump's files, in `folder`.
      tables: their entries of the manifest, without files.
      before: by table, the file of this rank that is continued; without an entry all is written.
      texts: by table, the texts that this rank writes.
      lock: of the folder, on its writer: rank 0, or every rank of a dump to an address.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        tables: Sequence[ItemOrTable],
        comm: Communicator,
        extra: Mapping[str, Any] | None,
        incremental: bool,
        prepare: Callable[[], None] | None,
        published: Callable[[], None] | None,
        beside: Sequence[str],
    ) -> None:
        self.comm, self.published, self.beside = comm, published, beside
        self.extra = dict(extra or {})
        shown, store = together(comm, lambda: place_of(path), save_by("dump()"))
        self.store, wanted = store, {"path": shown, "incremental": incremental}
        self.items = checked_items(tables, comm, wanted, "dump")
        refuse_keys_on_several_ranks(tables_of(self.items), comm, "A dump")
        self.folder, self.since = folder_of(shown, store, comm), time.monotonic()
        wait_for_pending(comm, self.folder, shown)
        _give_up_others(comm, self.folder)
        self.lock: Lock | None = None

        def lock() -> None:
            if store is not None:
                make_folder(self.folder)
            if comm.rank == 0 or store is not None:
                self.lock = manifest.lock(self.folder, shown)
            if comm.rank == 0 and store is not None:
                store.check_is_ours()

        try:
            together(comm, lock)
            token = np.frombuffer(secrets.token_bytes(8), np.uint8)
            self.data = "data-" + comm.broadcast(token).tobytes().hex()
        except BaseException:
            if self.lock is not None:
                self.lock.release()
            raise
        try:
            self._prepare(incremental, shown, prepare)
        except BaseException:
            self.end()
            raise

    def _prepare(self, incremental: bool, shown: str, prepare: Callable[[], None] | None) -> None:
        """Decides what to write, before the tables are locked."""
        self.before: Mapping[str, Shard] = {}
        if incremental:
            names = [item.table.name for item in self.items]
            tables = tables_of(self.items)
            self.before, reason = shards_to_continue(self.folder, tables, names, self.comm)
            if reason and self.comm.rank == 0:
                where = self.folder if self.store is None else shown
                text = f"All is dumped into {where}, and not only what has changed: {reason}."
                warn(text, RuntimeWarning)
        self.tables = [_facts(item.table) for item in self.items]
        # A lookup of a text locks the texts before the table.
        self.texts = {
            item.table.name: prune_texts(item.table, item.texts, self.comm)
            for item in self.items
            if item.texts is not None
        }
        together(self.comm, self._make_folder)
        if prepare is not None:
            prepare()

    def _make_folder(self) -> None:
        if self.lock is not None:
            os.mkdir(os.path.join(self.folder, self.data))

    def with_parts(self, chunk_bytes: int, function: Callable[[list[ShardContent]], T]) -> T:
        """Calls a function with the parts that this rank writes, under the locks of the tables."""
        tables = tables_of(self.items)
        for table in tables:
            with_lock(table, partial(drop_orphaned_states, table))

        def part(item: Item) -> ShardContent:
            name, comm = item.table.name, self.comm
            file = f"{self.data}/{manifest.file_name(name, comm.rank, comm.size)}"
            made = item.part(self.folder, file, comm, chunk_bytes, self.before.get(name))
            return made._replace(texts=self.texts.get(name))

        return with_locks(tables, lambda: function(list(map(part, self.items))))

    def write(
        self, parts: Sequence[ShardContent], chunk_bytes: int, report: Report | None = None
    ) -> list[Shard]:
        """Writes this rank's parts and syncs them to disk. It does not communicate."""
        progress = Progress(report, sum(part.num_bytes for part in parts))
        shards = [write_content(part, self.folder, chunk_bytes, progress) for part in parts]
        sync_path(os.path.join(self.folder, self.data))
        return shards

    def upload(self) -> None:
        """Uploads the files of this rank, if there is a store. It does not communicate."""
        if self.store is not None:
            continued = [part.file for shard in self.before.values() for part in shard.chain]
            data = {self.data, *(file.split("/")[0] for file in continued)}
            self.store.upload(self.folder, [*data, *self.beside])

    def write_and_publish(self, write: Callable[[], list[Shard]]) -> None:
        """Ends the dump; if a rank fails the old checkpoint stays. Every rank must call it.

        Args:
          write: writes and uploads the files of this rank, and returns their entries of the
            manifest.
        """
        try:
            shards = together(self.comm, write)
            texts = allgather_texts(self.comm, manifest.shards_to_text(shards), "dump")
            by_rank = list(map(manifest.shards_from_text, texts))
            together(self.comm, lambda: self._publish(by_rank))
            store = self.store
            if store is not None:
                together(self.comm, lambda: self._mark(store))
            new = [file for shard in shards for file in shard._replace(before=()).written_files]
            num_bytes = sum(file.num_bytes for file in new)
            DUMPS.add(time.monotonic() - self.since, num_bytes, time.time())
        finally:
            self.end()

    def _publish(self, by_rank: list[list[Shard]]) -> None:
        """Replaces the manifest in the folder, on its writer."""
        if self.lock is None:
            return
        tables = {
            facts.name: facts._replace(shards=tuple(shards))
            for facts, *shards in zip(self.tables, *by_rank, strict=True)
        }
        text = manifest.as_text(Manifest(self.comm.size, tables, self.extra))
        manifest.publish(self.folder, text)
        if self.store is None and self.published is not None:
            self.published()

    def _mark(self, store: Store) -> None:
        """Publishes the checkpoint in the store, and removes what it replaces."""
        if self.comm.rank != 0:
            return
        found = manifest.read(self.folder)
        store.check_has(found)
        store.mark(self.folder)
        store.sweep(found)
        if self.published is not None:
            self.published()

    def end(self) -> None:
        """Removes files that belong to no checkpoint, once no rank writes any more."""
        if self.lock is not None:
            sweep(self.folder, self.data)
            self.lock.release()


def checked_items(
    tables: Sequence[ItemOrTable], comm: Communicator, more: Mapping[str, Any], what: str
) -> list[Item]:
    """Returns tables as items of a checkpoint. Every rank must call it.

    Args:
      more: further values that must be equal on all ranks.
      what: "dump" or "load".

    Raises:
      TypeError: an item is no table with keys of its own. ValueError: a name repeats, or a rank
        has other tables.
    """

    def check() -> list[Item]:
        items = items_of(tables, what)
        names = [item.table.name for item in items]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(
                "The tables of a checkpoint must have different names. Received: several of "
                f"{', '.join(map(repr, repeated))}. Make them with other names."
            )
        return items

    items = together(comm, check)
    description = dict(more)
    for i, item in enumerate(items):
        table = item.table
        facts = (table.name, table.dim, table.row_dtype.name, table.key_dtype.name)
        description[f"table {i}"] = [*facts, table.owner.name, *item.equal_on_all_ranks]
    check_equal_on_all_ranks(comm, description, f"A {what}")
    return items


def _facts(table: AnyTable) -> TableFacts:
    """Returns the manifest's entry of a table, without files."""
    options = {"seed": table.seed, "initializer": repr(table.initializer)}
    options |= table.options_of_all_ranks()
    if table.max_capacity is not None:
        options["max_capacity"] = table.max_capacity
    if table.ids == "texts":
        options["ids"] = table.ids
    plain = json.loads(json.dumps(options, default=repr))
    kinds = (table.var_type, table.dim, table.row_dtype.name, table.key_dtype.name)
    return TableFacts(table.name, *kinds, table.owner.name, plain, ())


def sweep(folder: str, data: str) -> None:
    """Removes files that belong to no checkpoint: of old dumps, and of dumps that failed.

    Files that cannot be removed stay. If the manifest cannot be read nothing is removed; if there
    is no manifest at all, only the files of this dump.

    Args:
      data: the folder of this dump's files.
    """
    try:
        found = manifest.read(folder)
    except FileNotFoundError:
        unused = [data]
    except (OSError, ValueError):
        return
    else:
        used = {file.split("/")[0] for file in found.files}
        try:
            names = os.listdir(folder)
        except OSError:
            return
        unused = [n for n in names if manifest.DATA_FOLDER.fullmatch(n) and n not in used]
    for name in unused:
        shutil.rmtree(os.path.join(folder, name), ignore_errors=True)


def place_of(path: str | os.PathLike[str]) -> tuple[str, Store | None]:
    """Returns a path for errors, the same on all ranks, and the store if it is an address.

    Raises:
      ValueError: it is no path, or there is no package for the address.
    """
    store = Store(path) if is_in_store(path) else None
    return (local_path(path) if store is None else store.address), store


def folder_of(shown: str, store: Store | None, comm: Communicator) -> str:
    """Returns the folder into which this rank dumps, given the results of `place_of`."""
    return os.path.abspath(shown) if store is None else store.staging(comm.rank, comm.size)


class BackgroundDump:
    """A dump that is being written. `dump_in_background` makes it.

    The process does not end before this rank's files are written. If the system cannot start a
    thread, the files are written at once.
    """

    def __init__(self, begun: _Dump, parts: list[ShardContent], chunk_bytes: int) -> None:
        self._begun, self._is_over, self._process = begun, False, os.getpid()
        self._shards: list[Shard] | None = None
        self._failure: BaseException | None = self._interruption()
        # No daemon, so that the interpreter waits for it.
        name, arguments = f"dump into {self.path}", (parts, chunk_bytes)
        self._thread = threading.Thread(None, self._write, name, arguments, daemon=False)

    def _start(self) -> None:
        begun = self._begun
        _pending.setdefault(begun.comm.connection, {})[os.path.realpath(begun.folder)] = self
        if begun.store is not None:
            _wait_before_executors_end()
        try:
            self._thread.start()
        except RuntimeError:  # the system has no further thread
            self._thread.run()

    def _write(self, parts: list[ShardContent], chunk_bytes: int) -> None:
        try:
            shards = self._begun.write(parts, chunk_bytes)
            parts.clear()  # their memory is free during the upload
            self._begun.upload()
            self._shards, self._failure = shards, None
        except BaseException as error:
            self._failure = error
            # Else the error keeps what was not written in memory.
            parts.clear()
            traceback.clear_frames(error.__traceback__)
        if self._begun.comm.size == 1:
            self._finish()

    @property
    def done(self) -> bool:
        """Whether this rank's part has ended, successfully or not: `wait` then waits for other
        ranks at most."""
        return not self._thread.is_alive()

    @property
    def path(self) -> str:
        """The path of the folder, or its address."""
        begun = self._begun
        return begun.folder if begun.store is None else begun.store.address

    def wait(self) -> None:
        """Waits until the dump is over on all ranks. Every rank must call it; it returns together.

        With one rank the checkpoint is there as soon as it is written, with several when all have
        called this. The next dump into the folder, or load from it, does so first.

        Raises:
          OSError: a rank cannot write its files; the old checkpoint is as it was. All ranks raise
            the same, and so does every further call.
          RuntimeError: this process was forked from the one whose dump it is.
        """
        if os.getpid() != self._process:
            raise RuntimeError(
                f"The dump into {self.path} goes on in the process that this one was forked from. "
                "Wait for it there."
            )
        self._join()
        if not self._is_over:
            self._finish()
        self._remove_pending()
        if self._failure is not None:
            raise self._failure

    def _join(self) -> None:
        """Waits until this rank's part has ended."""
        if self._thread.ident is not None:  # it was started
            self._thread.join()

    def _give_up(self) -> None:
        """Ends it without a checkpoint, where the ranks do not agree any more."""
        if not self._is_over:
            self._is_over = True
            self._failure = RuntimeError(
                f"The dump into {self.path} was given up: other ranks of this process dump there."
            )
            self._begun.end()

    def _finish(self) -> None:
        failure, self._failure = self._failure, self._interruption()
        self._is_over = True

        def written() -> list[Shard]:
            if failure is not None:
                raise failure
            assert self._shards is not None
            return self._shards

        try:
            self._begun.write_and_publish(written)
        except BaseException as error:
            self._failure = error
        else:
            self._failure = None
            self._remove_pending()

    def _remove_pending(self) -> None:
        begun = self._begun
        dumps, path = _pending.get(begun.comm.connection, {}), os.path.realpath(begun.folder)
        if dumps.get(path) is self:  # and not a later one
            del dumps[path]

    def _interruption(self) -> RuntimeError:
        return RuntimeError(f"The dump into {self.path} was interrupted.")


def dump_in_background(
    path: str | os.PathLike[str],
    tables: Sequence[ItemOrTable],
    comm: Communicator,
    extra: Mapping[str, Any] | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    incremental: bool = False,
    prepare: Callable[[], None] | None = None,
    published: Callable[[], None] | None = None,
    beside: Sequence[str] = (),
) -> BackgroundDump:
    """Begins a dump of the present content of tables. Every rank must call it; it returns together.

    The arguments and errors are those of `dump`, but a failure to write files is raised by `wait`.

    Raises:
      OSError: the folders cannot be made. The old checkpoint is unchanged.
      MemoryError: a rank has no memory for a copy of its part. The old checkpoint is unchanged.
    """
    begun = _Dump(path, tables, comm, extra, incremental, prepare, published, beside)

    def copy(parts: list[ShardContent]) -> list[ShardContent]:
        return list(map(copy_to_host, parts))

    try:
        parts = together(comm, lambda: begun.with_parts(chunk_bytes, copy))
    except BaseException:
        begun.end()
        raise
    made = BackgroundDump(begun, parts, chunk_bytes)
    made._start()  # from here on it ends itself, whatever interrupts the caller
    return made


def wait_for_pending(comm: Communicator, folder: str, shown: str) -> None:
    """Waits for background dumps into a folder, or saves in it. Every rank must call it.

    Args:
      folder, shown: as `folder_of` and `place_of` return them.

    Raises:
      OSError: that dump has failed; or any other error of it.
    """
    at = os.path.realpath(folder)
    for path, dump in list(_pending.get(comm.connection, {}).items()):
        parent, name = os.path.split(path if dump._begun.store is None else dump.path)
        if path == at or (parent in (at, shown) and manifest.SAVE.fullmatch(name)):
            dump.wait()


def _give_up_others(comm: Communicator, folder: str) -> None:
    """Gives up a dump of this rank into a folder that it wrote on an earlier connection.

    The ranks of that connection cannot agree any more, and it would keep the folder locked.
    """
    path = os.path.realpath(folder)
    for connection, dumps in list(_pending.items()):
        dump = None if connection is comm.connection else dumps.get(path)
        # Ranks may be threads of one process.
        if dump is not None and dump.done and dump._begun.comm.rank == comm.rank:
            del dumps[path]
            dump._give_up()


@cache
def _wait_before_executors_end() -> None:
    """Has the interpreter wait for uploads before it ends the threads of `concurrent.futures`.

    File systems look up names in such threads. The interpreter ends them first of all, in functions
    that it calls in the opposite order of their registration.
    """
    importlib.import_module("concurrent.futures.thread")

    def wait() -> None:
        for dumps in list(_pending.values()):
            for dump in list(dumps.values()):
                dump._join()

    register = getattr(threading, "_register_atexit", None)
    if register is not None:
        register(wait)


def _warn_of_unfinished() -> None:
    for dumps in list(_pending.values()):
        for dump in dumps.values():
            failure = dump._failure
            reason = (
                "its files were written, but the ranks have not agreed. The checkpoint before it "
                "is there still. Call wait() on all ranks."
                if failure is None
                else f"{type(failure).__name__}: {failure}"
            )
            text = f"The background dump into {dump.path} was not finished: {reason}"
            print(text, file=sys.stderr, flush=True)


atexit.register(_warn_of_unfinished)
# A forked child has no thread that writes.
os.register_at_fork(after_in_child=_pending.clear)
