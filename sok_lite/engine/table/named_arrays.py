"""A table's content as arrays and texts by name: the form of TensorFlow's and Keras' checkpoints.

bridge/checkpoint.py lists the names.
"""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from sok_lite.engine.json_text import parsed
from sok_lite.engine.table.content import Content, check_sizes
from sok_lite.engine.table.state_columns import columns_of, side_by_side, states_of


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
    keys, pending = arrays["keys"], arrays["sightings"]
    columns = {name: arrays[name] for name in ("scores", "slots") if arrays[name].size}
    columns["stamps"] = arrays["stamps"].astype(np.uint32)
    content = Content(
        keys,
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
