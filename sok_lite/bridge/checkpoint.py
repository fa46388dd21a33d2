"""The tensors of a table in a `tf.train.Checkpoint`, and their restore.

Saved is the part of this rank. The tensors, n keys and m keys that were seen but have no row:

  keys           (n,)                key type, ascending
  values         (n, dimension)      rows
  states         (n, all of them)    float32, the optimizer states side by side
  state_columns  scalar text         JSON: a list of {name of a state: [its length, its initial
                                     value]}: first states that no optimizer keeps together, then
                                     those of each optimizer; old checkpoints have the first alone
  stamps         (n,)                int64, number of the lookup that last saw each key
  scores         (n,)                uint64; (0,) where the stamps are the scores
  slots          (n,)                int64, places in a "hybrid" index; (0,) of an "hbm" table
  sighted_keys   (m,)                int64
  sightings      (m,)                int64, how often each was seen, and 2**32 times the number of
                                     the lookup that last saw it, which old checkpoints do not have
  facts          scalar text         JSON: number of lookups, and when they were: spans, which old
                                     checkpoints do not have; of a "hybrid" table its epoch,
                                     capacity and strategy as well, and where its slots are: how
                                     many, and how many a bucket and a segment have; of a layer's
                                     table which part this is: its rank, and the number of ranks
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.bridge.checks import checked_keys, checked_rows
from sok_lite.bridge.table_call import text_call, to_rows
from sok_lite.bridge.tensor import to_array, to_tensor
from sok_lite.engine.json_text import parsed
from sok_lite.engine.table import EmbeddingTable
from sok_lite.engine.table.content import take
from sok_lite.engine.table.named_arrays import from_named_arrays, named_arrays
from sok_lite.engine.table.restore import restore

_PART = "part"  # among the facts: [rank, number of ranks]


def serialized(variable: Any, part: tuple[int, int] | None = None) -> dict[str, tf.Tensor]:
    """Returns the tensors of a variable's table, by name.

    Args:
      variable: whose table is saved.
      part: whose rank it is, and of how many, where another rank's is to be refused in a restore.
    """
    key_type, dtype = variable.key_type, variable.dtype
    dtypes = saved_dtypes(key_type, dtype)

    def run(table: EmbeddingTable) -> Sequence[tf.Tensor]:
        tensors = saved_tensors(table, key_type, dtype)
        if part is not None:
            facts = {**_facts(tensors), _PART: part}
            tensors["facts"] = tf.constant(json.dumps(facts))
        return [tensors[name] for name in dtypes]

    what, shapes = f"Saving {variable.name!r}", [None] * len(dtypes)
    tensors = text_call(variable, what, run, [], list(dtypes.values()), shapes)
    return dict(zip(dtypes, tensors, strict=True))


def restored(
    variable: Any, tensors: Mapping[str, tf.Tensor], part: tuple[int, int] | None = None
) -> Any:
    """Makes a variable's table what was saved; returns the operation.

    Args:
      variable: whose table it is.
      tensors: what `serialized` gave.
      part: the rank whose part the tensors have to be, and of how many; None: of any.

    Raises:
      ValueError: a tensor is missing, or does not fit, or is of another part.
    """
    names = list(saved_dtypes(variable.key_type, variable.dtype))
    missing = set(names) - set(tensors)
    if missing:
        raise ValueError(
            f"The checkpoint has no {', '.join(sorted(missing))} for {variable.name!r}: it was not "
            "written from a table of this version."
        )
    keys = checked_keys(variable, tensors["keys"])
    checked_rows(variable, keys, tensors["values"], "restore")

    def run(table: EmbeddingTable, *parts: tf.Tensor) -> Sequence[tf.Tensor]:
        tensors_by_name = dict(zip(names, parts, strict=True))
        if part is not None:
            _check_part(table, _facts(tensors_by_name), part)
        restore_tensors(table, tensors_by_name)
        return ()

    inputs = [tensors[name] for name in names]
    done = text_call(variable, f"The restore of {variable.name!r}", run, inputs)
    return tf.no_op() if tf.executing_eagerly() else done


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
    try:
        return as_tensors(named_arrays(take(table)), saved_dtypes(key_type, dtype))
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
    values = tensors["values"]
    rows = to_rows(to_array(values, table.backend), values.dtype, table)
    arrays = as_arrays({name: tensors[name] for name in tensors if name != "values"})
    arrays["values"] = table.store.to_storage(rows)
    restore(table, from_named_arrays(arrays, f"table {table.name!r}"))


def as_tensors(arrays: Mapping[str, Any], dtypes: Mapping[str, tf.DType]) -> dict[str, tf.Tensor]:
    """Returns arrays of the host, texts and numbers as eager tensors of given dtypes."""
    return {
        name: to_tensor(array, dtypes[name], None)
        if isinstance(array, np.ndarray)
        else tf.constant(array, dtypes[name])
        for name, array in arrays.items()
    }


def as_arrays(tensors: Mapping[str, tf.Tensor]) -> dict[str, Any]:
    """Returns eager tensors as arrays of the host, without a copy where they lie there."""
    return {
        name: tensor.numpy() if tensor.dtype == tf.string else np.asarray(tensor)
        for name, tensor in tensors.items()
    }


def _check_part(table: EmbeddingTable, facts: dict[str, Any], part: tuple[int, int]) -> None:
    rank, size = facts.get(_PART, part)  # older checkpoints do not have it
    if (rank, size) != part:
        raise ValueError(
            f"This checkpoint has the part that rank {rank} of {size} has of table {table.name!r}. "
            f"Received: a restore on rank {part[0]} of {part[1]}. The table is as it was. Give "
            "every rank a path or directory of its own, and restore with as many ranks; of a Keras "
            "model model.save(path) writes one file of all ranks, which any number of them loads."
        )


def _facts(tensors: Mapping[str, tf.Tensor]) -> dict[str, Any]:
    return parsed(bytes(tensors["facts"].numpy()), "a table")
