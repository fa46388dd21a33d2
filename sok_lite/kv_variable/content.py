"""All that a table knows of its keys, on the host: taken out, cut, joined and put back."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from sok_lite.engine.optimizer_states import drop_orphaned_states
from sok_lite.engine.table import EmbeddingTable, snapshot
from sok_lite.engine.table.exclusive import alone
from sok_lite.engine.table.snapshot import State

_MOST_SIGHTINGS = 2**32 - 2  # the last number stands for none


class Content(NamedTuple):
    """What a table knows, n keys with a row and m that were seen but have none. Arrays of NumPy.

    Attributes:
      keys: (n,) of the key type, ascending.
      values: (n, dim), rows of the storage dtype.
      states: of all optimizers, (n, dim) each.
      counts: (n,) int64, how often each key was seen.
      times: (n,) float64, when it was last, in seconds since 1970; 0: never.
      sighted_keys: (m,) int64, ascending.
      sightings, sighted_times: (m,) as `counts` and `times`.
    """

    keys: np.ndarray
    values: np.ndarray
    states: Sequence[State]
    counts: np.ndarray
    times: np.ndarray
    sighted_keys: np.ndarray
    sightings: np.ndarray
    sighted_times: np.ndarray


def taken(table: EmbeddingTable) -> Content:
    """Returns a copy of what a table knows now.

    Raises:
      MemoryError: no memory for it.
    """

    return alone(table, lambda: _taken(table))


def _taken(table: EmbeddingTable) -> Content:
    drop_orphaned_states(table)
    held, values, states = snapshot.take(table)
    host, times_of = table.backend.to_host, table.clock.times_of
    order = np.argsort(host(held.sighted_keys))
    return Content(
        host(held.keys),
        host(values),
        [state._replace(rows=host(state.rows)) for state in states],
        np.minimum(host(held.scores), np.uint64(2**63 - 1)).astype(np.int64),
        times_of(host(held.stamps)),
        host(held.sighted_keys)[order],
        host(held.sightings)[order].astype(np.int64),
        times_of(host(held.sighting_stamps)[order]),
    )


def put(table: EmbeddingTable, content: Content) -> None:
    """Makes a table know that, and nothing else.

    Raises:
      ValueError: it does not fit the table, or has no room there. The table is as it was.
      MemoryError: no memory for it beside what the table holds; it is as it was.
    """
    device = table.backend.from_host
    numbered = numbered_lookups(content)
    held = snapshot.Held(
        keys=device(content.keys),
        rows=device(np.empty(0, np.uint32)),
        stamps=device(numbered.stamps),
        scores=device(content.counts.astype(np.uint64)),
        slots=device(np.empty(0, np.int64)),
        sighted_keys=device(content.sighted_keys),
        sightings=device(sightings_of(content)),
        sighting_stamps=device(numbered.sighting_stamps),
        facts=numbered.facts,
    )
    states = [state._replace(rows=device(state.rows)) for state in content.states]
    snapshot.restore(table, snapshot.Snapshot(held, device(content.values), states))


class Lookups(NamedTuple):
    """The times of a content as numbers of lookups, as tables have them.

    Attributes:
      stamps: (n,) uint32, number of the lookup that last saw each key; 0: none did.
      sighting_stamps: (m,) of the keys without a row.
      facts: as of `snapshot.Held`.
    """

    stamps: np.ndarray
    sighting_stamps: np.ndarray
    facts: dict[str, Any]


def numbered_lookups(content: Content) -> Lookups:
    """Returns the times of a content as those of lookups: one for each, and a last of no key."""
    at = np.unique(np.concatenate([content.times, content.sighted_times]))
    at = at[at > 0]
    times = at.tolist()
    spans = {"numbers": list(range(1, at.size + 1)), "times": times, "ends": times}
    stamps, sighting_stamps = (
        np.searchsorted(at, each, "right").astype(np.uint32)
        for each in (content.times, content.sighted_times)
    )
    return Lookups(
        stamps,
        sighting_stamps,
        {"num_lookups": int(at.size) + 1, "spans": spans, "strategy": "kLfu", "epoch": 0},
    )


def sightings_of(content: Content) -> np.ndarray:
    """Returns how often each key without a row was seen, (m,) uint32."""
    return np.minimum(content.sightings, _MOST_SIGHTINGS).astype(np.uint32)


def cut(content: Content, mine: np.ndarray, sighted: np.ndarray) -> Content:
    """Returns a part of it.

    Args:
      mine: (n,) bool, or numbers of keys with a row.
      sighted: (m,) bool, or numbers of those without one.
    """
    if _are_all(mine) and _are_all(sighted):
        return content
    return Content(
        content.keys[mine],
        content.values[mine],
        [state._replace(rows=state.rows[mine]) for state in content.states],
        content.counts[mine],
        content.times[mine],
        content.sighted_keys[sighted],
        content.sightings[sighted],
        content.sighted_times[sighted],
    )


def _are_all(chosen: np.ndarray) -> bool:
    return chosen.dtype == bool and bool(chosen.all())


def in_order(content: Content) -> Content:
    """Returns it with ascending keys: itself if they are."""
    orders = [_order(content.keys), _order(content.sighted_keys)]
    return cut(content, *orders)


def _order(keys: np.ndarray) -> np.ndarray:
    """Returns what makes keys ascending, for `cut`."""
    if bool((keys[1:] > keys[:-1]).all()):
        return np.ones(keys.size, bool)
    return np.argsort(keys)


def are_distinct(keys: np.ndarray) -> bool:
    """Returns whether no key repeats."""
    ordered = np.sort(keys, kind="stable")  # quick where they are in order
    return not bool((ordered[1:] == ordered[:-1]).any())


def joined(contents: Sequence[Content]) -> Content:
    """Returns what several know together, none of them with a key of another.

    A state that one of them does not have is what it begins with there.
    """
    if len(contents) == 1:
        return contents[0]
    keys = np.concatenate([each.keys for each in contents])
    sighted = np.concatenate([each.sighted_keys for each in contents])
    whole = Content(
        keys,
        np.concatenate([each.values for each in contents]),
        _joined_states(contents),
        np.concatenate([each.counts for each in contents]),
        np.concatenate([each.times for each in contents]),
        sighted,
        np.concatenate([each.sightings for each in contents]),
        np.concatenate([each.sighted_times for each in contents]),
    )
    return in_order(whole)


def changed(content: Content, delta: Content, removed: np.ndarray) -> Content:
    """Returns what is known after a change.

    Args:
      delta: keys that are new or have changed, and all that are sighted afterwards.
      removed: (k,) keys that are gone.
    """
    gone = np.concatenate([delta.keys, removed.astype(delta.keys.dtype)])
    kept = cut(content, ~np.isin(content.keys, gone), np.zeros(content.sighted_keys.size, bool))
    return joined([kept, delta])


def _joined_states(contents: Sequence[Content]) -> list[State]:
    """Returns the states of several, those of one kind put together in the order they come in."""
    kinds: dict[tuple[str, int, float, int], State] = {}
    have: list[dict[tuple[str, int, float, int], State]] = []
    for content in contents:
        its: dict[tuple[str, int, float, int], State] = {}
        for state in content.states:
            turn = 0
            while (state.name, state.dim, state.initial, turn) in its:
                turn += 1
            its[state.name, state.dim, state.initial, turn] = state
        kinds |= its  # numbers of optimizers are those of the last
        have.append(its)
    joined = []
    for kind, state in kinds.items():
        parts = [
            its[kind].rows
            if kind in its
            else np.full((content.keys.size, state.dim), state.initial, np.float32)
            for content, its in zip(contents, have, strict=True)
        ]
        joined.append(state._replace(rows=np.concatenate(parts)))
    return joined
