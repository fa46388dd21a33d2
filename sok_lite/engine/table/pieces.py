"""Reads a table piece by piece, in the order of its slots: for files.

Hold the table, as `changing_alone` does, from `outline` to the last piece.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from sok_lite.engine.optimizer_states import State, numbered_states
from sok_lite.engine.table.hkv import HkvTable
from sok_lite.engine.table.index import IndexEntries
from sok_lite.engine.table.table import EmbeddingTable

# What goes with each key beside its rows; of the index alone, so never more than this a key.
ENTRY_BYTES = 32


class Outline(NamedTuple):
    """The sizes of a table's content, and which columns it has.

    Attributes:
      num_keys: keys with a row.
      num_pending: keys that were seen and have no row yet.
      has_scores: whether there are scores beside `last_seen`.
      has_slots: whether slots can be found again by their numbers: not where a growth has failed
        on its way.
      states: the optimizer states, with their columns.
      facts: number of lookups, their times and, of a "hybrid" table, what its index needs.
    """

    num_keys: int
    num_pending: int
    has_scores: bool
    has_slots: bool
    states: list[State]
    facts: dict[str, Any]


def outline(table: EmbeddingTable) -> Outline:
    """Returns the sizes and columns of a table's content."""
    num_pending, has_scores, has_slots = 0, False, False
    if isinstance(table, HkvTable):
        has_scores, has_slots = table.index.has_scores, table.index.is_regular
        num_pending = 0 if table.pending is None else table.pending.size
    states = numbered_states(table.store)
    return Outline(table.size, num_pending, has_scores, has_slots, states, facts_of(table))


def pieces(table: EmbeddingTable, num_slots: int) -> Iterator[IndexEntries]:
    """Yields all keys, of the table's key type, with what is kept beside them.

    Args:
      num_slots: that are looked at together, so the most keys of a piece.
    """
    for first in range(0, table.index.num_slots, num_slots):
        entries = table.index.entries(first, num_slots)
        yield entries._replace(keys=table.key_dtype.from_int64(table.backend.xp, entries.keys))


def pending_pieces(table: EmbeddingTable, num_slots: int) -> Iterator[IndexEntries]:
    """Yields the keys that were seen and have no row, of the table's key type; `rows` are their
    pending counts.

    Args:
      num_slots: that are looked at together, so the most keys of a piece.
    """
    pending = table.pending
    if pending is None:
        return
    for first in range(0, pending.num_slots, num_slots):
        entries = pending.entries(first, num_slots)
        yield entries._replace(keys=table.key_dtype.from_int64(table.backend.xp, entries.keys))


def facts_of(table: EmbeddingTable) -> dict[str, Any]:
    """Returns the facts that files have of a table, values that JSON knows: number and times of
    lookups and, of a "hybrid" table, what its index needs."""
    facts: dict[str, Any] = {"num_lookups": table.num_lookups, "spans": table.clock.spans._asdict()}
    if isinstance(table, HkvTable):
        index = table.index
        facts |= {
            "capacity": index.capacity,
            "bucket": index.bucket,
            "segment": index.sizes.unit,
            "num_slots": index.num_slots - 2,
            "hash_seed": index.seed,
            "strategy": index.strategy,
            "epoch": index.epoch,
        }
    return facts
