"""Tensors of a table in a `tf.train.Checkpoint`: save and restore.

Each rank saves its own part of the table. Shapes: n keys with rows, m keys that were counted but
have no row yet:

  keys           (n,)                key type, ascending
  values         (n, dimension)      rows
  states         (n, all of them)    float32, the optimizer states side by side
  state_columns  scalar text         JSON: a list of {state name: [length, initial value]}, first
                                     the states of no optimizer, then those of each optimizer; old
                                     checkpoints have the first alone
  stamps         (n,)                int64, number of the last lookup of each key
  scores         (n,)                uint64; (0,) where the stamps are the scores
  slots          (n,)                int64, slots in a "hybrid" index; (0,) of an "hbm" table
  sighted_keys   (m,)                int64
  sightings      (m,)                int64, occurrences of each key, plus 2**32 times the number of
                                     its last lookup, which old checkpoints lack
  facts          scalar text         JSON: number of lookups and their times (spans; not in old
                                     checkpoints); for a "hybrid" table also epoch, capacity,
                                     strategy, and numbers of slots, in all and by bucket and
                                     segment; for a layer's table its rank and number of ranks
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

    `part` is (rank, number of ranks), saved so that a restore rejects another rank's part.
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
    """Replaces the content of a variable's table by tensors from `serialized`.

    Raises ValueError if a tensor is missing, does not fit, or is not of `part`, unless None.
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
    """Returns the dtypes of a table's tensors, by name."""
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
    """Returns the eager tensors of a table, by name."""
    try:
        return as_tensors(named_arrays(take(table)), saved_dtypes(key_type, dtype))
    except MemoryError as error:
        raise MemoryError(
            f"No memory for a copy of table {table.name!r}, which has {table.size:,} keys. "
            "TensorFlow asks for one to save it, and also before it restores it: clear it before a "
            f"restore, or restore into a new one. It is as it was. ({error})"
        ) from error


def restore_tensors(table: EmbeddingTable, tensors: Mapping[str, tf.Tensor]) -> None:
    """Replaces the content of a table by eager tensors from `saved_tensors`.

    Raises ValueError if they do not fit the table or its capacity, MemoryError without room for
    them beside the old content; the table is then unchanged.
    """
    values = tensors["values"]
    rows = to_rows(to_array(values, table.backend), values.dtype, table)
    arrays = as_arrays({name: tensors[name] for name in tensors if name != "values"})
    arrays["values"] = table.store.to_storage(rows)
    restore(table, from_named_arrays(arrays, f"table {table.name!r}"))


def as_tensors(arrays: Mapping[str, Any], dtypes: Mapping[str, tf.DType]) -> dict[str, tf.Tensor]:
    """Returns host arrays, texts and numbers as eager tensors of the given dtypes."""
    return {
        name: to_tensor(array, dtypes[name], None)
        if isinstance(array, np.ndarray)
        else tf.constant(array, dtypes[name])
        for name, array in arrays.items()
    }


def as_arrays(tensors: Mapping[str, tf.Tensor]) -> dict[str, Any]:
    """Returns eager tensors as host arrays, without a copy of those in host memory."""
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
