"""Restores a variable from an object-based checkpoint that TFRA wrote.

There a variable has a list `tables_of_<name>` with a table per shard: "0", "1" and so on. A table
has tensors of keys and rows, or with a `FileSystemSaver` a single flag.
"""

import weakref
from typing import Any

import tensorflow as tf

from sok_lite.bridge.type_spec import alive
from sok_lite.dynamic_embedding.arguments import checked_values
from sok_lite.dynamic_embedding.file_system import file_call
from sok_lite.engine.callers import warn

LISTED = "tables_of_"
_KEYS, _VALUES = "table-keys", "table-values"
_IN_FILES = "table-shard_upsert_restore"


class ShardsOfTfra:
    """Collects the shards of a table, and restores it when all have arrived.

    It references the table weakly. `path` is the checkpoint's, or None if unknown.
    """

    def __init__(self, rows: Any, path: str | None) -> None:
        self._rows, self._path = weakref.ref(rows), path
        self._shards: dict[str, _Shard] = {}
        self._arrived: list[tuple[tf.Tensor, ...]] = []

    def shard(self, name: str) -> "_Shard":
        """Returns the trackable of a shard, by its number."""
        return self._shards.setdefault(name, _Shard(self))

    def expected(self) -> dict[str, tf.Tensor]:
        """Returns tensors shaped like those of a shard, by name."""
        rows = alive(self._rows)
        if rows.files is not None:
            return {_IN_FILES: tf.constant(False)}
        values = tf.zeros([0, rows.dimension], rows.value_dtype)
        return {_KEYS: tf.fill([0], tf.zeros([], rows.key_dtype)), _VALUES: values}

    def add_shard(self, tensors: dict[str, tf.Tensor]) -> Any:
        """Takes the tensors of a shard; the last one restores the table."""
        self._arrived.append(tuple(tensors[name] for name in (_KEYS, _VALUES) if name in tensors))
        if len(self._arrived) < len(self._shards):
            return tf.no_op()
        arrived, self._arrived = self._arrived, []
        rows = alive(self._rows)
        done = _read_table(rows) if rows.files is not None else _replace(rows, arrived)
        warn(
            f"The rows of {rows.table.name!r} were restored from a checkpoint of TFRA. What its "
            "optimizer and its restrict policy kept of them was not, and begins anew. `sok-lite "
            f"convert {self._path or 'CHECKPOINT'}.index FOLDER` brings the optimizer's states "
            "over, for sok.load into a sok.DynamicVariable.",
            RuntimeWarning,
        )
        return tf.no_op() if done is None else done


class _Shard(tf.__internal__.tracking.Trackable):
    """The object that TensorFlow restores instead of a TFRA table."""

    def __init__(self, shards: ShardsOfTfra) -> None:
        self._shards = shards

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        return self._shards.expected()

    def _restore_from_tensors(self, restored_tensors: dict[str, tf.Tensor]) -> Any:
        return self._shards.add_shard(restored_tensors)


def check_name(listed: str, rows: Any) -> None:
    """Raises ValueError if a list of tables belongs to a variable of another name."""
    name = listed.removeprefix(LISTED)
    if name != rows.table.name:
        raise ValueError(
            f"The checkpoint of TFRA has the rows of {name!r} where {rows.table.name!r} is to be "
            f"restored. Nothing was changed. Make the variable with name={name!r}."
        )


def _replace(rows: Any, shards: list[tuple[tf.Tensor, ...]]) -> Any:
    keys, values = (tf.concat(parts, 0) for parts in zip(*shards, strict=True))
    checked_values(values, keys, rows.dimension, rows.value_dtype, rows.table.name)
    cleared = rows.clear()
    with tf.control_dependencies([] if cleared is None else [cleared]):
        return rows.insert(keys, values)


def _read_table(rows: Any) -> Any:
    def read(rows: Any) -> None:
        rows.files.read()

    return file_call(rows, f"The restore of {rows.name!r}", read, [])
