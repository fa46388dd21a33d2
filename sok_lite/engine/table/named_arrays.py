"""A table's content as arrays and texts by name: the form of TensorFlow's and Keras' checkpoints.

bridge/checkpoint.py lists the names. The optimizer states are columns of one array, which the text
"state_columns" describes: a JSON list of objects, {name of a state: [its dim, its initial value]},
first the states without an optimizer, then those of each optimizer. Old checkpoints have the first
object alone, without a list.
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
    """Returns a content as arrays and texts by name."""
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
    """Returns the content that `named_arrays` gave.

    Args:
      arrays: texts may be bytes.
      whose: names the table in errors.

    Raises:
      ValueError: lengths differ, or the states are not those of their text.
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
    """Returns the description of states for "state_columns"."""
    columns: list[dict[str, Any]] = [{}]
    for state in states:
        while len(columns) <= (state.group or 0):
            columns.append({})
        columns[state.group or 0][state.name] = [state.dim, state.initial]
    return columns


def states_of(rows: Any, grouped: Any, whose: str) -> list[State]:
    """Splits the columns of an array into states.

    Args:
      rows: (n, sum of their dims) float32.
      grouped: the parsed "state_columns".
      whose: names the table in errors.

    Raises:
      ValueError: the array has more or fewer columns.
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
    """Joins the rows of states of n keys, on the host, to (n, sum of their dims) float32.

    Adjacent columns of one array are not copied.
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
