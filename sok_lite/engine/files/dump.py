"""Writing a checkpoint: several tables, on all ranks, into one folder; also in the background.

The folder has a manifest and, for each dump, a folder of files. A dump writes its files beside
those of the previous one, then replaces the manifest atomically, and only then removes old files
that the new manifest does not name: an increment names those that it continues. So whenever a dump
ends, however it ends, the folder has a complete checkpoint: the old one, or the new one. Files of
an interrupted dump are never read, and the next dump removes them.

A dump to an address (store.py) writes into a folder that each rank has of its own, as above. Each
rank brings its files to the store, once the tables are no longer locked, and rank 0 the manifest
when all have.

A background dump goes on while the tables are in use again. Each rank copies its part of the tables
to the host under their locks, and a thread writes the copy. So the host needs memory for the whole
content of the tables, which is freed as it is written, and the tables are locked for as long as the
copy takes. The thread makes no collective call, which could interleave with those of the program:
the ranks agree in `wait`, which all of them call.
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
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeVar

import numpy as np

from sok_lite.comm.header import save_by
from sok_lite.comm.protocol import Communicator
from sok_lite.engine.agreement import check_equal_on_all_ranks
from sok_lite.engine.failure import together
from sok_lite.engine.files import manifest
from sok_lite.engine.files.disk import sync_path
from sok_lite.engine.files.increment import shards_to_continue
from sok_lite.engine.files.item import (
    Item,
    Named,
    forget_gone_optimizers,
    items_of,
    keyed_tables_of,
    tables_of,
)
from sok_lite.engine.files.lock import Lock
from sok_lite.engine.files.manifest import Manifest, Shard, TableFacts
from sok_lite.engine.files.progress import Progress, Report
from sok_lite.engine.files.shard import CHUNK_BYTES
from sok_lite.engine.files.store import Store, is_in_store, make_folder
from sok_lite.engine.files.table_file import ShardContent, copied, write_part
from sok_lite.engine.foreign_keys import refuse_keys_on_several_ranks
from sok_lite.engine.local_path import local_path
from sok_lite.engine.static_table import AnyTable
from sok_lite.engine.table.exclusive import holding
from sok_lite.engine.texts import KeyTexts, settle
from sok_lite.engine.work_done import DUMPS

T = TypeVar("T")

_TOKEN_BYTES = 8

# By folder, of a connection of ranks. They make and finish them together, so that they have the
# same ones; ranks that were connected anew have none.
_pending: "weakref.WeakKeyDictionary[Communicator, dict[str, BackgroundDump]]" = (
    weakref.WeakKeyDictionary()
)


def dump(
    path: str | os.PathLike[str],
    tables: Sequence[Named],
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
    is replaced when the new one is complete. The tables are locked while files are written: no
    other thread changes them. Memory is needed for a few chunks, whatever the size of the tables.

    An incremental dump leaves the existing files, and writes the rows and states that have changed
    since, with all keys. If it is not known what has changed it writes everything, as without
    `incremental`, and rank 0 warns.

    Args:
      path: of the folder, or its address; it is made if missing. A background dump of these ranks
        into the folder is waited for.
      tables: with different names, the same on all ranks.
      comm: the ranks.
      extra: values that JSON knows, returned by `load`. Those of rank 0 count.
      chunk_bytes: bytes that are written together, and have one checksum.
      report: called with the bytes of this rank's files written so far, and of all of them.
      incremental: whether to add to the existing checkpoint.
      prepare: called on every rank before the tables are locked, once nobody else writes into the
        folder; it may communicate, and what it writes stays.
      published: called on rank 0, by any thread, as soon as the checkpoint is there.
      beside: names of folders that `prepare` writes there, which are to be at an address too.

    Raises:
      TypeError: an item is no table with keys of its own.
      ValueError: there is no package for the address, a name repeats, a rank has other tables, or a
        key has rows on several ranks.
      RuntimeError: another thread has restored a table meanwhile.
      BlockingIOError: another dump writes into the folder; of several ranks an OSError.
      OSError, MemoryError: the files of a rank cannot be written. The old checkpoint is as it was.
    """
    begun = _begin(path, tables, comm, extra, incremental, prepare, published, beside)

    def write(parts: list[ShardContent]) -> list[Shard]:
        return _write_parts(begun, parts, chunk_bytes, report)

    _write_and_publish(begun, lambda: _uploaded(begun, _with_parts(begun, chunk_bytes, write)))


class _Begun(NamedTuple):
    """A dump that all ranks have begun.

    Attributes:
      folder: path of the checkpoint; at an address that of this rank's own, from which it goes up.
      store: where it goes; None: nowhere.
      data: name of the folder of this dump's files, in it.
      items: the tables that are dumped.
      tables: their entries of the manifest, without files.
      comm: the ranks.
      extra: values that JSON knows, returned by `load`.
      before: by table the file of this rank that is continued; without an entry all is written.
      texts: by table what this rank writes of them, of tables that keep some.
      since: when it began, as of time.monotonic().
      lock: of the folder, on the rank whose it is: rank 0, or each of one's own.
      published: called on rank 0 when the checkpoint is there.
      beside: names of folders in it that go up too.
    """

    folder: str
    store: Store | None
    data: str
    items: list[Item]
    tables: list[TableFacts]
    comm: Communicator
    extra: dict[str, Any]
    before: Mapping[str, Shard]
    texts: Mapping[str, KeyTexts]
    since: float
    lock: Lock | None
    published: Callable[[], None] | None
    beside: Sequence[str]


def _begin(
    path: str | os.PathLike[str],
    tables: Sequence[Named],
    comm: Communicator,
    extra: Mapping[str, Any] | None,
    incremental: bool,
    prepare: Callable[[], None] | None,
    published: Callable[[], None] | None,
    beside: Sequence[str],
) -> _Begun:
    """Makes the folders of a dump; arguments and errors are those of `dump`."""
    shown, store = together(comm, lambda: place_of(path), save_by("dump()"))
    items = checked_items(tables, comm, {"path": shown, "incremental": incremental}, "dump")
    refuse_keys_on_several_ranks(keyed_tables_of(items), comm, "A dump")
    folder, since = folder_of(shown, store, comm), time.monotonic()
    wait_for_pending(comm, folder, shown)
    _give_up_others(comm, folder)
    locks: list[Lock | None] = [None]

    def lock() -> None:
        if store is not None:
            make_folder(folder)
        if comm.rank == 0 or store is not None:
            locks[0] = manifest.lock(folder, shown)
        if comm.rank == 0 and store is not None:
            store.check_is_ours()

    try:
        together(comm, lock)
        mine = np.frombuffer(secrets.token_bytes(_TOKEN_BYTES), np.uint8)
        data = "data-" + comm.broadcast(mine).tobytes().hex()
    except BaseException:
        if locks[0] is not None:
            locks[0].release()
        raise
    before: Mapping[str, Shard] = {}
    more = dict(extra or {})
    begun = _Begun(
        folder, store, data, items, [], comm, more, before, {}, since, locks[0], published, beside
    )
    try:
        if incremental:
            names = [item.table.name for item in items]
            before, reason = shards_to_continue(folder, tables_of(items), names, comm)
            if reason and comm.rank == 0:
                where = folder if store is None else shown
                text = f"All is dumped into {where}, and not only what has changed: {reason}."
                warnings.warn(text, RuntimeWarning, stacklevel=3)
        facts = [_facts(item.table) for item in items]
        # Before the tables are locked: whoever looks a text up has the lock of the texts first.
        kept = [(item.table, item.texts) for item in items]
        texts = {table.name: settle(table, own, comm) for table, own in kept if own is not None}
        together(comm, lambda: _make_folder(begun))
        if prepare is not None:
            prepare()
    except BaseException:
        _end(begun)
        raise
    return begun._replace(tables=facts, before=before, texts=texts)


def _write_and_publish(begun: _Begun, write: Callable[[], list[Shard]]) -> None:
    """Writes and publishes the checkpoint; if a rank fails the old one stays. Every rank calls it.

    Args:
      write: writes the files of this rank, to the store too, and returns their entries of the
        manifest.
    """
    try:
        shards = together(begun.comm, write)
        by_rank = _gather_shards(begun.comm, shards)
        together(begun.comm, lambda: _publish(begun, by_rank))
        store = begun.store
        if store is not None:
            together(begun.comm, lambda: _mark(begun, store))
        new = [file for shard in shards for file in shard._replace(before=()).written_files]
        num_bytes = sum(file.num_bytes for file in new)
        DUMPS.add(time.monotonic() - begun.since, num_bytes, time.time())
    finally:
        _end(begun)


def _end(begun: _Begun) -> None:
    """Removes files that belong to no checkpoint, once no rank writes any more."""
    if begun.lock is not None:
        sweep(begun.folder, begun.data)
        begun.lock.release()


def _with_parts(begun: _Begun, chunk_bytes: int, function: Callable[[list[ShardContent]], T]) -> T:
    """Calls a function with the parts that this rank has to write, under the locks of the tables.

    Args:
      chunk_bytes: of a piece at most.
    """
    forget_gone_optimizers(begun.items)

    def part(item: Item) -> ShardContent:
        name, comm = item.table.name, begun.comm
        file = f"{begun.data}/{manifest.file_name(name, comm.rank, comm.size)}"
        made = item.part(begun.folder, file, comm, chunk_bytes, begun.before.get(name))
        return made._replace(texts=begun.texts.get(name))

    return holding(tables_of(begun.items), lambda: function(list(map(part, begun.items))))


def _write_parts(
    begun: _Begun, parts: Sequence[ShardContent], chunk_bytes: int, report: Report | None = None
) -> list[Shard]:
    """Writes and syncs this rank's parts of a checkpoint to disk. It does not communicate."""
    progress = Progress(report, sum(part.num_bytes for part in parts))
    shards = [write_part(part, begun.folder, chunk_bytes, progress) for part in parts]
    sync_path(os.path.join(begun.folder, begun.data))
    return shards


def checked_items(
    tables: Sequence[Named], comm: Communicator, more: Mapping[str, Any], what: str
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
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(
                "The tables of a checkpoint must have different names. Received: several of "
                f"{', '.join(map(repr, twice))}. Make them with other names."
            )
        return items

    items = together(comm, check)
    description = dict(more)
    for i, item in enumerate(items):
        table = item.table
        facts = (table.name, table.dim, table.row_dtype.name, table.key_dtype.name)
        description[f"table {i}"] = [*facts, table.owner.name, *item.of_all_ranks]
    check_equal_on_all_ranks(comm, description, f"A {what}")
    return items


def _make_folder(begun: _Begun) -> None:
    if begun.lock is not None:
        os.mkdir(os.path.join(begun.folder, begun.data))


def _uploaded(begun: _Begun, shards: list[Shard]) -> list[Shard]:
    """Brings the files of this rank to the store, if there is one. It does not communicate."""
    if begun.store is not None:
        continued = [part.file for shard in begun.before.values() for part in shard.chain]
        data = {begun.data, *(file.split("/")[0] for file in continued)}
        begun.store.upload(begun.folder, [*data, *begun.beside])
    return shards


def _gather_shards(comm: Communicator, shards: list[Shard]) -> list[list[Shard]]:
    """Returns the manifest's entries of the files of every rank."""
    text = np.frombuffer(manifest.shards_to_text(shards).encode(), np.uint8)
    gathered = comm.allgatherv(text, call="dump")
    return [manifest.shards_from_text(part.tobytes()) for part in gathered.by_rank()]


def _publish(begun: _Begun, by_rank: list[list[Shard]]) -> None:
    if begun.lock is None:
        return
    tables = {
        facts.name: facts._replace(shards=tuple(shards[i] for shards in by_rank))
        for i, facts in enumerate(begun.tables)
    }
    text = manifest.as_text(Manifest(begun.comm.size, tables, begun.extra))
    manifest.publish(begun.folder, text)
    if begun.store is None and begun.published is not None:
        begun.published()


def _mark(begun: _Begun, store: Store) -> None:
    """Publishes the checkpoint in the store, and removes what it replaces."""
    if begun.comm.rank != 0:
        return
    found = manifest.read(begun.folder)
    store.check_has(found)
    store.mark(begun.folder)
    store.sweep(found)
    if begun.published is not None:
        begun.published()


def _facts(table: AnyTable) -> TableFacts:
    """Returns the manifest's entry of a table, without files."""
    kinds = (table.var_type, table.dim, table.row_dtype.name, table.key_dtype.name)
    return TableFacts(table.name, *kinds, table.owner.name, _options(table), ())


def _options(table: AnyTable) -> dict[str, Any]:
    options = {"seed": table.seed, "initializer": repr(table.initializer)}
    options |= table.options_of_all_ranks()
    if table.max_capacity is not None:
        options["max_capacity"] = table.max_capacity
    if table.ids == "texts":
        options["ids"] = table.ids
    plain: dict[str, Any] = json.loads(json.dumps(options, default=repr))
    return plain


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
        doomed = [data]
    except (OSError, ValueError):
        return
    else:
        used = {file.split("/")[0] for file in found.files}
        try:
            names = os.listdir(folder)
        except OSError:
            return
        doomed = [name for name in names if manifest.DATA_FOLDER.fullmatch(name)]
        doomed = [name for name in doomed if name not in used]
    for name in doomed:
        shutil.rmtree(os.path.join(folder, name), ignore_errors=True)


def place_of(path: str | os.PathLike[str]) -> tuple[str, Store | None]:
    """Returns a path as it is shown, the same on all ranks, and the store if it is an address.

    Raises:
      ValueError: it is no path, or there is no package for the address.
    """
    store = Store(path) if is_in_store(path) else None
    return (local_path(path) if store is None else store.address), store


def folder_of(shown: str, store: Store | None, comm: Communicator) -> str:
    """Returns the folder that dumps of this rank to a place are written into."""
    return os.path.abspath(shown) if store is None else store.staging(comm.rank, comm.size)


class BackgroundDump:
    """A dump that is being written. `dump_in_background` makes it.

    The process does not end before this rank's files are written. If the system cannot start a
    thread, the files are written at once.
    """

    def __init__(self, begun: _Begun, parts: list[ShardContent], chunk_bytes: int) -> None:
        self._begun, self._is_over, self._process = begun, False, os.getpid()
        self._shards: list[Shard] | None = None
        self._failure: BaseException | None = self._interruption()
        # Not a daemon, whoever makes it: the interpreter waits for it.
        name, arguments = f"dump into {self.path}", (parts, chunk_bytes)
        self._thread = threading.Thread(None, self._write, name, arguments, daemon=False)

    def _start(self) -> None:
        _add_pending(self._begun.comm, self._begun.folder, self)
        if self._begun.store is not None:
            _wait_before_executors_end()
        try:
            self._thread.start()
        except RuntimeError:  # the system has no further thread: the caller's own writes
            self._thread.run()

    def _write(self, parts: list[ShardContent], chunk_bytes: int) -> None:
        try:
            shards = _write_parts(self._begun, parts, chunk_bytes)
            parts.clear()  # an upload takes long, and needs none of it
            self._shards, self._failure = _uploaded(self._begun, shards), None
        except BaseException as error:
            self._failure = error
            # Else what was not written stays in memory as long as somebody has the error.
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

    @property
    def is_to_store(self) -> bool:
        """Whether it goes to an address."""
        return self._begun.store is not None

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
        _remove_pending(self._begun.comm, self._begun.folder, self)
        if self._failure is not None:
            raise self._failure

    def _join(self) -> None:
        """Waits until this rank's part has ended."""
        if self._thread.ident is not None:  # it was started
            self._thread.join()

    @property
    def rank(self) -> int:
        """The rank that it is on."""
        return self._begun.comm.rank

    def give_up(self) -> None:
        """Ends it without a checkpoint, where the ranks do not agree any more."""
        if not self._is_over:
            self._is_over = True
            self._failure = RuntimeError(
                f"The dump into {self.path} was given up: other ranks of this process dump there."
            )
            _end(self._begun)

    def _finish(self) -> None:
        failure, self._failure = self._failure, self._interruption()
        self._is_over = True
        try:
            _write_and_publish(self._begun, lambda: self._written(failure))
        except BaseException as error:
            self._failure = error
        else:
            self._failure = None
            _remove_pending(self._begun.comm, self._begun.folder, self)

    def _interruption(self) -> RuntimeError:
        return RuntimeError(f"The dump into {self.path} was interrupted.")

    def _written(self, failure: BaseException | None) -> list[Shard]:
        if failure is not None:
            raise failure
        assert self._shards is not None
        return self._shards

    def why_unfinished(self) -> str:
        """Returns why the dump is not complete, for a warning when the process ends."""
        if self._failure is not None:
            return f"{type(self._failure).__name__}: {self._failure}"
        return (
            "its files were written, but the ranks have not agreed. The checkpoint before it is "
            "there still. Call wait() on all ranks."
        )


def dump_in_background(
    path: str | os.PathLike[str],
    tables: Sequence[Named],
    comm: Communicator,
    extra: Mapping[str, Any] | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    incremental: bool = False,
    prepare: Callable[[], None] | None = None,
    published: Callable[[], None] | None = None,
    beside: Sequence[str] = (),
) -> BackgroundDump:
    """Begins a dump of the present content of tables. Every rank must call it; it returns together.

    The arguments are those of `dump`.

    Raises:
      TypeError: an item is no table with keys of its own.
      ValueError: there is no package for the address, a name repeats, a rank has other tables, or a
        key has rows on several ranks.
      RuntimeError: another thread has restored a table meanwhile.
      BlockingIOError: another dump writes into the folder; of several ranks an OSError.
      OSError: the folders cannot be made. The old checkpoint is as it was.
      MemoryError: a rank has no memory for a copy of its part. The old checkpoint is as it was.
      Later failures are raised by `wait`.
    """
    begun = _begin(path, tables, comm, extra, incremental, prepare, published, beside)
    try:
        parts = together(comm, lambda: _with_parts(begun, chunk_bytes, _copies))
    except BaseException:
        _end(begun)
        raise
    made = BackgroundDump(begun, parts, chunk_bytes)
    made._start()  # from here on it ends itself, whatever interrupts the caller
    return made


def _copies(parts: list[ShardContent]) -> list[ShardContent]:
    return [copied(part) for part in parts]


def _add_pending(comm: Communicator, folder: str, dump: BackgroundDump) -> None:
    """Registers a dump that has begun."""
    _pending.setdefault(comm.connection, {})[os.path.realpath(folder)] = dump


def _remove_pending(comm: Communicator, folder: str, dump: BackgroundDump) -> None:
    """Removes a dump that has ended; another one may be registered by then."""
    dumps, path = _pending.get(comm.connection, {}), os.path.realpath(folder)
    if dumps.get(path) is dump:
        del dumps[path]


def wait_for_pending(comm: Communicator, folder: str, shown: str) -> None:
    """Waits for background dumps into a folder, or saves in it. Every rank must call it.

    Args:
      comm: the ranks.
      folder, shown: as `folder_of` and `place_of` return them.

    Raises:
      OSError: that dump has failed; or any other error of it.
    """
    at = os.path.realpath(folder)
    for path, dump in list(_pending.get(comm.connection, {}).items()):
        parent, name = os.path.split(dump.path if dump.is_to_store else path)
        if path == at or (parent in (at, shown) and manifest.SAVE.fullmatch(name)):
            dump.wait()


def _give_up_others(comm: Communicator, folder: str) -> None:
    """Gives up a dump into a folder that this rank has written when it was connected before.

    The ranks of then cannot agree any more, and it would keep the folder locked.
    """
    path = os.path.realpath(folder)
    for connection, dumps in list(_pending.items()):
        dump = None if connection is comm.connection else dumps.get(path)
        if dump is not None and dump.done and dump.rank == comm.rank:  # ranks may be threads
            del dumps[path]
            dump.give_up()


@cache
def _wait_before_executors_end() -> None:
    """Has the interpreter wait for what goes up before it ends the threads of `concurrent.futures`.

    File systems look up names in such threads. It ends them first of all, in functions that it
    calls in the opposite order of their registration.
    """
    importlib.import_module("concurrent.futures.thread")

    def wait() -> None:
        for dumps in list(_pending.values()):
            for dump in list(dumps.values()):
                dump._join()

    register = getattr(threading, "_register_atexit", None)
    if register is not None:
        register(wait)


def _at_exit() -> None:
    for dumps in list(_pending.values()):
        for dump in dumps.values():
            text = f"The background dump into {dump.path} was not finished: {dump.why_unfinished()}"
            print(text, file=sys.stderr, flush=True)


atexit.register(_at_exit)
# A forked child has no thread that writes.
os.register_at_fork(after_in_child=_pending.clear)
