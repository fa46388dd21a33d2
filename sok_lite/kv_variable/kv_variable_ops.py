"""`KvVariable`: a table of embeddings by key, in TFPlus' words."""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from sok_lite.backend import Array
from sok_lite.bridge.autograph import unconverted
from sok_lite.bridge.inference import MissingKeyPolicy, checked_missing, checked_training
from sok_lite.bridge.table_call import method_call
from sok_lite.bridge.tf_private import SaveableObject
from sok_lite.bridge.variable import TableVariable
from sok_lite.bridge.writes import refuse_foreign
from sok_lite.engine.table import EmbeddingTable
from sok_lite.kv_variable import counting, reading, removing, scatter
from sok_lite.kv_variable.kv_variable_options import KvOptions, StorageCombination, StorageType
from sok_lite.kv_variable.saveable import KvVariableSaveable, SavedBySavers
from sok_lite.kv_variable.saved_table import SavedTable
from sok_lite.kv_variable.saved_tensors import CUTOFF
from sok_lite.kv_variable.saving import (
    GRAPH_COLLECTION,
    disable_delta_export,
    disable_full_or_delta_import_v2,
    disable_save_v3,
    enable_delta_export,
    enable_full_or_delta_import_v2,
    enable_save_v3,
    set_new_num_shards,
    set_tfplus_saver_mode,
)
from sok_lite.kv_variable.share import WHOLE, Share

__all__ = [
    "CUTOFF",
    "IS_TRAINING",
    "KvVariable",
    "KvVariableSaveable",
    "Share",
    "disable_delta_export",
    "disable_full_or_delta_import_v2",
    "disable_save_v3",
    "enable_delta_export",
    "enable_full_or_delta_import_v2",
    "enable_save_v3",
    "get_kv_feature_size",
    "set_new_num_shards",
    "set_tfplus_saver_mode",
    "training_mode",
]

# Whether lookups insert where neither the lookup nor its variable says so. The value counts that
# the flag has when a lookup is built.
IS_TRAINING = True


@contextmanager
def training_mode(is_training: bool) -> Iterator[None]:
    """A `with` block in which IS_TRAINING has this value, for lookups that are built in it.

    Args:
      is_training: whether they insert.

    Raises:
      TypeError: it is no bool.
    """
    global IS_TRAINING
    if checked_training(is_training) is None:
        raise TypeError("`is_training` must be True or False. Received: is_training=None.")
    before = IS_TRAINING
    IS_TRAINING = bool(is_training)
    try:
        yield
    finally:
        IS_TRAINING = before


def get_kv_feature_size() -> dict[str, tf.Tensor]:
    """Returns `total_count` of the KvVariables of the default TF1 graph, by name."""
    variables = tf.compat.v1.get_collection(GRAPH_COLLECTION)
    return {variable.saved.name: variable.total_count for variable in variables}


@unconverted
class KvVariable(SavedBySavers, TableVariable, SaveableObject):
    """Embeddings by key: a table that grows with its keys, or one of its partitions.

    Made by `get_kv_variable`. A lookup in training inserts the keys that are new, once they were
    seen often enough; one that predicts changes nothing, and gives zeros for a key without a row.
    Which of the two it is says the lookup's `training`, else the variable's attribute of that name,
    else the module's IS_TRAINING, when the lookup is built; then `sok_lite.inference_mode()`, when
    it runs.

    In a job whose ranks `sok_lite.init()` has connected each rank holds the keys that it owns, and
    a lookup reaches the others: every rank must make the same lookups in the same order. What is
    said of keys otherwise is about this rank's.

    A partition reaches any key of its table, but lists, counts and removes its own.

    In a TF1 graph the variable is initialized, saved and restored like any other. Its initializer
    removes all keys.

    Args:
      table: what `bridge.variable.table_for_variable` gave.
      name: with its scopes: what checkpoints know it by. Where the graph has an operation of that
        name, TensorFlow appends a number to `KvVariable.name`.
      trainable: whether it is trained.
      collections: of the graph, that it is in.
      options: where its rows are.
      share: which keys of the table it stands for.
      saved: what checkpoints know the table by; None: this is its only variable.

    Attributes:
      training: whether lookups insert; None: as IS_TRAINING says.
      kv_options, share: the arguments.
      saved: what checkpoints know the table by.
    """

    kind = "KvVariable"
    trained_by_patched = True
    instead_of_value = "Use tf.nn.embedding_lookup(variable, keys) for some rows."
    instead_of_write = (
        "Use the variable's scatter_add and the like, or insert_kv_embedding. After patch_tf() "
        "tf.compat.v1.scatter_add and the like take it as well."
    )
    instead_of_copy = "Make another one, and assign() this one to it."
    instead_of_save = "Use sok_lite.export_serving for a model that is to be served."
    instead_of_custom_step = "Hold it in a layer that lists it among its weights."
    instead_of_partitions = "Look each up by itself."

    # TFPlus' optimizers set how many states lie in a row of theirs. Here each lies in its own.
    num_concat_opt_vars = 1
    training: bool | None = None
    _whole: "weakref.ref[Any] | None" = None

    def __init__(
        self,
        table: EmbeddingTable,
        *,
        name: str,
        trainable: bool,
        collections: Sequence[str],
        options: KvOptions,
        share: Share = WHOLE,
        saved: SavedTable | None = None,
    ) -> None:
        self.kv_options, self.share = options, share
        self.collections = tuple(collections)
        super().__init__(table, name=name, trainable=trainable)
        self.saved = saved or SavedTable(table, name)
        self._track_trackable(self.saved, "table")
        if self._in_graph_mode:
            if self.parts == [self]:
                self.saved.handles.append(self.handle)
            with tf.control_dependencies(None):
                self._emptied = tf.group(self._initializer_op, removing.clear(self))

    def _element_of_graph(self) -> tf.Tensor:
        with tf.control_dependencies(None):
            return self.value()

    def ready_inputs(self) -> list[tf.Tensor]:
        """Returns inputs for a call that fail in a session of a TF1 graph which has not initialized
        the variable; none elsewhere.

        A control dependency would not do: TensorFlow may leave out a read whose value nobody has.
        """
        inputs = []
        for part in self.parts if self._in_graph_mode else ():
            is_global = tf.compat.v1.GraphKeys.GLOBAL_VARIABLES in part.collections
            with tf.control_dependencies([] if is_global else [part._initializer_op]):
                read = tf.raw_ops.ReadVariableOp(resource=part._true_handle, dtype=part.dtype)
            inputs.append(read)
        return inputs

    def readable_source(self) -> tf.Tensor:
        """Returns the empty tensor whose gradient is the variable's, and records the access."""
        source = self.gradient_source()
        if source.dtype != tf.resource:
            return source
        return tf.raw_ops.ReadVariableOp(resource=source, dtype=self.dtype)

    # ---------------------------------------------------------------- facts

    @property
    def initializer(self) -> Any:
        """The operation of a TF1 graph that makes it ready, without any keys."""
        return self._emptied if self._in_graph_mode else None

    def is_initialized(self, name: str | None = None) -> tf.Tensor:
        """Returns whether its initializer has run, or a restore, in this session."""
        if not self._in_graph_mode:
            return tf.constant(True, name=name)
        return tf.raw_ops.VarIsInitializedOp(resource=self.handle, name=name)

    @property
    def key_dtype(self) -> tf.DType:
        """Type of the keys."""
        return self.key_type

    @property
    def embedding_dim(self) -> int:
        """Length of a row."""
        return self.dimension

    @property
    def enter_threshold(self) -> int:
        """How often a key must have been seen to get a row; 0 and 1: the first time."""
        table: Any = self.table  # a "hybrid" one
        return int(table.options.enter_threshold)

    def get_generic_name(self) -> str:
        """Returns the name with its scopes, of a partition that of its whole."""
        return self.saved.name

    @property
    def whole(self) -> Any:
        """The whole of a partition, as long as the program keeps it; of any other itself."""
        return self if self._whole is None else self._whole()

    @property
    def parts(self) -> list["KvVariable"]:
        """Its partitions; of one without any, and of a partition, itself."""
        return [self]

    def has_storage(
        self, storage_type: StorageCombination | StorageType = StorageCombination.MEM_SSD
    ) -> bool:
        """Whether rows may lie in some memory, by default beside the first one."""
        is_first = storage_type in (StorageCombination.MEM, StorageType.MEM_STORAGE)
        return is_first or self.table.store.near_rows is not None

    total_count = property(counting.total_count)
    total_freq = property(counting.total_freq)
    storage_size_count = property(counting.storage_size_count)
    get_counting = counting.get_counting
    get_timestamp = counting.get_timestamp
    increase_counting = counting.increase_counting

    # ---------------------------------------------------------------- reading

    sparse_read = reading.sparse_read
    sparse_read_with_counts = reading.sparse_read_with_counts
    value = read_value = reading.value
    export = reading.export

    def policy(self, training: bool | None, missing: str | None = None) -> MissingKeyPolicy:
        """Returns how a lookup with these arguments treats keys without a row."""
        training = checked_training(self.training if training is None else training)
        if training is None and not IS_TRAINING:
            training = False
        # Where nothing is inserted such keys give zeros.
        return MissingKeyPolicy(training, checked_missing(missing), False, "zeros")

    def _read_variable_op(self, no_copy: bool = False) -> tf.Tensor:
        return self.value()

    def numpy(self) -> Any:
        """Returns what `value` does, of eager mode."""
        if self._in_graph_mode:
            raise NotImplementedError(
                f"numpy() of {self.name!r} needs eager mode. Use session.run(variable)."
            )
        return self.value().numpy()

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return np.asarray(self.numpy(), *args, **kwargs)

    def eval(self, session: Any = None) -> Any:
        """Returns what `value` does, of a TF1 graph."""
        return self._graph_element.eval(session=session)

    def _dense_var_to_tensor(
        self, dtype: Any = None, name: Any = None, as_ref: bool = False
    ) -> Any:
        value = self.value()
        if dtype is not None and not dtype.is_compatible_with(value.dtype):
            return NotImplemented
        return value

    # ---------------------------------------------------------------- writing

    def assign(self, value: "KvVariable", *_: Any, **__: Any) -> Any:
        """Makes it hold the keys and rows of another one, and no others, without their counts.

        A partition takes those keys that are its own.

        Returns:
          The variable in eager mode, the operation in a graph.

        Raises:
          TypeError: it is no KvVariable. ValueError: its rows are of another length.
        """
        if not isinstance(value, KvVariable):
            raise TypeError(
                f"assign() of {self.name!r} takes another KvVariable, all of whose keys it is to "
                f"have. Received: {type(value).__name__}. Use insert_kv_embedding for some rows. "
                "Where hvd.broadcast_variables or hvd.broadcast_global_variables asks, leave it "
                "out: each rank has its own keys, so broadcast the dense variables alone."
            )
        if value.dimension != self.dimension:
            raise ValueError(
                f"assign() of {self.name!r} takes rows of {self.dimension} elements. Received: "
                f"{value.name!r}, with rows of {value.dimension}."
            )
        share = self.share
        keys, rows = value.export(cutoff=None)
        keys, rows = tf.cast(keys, self.key_type), tf.cast(rows, self.dtype)

        def run(table: EmbeddingTable, keys: Array, rows: Array) -> None:
            mine = share.has(keys)
            refuse_foreign(table, keys[mine], "assign")
            removing.remove_all(table, share)
            table.insert_or_assign(keys[mine], rows[mine])

        return scatter.done(self, method_call(self, "assign", run, [keys, rows]))

    insert = scatter.insert
    scatter_add = scatter.scatter_method("add")
    scatter_sub = scatter.scatter_method("sub")
    scatter_mul = scatter.scatter_method("mul")
    scatter_div = scatter.scatter_method("div")
    scatter_min = scatter.scatter_method("min")
    scatter_max = scatter.scatter_method("max")
    scatter_update = scatter.scatter_method("update")

    # ---------------------------------------------------------------- removing

    delete = removing.delete
    delete_with_timestamp = removing.delete_with_timestamp

    # ---------------------------------------------------------------- of TFPlus alone

    def apply_snapshot(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises NotImplementedError."""
        self._refuse("apply_snapshot", "Restore a checkpoint with tf.compat.v1.train.Saver.")

    def dynamic_restore(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises NotImplementedError."""
        self._refuse("dynamic_restore", "Any restore takes any number of partitions and ranks.")

    def load_remote_storage(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises NotImplementedError."""
        self._refuse("load_remote_storage", "Use `kv_options` for rows beside the first memory.")

    def add_multi_level_hash(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises NotImplementedError."""
        self._refuse("add_multi_level_hash", "Make a variable for each level with get_kv_variable.")
