"""Methods of a table beyond a tf.Variable's: remove keys, read scores, count.

Functions of a variable; the APIs offer them as its methods. Each acts on this rank's part and does
not communicate, unless it says so. Those that return tensors work in eager mode and in graphs.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.backend import Array
from sok_lite.bridge.checks import checked_keys, checked_scores
from sok_lite.bridge.collectives import alltoall
from sok_lite.bridge.host_call import on_device
from sok_lite.bridge.job import communicator
from sok_lite.bridge.table_call import array_call, method_call, of_each_key
from sok_lite.bridge.table_exports import Predicate, on_host
from sok_lite.bridge.tensor import as_int64, from_int64
from sok_lite.bridge.variable import TableVariable
from sok_lite.engine.dtypes import is_integer, key_advice, unwrap_scalar
from sok_lite.engine.table import EmbeddingTable, Statistics
from sok_lite.engine.table.remove import check_limits

# ---------------------------------------------------------------- queries


def size(variable: TableVariable) -> tf.Tensor:
    """Returns int32 [rows on this rank, dimension]; rows saturate at the largest int32."""

    def run(table: EmbeddingTable) -> Array:
        rows = min(table.size, np.iinfo(np.int32).max)
        return table.backend.from_host(np.array([rows, table.dim], np.int32))

    (found,) = array_call(variable, f"The size of {variable.name!r}", run, [], [tf.int32], [[2]])
    return found


def num_keys(variable: TableVariable) -> tf.Tensor:
    """Returns the number of keys on this rank, scalar int64."""

    def run(table: EmbeddingTable) -> Array:
        return np.array(table.size, np.int64)

    (found,) = array_call(variable, f"The size of {variable.name!r}", run, [], [tf.int64], [[]])
    return found


def length(variable: TableVariable) -> int:
    """Returns the current number of keys on this rank: len(variable). Not in a tf.function."""
    _refuse_in_function(variable, "len()", "variable.size there")
    return int(on_device(variable.table.backend, getattr, variable.table, "size"))


def has(variable: TableVariable, key: Any) -> bool:
    """Returns whether a key has a row on this rank now: key in variable. It changes nothing.

    Args:
      key: one integer; outside the key type's range it has no row. Not in a tf.function.

    Raises:
      TypeError: not an integer, or several.
    """
    _refuse_in_function(variable, "`in`", "variable.contains(keys) there")
    if tf.is_tensor(key) and key.shape.rank == 0 and hasattr(key, "numpy"):
        key = key.numpy()
    key = unwrap_scalar(key)
    if not is_integer(key):
        of_keras = not hasattr(variable, "contains")  # the layer has it
        several = "table.contains(keys)" if of_keras else "variable.contains(keys)"
        raise TypeError(
            f"`in` asks {variable.name!r} for one key, an integer. Received: {key!r}. "
            f"{key_advice(key, several)}"
        )
    key_type = variable.key_type
    if not key_type.min <= key <= key_type.max:
        return False
    keys = np.array([key], key_type.as_numpy_dtype)
    table = variable.table
    backend = table.backend

    def find() -> bool:
        return bool(backend.to_host(table.contains(backend.from_host(keys)))[0])

    return on_device(backend, find)


def statistics(variable: TableVariable) -> Statistics:
    """Returns sizes and counters of the table: a NamedTuple of numbers, as of now.

    It reads the whole index. Not in a tf.function, which would call it only while traced.
    """
    _refuse_in_function(variable, "statistics()", "it outside of the tf.function")
    return on_device(variable.table.backend, variable.table.statistics)


def contains(variable: TableVariable, keys: Any, all_ranks: bool = False) -> tf.Tensor:
    """Returns whether keys have a row. It changes nothing.

    Args:
      keys: integers of any shape.
      all_ranks: True: ask the keys' owner ranks, each rank with its own keys; then every rank must
        call it. False: this rank only.

    Returns:
      bool, of the keys' shape.
    """
    keys = checked_keys(variable, keys)
    if all_ranks and communicator().size > 1:
        return tf.reshape(_at_owners(variable, tf.reshape(keys, [-1])), tf.shape(keys))

    def run(table: EmbeddingTable, keys: Array) -> Array:
        # As uint8: not every TensorFlow accepts bool memory from outside.
        return table.contains(keys).view(np.uint8)

    return tf.cast(of_each_key(variable, "contains", keys, run, tf.uint8), tf.bool)


def _at_owners(variable: TableVariable, keys: tf.Tensor) -> tf.Tensor:
    """Returns whether keys (n,) have a row on their owner ranks, (n,) bool."""

    def run(table: EmbeddingTable, keys: Array) -> tuple[Array, Array]:
        xp, size = table.backend.xp, communicator().size
        owners = table.owner.owners(table.engine_keys(keys), size, table.key_dtype, xp)
        return xp.argsort(owners, kind="stable"), xp.bincount(owners, minlength=size)

    dtypes, shapes = [tf.int64, tf.int64], [keys.shape, [None]]
    order, splits = method_call(variable, "contains", run, [keys], dtypes, shapes)
    asked, asked_splits = alltoall(tf.gather(as_int64(keys), order), splits)
    here = contains(variable, from_int64(asked, keys.dtype))
    told, _ = alltoall(tf.cast(here, tf.uint8), asked_splits)
    return tf.cast(tf.scatter_nd(order[:, None], told, [tf.size(keys)]), tf.bool)


def scores(variable: TableVariable, keys: Any) -> tf.Tensor:
    """Returns the scores of keys: the lowest is evicted first. It changes nothing.

    Args:
      keys: integers of any shape.

    Returns:
      uint64, of the keys' shape; 0 for a key without a row. For kLru and for an "hbm" table, the
      number of the key's last lookup.
    """
    return of_each_key(variable, "scores", keys, lambda table, keys: table.scores(keys), tf.uint64)


def num_zero_rows(variable: TableVariable) -> tf.Tensor:
    """Returns how many keys of this rank have rows of zeros, scalar int64.

    It reads every row and changes nothing.
    """
    return _count(variable, "num_zero_rows", lambda table: table.num_zero_rows(), [])


# ---------------------------------------------------------------- removal


def erase(variable: TableVariable, keys: Any) -> tf.Tensor:
    """Removes keys with their rows and optimizer states.

    Args:
      keys: integers of any shape; those without a row are skipped.

    Returns:
      Scalar int64, how many were removed.
    """
    keys = checked_keys(variable, keys)
    return _count(variable, "erase", lambda table, keys: table.erase(keys.reshape(-1)), [keys])


def erase_if(variable: TableVariable, predicate: Predicate) -> tf.Tensor:
    """Removes the keys that a predicate selects; returns how many, scalar int64.

    Args:
      predicate: takes some entries at a time, NumPy arrays keys (n,), rows (n, dimension) and
        scores (n,) uint64; returns (n,) bool. It sees all entries before the first is removed.
    """
    choose = on_host(variable, predicate)
    return _count(variable, "erase_if", lambda table: table.erase_if(choose), [])


def expire(
    variable: TableVariable,
    *,
    num_lookups: int | None = None,
    seconds: float | None = None,
    **others: Any,
) -> tf.Tensor:
    """Removes keys without recent lookups; returns how many, scalar int64.

    It is atomic and shows no progress: removing half of 10 million keys of dim 16 takes about a
    second on one core.

    Args:
      num_lookups: removes keys absent from the last `num_lookups` lookups of this table.
      seconds: removes keys without a lookup within that time, to about a second. Checkpoints keep
        times; keys from an old one without times count from its restore.
      others: none is accepted; days and the like raise.

    Raises:
      TypeError, ValueError: not exactly one of the two is passed, another is passed, or it is not a
        number or negative.
    """
    check_limits(num_lookups, seconds, others)
    return _count(
        variable, "expire", lambda table: table.expire(num_lookups=num_lookups, seconds=seconds), []
    )


def erase_below(variable: TableVariable, cutoff: float) -> tf.Tensor:
    """Removes keys whose row has only |elements| < cutoff; returns how many, scalar int64.

    Raises:
      ValueError: the cutoff is not above 0.
    """
    return _count(variable, "erase_below", lambda table: table.erase_below(cutoff), [])


def clear(variable: TableVariable) -> Any:
    """Removes every key and frees the memory. Returns the operation in a graph."""
    return method_call(variable, "clear", lambda table: table.clear())


def reserve(variable: TableVariable, num_keys: int) -> Any:
    """Reserves index capacity for `num_keys` keys. Returns the operation in a graph."""
    return method_call(variable, "reserve", lambda table: table.reserve(num_keys))


# ---------------------------------------------------------------- scores and epochs


def assign_scores(variable: TableVariable, keys: Any, scores: Any) -> Any:
    """Sets the scores of the keys that have a row. Returns the operation in a graph.

    Args:
      keys: (n,) integers; for a repeated key the last score is kept.
      scores: (n,) non-negative integers; for kLru, numbers of lookups.

    Raises:
      TypeError, ValueError: types or shapes do not fit, or a score is negative.
    """
    keys, scores = checked_keys(variable, keys), checked_scores(variable.name, scores)
    return method_call(
        variable, "assign_scores", lambda table, k, s: table.assign_scores(k, s), [keys, scores]
    )


def decay_scores(variable: TableVariable, factor: float) -> Any:
    """Multiplies the counts of kLfu and kEpochLfu on this rank by a factor, rounded down.

    A key that was popular once then has to be seen again to stay. The next increment of a
    checkpoint is a full one. Returns the operation in a graph.

    Args:
      factor: from 0 to 1, such as 0.5 once a day.

    Raises:
      TypeError, ValueError: `factor` is not such a number, or the table evicts by other scores.
    """
    return method_call(variable, "decay_scores", lambda table: table.decay_scores(factor))


def epoch(variable: TableVariable) -> int:
    """Returns the epoch of kEpochLru and kEpochLfu: keys of an earlier one are evicted first.

    Raises:
      NotImplementedError: the table is "hbm", which evicts nothing.
    """
    _check_evicts(variable)
    return variable.table.epoch


def set_epoch(variable: TableVariable, epoch: int) -> None:
    """Begins an epoch: keys of earlier ones are evicted first. Not in a tf.function."""
    if tf.inside_function():
        raise RuntimeError(
            f"The epoch of {variable.name!r} would be set once, while the tf.function is traced. "
            "Set it outside of the function."
        )
    _check_evicts(variable)
    on_device(variable.table.backend, setattr, variable.table, "epoch", epoch)


# ---------------------------------------------------------------- helpers


def _refuse_in_function(variable: TableVariable, what: str, instead: str) -> None:
    if tf.inside_function():
        raise RuntimeError(
            f"{what} of {variable.name!r} is of the moment: a tf.function would ask once, when it "
            f"is traced. Use {instead}."
        )


def _check_evicts(variable: TableVariable) -> None:
    if variable.table.keeps_every_key:
        raise NotImplementedError(
            f"{variable.name!r} has var_type={variable.table.var_type!r} and no epoch: such a "
            "table keeps every key. Make it with var_type='hybrid'."
        )


def _count(
    variable: TableVariable, method: str, function: Callable[..., int], inputs: Sequence[Any]
) -> tf.Tensor:
    def count(table: EmbeddingTable, *arrays: Array) -> np.ndarray:
        return np.array(function(table, *arrays), np.int64)

    (counted,) = method_call(variable, method, count, inputs, [tf.int64], [[]])
    return counted
