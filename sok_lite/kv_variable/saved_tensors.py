"""The tensors of a KvVariable in a TF1 checkpoint, by TFPlus' names and some more.

Names are `<variable>/part_<i>:0-keys` and so on for a partition, `<variable>:0-keys` without
partitions. There are n keys whose row is not zeros, b that training has shrunk to zeros, and f in
all, with a row or without one. A row is zeros if every |element| is below the cutoff.

  keys              (n,)       key type, ascending
  values            (n, dim)   their rows
  init_table        (0, dim)   float32; initial values are functions of the key
  blacklist         (b,)       key type; shrunk: some optimizer state differs from its initial value
  freq_keys         (f,)       key type, first those with a row
  freq_values       (f,)       int64, how often each was seen
  freq_times        (f,)       float64, when each was last seen, in seconds since 1970; 0: never
  states            (n + b, s) float32, the optimizer states of `keys` and `blacklist`, side by side
  state_columns     scalar     JSON as in bridge/checkpoint.py
  need_full_import  scalar     bool, False for a delta
  delete_keys       (d,)       key type, removed keys of a delta
  facts             scalar     JSON, the fields of `Facts`

A delta has only new and changed keys, and in `freq_keys` also all keys without a row. For serving
only keys and values are written, and the keys of a delta whose rows are zeros count as removed.
TFPlus' own files have only the first six, the fifth and sixth as uint16 or uint32: 16 bits of
count, and above it the day since 1970.

Between a table and these tensors is a `Content` of engine/table/content.py with these columns for
all keys:

  counts  int64, how often a key was seen
  times   float64, when it was last seen, in seconds since 1970; 0: never
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from sok_lite.engine.dtypes import RowDtype
from sok_lite.engine.json_text import parsed
from sok_lite.engine.optimizer_states import State
from sok_lite.engine.table import EmbeddingTable
from sok_lite.engine.table.admission import MAX_PENDING_COUNT
from sok_lite.engine.table.content import Content, concatenate, in_order, select, take
from sok_lite.engine.table.named_arrays import columns_of, side_by_side, states_of
from sok_lite.kv_variable.share import Share

# Rows with every |element| below it are left out of `keys` and `values`.
CUTOFF = 1e-20
TRAIN, PREDICT = 1, 0

_VERSION = 1
_DAY = 86400.0


class Facts(NamedTuple):
    """A checkpoint's description of itself."""

    partition: int  # of this rank's keys
    num_partitions: int
    rank: int  # that saved
    num_ranks: int
    num_rows: int  # number of `freq_keys` with a row
    save: int  # a 64-bit number unique to this save of the table
    base: int | None  # `save` that a delta changes; None: a full save
    mode: int  # 1 for training, 0 for serving


def saved_dtypes(key_type: tf.DType, dtype: tf.DType) -> dict[str, tf.DType]:
    """Returns the names and dtypes of the tensors of a variable."""
    return {
        "keys": key_type,
        "values": dtype,
        "init_table": tf.float32,
        "blacklist": key_type,
        "freq_keys": key_type,
        "freq_values": tf.int64,
        "freq_times": tf.float64,
        "states": tf.float32,
        "state_columns": tf.string,
        "need_full_import": tf.bool,
        "delete_keys": key_type,
        "facts": tf.string,
    }


def encode(
    content: Content, facts: Facts, share: Share, deleted: np.ndarray, row_dtype: RowDtype
) -> dict[str, Any]:
    """Returns the tensors of a part of a table, by name: arrays, numbers and strings.

    Args:
      facts: of the part; the number of rows is filled in here.
    """
    part = select(content, share.contains(content.keys), share.contains(content.pending_keys))
    # Few rows begin with a zero: only those are checked.
    zeros = np.flatnonzero(row_dtype.is_below(np, part.values[:, 0], CUTOFF))
    zeros = zeros[row_dtype.is_below(np, part.values[zeros], CUTOFF).all(axis=1)]
    is_zero, is_shrunk = np.zeros(part.keys.size, bool), np.zeros(part.keys.size, bool)
    is_zero[zeros] = True
    for state in part.states:
        is_shrunk[zeros] |= (state.rows[zeros] != np.float32(state.initial)).any(axis=1)
    deleted = deleted[share.contains(deleted)]
    if facts.mode == PREDICT:
        if facts.base is not None:
            deleted = np.union1d(deleted, part.keys[is_zero])
        part = select(part, ~is_zero, np.zeros(part.pending_keys.size, bool))._replace(states=[])
        is_zero = is_shrunk = np.zeros(part.keys.size, bool)
    stated = np.concatenate([np.flatnonzero(~is_zero), np.flatnonzero(is_shrunk)])
    known = np.concatenate([part.keys, part.pending_keys.astype(part.keys.dtype)])
    counts = np.concatenate([part.columns["counts"], part.pending["counts"]])
    times = np.concatenate([part.columns["times"], part.pending["times"]])
    if facts.mode == PREDICT:
        known, counts, times = known[:0], counts[:0], times[:0]
    all_states = side_by_side(part.states, part.keys.size)
    num_rows = part.keys.size if facts.mode == TRAIN else 0
    return {
        "keys": part.keys[~is_zero],
        "values": part.values[~is_zero] if zeros.size else part.values,
        "init_table": np.empty((0, part.values.shape[1]), np.float32),
        "blacklist": part.keys[is_shrunk],
        "freq_keys": known,
        "freq_values": counts,
        "freq_times": times,
        "states": all_states[stated] if zeros.size else all_states,
        "state_columns": json.dumps(columns_of(part.states)),
        "need_full_import": facts.base is None,
        "delete_keys": deleted.astype(part.keys.dtype),
        "facts": json.dumps({"version": _VERSION, **facts._replace(num_rows=num_rows)._asdict()}),
    }


def facts_of(text: Any, whose: str) -> Facts:
    """Parses a checkpoint's facts. ValueError: from a later version, or corrupt."""
    try:
        facts = parsed(text)
        version = facts.pop("version")
    except (ValueError, LookupError, AttributeError) as error:
        raise ValueError(f"What was saved of {whose} is corrupt: no facts. ({error})") from error
    if version != _VERSION:
        raise ValueError(
            f"What was saved of {whose} has version {version!r}, and this sok_lite knows "
            f"version {_VERSION}. Use the sok_lite that has written it, or a later one."
        )
    try:
        return Facts(**facts)
    except TypeError as error:
        raise ValueError(f"What was saved of {whose} is corrupt: {error}.") from error


def decode(
    tensors: Mapping[str, Any],
    facts: Facts | None,
    row_dtype: RowDtype,
    threshold: int,
    now: float,
    whose: str,
) -> Content:
    """Returns the content of a part of a checkpoint; keys with zero rows get rows of zeros.

    Args:
      tensors: by name; those that TFPlus does not write may be missing.
      facts: of the part; None: TFPlus wrote it.
      threshold: times that a key must be seen to get a row.
      now: time for keys without one.

    Raises:
      ValueError: inconsistent tensors.
    """
    keys, values = tensors["keys"], np.ascontiguousarray(tensors["values"])
    empty = keys[:0]
    blacklist = tensors.get("blacklist", empty)
    if blacklist.size:
        blacklist = np.setdiff1d(blacklist, keys)
    known = tensors.get("freq_keys", empty)
    counts, times = _frequencies(tensors, now)
    stated = np.concatenate([keys, blacklist])
    if not known.shape == counts.shape == times.shape or values.shape[:1] != keys.shape:
        raise ValueError(f"What was saved of {whose} is corrupt: its tensors differ in length.")
    if not are_distinct(stated) or not are_distinct(known):
        raise ValueError(f"What was saved of {whose} is corrupt: its keys repeat.")
    places = _places(known, stated)
    is_stated = places >= 0
    if facts is not None:
        has_row = np.arange(known.size) < facts.num_rows
    else:
        has_row = is_stated | (counts >= threshold)
    clipped = np.flatnonzero(has_row & ~is_stated)
    all_keys = np.concatenate([stated, known[clipped]])
    num_zeros = all_keys.size - keys.size
    if num_zeros:
        zeros = np.zeros((num_zeros, values.shape[1]), values.dtype)
        values = np.concatenate([values, zeros])
    its_counts = np.full(all_keys.size, max(1, threshold), np.int64)
    its_times = np.full(all_keys.size, now)
    for its, numbers in ((its_counts, counts), (its_times, times)):
        its[places[is_stated]] = numbers[is_stated]
        its[stated.size :] = numbers[clipped]
    content = Content(
        all_keys,
        values.view(row_dtype.storage),
        _states(tensors, stated.size, clipped.size, whose),
        {"counts": its_counts, "times": its_times},
        known[~has_row].astype(np.int64),
        {"counts": counts[~has_row], "times": times[~has_row]},
        {},
    )
    return in_order(content)


def _places(keys: np.ndarray, among: np.ndarray) -> np.ndarray:
    """Returns the index of each key among distinct ones, or -1."""
    if among.size == 0:
        return np.full(keys.size, -1)
    order = np.argsort(among, kind="stable")  # fast if sorted
    ordered = among[order]
    at = np.minimum(np.searchsorted(ordered, keys), among.size - 1)
    return np.where(ordered[at] == keys, order[at], -1)


def _frequencies(tensors: Mapping[str, Any], now: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns counts and times of keys."""
    values = tensors.get("freq_values", np.empty(0, np.int64))
    if values.dtype == np.uint32:
        counts, days = (values & 0xFFFF).astype(np.int64), (values >> 16).astype(np.float64)
        return counts, np.where(days > 0, days * _DAY, now)
    counts = values.astype(np.int64)
    return counts, tensors.get("freq_times", np.full(counts.shape, now))


def _states(
    tensors: Mapping[str, Any], num_stated: int, num_clipped: int, whose: str
) -> list[State]:
    if "states" not in tensors:
        return []
    states = states_of(tensors["states"], parsed(tensors["state_columns"], whose), whose)
    if any(len(state.rows) != num_stated for state in states):
        raise ValueError(
            f"What was saved of {whose} is corrupt: optimizer states of "
            f"{len(tensors['states']):,} keys, and {num_stated:,} keys."
        )
    if num_clipped == 0:
        return states
    return [
        state._replace(
            rows=np.concatenate(
                [state.rows, np.full((num_clipped, state.dim), state.initial, np.float32)]
            )
        )
        for state in states
    ]


# ---- counts and times, comparable between clocks ------------------------------------------------


def copy_content(table: EmbeddingTable) -> Content:
    """Copies the content of a table, whose lock the caller holds. MemoryError: no memory."""
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
    """Converts times to numbers of lookups: one for each time, and a last one without keys."""
    of_keys, of_pending = known.columns["times"], known.pending["times"]
    at = np.unique(np.concatenate([of_keys, of_pending]))
    at = at[at > 0]
    times = at.tolist()
    spans = {"numbers": list(range(1, at.size + 1)), "times": times, "ends": times}
    last_seen, pending_last_seen = (
        np.searchsorted(at, each, "right").astype(np.uint32) for each in (of_keys, of_pending)
    )
    sightings = np.clip(known.pending["counts"], 1, MAX_PENDING_COUNT).astype(np.uint32)
    return known._replace(
        columns={"stamps": last_seen, "scores": known.columns["counts"].astype(np.uint64)},
        pending={"sightings": sightings, "sighting_stamps": pending_last_seen},
        facts={"num_lookups": int(at.size) + 1, "spans": spans, "strategy": "kLfu", "epoch": 0},
    )


def are_distinct(keys: np.ndarray) -> bool:
    """Returns whether no key repeats."""
    ordered = np.sort(keys, kind="stable")  # fast if sorted
    return not bool((ordered[1:] == ordered[:-1]).any())


def apply_delta(known: Content, delta: Content, removed: np.ndarray, whose: str) -> Content:
    """Applies a delta to a content.

    Args:
      delta: new and changed keys, and all keys without a row afterwards.
      removed: (k,) removed keys.
    """
    gone = np.concatenate([delta.keys, removed.astype(delta.keys.dtype)])
    none = np.zeros(known.pending_keys.size, bool)
    kept = select(known, ~np.isin(known.keys, gone), none)
    return concatenate([kept, delta], whose)
