"""The tensors that a checkpoint of TF1 has of a KvVariable, by TFPlus' names and some more.

Those of a partition are `<variable>/part_<i>:0-keys` and so on, of a variable without partitions
`<variable>:0-keys`. There are n keys whose row is not zeros, b that training has shrunk to zeros,
and f in all, with a row or without one. A row is zeros where every |element| is below the cutoff.

  keys              (n,)       key type, ascending
  values            (n, dim)   their rows
  init_table        (0, dim)   float32; initial values are functions of the key
  blacklist         (b,)       key type; shrunk: some optimizer state is not what it begins with
  freq_keys         (f,)       key type, first those with a row
  freq_values       (f,)       int64, how often each was seen
  freq_times        (f,)       float64, when each was last seen, in seconds since 1970; 0: never
  states            (n + b, s) float32, the optimizer states of `keys` and `blacklist`, side by side
  state_columns     scalar     text, JSON: as of bridge/checkpoint.py
  need_full_import  scalar     bool, False of a delta
  delete_keys       (d,)       key type, of a delta: keys that are gone
  facts             scalar     text, JSON: see `Facts`

A delta has of all but `delete_keys` the keys that are new or have changed, and in `freq_keys` also
all keys without a row. For serving there are keys and values alone, the rest is empty; and the keys
of a delta whose rows are zeros count as gone. TFPlus' own files have no more than the first six,
the fifth and sixth as uint16 or uint32: 16 bits of count, and above it the day since 1970.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from sok_lite.engine.dtypes import RowDtype
from sok_lite.engine.files.state_columns import columns_of, states_of
from sok_lite.engine.table.snapshot import State
from sok_lite.kv_variable.content import Content, cut
from sok_lite.kv_variable.share import Share

# Rows all of whose |elements| are below it are left out of `keys` and `values`.
CUTOFF = 1e-20
TRAIN, PREDICT = 1, 0

_VERSION = 1
_DAY = 86400.0


class Facts(NamedTuple):
    """What a checkpoint says of itself.

    Attributes:
      partition, num_partitions: which part of this rank's keys it has.
      rank, num_ranks: whose keys.
      num_rows: how many of `freq_keys` have a row.
      save: a number of 64 bits that no other save of the table has.
      base: of a delta, `save` of what it changes; None: it is no delta.
      mode: 1 for training, 0 for serving.
    """

    partition: int
    num_partitions: int
    rank: int
    num_ranks: int
    num_rows: int
    save: int
    base: int | None
    mode: int


def saved_dtypes(key_type: tf.DType, dtype: tf.DType) -> dict[str, tf.DType]:
    """Returns the names and dtypes of the tensors.

    Args:
      key_type, dtype: of the variable.
    """
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


def encoded(
    content: Content, facts: Facts, share: Share, deleted: np.ndarray, row_dtype: RowDtype
) -> dict[str, Any]:
    """Returns what is saved of a part of a table, by name: arrays, numbers and texts.

    Args:
      content: of the whole table, of a delta what has changed.
      facts: of the part; its number of rows is put in here.
      share: which keys it has.
      deleted: (d,) keys that are gone.
    """
    part = cut(content, share.has(content.keys), share.has(content.sighted_keys))
    rows = row_dtype.to_float32(np, part.values)
    is_zero = (np.abs(rows) < CUTOFF).all(axis=1)
    is_shrunk = np.zeros(part.keys.size, bool)
    for state in part.states:
        is_shrunk |= (state.rows != np.float32(state.initial)).any(axis=1)
    is_shrunk &= is_zero
    deleted = deleted[share.has(deleted)]
    if facts.mode == PREDICT:
        if facts.base is not None:
            deleted = np.union1d(deleted, part.keys[is_zero])
        part = cut(part, ~is_zero, np.zeros(part.sighted_keys.size, bool))._replace(states=[])
        is_zero = is_shrunk = np.zeros(part.keys.size, bool)
    stated = np.concatenate([np.flatnonzero(~is_zero), np.flatnonzero(is_shrunk)])
    known = np.concatenate([part.keys, part.sighted_keys.astype(part.keys.dtype)])
    counts = np.concatenate([part.counts, part.sightings])
    times = np.concatenate([part.times, part.sighted_times])
    if facts.mode == PREDICT:
        known, counts, times = known[:0], counts[:0], times[:0]
    columns = [np.empty((stated.size, 0), np.float32)]
    columns += [state.rows[stated] for state in part.states]
    num_rows = part.keys.size if facts.mode == TRAIN else 0
    return {
        "keys": part.keys[~is_zero],
        "values": part.values[~is_zero],
        "init_table": np.empty((0, rows.shape[1]), np.float32),
        "blacklist": part.keys[is_shrunk],
        "freq_keys": known,
        "freq_values": counts,
        "freq_times": times,
        "states": np.concatenate(columns, axis=1),
        "state_columns": json.dumps(columns_of(part.states)),
        "need_full_import": facts.base is None,
        "delete_keys": deleted.astype(part.keys.dtype),
        "facts": json.dumps({"version": _VERSION, **facts._replace(num_rows=num_rows)._asdict()}),
    }


def facts_of(text: Any, whose: str) -> Facts:
    """Returns the facts of a checkpoint.

    Args:
      text: of the tensor.
      whose: for errors.

    Raises:
      ValueError: a later version has written them, or they are corrupt.
    """
    try:
        facts = json.loads(text)
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


def decoded(
    tensors: Mapping[str, Any],
    facts: Facts | None,
    row_dtype: RowDtype,
    threshold: int,
    now: float,
    whose: str,
) -> Content:
    """Returns what a part of a checkpoint knows; keys whose rows were zeros have rows of zeros.

    Args:
      tensors: what was saved, by name; those that TFPlus does not write may be missing.
      facts: of the part; None: TFPlus has written it.
      threshold: how often a key must have been seen to get a row.
      now: the time of keys that the checkpoint has no time of.
      whose: for errors.

    Raises:
      ValueError: it contradicts itself.
    """
    keys, values = tensors["keys"], np.ascontiguousarray(tensors["values"])
    empty = keys[:0]
    blacklist = np.setdiff1d(tensors.get("blacklist", empty), keys)
    known = tensors.get("freq_keys", empty)
    counts, times = _frequencies(tensors, now)
    stated = np.concatenate([keys, blacklist])
    if not known.shape == counts.shape == times.shape or values.shape[:1] != keys.shape:
        raise ValueError(f"What was saved of {whose} is corrupt: its tensors differ in length.")
    if np.unique(stated).size != stated.size or np.unique(known).size != known.size:
        raise ValueError(f"What was saved of {whose} is corrupt: its keys repeat.")
    if facts is not None:
        has_row = np.arange(known.size) < facts.num_rows
    else:
        has_row = np.isin(known, stated) | (counts >= threshold)
    clipped = np.setdiff1d(known[has_row], stated)
    zeros = blacklist.size + clipped.size
    all_keys = np.concatenate([stated, clipped])
    rows = np.concatenate([values, np.zeros((zeros, values.shape[1]), values.dtype)])
    its_counts = np.full(all_keys.size, max(1, threshold), np.int64)
    its_times = np.full(all_keys.size, now)
    _, at, of = np.intersect1d(all_keys, known, assume_unique=True, return_indices=True)
    its_counts[at], its_times[at] = counts[of], times[of]
    content = Content(
        all_keys,
        rows.view(row_dtype.storage),
        _states(tensors, stated.size, clipped.size, whose),
        its_counts,
        its_times,
        known[~has_row].astype(np.int64),
        counts[~has_row],
        times[~has_row],
    )
    return cut(content, np.argsort(all_keys), np.argsort(content.sighted_keys))


def _frequencies(tensors: Mapping[str, Any], now: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns how often keys were seen, and when."""
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
    states = states_of(tensors["states"], json.loads(tensors["state_columns"]), whose)
    if any(len(state.rows) != num_stated for state in states):
        raise ValueError(
            f"What was saved of {whose} is corrupt: optimizer states of "
            f"{len(tensors['states']):,} keys, and {num_stated:,} keys."
        )
    return [
        state._replace(
            rows=np.concatenate(
                [state.rows, np.full((num_clipped, state.dim), state.initial, np.float32)]
            )
        )
        for state in states
    ]
