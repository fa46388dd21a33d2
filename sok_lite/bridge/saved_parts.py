"""What several ranks have saved of a table, put together for one rank of any number."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.engine.files.joined import joined_facts, joined_states, without_slots
from sok_lite.engine.files.manifest import StateFacts
from sok_lite.engine.files.state_columns import columns_of, states_of
from sok_lite.engine.table import EmbeddingTable
from sok_lite.engine.table.snapshot import State

Tensors = Mapping[str, tf.Tensor]


def part_of_rank(
    parts: Sequence[Tensors], table: EmbeddingTable, rank: int, size: int
) -> dict[str, tf.Tensor]:
    """Returns what a rank is to have of what all have saved: its own keys, of every part.

    Args:
      parts: of each rank that saved what `checkpoint.serialized` gave, eager tensors.
      table: whose keys they are.
      rank, size: of the ranks that there are now.

    Raises:
      ValueError: a part is corrupt.
    """
    arrays = [{name: tensor.numpy() for name, tensor in part.items()} for part in parts]
    kind = table.key_dtype

    def mine(keys: np.ndarray) -> np.ndarray:
        return np.flatnonzero(table.owner.owners(keys, size, kind, np) == rank)

    chosen = [mine(kind.to_int64(np, part["keys"])) for part in arrays]
    sighted = [mine(part["sighted_keys"]) for part in arrays]

    def joined(name: str, places: Sequence[np.ndarray]) -> np.ndarray:
        pairs = zip(arrays, places, strict=True)
        return np.concatenate([part[name][its] for part, its in pairs])

    order = np.argsort(joined("keys", chosen), kind="stable")
    has_scores = all(part["scores"].size == part["keys"].size for part in arrays)
    states = _states(arrays, chosen, table.name)
    columns = [np.empty((order.size, 0), np.float32), *(state.rows for state in states)]
    facts = without_slots(joined_facts([json.loads(bytes(part["facts"])) for part in arrays]))
    result = {
        "keys": joined("keys", chosen)[order],
        "values": joined("values", chosen)[order],
        "states": np.concatenate(columns, axis=1)[order],
        "state_columns": json.dumps(columns_of(states)),
        "stamps": joined("stamps", chosen)[order],
        "scores": joined("scores", chosen)[order] if has_scores else np.empty(0, np.uint64),
        "slots": np.empty(0, np.int64),
        "sighted_keys": joined("sighted_keys", sighted),
        "sightings": joined("sightings", sighted),
        "facts": json.dumps(facts),
    }
    return {name: tf.constant(array) for name, array in result.items()}


def _states(
    parts: Sequence[Mapping[str, Any]], chosen: Sequence[np.ndarray], whose: str
) -> list[State]:
    """Returns the states of the chosen keys, group by group."""
    saved = [
        states_of(part["states"], json.loads(bytes(part["state_columns"])), f"table {whose!r}")
        for part in parts
    ]
    files = [
        [StateFacts(str(i), s.name, s.dim, s.initial, s.group) for i, s in enumerate(states)]
        for states in saved
    ]
    found = []
    for name, dim, initial, group, tensors in joined_states(files):
        rows = [
            states[int(tensors[i])].rows[its]
            if i in tensors
            else np.full((its.size, dim), initial, np.float32)
            for i, (states, its) in enumerate(zip(saved, chosen, strict=True))
        ]
        found.append(State(name, dim, initial, np.concatenate(rows), group))
    return sorted(found, key=lambda state: state.group or 0)
