"""Counts and times of a table's keys, so that parts of several clocks can be joined.

It is a `Content` of engine/table/content.py with these columns, of keys with a row and without:

  counts  int64, how often it was seen
  times   float64, when it was last, in seconds since 1970; 0: never
"""

from typing import Any, NamedTuple

import numpy as np

from sok_lite.engine.table import EmbeddingTable, content
from sok_lite.engine.table.content import Content
from sok_lite.engine.table.content_parts import concatenate, select
from sok_lite.engine.table.exclusive import alone

_MAX_PENDING_COUNT = 2**32 - 2  # the last number stands for none


def taken(table: EmbeddingTable) -> Content:
    """Returns a copy of what a table knows now.

    Raises:
      MemoryError: no memory for it.
    """
    return alone(table, lambda: _take(table))


def _take(table: EmbeddingTable) -> Content:
    whole, times_of = content.take(table), table.clock.times_of
    columns, pending = whole.columns, whole.pending
    scores = columns.get("scores", np.empty(0, np.uint64))
    return whole._replace(
        columns={
            "counts": np.minimum(scores, np.uint64(2**63 - 1)).astype(np.int64),
            "times": times_of(columns["stamps"]),
        },
        pending={
            "counts": pending["sightings"].astype(np.int64),
            "times": times_of(pending["sighting_stamps"]),
        },
        facts={},
    )


def put(table: EmbeddingTable, known: Content) -> None:
    """Makes a table know that, and nothing else.

    Raises:
      ValueError: it does not fit the table, or has no room there. The table is as it was.
      MemoryError: no memory for it beside what the table holds; it is as it was.
    """
    numbered = numbered_lookups(known)
    columns = {"stamps": numbered.last_seen, "scores": known.columns["counts"].astype(np.uint64)}
    pending = {"sightings": pending_counts_of(known), "sighting_stamps": numbered.pending_last_seen}
    content.restore(table, known._replace(columns=columns, pending=pending, facts=numbered.facts))


class Lookups(NamedTuple):
    """The times of a content as numbers of lookups, as tables have them.

    Attributes:
      last_seen: (n,) uint32, number of the lookup that last saw each key; 0: none did.
      pending_last_seen: (m,) of the keys without a row.
      facts: of the table: number and spans of lookups, strategy and epoch.
    """

    last_seen: np.ndarray
    pending_last_seen: np.ndarray
    facts: dict[str, Any]


def numbered_lookups(known: Content) -> Lookups:
    """Returns the times of a content as those of lookups: one for each, and a last of no key."""
    of_keys, of_pending = known.columns["times"], known.pending["times"]
    at = np.unique(np.concatenate([of_keys, of_pending]))
    at = at[at > 0]
    times = at.tolist()
    spans = {"numbers": list(range(1, at.size + 1)), "times": times, "ends": times}
    last_seen, pending_last_seen = (
        np.searchsorted(at, each, "right").astype(np.uint32) for each in (of_keys, of_pending)
    )
    return Lookups(
        last_seen,
        pending_last_seen,
        {"num_lookups": int(at.size) + 1, "spans": spans, "strategy": "kLfu", "epoch": 0},
    )


def pending_counts_of(known: Content) -> np.ndarray:
    """Returns how often each key without a row was seen, (m,) uint32."""
    return np.minimum(known.pending["counts"], _MAX_PENDING_COUNT).astype(np.uint32)


def are_distinct(keys: np.ndarray) -> bool:
    """Returns whether no key repeats."""
    ordered = np.sort(keys, kind="stable")  # quick where they are in order
    return not bool((ordered[1:] == ordered[:-1]).any())


def changed(known: Content, delta: Content, removed: np.ndarray, whose: str) -> Content:
    """Returns what is known after a change.

    Args:
      delta: keys that are new or have changed, and all that are sighted afterwards.
      removed: (k,) keys that are gone.
      whose: names the table in errors.
    """
    gone = np.concatenate([delta.keys, removed.astype(delta.keys.dtype)])
    none = np.zeros(known.pending_keys.size, bool)
    kept = select(known, ~np.isin(known.keys, gone), none)
    return concatenate([kept, delta], whose)
