"""How many keys a KvVariable has, and how often and when they were seen: its methods."""

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
    """Returns `KvVariable.total_count`."""
    share = variable.share

    def run(table: EmbeddingTable) -> Array:
        count = int(share.keys(table).size) - int(share.shrunk(table).size)
        return np.array(count, np.int64)

    (count,) = method_call(variable, "total_count", run, [], [tf.int64], [[]])
    return count


def total_freq(variable: "KvVariable") -> tf.Tensor:
    """Returns `KvVariable.total_freq`."""
    share = variable.share

    def run(table: EmbeddingTable) -> Array:
        counts = table.counts(share.keys(table)).sum()
        return np.array(int(counts - table.counts(share.shrunk(table)).sum()), np.int64)

    (count,) = method_call(variable, "total_freq", run, [], [tf.int64], [[]])
    return count


def storage_size_count(variable: "KvVariable") -> tf.Tensor:
    """Returns `KvVariable.storage_size_count`."""

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
