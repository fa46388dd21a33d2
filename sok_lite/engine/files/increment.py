"""Decides whether a dump may continue the existing checkpoint, and what an increment is.

An increment may continue a file only if no change can have been missed in between. Each rank must
remember that its table was written to the newest file of its part, or loaded from that file, and
the ranks must be the same. Otherwise everything is dumped again.
"""

import os
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from sok_lite.comm.protocol import Communicator, allgather_texts
from sok_lite.engine.files import manifest
from sok_lite.engine.files.manifest import Manifest, Shard, TableFacts, path_of
from sok_lite.engine.optimizer_states import numbered_states
from sok_lite.engine.rows.column import Column
from sok_lite.engine.table import EmbeddingTable
from sok_lite.engine.table.content import TablePart, pieces
from sok_lite.engine.table.dump_mark import DumpMark, find_mark, remember


class CannotContinueError(Exception):
    """An increment would be incomplete, for the reason in its text."""


def shards_to_continue(
    folder: str, tables: Sequence[EmbeddingTable], names: Collection[str], comm: Communicator
) -> tuple[Mapping[str, Shard], str]:
    """Returns the files that increments of tables continue. Every rank must call it.

    Args:
      names: of all tables that are dumped: of these, and of static ones.

    Returns:
      (by table name, the newest file of this rank's part, or {} if everything is dumped; the reason
      for this, "" if there is no checkpoint).
    """
    reason, newest, shards = "", "", dict[str, Shard]()
    try:
        found = manifest.read(folder)
        shards = {
            table.name: _checked_newest(folder, table, names, found, comm) for table in tables
        }
        newest = ", ".join(sorted({shard.file.split("/")[0] for shard in shards.values()}))
    except FileNotFoundError:
        pass
    except (CannotContinueError, OSError, ValueError, MemoryError) as error:
        reason = f"{error}".rstrip(".")
    texts = allgather_texts(comm, f"{newest}\n{reason}", "dump")
    if len({text.partition("\n")[0] for text in texts}) == 1 and newest:
        return shards, ""
    reasons = [text.partition("\n")[2] for text in texts]
    return {}, next(filter(None, reasons), "")


def _checked_newest(
    folder: str, table: EmbeddingTable, names: Collection[str], found: Manifest, comm: Communicator
) -> Shard:
    """Returns the newest file of this rank's part of a table.

    Raises:
      CannotContinueError: it is unknown what has changed since.
    """
    if found.tables.keys() != set(names):
        others = ", ".join(map(repr, sorted(found.tables)))
        raise CannotContinueError(f"the checkpoint is of other tables: {others}")
    if found.ranks != comm.size:
        raise CannotContinueError(f"{found.ranks} ranks wrote the checkpoint, not {comm.size}")
    facts = found.tables[table.name]
    if not _fits(table, facts):
        raise CannotContinueError(f"table {table.name!r} was another one when it was written")
    shard = facts.shards[comm.rank]
    dumped = find_mark(table, shard.file)
    if dumped is None:
        raise CannotContinueError(
            f"table {table.name!r} cannot tell what has changed since {shard.file} was written: "
            "another process wrote it, or the table was restored, its lookups are counted anew, or "
            "keys were given scores that are numbers of lookups"
        )
    for part in shard.chain:
        path = path_of(folder, part)
        try:
            num_bytes = os.path.getsize(path)
        except FileNotFoundError:
            raise CannotContinueError(f"{path} is missing") from None
        if num_bytes != part.written.num_bytes:
            raise CannotContinueError(f"{path} does not have the length with which it was written")
    return shard


def _fits(table: EmbeddingTable, facts: TableFacts) -> bool:
    mine = (table.dim, table.row_dtype.name, table.key_dtype.name, table.owner.name)
    return mine == (facts.dim, facts.dtype, facts.key_type, facts.owner)


def increment_of(shard: Shard, before: Shard, part: TablePart) -> tuple[Shard, int]:
    """Returns an increment's entry without `written`, and the least `last_seen` of its changes.

    Args:
      shard: the entry of a complete dump of the table.
      before: the file that the increment continues.

    Raises:
      RuntimeError: the table no longer knows what has changed since.
    """
    table = part.table
    dumped = find_mark(table, before.file)
    if dumped is None:
        raise RuntimeError(
            f"Table {table.name!r} was restored, or its lookups are counted anew, while it was to "
            "be dumped. The old checkpoint is as it was. Dump again."
        )
    since = dumped.number
    changed = sum(
        int((piece.last_seen >= np.uint32(since)).sum()) for piece in pieces(table, part.num_slots)
    )
    states = tuple(
        state._replace(before=_tensor_before(its.rows, dumped, before))
        for state, its in zip(shard.states, part.states, strict=True)
    )
    # Only the rows of older files are read, so the long times of their lookups are left out.
    *older, last = before.chain
    slim = last._replace(facts={"num_lookups": last.facts["num_lookups"]}, before=(), texts=None)
    return shard._replace(states=states, changed=changed, before=(*older, slim)), since


def _tensor_before(column: Column, dumped: DumpMark, before: Shard) -> str | None:
    """Returns the tensor of a state in the previous file; None: it has none."""
    pairs = zip(dumped.states, before.states, strict=True)
    return next((state.tensor for known, state in pairs if known() is column), None)


def remember_file(table: EmbeddingTable, folder: str, shard: Shard) -> None:
    """Remembers that a file has the content of a table, which is locked."""
    columns = [state.rows for state in numbered_states(table.store)]
    continued = shard.before[-1].file if shard.before else None
    remember(table, folder, shard.file, columns, continued)


def remember_load(
    folder: str, tables: Sequence[EmbeddingTable], found: Manifest, comm: Communicator
) -> None:
    """Remembers that tables have the content of a checkpoint. They are locked since their load."""
    if found.ranks != comm.size:
        return
    for table in tables:
        facts = found.tables[table.name]
        shard = facts.shards[comm.rank]
        states = numbered_states(table.store)
        # New ones, of an optimizer that the table has now, come last.
        kinds, saved = (
            [(s.group, s.name, s.dim, s.initial) for s in some] for some in (states, shard.states)
        )
        if _fits(table, facts) and kinds[: len(saved)] == saved:
            columns = [state.rows for state in states[: len(saved)]]
            remember(table, folder, shard.file, columns)
