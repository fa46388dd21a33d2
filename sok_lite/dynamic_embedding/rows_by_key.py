"""Methods of a `Variable` that read, write and remove rows by their keys."""

from typing import Any

import tensorflow as tf

from sok_lite.dynamic_embedding.arguments import checked_keys
from sok_lite.dynamic_embedding.partition import default_partition_fn


def upsert(variable: Any, keys: Any, values: Any, name: str | None = None) -> Any:
    """Sets the rows of keys, inserting new ones. Of a repeated key the last row counts.

    Args:
      keys: of any shape and the variable's key dtype.
      values: keys.shape + [dim].
      name: not used.

    Returns:
      None in eager mode, the operation in a graph.

    Raises:
      TypeError: keys or values of another dtype. (It is a ValueError as well.)
      tf.errors.InvalidArgumentError: values of another shape. (It is a ValueError as well.)
    """
    return variable.rows.insert(checked(variable, keys), values)


def accum(
    variable: Any, keys: Any, old_values: Any, new_values: Any, exists: Any, name: str | None = None
) -> Any:
    """Adds `new_values - old_values` to the rows of keys, or inserts `new_values`.

    A key that exists by `exists` and is in the table has the difference added; one that is in
    neither is inserted; any other is left alone, for somebody else has inserted or removed it.
    Differences of a repeated key are summed; of one to be inserted the first row counts. What
    is in the table is what was there when the call began.

    Args:
      keys: of any shape and the variable's key dtype.
      old_values, new_values: keys.shape + [dim].
      exists: bool, one for each key.
      name: not used.

    Returns:
      None in eager mode, the operation in a graph.

    Raises: as `upsert`.
    """
    return variable.rows.accum_difference(checked(variable, keys), old_values, new_values, exists)


def lookup(variable: Any, keys: Any, return_exists: bool = False, name: str | None = None) -> Any:
    """Returns the rows of keys, without a gradient. It changes nothing.

    Args:
      keys: of any shape and the variable's key dtype.
      return_exists: whether to return, too, which keys are in the table.
      name: not used.

    Returns:
      keys.shape + [dim]; with `return_exists` also a bool of the keys' shape.

    Raises:
      TypeError: keys of another dtype. (It is a ValueError as well.)
    """
    return variable.rows.lookup(checked(variable, keys), return_exists=return_exists)


def remove(variable: Any, keys: Any, name: str | None = None) -> Any:
    """Removes keys with their rows and optimizer states; missing ones are left out.

    Returns:
      None in eager mode, the operation in a graph.

    Raises:
      TypeError: keys of another dtype. (It is a ValueError as well.)
    """
    keys = checked(variable, keys)
    return _both(variable.rows.remove(keys), _with_status(variable, "remove", keys))


def clear(variable: Any, name: str | None = None) -> Any:
    """Removes all keys. Returns None in eager mode, the operation in a graph."""
    return _both(variable.rows.clear(), _with_status(variable, "clear"))


def export(variable: Any, name: str | None = None) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns all keys (n,) and their rows (n, dim): those of shard 0 first, then of 1, ..."""
    keys, values = variable.rows.export()
    if variable.shard_num == 1:
        return keys, values
    order = tf.argsort(variable.shards_of(keys), stable=True)
    return tf.gather(keys, order), tf.gather(values, order)


def size(variable: Any, index: int | None = None, name: str | None = None) -> tf.Tensor:
    """Returns how many keys there are, scalar int64.

    Args:
      index: of a shard: its keys are counted, which looks at all keys; None: of all.
      name: not used.

    Raises:
      IndexError: there is no such shard.
    """
    return variable.rows.size() if index is None else variable.tables[index].size()


def _with_status(variable: Any, method: str, *arguments: Any) -> Any:
    """Does with the policy's status what is done with the rows."""
    policy = variable.restrict_policy
    return None if policy is None else getattr(policy.status, method)(*arguments)


def checked(variable: Any, keys: Any) -> tf.Tensor:
    """Returns keys as a tensor; the partitioner has been asked."""
    keys = checked_keys(keys, variable.key_dtype, variable.name)
    if variable.shard_num > 1 or variable.partition_fn is not default_partition_fn:
        variable.shards_of(keys)
    return keys


def _both(*operations: Any) -> Any:
    """Returns one operation for several of a graph; None in eager mode."""
    present = [operation for operation in operations if operation is not None]
    return tf.group(*present) if len(present) > 1 else next(iter(present), None)
