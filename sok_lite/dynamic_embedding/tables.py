"""`CuckooHashTable` and `HkvHashTable`: the tables that hold the rows of variables.

A process has one device, where all of its tables lie: the GPU where there is one, else RAM. The
argument `device` is taken as a name.
"""

import os
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from sok_lite.backend import Backend
from sok_lite.bridge import reads, table_exports, table_ops, writes
from sok_lite.bridge.autograph import unconverted
from sok_lite.bridge.host_call import on_device
from sok_lite.bridge.refusals import is_called_from
from sok_lite.bridge.saveable import TableSaveable, save_with_graph
from sok_lite.bridge.texts import Texts
from sok_lite.bridge.tf_private import SAVER, SaveableObject
from sok_lite.bridge.type_spec import alive
from sok_lite.bridge.variable import TableVariable, table_for_variable
from sok_lite.dynamic_embedding import accumulation, file_methods, table_checkpoint
from sok_lite.dynamic_embedding.arguments import checked_dtypes, checked_keys, checked_values
from sok_lite.dynamic_embedding.initial import array_of, initial_value
from sok_lite.dynamic_embedding.saved_by_tfra import ShardsOfTfra
from sok_lite.engine.owner import MOD, AlsoLocal, OwnerRule
from sok_lite.engine.table import EmbeddingTable, make_table
from sok_lite.engine.texts import are_held


class RowOptions(NamedTuple):
    """The rows that a variable asks a table for, in place of a `default_value`.

    Attributes:
      dim: elements of a row.
      initializer: what a missing key gives: a number, a row, a function or an initializer.
      owner: which rank owns a key where ranks look up together.
      files: the `VariableFiles` that are saved in place of the rows; None: rows are.
      row_shape: (fan_in, fan_out) for initializers that scale by the shape of a weight.
    """

    dim: int
    initializer: Any
    owner: OwnerRule = AlsoLocal(MOD)
    files: Any = None
    row_shape: tuple[int, int] | None = None


@unconverted
class HashTable(TableVariable, SaveableObject):
    """Rows by key: the base of `CuckooHashTable`, `HkvHashTable` and `RedisTable`.

    A `tf.compat.v1.train.Saver` may be given it: TensorFlow takes it for a SaveableObject.

    Args:
      key_dtype: tf.int64, tf.int32 or tf.string.
      value_dtype: tf.float32, float16, bfloat16, float64, int32, int64 or int8.
      default_value: the row of a missing key, (dim,) numbers, as many as a row has.
      name: of the table; it also seeds random initial values.
      checkpoint: whether checkpoints have it.
      options: of the engine's table.

    Raises:
      DtypeError: such keys or values there are not.
    """

    kind = "dynamic_embedding table"
    instead_of_value = "Use lookup(keys) for some rows and export() for all."
    instead_of_write = "Use insert(keys, values) or accum(keys, deltas, exists)."
    instead_of_copy = "To copy a table, insert what export() gives into a new one."
    instead_of_save = (
        "Hold it in a layer of de.keras.layers, and use de.keras.models.save_model(model, path); "
        "or tf.train.Checkpoint. For serving alone there is sok_lite.export_serving."
    )
    instead_of_custom_step = "Train it with de.DynamicEmbeddingOptimizer in a loop of your own."
    instead_of_partitions = "Look each up by itself."
    # A saver of TF1 finds the table among the saveable objects: `save_with_graph` puts it there.
    collections = (tf.compat.v1.GraphKeys.LOCAL_VARIABLES,)
    var_type = "hbm"
    is_shared = False  # whether its rows are in a server that all processes share
    shards_of_tfra: ShardsOfTfra | None = None  # of the checkpoint that was restored last

    def __init__(
        self,
        key_dtype: Any,
        value_dtype: Any,
        default_value: Any,
        name: str,
        checkpoint: bool,
        options: dict[str, Any],
    ) -> None:
        self.key_dtype, self.value_dtype = checked_dtypes(key_dtype, value_dtype)
        rows = default_value
        if not isinstance(rows, RowOptions):
            values = array_of(default_value)
            rows = RowOptions(max(1, values.size), values.reshape(-1))
        self.files = rows.files
        initializer = initial_value(
            rows.initializer, rows.dim, self.value_dtype, rows.row_shape, name
        )

        def make(backend: Backend) -> EmbeddingTable:
            return self._made_by(
                partial(
                    make_table,
                    self.var_type,
                    backend,
                    rows.dim,
                    initializer=initializer,
                    key_type="int32" if self.key_dtype == tf.int32 else "int64",
                    dtype=self.value_dtype.name,
                    name=name,
                    owner=rows.owner,
                    **options,
                )
            )

        self._texts = None
        if self.key_dtype == tf.string:
            reference = weakref.ref(self)

            def are_there(keys: np.ndarray) -> np.ndarray:
                table = alive(reference).table
                return on_device(table.backend, are_held, table, keys)

            self._texts = Texts(name, are_there)
        table = table_for_variable(self.kind, make, is_shared=self.is_shared)
        super().__init__(table, name=name, trainable=False)
        self.checkpoint = checkpoint
        if checkpoint and self._in_graph_mode:
            save_with_graph(self, self.op.name)

    def _made_by(self, make: Callable[[], EmbeddingTable]) -> EmbeddingTable:
        """Returns the table that has the rows: one of this process, but in subclasses."""
        return make()

    def sparse_read(self, indices: Any, name: Any = None, *_: Any, **options: Any) -> tf.Tensor:
        """Returns the rows of keys, as `lookup`: nothing is inserted."""
        return self.lookup(indices)

    def keys_of(self, keys: Any, remember: bool = False) -> tf.Tensor:
        """Returns keys of any shape as the integers that the table knows them by.

        Args:
          remember: whether keys may be inserted by them.

        Raises:
          DtypeError: they are no keys of the table.
        """
        keys = checked_keys(keys, self.key_dtype, self.name)
        return keys if self._texts is None else self._texts.keys(keys, remember)

    def original_keys(self, keys: tf.Tensor) -> tf.Tensor:
        """Returns integers (n,) that are in the table as the keys that programs know."""
        return keys if self._texts is None else self._texts.texts(keys)

    # ---------------------------------------------------------------- what programs call

    def size(self, name: str | None = None) -> tf.Tensor:
        """Returns the number of keys, scalar int64."""
        return tf.cast(table_ops.size(self)[0], tf.int64)

    def lookup(
        self,
        keys: Any,
        dynamic_default_values: Any = None,
        return_exists: bool = False,
        name: str | None = None,
    ) -> Any:
        """Returns the rows of keys. It changes nothing.

        Args:
          keys: of any shape.
          dynamic_default_values: keys.shape + [dim] or (dim,): what missing keys give in place of
            the table's default.
          return_exists: whether to return, too, which keys are in the table.

        Returns:
          keys.shape + [dim]; with it a bool of the keys' shape.
        """
        keys = self.keys_of(keys)
        if dynamic_default_values is None and not return_exists:
            return reads.read(self, keys)
        values, exists = reads.read(self, keys, with_exists=True)
        if dynamic_default_values is not None:
            defaults = tf.convert_to_tensor(dynamic_default_values, self.value_dtype)
            values = tf.where(exists[..., None], values, defaults)
        return (values, exists) if return_exists else values

    def insert(self, keys: Any, values: Any, name: str | None = None) -> Any:
        """Sets the rows of keys, inserting new ones; of a repeated key the last row counts.

        Args:
          keys: of any shape.
          values: keys.shape + [dim].

        Returns:
          None in eager mode, the operation in a graph.
        """
        ints = self.keys_of(keys, remember=True)
        values = checked_values(values, ints, self.dimension, self.value_dtype, self.name)
        flat = tf.reshape(ints, [-1])
        return _done(writes.insert_or_assign(self, "insert", flat, values, self.scores_of(flat)))

    accum = accumulation.accum
    accum_difference = accumulation.accum_difference
    _accumulated = accumulation.accumulated

    def remove(self, keys: Any, name: str | None = None) -> Any:
        """Removes keys, with rows and optimizer states; missing ones are left out.

        Returns:
          None in eager mode, the operation in a graph.
        """
        return _done(table_ops.erase(self, self.keys_of(keys)))

    def clear(self, name: str | None = None) -> Any:
        """Removes all keys. Returns None in eager mode, the operation in a graph."""
        return table_ops.clear(self)

    def export(self, name: str | None = None) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns all keys (n,), in the order of their integers, and their rows (n, dim)."""
        keys, values = table_exports.export(self)
        return self.original_keys(keys), values

    save_to_file_system = file_methods.save_table
    load_from_file_system = file_methods.load_table

    @property
    def saved_as(self) -> tuple[Any, int | None]:
        """Whose files its methods write and read, and the number of the shard; None: all."""
        return self, None

    def scores_of(self, keys: tf.Tensor) -> tf.Tensor | None:
        """Returns the scores to write keys with; None: as a lookup would."""
        return None

    # ---------------------------------------------------------------- checkpoints

    def _lookup_dependency(self, name: str, cached_dependencies: Any = None) -> Any:
        """Returns what a checkpoint has beneath the table, by name: of TFRA's the shards."""
        if self.shards_of_tfra is not None and name.isdigit():
            return self.shards_of_tfra.shard(name)
        return super()._lookup_dependency(name, cached_dependencies)

    @property
    def op(self) -> Any:
        """The operation of a graph; in eager mode, without any, a saver of TF1 has the handle."""
        if self._in_graph_mode or not is_called_from(SAVER):
            return super().op
        return self.handle

    @property
    def specs(self) -> list[Any]:
        """The tensors that a saver of TF1 saves."""
        return list(self._saveable().specs)

    def restore(self, restored_tensors: list[tf.Tensor], restored_shapes: Any) -> Any:
        """Returns the operation that makes the table what a saver of TF1 has saved."""
        return self._saveable().restore(restored_tensors, restored_shapes)

    def _saveable(self) -> TableSaveable:
        return TableSaveable(self, self.op.name if self._in_graph_mode else self.table.name)

    _serialize_to_tensors = table_checkpoint.serialize_to_tensors
    _restore_from_tensors = table_checkpoint.restore_from_tensors

    def saved_tensors(self) -> dict[str, tf.Tensor]:
        """Returns rows, states and what else a table is restored from, wherever it is kept."""
        tensors = super()._serialize_to_tensors()
        if self._texts is not None:
            tensors["texts"] = self._texts.texts(tensors["keys"])
        return tensors

    def restore_tensors(self, tensors: dict[str, tf.Tensor]) -> Any:
        """Makes the table what `saved_tensors` gave of one like it; returns the operation."""
        tensors = dict(tensors)
        if self._texts is not None:
            texts = tensors.pop("texts")
            tensors["keys"] = self._texts.keys(texts, remember=True)
        return super()._restore_from_tensors(tensors)


def _done(result: Any) -> Any:
    """Returns what a write gives a program: None in eager mode, the operation in a graph."""
    if tf.executing_eagerly():
        return None
    return result.op if isinstance(result, tf.Tensor) else result


class CuckooHashTable(HashTable):
    """A table that grows without bound and keeps every key.

    Args:
      key_dtype: tf.int64, tf.int32 or tf.string.
      value_dtype: tf.float32, float16, bfloat16, float64, int32, int64 or int8.
      default_value: the row of a missing key, (dim,) numbers, as many as a row has.
      name: of the table; it also seeds random initial values.
      checkpoint: whether checkpoints have it.
      init_size: keys to make room for at once; 0: the environment variable TF_HASHTABLE_INIT_SIZE,
        else 8,192.
      config, device, shard_saveable_object_fn: not used.
    """

    kind = "de.CuckooHashTable"

    def __init__(
        self,
        key_dtype: Any,
        value_dtype: Any,
        default_value: Any,
        name: str = "CuckooHashTable",
        checkpoint: bool = True,
        init_size: int = 0,
        config: Any = None,
        device: str = "",
        shard_saveable_object_fn: Callable[..., Any] | None = None,
    ) -> None:
        size = init_size or int(os.environ.get("TF_HASHTABLE_INIT_SIZE", 8192))
        super().__init__(
            key_dtype, value_dtype, default_value, name, checkpoint, {"init_capacity": size}
        )
