"""`CuckooHashTable`, and the base of the tables that hold the rows of variables.

A process has one device for all tables: the GPU if there is one, else RAM. The argument `device` is
accepted as a name.
"""

import json
import os
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from sok_lite.backend import Array, Backend
from sok_lite.bridge import reads, table_exports, table_ops, writes
from sok_lite.bridge.autograph import unconverted
from sok_lite.bridge.host_call import on_device
from sok_lite.bridge.native_write import adding
from sok_lite.bridge.refusals import is_called_from
from sok_lite.bridge.saveable import SaverCall, TableSaveable, save_with_graph, saver_call
from sok_lite.bridge.table_call import method_call
from sok_lite.bridge.texts import Texts
from sok_lite.bridge.tf_private import (
    CONTROL_FLOW,
    CONTROL_INPUTS,
    SAVER,
    SaveableObject,
    SaveSpec,
)
from sok_lite.bridge.type_spec import alive
from sok_lite.bridge.variable import TableVariable, table_for_variable
from sok_lite.dynamic_embedding import file_system
from sok_lite.dynamic_embedding.arguments import (
    ShapeError,
    checked_dtypes,
    checked_keys,
    checked_values,
)
from sok_lite.dynamic_embedding.file_system import file_call
from sok_lite.dynamic_embedding.initial import array_of, initial_value
from sok_lite.dynamic_embedding.saved_by_tfra import ShardsOfTfra
from sok_lite.engine.json_text import parsed
from sok_lite.engine.owner import MOD, AlsoLocal, OwnerRule
from sok_lite.engine.table import EmbeddingTable, make_table
from sok_lite.engine.texts import are_held

# A checkpoint's description of a table, so that no other table is restored from it.
_FIELDS = ("name", "key_dtype", "value_dtype", "dim")


class RowOptions(NamedTuple):
    """The rows that a variable requests of a table, instead of a `default_value`."""

    dim: int
    initializer: Any  # row of a missing key: a number, a row, a function or an initializer
    owner: OwnerRule = AlsoLocal(MOD)  # for ranks that look up together
    files: Any = None  # the `VariableFiles` to save instead of rows
    row_shape: tuple[int, int] | None = None  # (fan_in, fan_out) for initializers


@unconverted
class HashTable(TableVariable, SaveableObject):
    """Rows by key: the base of `CuckooHashTable`, `HkvHashTable` and `RedisTable`.

    A `tf.compat.v1.train.Saver` accepts it, as a SaveableObject. Methods that write return None in
    eager mode, the operation in a graph. The argument `name` of methods has no effect.

    Args:
      key_dtype: tf.int64, tf.int32 or tf.string.
      value_dtype: tf.float32, float16, bfloat16, float64, int32, int64 or int8.
      default_value: row of a missing key, (dim,) numbers; its length sets dim.
      name: of the table; also seeds random initial values.
      checkpoint: whether checkpoints include it.
      options: of the engine's table.

    Raises:
      DtypeError: unsupported keys or values.
    """

    kind = "dynamic_embedding table"
    instead_of_value = "Use lookup(keys) for some rows and export() for all."
    instead_of_write = "Use insert(keys, values) or accum(keys, deltas, exists)."
    instead_of_copy = "To copy a table, insert what export() gives into a new one."
    instead_of_save = (
        "Save a model with layers of de.keras.layers by de.keras.models.save_model(model, path), "
        "or use tf.train.Checkpoint. For serving alone there is sok_lite.export_serving."
    )
    instead_of_custom_step = "Train it with de.DynamicEmbeddingOptimizer in a loop of your own."
    instead_of_partitions = "Look each up by itself."
    # TF1 savers find it among the saveable objects, where `save_with_graph` puts it.
    collections = (tf.compat.v1.GraphKeys.LOCAL_VARIABLES,)
    var_type = "hbm"
    is_shared = False  # whether all processes share its rows in a server
    shards_of_tfra: ShardsOfTfra | None = None  # of the checkpoint restored last

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
            return self._make_table(
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
        self.checkpoint = self.is_in_checkpoints = checkpoint
        if checkpoint and self._in_graph_mode:
            save_with_graph(self, self.op.name)
        self._size_in_graph = None
        if self._in_graph_mode:
            with tf.init_scope():
                self._size_in_graph = self._new_size()

    def _make_table(self, make: Callable[[], EmbeddingTable]) -> EmbeddingTable:
        """Returns the table with the rows: one of this process; subclasses override it."""
        return make()

    def sparse_read(self, indices: Any, name: Any = None, *_: Any, **options: Any) -> tf.Tensor:
        """Returns the rows of keys, as `lookup`, without inserting."""
        return self.lookup(indices)

    def keys_of(self, keys: Any, remember: bool = False) -> tf.Tensor:
        """Returns keys of any shape as the table's integers. DtypeError: they are not its keys.

        Args:
          remember: whether they may be inserted.
        """
        keys = checked_keys(keys, self.key_dtype, self.name)
        return keys if self._texts is None else self._texts.keys(keys, remember)

    def original_keys(self, keys: tf.Tensor) -> tf.Tensor:
        """Converts the table's integers (n,) back to the program's keys."""
        return keys if self._texts is None else self._texts.texts(keys)

    # ---------------------------------------------------------------- public methods

    def size(self, name: str | None = None) -> tf.Tensor:
        """Returns the number of keys, scalar int64.

        In a TF1 graph this is one tensor, made with the table, so a finalized graph can ask for it.
        Only inside loops, branches or control dependencies is it a new one.
        """
        known = self._size_in_graph
        if known is None or tf.executing_eagerly():
            return self._new_size()
        graph = tf.compat.v1.get_default_graph()
        if graph is not known.graph:
            return self._new_size()
        waits = getattr(graph, CONTROL_FLOW)() or getattr(graph, CONTROL_INPUTS)()
        return self._new_size() if waits and not graph.finalized else known

    def _new_size(self) -> tf.Tensor:
        return table_ops.num_keys(self)

    def lookup(
        self,
        keys: Any,
        dynamic_default_values: Any = None,
        return_exists: bool = False,
        name: str | None = None,
    ) -> Any:
        """Returns the rows of keys, keys.shape + [dim]. It changes nothing.

        Args:
          keys: of any shape.
          dynamic_default_values: keys.shape + [dim] or (dim,): rows for missing keys instead of the
            table's default.
          return_exists: whether to also return which keys are in the table, bool of the keys'
            shape.
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
        """Sets rows (keys.shape + [dim]), inserting new keys; the last of a repeated key wins."""
        ints = self.keys_of(keys, remember=True)
        values = checked_values(values, ints, self.dimension, self.value_dtype, self.name)
        flat = tf.reshape(ints, [-1])
        return _done(writes.insert_or_assign(self, "insert", flat, values, self.scores_of(flat)))

    def accum(self, keys: Any, values_or_deltas: Any, exists: Any, name: str | None = None) -> Any:
        """Adds to the rows of keys, or inserts them.

        If `exists` (bool per key) and the table agree, an existing key gets its delta added, and a
        missing one is inserted. Other keys are skipped: another worker inserted or removed them.
        Deltas of a repeated key are summed; on insertion the first wins. Values are keys.shape +
        [dim].
        """
        ints = self.keys_of(keys, remember=True)
        values = checked_values(values_or_deltas, ints, self.dimension, self.value_dtype, self.name)
        return self._accumulate_rows(ints, exists, values)

    def accum_difference(self, keys: Any, old_values: Any, new_values: Any, exists: Any) -> Any:
        """As `accum`, with new - old values for keys that exist and new values for others."""
        ints = self.keys_of(keys, remember=True)
        old, new = (
            checked_values(values, ints, self.dimension, self.value_dtype, self.name)
            for values in (old_values, new_values)
        )
        return self._accumulate_rows(ints, exists, new, old)

    def _accumulate_rows(self, keys: tf.Tensor, exists: Any, *values: tf.Tensor) -> Any:
        """Implements `accum`; tables that count steps extend it."""
        if self.value_dtype in (tf.float16, tf.bfloat16):  # a half cannot hold it
            values = tuple(tf.cast(each, tf.float32) for each in values)
        flags = tf.cast(tf.reshape(tf.cast(exists, tf.bool), [-1]), tf.uint8)
        keys = tf.reshape(keys, [-1])
        plan = adding(self, keys, values, begins_lookup=True, has_flags=True)
        return method_call(self, "accum", _accumulate, [keys, flags, *values], plan=plan)

    def remove(self, keys: Any, name: str | None = None) -> Any:
        """Removes keys with rows and optimizer states; missing keys are ignored."""
        return _done(table_ops.erase(self, self.keys_of(keys)))

    def clear(self, name: str | None = None) -> Any:
        """Removes all keys."""
        return table_ops.clear(self)

    def export(self, name: str | None = None) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns all keys (n,), in the order of their integers, and rows (n, dim)."""
        keys, values = table_exports.export(self)
        return self.original_keys(keys), values

    save_to_file_system = file_system.save_table
    load_from_file_system = file_system.load_table

    @property
    def saved_as(self) -> tuple[Any, int | None]:
        """The owner of the files for its methods, and the number of the shard; None: all."""
        return self, None

    def scores_of(self, keys: tf.Tensor) -> tf.Tensor | None:
        """Returns the scores to write with keys; None: as for a lookup."""
        return None

    # ---------------------------------------------------------------- checkpoints

    def _lookup_dependency(self, name: str, cached_dependencies: Any = None) -> Any:
        """Returns a child in a checkpoint by name: the shards of a TFRA table."""
        if self.shards_of_tfra is not None and name.isdigit():
            return self.shards_of_tfra.shard(name)
        return super()._lookup_dependency(name, cached_dependencies)

    @property
    def op(self) -> Any:
        """The operation in a graph; the handle in eager mode, for TF1 savers."""
        if self._in_graph_mode or not is_called_from(SAVER):
            return super().op
        return self.handle

    @property
    def specs(self) -> list[Any]:
        """The tensors that a TF1 saver saves."""
        return list(self._saveable().specs)

    def restore(self, restored_tensors: list[tf.Tensor], restored_shapes: Any) -> Any:
        """Returns the operation that restores what a TF1 saver saved."""
        return self._saveable().restore(restored_tensors, restored_shapes)

    def _saveable(self) -> TableSaveable:
        return TableSaveable(self, self.op.name if self._in_graph_mode else self.table.name)

    def _serialize_to_tensors(self) -> dict[str, Any]:
        """Returns the tensors of a checkpoint, or a SaveSpec if rows are in files."""
        if self.files is not None:
            return {"files": _write(self)}
        tensors = self.saved_tensors()
        tensors["description"] = tf.constant(_describe(self))
        if tf.executing_eagerly():
            return tensors
        with tf.device("CPU:0"):  # where files are written; a TF1 saver wants all on one device
            return {name: tf.identity(tensor) for name, tensor in tensors.items()}

    def _restore_from_tensors(self, restored_tensors: dict[str, tf.Tensor]) -> Any:
        """Restores `_serialize_to_tensors` of a similar table; returns the operation."""
        tensors = dict(restored_tensors)
        if self.files is not None:
            return _read(self, tensors["files"])
        description = tensors.pop("description")
        checked = file_call(
            self, f"The restore of {self.name!r}", _check_description, [description]
        )
        with tf.control_dependencies([] if checked is None else [checked]):
            tensors = {name: tf.identity(tensor) for name, tensor in tensors.items()}
        return self.restore_tensors(tensors)

    def saved_tensors(self) -> dict[str, tf.Tensor]:
        """Returns rows, states and all else needed to restore the table."""
        tensors = super()._serialize_to_tensors()
        if self._texts is not None:
            tensors["texts"] = self._texts.texts(tensors["keys"])
        return tensors

    def restore_tensors(self, tensors: dict[str, tf.Tensor]) -> Any:
        """Restores `saved_tensors` of a similar table; returns the operation."""
        tensors = dict(tensors)
        if self._texts is not None:
            texts = tensors.pop("texts")
            tensors["keys"] = self._texts.keys(texts, remember=True)
        return super()._restore_from_tensors(tensors)


def _done(result: Any) -> Any:
    """Returns None in eager mode, the operation in a graph."""
    if tf.executing_eagerly():
        return None
    return result.op if isinstance(result, tf.Tensor) else result


def _accumulate(
    table: EmbeddingTable, keys: Array, flags: Array, new: Array, old: Array | None = None
) -> None:
    xp, exists = table.backend.xp, flags.view(np.bool_)
    if exists.shape != keys.shape:
        raise ShapeError(
            f"`exists` must have one bool for each of {keys.size} keys. Received: {exists.size}."
        )
    if old is not None and old.shape != new.shape:
        raise ShapeError(
            f"Old and new values must have one shape. Received: {old.shape} and {new.shape}."
        )
    if old is None:
        table.accum_or_assign(keys, new, exists)
        return
    values = new - old
    missing = xp.flatnonzero(~exists)
    if missing.size:
        values[missing] = new[missing]
    table.accum_or_assign(keys, values, exists)


# ---- checkpoints: a description beside the table -------------------------------------------------


def _describe(rows: Any, checksums: Sequence[Sequence[int]] | None = None) -> str:
    """Returns JSON of a table's name, dtypes and dim, and checksums of its files if it has any."""
    facts = (rows.table.name, rows.key_dtype.name, rows.value_dtype.name, rows.dimension)
    description = dict(zip(_FIELDS, facts, strict=True))
    return json.dumps(description if checksums is None else description | {"files": checksums})


def _parse_checksums(saved: str | bytes) -> list[tuple[int, int]] | None:
    """Returns the checksums passed to `_describe`."""
    checksums = parsed(saved, "a table").get("files")
    return None if checksums is None else [tuple(pair) for pair in checksums]


def _check_description(rows: Any, saved: str | bytes) -> None:
    """Raises ValueError if a description of `_describe` is of another table."""
    facts, expected = parsed(saved, "a table"), json.loads(_describe(rows))
    wrong = [field for field in _FIELDS if facts.get(field) != expected[field]]
    if wrong:
        raise ValueError(
            f"The checkpoint is of another variable than {rows.table.name!r}, or of one of another "
            f"form: its {', '.join(f'{field} is {facts.get(field)!r}' for field in wrong)}. "
            f"Expected {', '.join(f'{field}={expected[field]!r}' for field in wrong)}. Nothing "
            "was changed. Restore it into a variable of that form, and copy its export()."
        )


def _write(table: Any) -> Any:
    """Writes the files of the rows, and returns the description for the checkpoint."""

    def write(rows: Any, *prefix: bytes) -> str:
        return _describe(rows, rows.files.write(*prefix))

    def written() -> tf.Tensor:
        call = saver_call()
        if call is not None and call.restores:  # TensorFlow asks for the tensor's shape
            return tf.constant("")
        return file_call(table, f"Saving {table.name!r}", write, _prefix(call), [tf.string])[0]

    # TensorFlow also asks before restoring; it calls this only for saving.
    with tf.device("CPU:0"):
        device = tf.constant("").device
    return SaveSpec(written, "", "files", tf.string, device)


def _read(table: Any, description: tf.Tensor) -> Any:
    def read(rows: Any, saved: bytes, *prefix: bytes) -> None:
        _check_description(rows, saved)
        rows.files.read(_parse_checksums(saved), *prefix)

    texts = [description, *_prefix(saver_call())]
    done = file_call(table, f"The restore of {table.name!r}", read, texts)
    return tf.no_op() if done is None else done


def _prefix(call: SaverCall | None) -> list[tf.Tensor]:
    """Returns the checkpoint prefix if a TF1 saver asks, which knows it."""
    return [] if call is None else [call.filename]


class CuckooHashTable(HashTable):
    """A table that grows without bound and keeps every key.

    Args:
      key_dtype: tf.int64, tf.int32 or tf.string.
      value_dtype: tf.float32, float16, bfloat16, float64, int32, int64 or int8.
      default_value: row of a missing key, (dim,) numbers; its length sets dim.
      name: of the table; also seeds random initial values.
      checkpoint: whether checkpoints include it.
      init_size: keys to reserve memory for; 0: the environment variable TF_HASHTABLE_INIT_SIZE,
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
