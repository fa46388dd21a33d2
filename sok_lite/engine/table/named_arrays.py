"""A table's content as arrays and texts by name: the form of TensorFlow's and Keras' checkpoints.

bridge/checkpoint.py lists the names. Optimizer states are one array, side by side, and a text says
which columns are whose: JSON, a list of {name of a state: [its length, its initial value]}, first
states that no optimizer keeps together, then those of each optimizer. Old ones have the first
alone, no list.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sok_lite.backend.arguments import address_of
from sok_lite.engine.json_text import parsed
from sok_lite.engine.optimizer_states import State
from sok_lite.engine.table.content import Content, check_sizes


def named_arrays(content: Content) -> dict[str, Any]:
    """Returns a content as what bridge/checkpoint.py lists: arrays and texts by name."""
    last_seen = content.pending["sighting_stamps"].astype(np.int64) << 32
    return {
        "keys": content.keys,
        "values": content.values,
        "states": side_by_side(content.states, content.keys.size),
        "state_columns": json.dumps(columns_of(content.states)),
        "stamps": content.columns["stamps"].astype(np.int64),
        "scores": content.columns.get("scores", np.empty(0, np.uint64)),
        "slots": content.columns.get("slots", np.empty(0, np.int64)),
        "sighted_keys": content.pending_keys,
        "sightings": last_seen | content.pending["sightings"],
        "facts": json.dumps(content.facts),
    }


def from_named_arrays(arrays: Mapping[str, Any], whose: str) -> Content:
    """Returns the content of which `named_arrays` gave these.

    Args:
      arrays: texts may be bytes.
      whose: names the table in errors.

    Raises:
      ValueError: they are not equally long, or the states are others than their text says.
    """
    pending = arrays["sightings"]
    columns = {name: arrays[name] for name in ("scores", "slots") if arrays[name].size}
    columns["stamps"] = arrays["stamps"].astype(np.uint32)
    content = Content(
        arrays["keys"],
        arrays["values"],
        states_of(arrays["states"], parsed(arrays["state_columns"], whose), whose),
        columns,
        arrays["sighted_keys"],
        {
            "sightings": pending.astype(np.uint32),
            "sighting_stamps": (pending >> 32).astype(np.uint32),
        },
        parsed(arrays["facts"], whose),
    )
    check_sizes(content, whose)
    return content


def columns_of(states: Sequence[State]) -> list[dict[str, Any]]:
    """Returns what "state_columns" says of states, group by group."""
    columns: list[dict[str, Any]] = [{}]
    for state in states:
        while len(columns) <= (state.group or 0):
            columns.append({})
        columns[state.group or 0][state.name] = [state.dim, state.initial]
    return columns


def states_of(rows: Any, grouped: Any, whose: str) -> list[State]:
    """Returns the states of which rows are side by side.

    Args:
      rows: (n, all of them) float32.
      grouped: what "state_columns" says.
      whose: for errors.

    Raises:
      ValueError: there are more or fewer columns than those.
    """
    states, start = [], 0
    for number, group in enumerate([grouped] if isinstance(grouped, dict) else grouped):
        for name, (dim, initial) in group.items():
            its_rows = rows[:, start : start + dim]
            states.append(State(name, dim, initial, its_rows, number or None))
            start += dim
    if start != rows.shape[1]:
        raise ValueError(
            f"What was saved of {whose} is corrupt: its states have {start} columns by their "
            f"names, and {rows.shape[1]} were saved."
        )
    return states


def side_by_side(states: Sequence[State], n: int) -> np.ndarray:
    """Returns the rows of states as one array, without a copy where they are parts of one.

    Args:
      states: of n keys, on the host.

    Returns:
      (n, all of them) float32.
    """
    width = sum(state.dim for state in states)
    if n and width and _are_parts_of_one(states, 4 * width):
        first = states[0].rows
        return np.lib.stride_tricks.as_strided(first, (n, width), first.strides)
    return np.concatenate([np.empty((n, 0), np.float32), *(s.rows for s in states)], axis=1)


def _are_parts_of_one(states: Sequence[State], row_bytes: int) -> bool:
    owner, end = states[0].rows.base, address_of(states[0].rows)
    for state in states:
        rows = state.rows
        is_next = rows.base is owner and address_of(rows) == end
        if not is_next or rows.strides != (row_bytes, 4) or rows.dtype != np.float32:
            return False
        end += 4 * state.dim
    return owner is not None
