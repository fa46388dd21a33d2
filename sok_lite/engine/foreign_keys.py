"""Foreign keys, owned by other ranks: refused before they get rows that no lookup would find.

A lookup over all ranks returns to each rank the gradient of its own keys. Horovod, if a program
passes it that gradient, gathers the keys of all ranks. A program that assigns the same rows on all
ranks has keys of other ranks too.

Rows that exist may change: a lookup on one rank alone may insert any key.
"""

import logging
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from sok_lite.backend import Array
from sok_lite.comm.protocol import Communicator, allgather_texts
from sok_lite.engine.failure import together
from sok_lite.engine.rows.store import NO_ROW
from sok_lite.engine.table.locking import with_lock
from sok_lite.engine.table.table import EmbeddingTable
from sok_lite.engine.update_rows import ResolvedUpdate, Update

_SLOTS = 1 << 16  # read at a time: they fit a processor's cache

_log = logging.getLogger("sok_lite")


class RankInfo(NamedTuple):
    """This rank, from 0 on, and the number of ranks."""

    rank: int
    size: int


class ForeignKeysError(ValueError):
    """Keys of other ranks would get rows."""


def refuse_foreign_keys(
    updates: Sequence[Update], by_row: Sequence[ResolvedUpdate], rank_info: RankInfo
) -> None:
    """Raises ForeignKeysError if an update would insert keys of other ranks.

    Keys of a lookup's own gradient and keys that have a row are not checked: so it waits for the
    device only if others have no row.

    Args:
      updates: of different tables.
      by_row: the same updates with row numbers.
    """
    for update, (table, all_keys, rows, _, num_without_row, _) in zip(updates, by_row, strict=True):
        if update.of_gradient or not num_without_row or not table.owner.is_strict:
            continue
        count, example = _foreign(table, all_keys[rows == np.uint32(NO_ROW)], rank_info)
        if count:
            raise ForeignKeysError(
                f"{count} of {all_keys.size} keys of the gradient of table {table.name!r} belong "
                f"to other ranks than this one, {rank_info.rank}, which has no row for them. "
                f"Received: {example}; nothing was changed. "
                "A lookup gives each rank the gradient of its own keys, summed over all ranks: "
                "keep it out of Horovod's collectives. With hvd.DistributedGradientTape, call "
                "tape.register_local_source(table). Do not wrap the optimizer in "
                "hvd.DistributedOptimizer."
            )


def refuse_foreign_write(
    table: EmbeddingTable, keys: Array, rank_info: RankInfo, what: str
) -> None:
    """Raises ForeignKeysError if a write has keys of other ranks that have no row here.

    They are refused even if all ranks write the same keys, as no rank knows what others write.

    Args:
      keys: (n,) of the table's key type, on its device.
      what: the program's call, for the error.
    """
    if not table.owner.is_strict or rank_info.size == 1:
        return
    whole = table.key_dtype.to_int64(table.backend.xp, keys, f"keys of {table.name!r}")
    if not _foreign(table, whole, rank_info)[0]:
        return
    count, example = _foreign(table, whole[~table.contains(keys)], rank_info)
    if count:
        raise ForeignKeysError(
            f"{count:,} of {keys.size:,} keys that {what} is to write belong to other ranks than "
            f"this one, {rank_info.rank}. Received: {example}; nothing was changed. A lookup over "
            f"ranks would not find them here: {table.owner.advice}."
        )


def refuse_keys_on_several_ranks(
    tables: Iterable[EmbeddingTable], comm: Communicator, what: str
) -> None:
    """Raises on all ranks if a key has rows on several, before tables are saved. All must call it.

    A checkpoint would have such a key twice, with different rows. Other foreign keys are saved, and
    the logger "sok_lite" warns of them. Tables whose ranks may each have any key are not checked.

    Args:
      tables: the same on all ranks.
      what: the program's call, for the error.

    Raises:
      ForeignKeysError: there are such keys; all ranks raise the same.
    """
    strict = [table for table in tables if table.owner.is_strict]
    if comm.size == 1 or not strict:
        return
    ranks = RankInfo(comm.rank, comm.size)
    found = together(
        comm, lambda: [with_lock(table, partial(_foreign_keys, table, ranks)) for table in strict]
    )
    counts = np.array([keys.size for keys in found], np.int64)
    all_counts = np.sum(comm.allgatherv(counts, call="foreign keys").by_rank(), axis=0)
    for table, keys, count in zip(strict, found, all_counts.tolist(), strict=True):
        if count:
            _check_once(table, keys, comm, what)
            _warn(table, keys, ranks)


def warn_of_foreign_keys(tables: Iterable[EmbeddingTable], comm: Communicator) -> None:
    """Logs a warning for keys on this rank that others own, without communication.

    Tables whose ranks may each have any key are not checked.
    """
    ranks = RankInfo(comm.rank, comm.size)
    for table in tables:
        if comm.size > 1 and table.owner.is_strict:
            _warn(table, with_lock(table, partial(_foreign_keys, table, ranks)), ranks)


def _warn(table: EmbeddingTable, keys: np.ndarray, ranks: RankInfo) -> None:
    """Logs a warning if this rank has foreign keys of a table; keys: (n,) int64 of the host."""
    if keys.size:
        _, example = _foreign(table, table.backend.from_host(keys), ranks)
        _log.warning(
            "Rank %s has %s keys of table %r that other ranks own, such as %s: no lookup over "
            "ranks finds them.",
            *(ranks.rank, f"{keys.size:,}", table.name, example),
        )


def _foreign_keys(table: EmbeddingTable, ranks: RankInfo) -> np.ndarray:
    """Returns the keys of a locked table that other ranks own, (n,) int64 on the host."""
    parts = [np.empty(0, np.int64)]
    for first in range(0, table.index.num_slots, _SLOTS):
        keys = table.index.entries(first, _SLOTS).keys
        owners = table.owner.owners(keys, ranks.size, table.key_dtype, table.backend.xp)
        parts.append(table.backend.to_host(keys[owners != ranks.rank]))
    return np.concatenate(parts)


def _check_once(table: EmbeddingTable, foreign: np.ndarray, comm: Communicator, what: str) -> None:
    """Raises on all ranks if a key of a table is on several, by asking the owners of foreign keys.

    Args:
      foreign: (n,) int64, the keys of this rank that others own.
    """
    kind, backend = table.key_dtype, table.backend
    owners = table.owner.owners(foreign, comm.size, kind)
    by_owner = foreign[np.argsort(owners, kind="stable")]
    splits = np.bincount(owners, minlength=comm.size)
    asked = comm.alltoallv(by_owner, splits, call="foreign keys")
    wanted = backend.from_host(kind.from_int64(np, asked.rows))
    is_here = together(comm, lambda: backend.to_host(table.contains(wanted)))
    distinct, num_asked = np.unique(asked.rows, return_counts=True)
    repeated = distinct[np.isin(distinct, asked.rows[is_here]) | (num_asked > 1)]
    counts = comm.allgatherv(np.array([repeated.size]), call="foreign keys").rows
    if not counts.any():
        return
    example = ""
    if repeated.size:
        key = repeated[:1]
        holders = [rank for rank, keys in enumerate(asked.by_rank()) if key in keys]
        holders += [comm.rank] * bool(np.isin(key, asked.rows[is_here]))
        on = ", ".join(map(str, sorted(holders)))
        example = f"{kind.from_int64(np, key)[0]}, of rank {comm.rank}, on ranks {on}"
    first = allgather_texts(comm, example, "foreign keys")[np.flatnonzero(counts)[0]]
    raise ForeignKeysError(
        f"{what} must have each key once. Received: {counts.sum():,} keys of table {table.name!r} "
        f"are on several ranks, such as key {first}. Nothing was saved. Erase them on the ranks "
        "that do not own them; sok.export gives the keys of a rank. And where the program gives "
        f"them rows: {table.owner.advice}."
    )


def _foreign(table: EmbeddingTable, keys: Array, rank_info: RankInfo) -> tuple[int, str]:
    """Returns how many of the keys, (n,) int64, other ranks own, and one of them as text."""
    rank, size = rank_info
    owners = table.owner.owners(keys, size, table.key_dtype, table.backend.xp)
    foreign = owners != rank
    count = int(foreign.sum())
    if not count:
        return 0, ""
    first = table.backend.to_host(keys[foreign][:1])
    return count, f"key {table.key_dtype.from_int64(np, first)[0]} of rank {owners[foreign][0]}"
