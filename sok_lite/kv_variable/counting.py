"""How many keys a KvVariable has, and how often and when they were seen: its methods."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from sok_lite.backend import Array
from sok_lite.bridge.checks import checked_keys
from sok_lite.bridge.table_call import method_call, of_each_key
from sok_lite.engine.table import EmbeddingTable

if TYPE_CHECKING:
    from sok_lite.kv_variable.kv_variable_ops import KvVariable


def total_count(variable: "KvVariable") -> tf.Tensor:
    """How many keys have a row that training has not set to zeros, scalar int64."""
    return _total(variable, "total_count", lambda table, keys: keys.size)


def total_freq(variable: "KvVariable") -> tf.Tensor:
    """How often the keys that `total_count` counts were seen, scalar int64."""
    return _total(variable, "total_freq", lambda table, keys: table.counts(keys).sum())


def _total(
    variable: "KvVariable", method: str, of_keys: Callable[[EmbeddingTable, Array], Any]
) -> tf.Tensor:
    """Returns a number of all keys with a row, less that of those set to zeros."""
    share = variable.share

    def run(table: EmbeddingTable) -> Array:
        keys, shrunk = share.of(table.export_rows()[0]), share.of(table.shrunk_keys())
        return np.array(int(of_keys(table, keys) - of_keys(table, shrunk)), np.int64)

    (total,) = method_call(variable, method, run, [], [tf.int64], [[]])
    return total


def storage_size_count(variable: "KvVariable") -> tf.Tensor:
    """Rows in the first memory and beside it, (2,) int64, of all partitions."""

    def run(table: EmbeddingTable) -> Array:
        store = table.store
        far = store.num_far_rows
        return table.backend.from_host(np.array([store.num_rows - far, far], np.int64))

    (counts,) = method_call(variable, "storage_size_count", run, [], [tf.int64], [[2]])
    return counts


def get_counting(variable: "KvVariable", indices: Any, name: str | None = None) -> tf.Tensor:
    """Returns how often training lookups and writes have seen keys, int64 of their shape."""
    return of_each_key(
        variable, "get_counting", indices, lambda table, keys: table.counts(keys), tf.int64
    )


def get_timestamp(variable: "KvVariable", indices: Any, name: str | None = None) -> tf.Tensor:
    """Returns when a training lookup or a write last saw keys, int64 of their shape; 0: never.

    In seconds since 1970, as exact as `sok_lite.DynamicVariable.expire` is.
    """

    def run(table: EmbeddingTable, keys: Array) -> Array:
        return table.times(keys).astype(np.int64)

    return of_each_key(variable, "get_timestamp", indices, run, tf.int64)


def increase_counting(
    variable: "KvVariable", indices: Any, counts: Any, name: str | None = None
) -> Any:
    """Counts keys as seen: what a lookup in training notes of them.

    Args:
      indices: (n,) integers.
      counts: (n,) integers from 1 on.
    """

    def run(table: EmbeddingTable, keys: Array, counts: Array) -> None:
        table.lookup(keys, counts=counts)

    keys = checked_keys(variable, indices)
    return method_call(variable, "increase_counting", run, [keys, tf.cast(counts, tf.int64)])
