"""Loads checkpoints: several tables, on any number of ranks, written by any number.

No table changes before everything was read and checked on all ranks: a load that fails leaves every
table as it was.
"""

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any

from sok_lite.comm.header import load_by
from sok_lite.comm.protocol import Communicator
from sok_lite.engine.agreement import check_equal_on_all_ranks
from sok_lite.engine.dtypes import row_dtype
from sok_lite.engine.failure import together
from sok_lite.engine.files import manifest
from sok_lite.engine.files.dump import checked_items, folder_of, place_of, wait_for_pending
from sok_lite.engine.files.increment import remember_load
from sok_lite.engine.files.item import Item, ItemOrTable, tables_of
from sok_lite.engine.files.manifest import Manifest, TableFacts
from sok_lite.engine.files.progress import Progress, Report
from sok_lite.engine.files.saved_file import shards_of
from sok_lite.engine.files.store import Store
from sok_lite.engine.foreign_keys import warn_of_foreign_keys
from sok_lite.engine.static_table import AnyTable
from sok_lite.engine.table.locking import with_locks
from sok_lite.engine.table.restore import Swap, swap_all

_log = logging.getLogger("sok_lite")


def load(
    path: str | os.PathLike[str],
    tables: Sequence[ItemOrTable],
    comm: Communicator,
    mode: str = "replace",
    cast: bool = False,
    report: Report | None = None,
    accept: Callable[[dict[str, Any]], None] | None = None,
    on_full: str = "error",
) -> dict[str, Any]:
    """Loads tables from a checkpoint. Every rank must call it; it returns together.

    The new content of a table is built beside the old one, so there must be memory for both, unless
    the table is empty. Kinds and options of tables may differ from those of the checkpoint, a table
    of int64 takes keys of int32, and the number of ranks may be another: each rank needs room, by
    its own `max_capacity`, for the keys that it owns now. No other thread may look the tables up on
    all ranks meanwhile: the ranks would deadlock.

    Args:
      path: of the folder of `dump`, or its address, from which each rank downloads the files that
        it reads (store.py); of a `sok_lite.keras.Checkpoint` the newest save is loaded.
      tables: those to load, the same on all ranks; others of the checkpoint are not read. A static
        table takes all of its rows, in both modes.
      mode: "replace": a table has the keys of the checkpoint and no others. "merge": it keeps its
        other keys too; a key of both has the row of the checkpoint.
      cast: whether float rows may be rounded to another float dtype, that of the table.
      report: called with the bytes that this rank has read, and the bytes of the files that it
        reads, rows included that newer files replace.
      accept: called with the `extra` of `dump` before anything else is read; raises ValueError to
        reject it.
      on_full: for a "hybrid" table with less room than keys: "error": nothing is loaded. "evict":
        keys of the lowest scores are left out, on each rank by itself; the logger "sok_lite" says
        how many.

    Returns:
      The `extra` of `dump`.

    Raises:
      TypeError: an item is no table with keys of its own.
      OSError: a file cannot be read, or there is no checkpoint.
      ValueError: there is no package for the address, a name repeats, a rank has other tables, a
        file is corrupt, or its content does not fit a table.
      MemoryError: no memory for it. In all cases every table is as it was, on all ranks.
    """
    shown, store = together(comm, lambda: place_of(path), load_by("load()"))
    folder = folder_of(shown, store, comm)
    wanted = {"path": shown, "mode": mode, "cast": cast, "on_full": on_full}
    items = checked_items(tables, comm, wanted, "load")
    if mode not in ("replace", "merge"):
        raise ValueError(f"`mode` must be 'replace' or 'merge'. Received: mode={mode!r}.")
    if on_full not in ("error", "evict"):
        raise ValueError(f"`on_full` must be 'error' or 'evict'. Received: on_full={on_full!r}.")
    wait_for_pending(comm, folder, shown)
    dynamic = tables_of(items)
    with ExitStack() as reading:
        place = folder if store is None else store
        folder, found = together(comm, lambda: _open(place, items, cast, accept, comm, reading))
        at = folder if store is None else shown
        check_equal_on_all_ranks(comm, {"files": found.files}, f"The checkpoint at {at}")
        pairs = [(item, found.tables[item.table.name]) for item in items]

        def read() -> list[Swap]:
            shards = [s for item, facts in pairs for s in shards_of(item.table, facts, comm)]
            total = sum(part.written.num_bytes for shard in shards for part in shard.chain)
            progress = Progress(report, total)
            swaps = [
                item.prepare_load(facts, folder, comm, mode, on_full, progress)
                for item, facts in pairs
            ]
            progress.finish()
            return swaps

        def read_and_swap() -> None:
            swap_all(dynamic, together(comm, read))
            if mode == "replace" and store is None:
                remember_load(folder, dynamic, found, comm)

        with_locks(dynamic, read_and_swap)
    if comm.rank == 0:
        for item, facts in pairs:
            _warn_of_texts(item.table, facts)
    # If as many ranks wrote it, each has read one file, which may have keys of other ranks.
    warn_of_foreign_keys(
        tables_of(item for item, facts in pairs if len(facts.shards) == comm.size), comm
    )
    return found.extra


def _open(
    place: str | Store,
    items: Sequence[Item],
    cast: bool,
    accept: Callable[[dict[str, Any]], None] | None,
    comm: Communicator,
    reading: ExitStack,
) -> tuple[str, Manifest]:
    """Returns the folder and the manifest of a checkpoint that fits the items.

    Args:
      place: a folder, or a store from which the files that this rank reads are downloaded.
      reading: keeps these files until it is closed.
    """

    def wanted(found: Manifest) -> list[str]:
        tables = [(i.table, found.tables.get(i.table.name)) for i in items]
        files = [_files_of(table, facts, comm) for table, facts in tables if facts is not None]
        return list(chain.from_iterable(files))

    if isinstance(place, str):
        folder = manifest.newest_at(place)
        found = manifest.read(folder)
    else:
        folder, found = reading.enter_context(place.download(wanted))
    if accept is not None:
        accept(found.extra)
    for item in items:
        table = item.table
        if table.name not in found.tables:
            names = ", ".join(map(repr, sorted(found.tables))) or "none"
            raise ValueError(
                f"The checkpoint at {folder} has no table {table.name!r}. It has: {names}. Make "
                "the table with the name that it had."
            )
        _check_fits(folder, table, found.tables[table.name], cast)
    return folder, found


def _files_of(table: AnyTable, facts: TableFacts, comm: Communicator) -> list[str]:
    """Returns the files that this rank reads of a table."""
    files = [part.file for shard in shards_of(table, facts, comm) for part in shard.chain]
    texts = [shard.texts for shard in facts.shards[comm.rank :: comm.size]]
    return files + [each.file for each in texts if each is not None]


def _warn_of_texts(table: AnyTable, facts: TableFacts) -> None:
    """Warns that no integer finds the keys of a table of texts."""
    if table.ids == "integers" and facts.options.get("ids") == "texts":
        _log.warning(
            "Table %r was made for integers, and the ids of its checkpoint are texts: their "
            "hashes are its keys. Make the table with key_type=str, or look up "
            "sok_lite.hash_strings(texts).",
            table.name,
        )


def _check_fits(folder: str, table: AnyTable, facts: TableFacts, cast: bool) -> None:
    mine = (table.dim, table.key_dtype.name, table.row_dtype.name)
    theirs = (facts.dim, facts.key_type, facts.dtype)
    if facts.key_type == "int32" and table.key_dtype.name == "int64":
        theirs = (facts.dim, "int64", facts.dtype)
    advice = "Make the table as it was"
    if mine[:2] == theirs[:2] and mine[2] != theirs[2]:
        are_floats = not table.row_dtype.is_integer and not row_dtype(facts.dtype).is_integer
        if are_floats and cast:
            return
        advice += ", or load it with cast=True" if are_floats else ""
    if mine != theirs:
        names = ("dimension", "key_type", "dtype")
        expected, received = (
            ", ".join(f"{name} {value}" for name, value in zip(names, values, strict=True))
            for values in (theirs, mine)
        )
        raise ValueError(
            f"Table {table.name!r} must be as in the checkpoint at {folder}: {expected}. "
            f"Received: {received}. Nothing was loaded. {advice}."
        )
