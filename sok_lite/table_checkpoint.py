"""What `tf.train.Checkpoint` saves of a table, and how a table takes it back.

Saved is the part of this rank. The tensors, n keys and m keys that were seen but have no row:

  keys           (n,)                key type, ascending
  values         (n, dimension)      rows
  states         (n, all of them)    float32, the optimizer states side by side
  state_columns  scalar text         JSON: name of a state -> [its length, its initial value]
  stamps         (n,)                int64, number of the lookup that last saw each key
  scores         (n,)                uint64; (0,) where the stamps are the scores
  slots          (n,)                int64, places in a "hybrid" index; (0,) of an "hbm" table
  sighted_keys   (m,)                int64
  sightings      (m,)                int64, how often each was seen
  facts          scalar text         JSON: number of lookups; of a "hybrid" table its epoch,
                                     capacity and strategy as well, and where its slots are: how
                                     many, and how many a bucket and a segment have
"""

import json
from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from sok_lite.engine.table import EmbeddingTable, snapshot
from sok_lite.engine.table.exclusive import alone
from sok_lite.row_writes import to_rows
from sok_lite.tensor import to_array, to_tensor


def saved_dtypes(key_type: tf.DType, dtype: tf.DType) -> dict[str, tf.DType]:
    """Returns the names and dtypes of the tensors of a table.

    Args:
      key_type, dtype: of its keys and its rows.
    """
    return {
        "keys": key_type,
        "values": dtype,
        "states": tf.float32,
        "state_columns": tf.string,
        "stamps": tf.int64,  # not uint32: few of TensorFlow's kernels know it
        "scores": tf.uint64,
        "slots": tf.int64,
        "sighted_keys": tf.int64,
        "sightings": tf.int64,
        "facts": tf.string,
    }


def saved_tensors(
    table: EmbeddingTable, key_type: tf.DType, dtype: tf.DType
) -> dict[str, tf.Tensor]:
    """Returns the tensors of a table, eager ones.

    Args:
      key_type, dtype: of its keys and its rows.
    """
    backend = table.backend
    xp = backend.xp

    def taken() -> dict[str, tf.Tensor]:
        saved = snapshot.take(table)
        rows = xp.ascontiguousarray(saved.rows)
        states = [table.store.column(name) for name in table.store.state_names]
        state_rows = [
            xp.empty((int(rows.size), 0), np.float32),
            *(table.store.read(rows, column=state.name) for state in states),
        ]
        return {
            "keys": to_tensor(saved.keys, key_type, backend),
            "values": to_tensor(table.store.read(rows), dtype, backend),
            "states": to_tensor(xp.concatenate(state_rows, axis=1), tf.float32, backend),
            "state_columns": _text({state.name: [state.dim, state.initial] for state in states}),
            "stamps": to_tensor(saved.stamps.astype(np.int64), tf.int64, backend),
            "scores": to_tensor(saved.scores, tf.uint64, backend),
            "slots": to_tensor(saved.slots, tf.int64, backend),
            "sighted_keys": to_tensor(saved.sighted_keys, tf.int64, backend),
            "sightings": to_tensor(saved.sightings.astype(np.int64), tf.int64, backend),
            "facts": _text(saved.facts),
        }

    try:
        return alone(table, taken)
    except MemoryError as error:
        raise MemoryError(
            f"No memory for a copy of table {table.name!r}, which has {table.size:,} keys. "
            "TensorFlow asks for one to save it, and also before it restores it: clear it before a "
            f"restore, or restore into a new one. It is as it was. ({error})"
        ) from error


def restore_tensors(table: EmbeddingTable, tensors: Mapping[str, tf.Tensor]) -> None:
    """Makes a table what was saved: other keys go.

    Args:
      tensors: what `saved_tensors` gave, eager ones.

    Raises:
      ValueError: the keys or states do not fit the table, or it has no room for them. It is as it
        was.
      MemoryError: no memory for all of it beside what the table holds; it is as it was.
    """
    backend = table.backend
    arrays = {
        name: to_array(tensor, backend)
        for name, tensor in tensors.items()
        if tensor.dtype != tf.string and name != "values"
    }
    saved = snapshot.Snapshot(
        arrays["keys"],
        backend.xp.empty(0, np.uint32),  # of the table that was saved
        arrays["stamps"].astype(np.uint32),
        arrays["scores"],
        arrays["slots"],
        arrays["sighted_keys"],
        arrays["sightings"].astype(np.uint32),
        json.loads(bytes(tensors["facts"].numpy())),
    )
    values = table.store.to_storage(to_rows(tensors["values"], table))
    states, start = [], 0
    for name, (dim, initial) in json.loads(bytes(tensors["state_columns"].numpy())).items():
        rows = arrays["states"][:, start : start + dim]
        states.append(snapshot.State(name, dim, initial, rows))
        start += dim
    snapshot.restore(table, saved, values, states)


def _text(value: object) -> tf.Tensor:
    return tf.constant(json.dumps(value))
