"""Keys of a KvVariable are removed: its methods."""

from typing import TYPE_CHECKING, Any

import tensorflow as tf

from sok_lite.backend import Array
from sok_lite.bridge.checks import checked_keys
from sok_lite.bridge.table_call import array_call, method_call
from sok_lite.engine.dtypes import as_float
from sok_lite.engine.table import EmbeddingTable
from sok_lite.engine.table.exclusive import alone
from sok_lite.kv_variable.share import Share

if TYPE_CHECKING:
    from sok_lite.kv_variable.kv_variable_ops import KvVariable


def delete(variable: "KvVariable", indices: Any, name: str | None = None) -> Any:
    """Removes keys with their rows, counts and optimizer states; missing ones are left out."""

    def run(table: EmbeddingTable, keys: Array) -> None:
        table.erase(keys.reshape(-1))

    return method_call(variable, "delete", run, [checked_keys(variable, indices)])


def delete_with_timestamp(
    variable: "KvVariable",
    threshold: float = 7,
    name: str | None = None,
    *,
    seconds: float | None = None,
) -> tf.Tensor:
    """Removes the keys that no training lookup or write has seen lately, row or not.

    Args:
      threshold: for so many days.
      seconds: for so many seconds, in place of days.

    Returns:
      (n,) of the key type, the keys that are gone.
    """
    limit = as_float(threshold) * 86400 if seconds is None else as_float(seconds)
    if not limit >= 0:
        raise ValueError(f"The time must be 0 or more. Received: {limit} seconds.")

    share = variable.share

    def run(table: EmbeddingTable) -> Array:
        return alone(table, lambda: _removed_before(table, share, limit))

    (gone,) = method_call(variable, "delete_with_timestamp", run, [], [variable.key_type], [[None]])
    return gone


def clear(variable: "KvVariable") -> Any:
    """Removes all keys; returns the operation in a graph."""
    share = variable.share
    what = f"clear of {variable.name!r}"
    return array_call(variable, what, lambda table: remove_all(table, share))


def remove_all(table: EmbeddingTable, share: Share) -> None:
    """Removes the keys of a share, and forgets those that were seen and have no row."""
    if share.is_whole:
        table.clear()
    else:
        alone(table, lambda: table.erase(_known_keys(table, share)))


def _removed_before(table: EmbeddingTable, share: Share, seconds: float) -> Array:
    """Removes the keys of a share that were not seen for some time, and returns them."""
    keys = _known_keys(table, share)
    times = table.times(keys)
    old = keys[(times > 0) & (times <= table.clock.read() - seconds)]
    table.erase(old)
    return old


def _known_keys(table: EmbeddingTable, share: Share) -> Array:
    """Returns the keys of a share that have a row or were seen."""
    keys = [table.export_rows()[0], table.pending_keys()]
    return share.of(table.backend.xp.concatenate(keys))
