"""Counts and times of a table's keys, so that parts of several clocks can be joined.

It is a `Content` of engine/table/content.py with these columns, of keys with a row and without:

  counts  int64, how often it was seen
  times   float64, when it was last, in seconds since 1970; 0: never
"""

import numpy as np

from sok_lite.engine.table import EmbeddingTable
from sok_lite.engine.table.admission import MOST_SIGHTINGS
from sok_lite.engine.table.content import Content, take
from sok_lite.engine.table.content_parts import concatenate, select


def taken(table: EmbeddingTable) -> Content:
    """Returns a copy of what a table knows now. The caller has the table's lock.

    Raises:
      MemoryError: no memory for it.
    """
    whole, times_of = take(table), table.clock.times_of
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


def as_of_table(known: Content) -> Content:
    """Returns a content as tables have it, its times as numbers of lookups.

    There is a lookup for each time, and a last one of no key.
    """
    of_keys, of_pending = known.columns["times"], known.pending["times"]
    at = np.unique(np.concatenate([of_keys, of_pending]))
    at = at[at > 0]
    times = at.tolist()
    spans = {"numbers": list(range(1, at.size + 1)), "times": times, "ends": times}
    last_seen, pending_last_seen = (
        np.searchsorted(at, each, "right").astype(np.uint32) for each in (of_keys, of_pending)
    )
    sightings = np.clip(known.pending["counts"], 1, MOST_SIGHTINGS).astype(np.uint32)
    return known._replace(
        columns={"stamps": last_seen, "scores": known.columns["counts"].astype(np.uint64)},
        pending={"sightings": sightings, "sighting_stamps": pending_last_seen},
        facts={"num_lookups": int(at.size) + 1, "spans": spans, "strategy": "kLfu", "epoch": 0},
    )


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
