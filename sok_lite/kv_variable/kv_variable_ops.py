"""`KvVariable`: TFPlus' table of embeddings by key."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from sok_lite.backend import Array
from sok_lite.bridge import job
from sok_lite.bridge.access import accessed
from sok_lite.bridge.autograph import unconverted
from sok_lite.bridge.checks import check_cutoff, checked_keys, checked_rows
from sok_lite.bridge.inference import MissingKeyPolicy, checked_missing, checked_training
from sok_lite.bridge.lookup import look_up_each
from sok_lite.bridge.operation import Facts, Outputs, operation
from sok_lite.bridge.table_call import array_call, method_call, of_each_key
from sok_lite.bridge.tf_private import SaveableObject
from sok_lite.bridge.type_spec import alive
from sok_lite.bridge.variable import TableVariable
from sok_lite.bridge.writes import refuse_foreign
from sok_lite.engine.dtypes import as_float
from sok_lite.engine.table import EmbeddingTable
from sok_lite.engine.table.locking import with_lock
from sok_lite.kv_variable.kv_variable_options import KvOptions, StorageCombination, StorageType
from sok_lite.kv_variable.saveable import (
    GRAPH_COLLECTION,
    KvVariableSaveable,
    SavedBySavers,
    disable_delta_export,
    disable_full_or_delta_import_v2,
    disable_save_v3,
    enable_delta_export,
    enable_full_or_delta_import_v2,
    enable_save_v3,
    set_new_num_shards,
    set_tfplus_saver_mode,
)
from sok_lite.kv_variable.saved_table import SavedTable
from sok_lite.kv_variable.saved_tensors import CUTOFF
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

# Whether lookups insert if neither the lookup nor its variable decides; read when a lookup is
# built.
IS_TRAINING = True


@contextmanager
def training_mode(is_training: bool) -> Iterator[None]:
    """A context that sets IS_TRAINING for lookups built in it.

    Args:
      is_training: whether they insert.

    Raises:
      TypeError: not a bool.
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


# By method: its docstring, and the function of rows and values (None: values replace rows).
OPERATIONS: dict[str, tuple[str, Callable[..., np.ndarray] | None]] = {
    "add": ("Adds values to the rows of keys.", np.add),
    "sub": ("Subtracts values from the rows of keys.", np.subtract),
    "mul": ("Multiplies the rows of keys by values.", np.multiply),
    "div": ("Divides the rows of keys by values.", np.divide),
    "min": ("Makes the rows of keys the smaller of themselves and values.", np.minimum),
    "max": ("Makes the rows of keys the larger of themselves and values.", np.maximum),
    "update": ("Sets the rows of keys.", None),
}


def _scatter_method(operation: str) -> Callable[..., Any]:
    def scatter(
        variable: "KvVariable", sparse_delta: Any, use_locking: bool = False, name: Any = None
    ) -> Any:
        return _scatter(variable, operation, sparse_delta)

    scatter.__name__ = f"scatter_{operation}"
    scatter.__qualname__ = f"KvVariable.{scatter.__name__}"
    scatter.__doc__ = f"""{OPERATIONS[operation][0]}

        A key without a row gets one first. What a repeated key has is taken in its order.

        Args:
          sparse_delta: a tf.IndexedSlices of keys (n,) and values (n, dim).
          use_locking, name: not used.

        Returns:
          The variable in eager mode, the operation in a graph.

        Raises:
          TypeError, ValueError: keys or rows do not fit, or other ranks own keys that have no row
            here. Nothing has changed then.
        """
    return scatter


@unconverted
class KvVariable(SavedBySavers, TableVariable, SaveableObject):
    """Embeddings by key: a table that grows with its keys, or one of its partitions.

    Made by `get_kv_variable`. A training lookup inserts new keys once they were seen often enough;
    a prediction lookup changes nothing, and returns zeros for a key without a row. When the lookup
    is built, its `training` decides, else the variable's attribute `training`, else the module's
    IS_TRAINING; when it runs, `sok_lite.inference_mode()` can still prevent insertion.

    In a job connected by `sok_lite.init()` each rank holds the keys that it owns, and a lookup
    reaches the others: every rank must make the same lookups in the same order. All other methods
    act on this rank's keys. A partition looks up any key of its table, but lists, counts and
    removes only its own. `assign`, `insert` and the scatter methods return the variable in eager
    mode, the operation in a graph.

    In a TF1 graph the variable is initialized, saved and restored like any other. Its initializer
    removes all keys.

    Args:
      table: from `bridge.variable.table_for_variable`.
      name: with its scopes, as checkpoints know it. If the graph has an operation of that name,
        TensorFlow appends a number to `KvVariable.name`.
      trainable: whether it is trained.
      collections: graph collections to add it to.
      options: where its rows are.
      share: the keys of the table that it represents.
      saved: the table's checkpoint object; None: this is its only variable.

    Attributes:
      training: whether lookups insert; None: IS_TRAINING decides.
      kv_options, share, saved: the arguments.
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

    # For TFPlus' optimizers: the number of states per row of a slot variable, here one.
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
        self.saved = saved or SavedTable(table, name)
        super().__init__(table, name=name, trainable=trainable)
        if self.parts == [self]:
            self.saved.handles.append(self.handle)
        self._track_trackable(self.saved, "table")
        if self._in_graph_mode:
            with tf.control_dependencies(None):
                self._emptied = tf.group(self._initializer_op, _clear(self))

    def _element_of_graph(self) -> tf.Tensor:
        with tf.control_dependencies(None):
            return self.value()

    @property
    def resources(self) -> list[TableVariable]:
        """The resources of its parts."""
        return list(self.parts)

    @property
    def handles(self) -> list[tf.Tensor]:
        """Handles of all variables over its table: partitions look up each other's keys."""
        return self.saved.handles or [self.handle]  # a graph asks while the first one is made

    def ready_inputs(self) -> list[tf.Tensor]:
        """Returns inputs that make a TF1 session fail before the variable is initialized; else [].

        A control dependency is not enough: TensorFlow may prune a read whose value nobody uses.
        """
        inputs = []
        for part in self.parts if self._in_graph_mode else ():
            is_global = tf.compat.v1.GraphKeys.GLOBAL_VARIABLES in part.collections
            with tf.control_dependencies([] if is_global else [part._initializer_op]):
                read = tf.raw_ops.ReadVariableOp(resource=part._true_handle, dtype=part.dtype)
            inputs.append(read)
        return inputs

    # ---------------------------------------------------------------- facts

    @property
    def initializer(self) -> Any:
        """The operation of a TF1 graph that initializes it without keys."""
        return self._emptied if self._in_graph_mode else None

    def is_initialized(self, name: str | None = None) -> tf.Tensor:
        """Returns whether its initializer, or a restore, has run in this session."""
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
        """Times that a key must be seen to get a row; 0 and 1: once."""
        table: Any = self.table  # a "hybrid" one
        return int(table.options.enter_threshold)

    def get_generic_name(self) -> str:
        """Returns the name with scopes; for a partition the name of the whole."""
        return self.saved.name

    @property
    def whole(self) -> Any:
        """The whole of a partition while the program keeps it; else itself."""
        return self if self._whole is None else self._whole()

    @property
    def parts(self) -> list["KvVariable"]:
        """Its partitions, or itself without any."""
        return [self]

    def has_storage(
        self, storage_type: StorageCombination | StorageType = StorageCombination.MEM_SSD
    ) -> bool:
        """Whether rows may lie in a memory, by default beyond the first one."""
        is_first = storage_type in (StorageCombination.MEM, StorageType.MEM_STORAGE)
        return is_first or self.table.store.near_rows is not None

    @property
    def total_count(self) -> tf.Tensor:
        """Number of keys with a row that training has not set to zeros, scalar int64."""
        return _total(self, "total_count", lambda table, keys: keys.size)

    @property
    def total_freq(self) -> tf.Tensor:
        """Sum of the frequencies of the keys in `total_count`, scalar int64."""
        return _total(self, "total_freq", lambda table, keys: table.counts(keys).sum())

    @property
    def storage_size_count(self) -> tf.Tensor:
        """Rows in the first memory and beyond, (2,) int64, of all partitions."""

        def run(table: EmbeddingTable) -> Array:
            store = table.store
            far = store.num_far_rows
            return table.backend.from_host(np.array([store.num_rows - far, far], np.int64))

        (counts,) = method_call(self, "storage_size_count", run, [], [tf.int64], [[2]])
        return counts

    def get_counting(self, indices: Any, name: str | None = None) -> tf.Tensor:
        """Returns how often training lookups and writes saw keys, int64 of their shape."""
        return of_each_key(
            self, "get_counting", indices, lambda table, keys: table.counts(keys), tf.int64
        )

    def get_timestamp(self, indices: Any, name: str | None = None) -> tf.Tensor:
        """Returns when a training lookup or write last saw keys, int64 of their shape; 0: never.

        In seconds since 1970, as exact as `sok_lite.DynamicVariable.expire`.
        """

        def run(table: EmbeddingTable, keys: Array) -> Array:
            return table.times(keys).astype(np.int64)

        return of_each_key(self, "get_timestamp", indices, run, tf.int64)

    def increase_counting(self, indices: Any, counts: Any, name: str | None = None) -> Any:
        """Counts keys (n,) as seen `counts` (n,) >= 1 times, as training lookups do."""

        def run(table: EmbeddingTable, keys: Array, counts: Array) -> None:
            table.lookup(keys, counts=counts)

        keys = checked_keys(self, indices)
        return method_call(self, "increase_counting", run, [keys, tf.cast(counts, tf.int64)])

    # ---------------------------------------------------------------- reading

    def sparse_read(
        self,
        indices: Any,
        name: str | None = None,
        training: bool | None = None,
        missing: str | None = None,
    ) -> tf.Tensor:
        """Returns the rows of keys, indices.shape + [dim]; see the class.

        Args:
          indices: integers of any shape.
          training: whether to insert new keys; None: see the class.
          missing: row of a missing key, "initial" or "zeros"; None: "initial" if keys are inserted,
            else "zeros".
        """
        return look_up_each(job.other_ranks(), self, indices, self.policy(training, missing))

    def sparse_read_with_counts(
        self,
        indices: Any,
        counts: Any,
        name: str | None = None,
        training: bool | None = None,
    ) -> tf.Tensor:
        """Returns rows of keys of any shape, each seen `counts` >= 1 times. On one rank only."""
        if job.other_ranks() is not None:
            raise NotImplementedError(
                f"sparse_read_with_counts of {self.name!r} works on one rank: counts do not travel "
                "with keys. Use sparse_read, which counts a key once for each rank that has it."
            )
        counts = tf.cast(counts, tf.int64)
        return look_up_each(None, self, indices, self.policy(training), counts)

    def value(self) -> tf.Tensor:
        """Returns all rows, (n, dim), by ascending key, with a gradient."""
        reference, share = weakref.ref(self), self.share  # a graph would keep the variable alive

        def run(outputs: Outputs, _: list[Array]) -> None:
            for number, array in enumerate(share.export(alive(reference).table, None)):
                outputs.give(number, array)

        keys, rows = operation(
            "sok_value",
            accessed([self]),
            run,
            self.ready_inputs(),
            [self.key_type, self.dtype],
            self.table.backend,
            f"The value of {self.name!r}",
            Facts.of_variables([self]),
        )
        if not tf.executing_eagerly():
            keys.set_shape([None])
            rows.set_shape([None, self.dimension])
        return rows

    read_value = value

    def export(
        self, name: str | None = None, cutoff: float | None = CUTOFF
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns all keys (n,), ascending, and their rows (n, dim).

        Args:
          cutoff: skips keys whose row has every |element| below it; None: keeps all.
        """
        check_cutoff(cutoff)
        share = self.share
        keys, rows = method_call(
            self,
            "export",
            lambda table: share.export(table, cutoff),
            [],
            [self.key_type, self.dtype],
            [[None], [None, self.dimension]],
        )
        return keys, rows

    def policy(self, training: bool | None, missing: str | None = None) -> MissingKeyPolicy:
        """Returns how a lookup with these arguments treats keys without a row."""
        training = checked_training(self.training if training is None else training)
        if training is None and not IS_TRAINING:
            training = False
        # Without insertion such keys return zeros.
        return MissingKeyPolicy(training, checked_missing(missing), False, "zeros")

    def _read_variable_op(self, copy_error: bool = False) -> tf.Tensor:
        return self.value()

    def numpy(self) -> Any:
        """Returns `value` in eager mode."""
        if self._in_graph_mode:
            raise NotImplementedError(
                f"numpy() of {self.name!r} needs eager mode. Use session.run(variable)."
            )
        return self.value().numpy()

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return np.asarray(self.numpy(), *args, **kwargs)

    def eval(self, session: Any = None) -> Any:
        """Returns `value` in a TF1 session."""
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
        """Replaces its content by the keys and rows of another variable, without their counts.

        A partition takes only its own keys.

        Raises:
          TypeError: not a KvVariable. ValueError: its rows have another length.
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
            mine = share.contains(keys)
            refuse_foreign(table, keys[mine], "assign")
            _remove_all(table, share)
            table.insert_or_assign(keys[mine], rows[mine])

        return _done(self, method_call(self, "assign", run, [keys, rows]))

    def insert(self, indices: Any, values: Any) -> Any:
        """Sets the rows of keys, inserting new ones; the last row of a repeated key wins.

        Args:
          indices: (n,) integers.
          values: (n, dim).

        Raises:
          TypeError, ValueError: keys or rows do not match, or other ranks own keys that have no row
            here. Nothing has changed.
        """
        keys = checked_keys(self, indices)
        rows = tf.cast(checked_rows(self, keys, values, "insert"), self.dtype)

        def run(table: EmbeddingTable, keys: Array, rows: Array) -> None:
            refuse_foreign(table, keys, "insert")
            table.insert_or_assign(keys, rows)

        return _done(self, method_call(self, "insert", run, [keys, rows]))

    scatter_add = _scatter_method("add")
    scatter_sub = _scatter_method("sub")
    scatter_mul = _scatter_method("mul")
    scatter_div = _scatter_method("div")
    scatter_min = _scatter_method("min")
    scatter_max = _scatter_method("max")
    scatter_update = _scatter_method("update")

    # ---------------------------------------------------------------- removing

    def delete(self, indices: Any, name: str | None = None) -> Any:
        """Removes keys with rows, counts and optimizer states; missing keys are ignored."""

        def run(table: EmbeddingTable, keys: Array) -> None:
            table.erase(keys.reshape(-1))

        return method_call(self, "delete", run, [checked_keys(self, indices)])

    def delete_with_timestamp(
        self,
        threshold: float = 7,
        name: str | None = None,
        *,
        seconds: float | None = None,
    ) -> tf.Tensor:
        """Removes keys that no training lookup or write saw recently, with or without a row.

        The age is `threshold` in days, or `seconds`. Returns the removed keys, (n,) of the key
        type.
        """
        limit = as_float(threshold) * 86400 if seconds is None else as_float(seconds)
        if not limit >= 0:
            raise ValueError(f"The time must be 0 or more. Received: {limit} seconds.")

        share = self.share

        def run(table: EmbeddingTable) -> Array:
            return with_lock(table, lambda: _remove_before(table, share, limit))

        (gone,) = method_call(self, "delete_with_timestamp", run, [], [self.key_type], [[None]])
        return gone

    # ---------------------------------------------------------------- TFPlus only

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


# ---- functions of tables for the methods --------------------------------------------------------


def _total(
    variable: KvVariable, method: str, of_keys: Callable[[EmbeddingTable, Array], Any]
) -> tf.Tensor:
    """Sums a number over all keys with a row, except rows of zeros."""
    share = variable.share

    def run(table: EmbeddingTable) -> Array:
        keys, shrunk = share.select(table.export_rows()[0]), share.select(table.shrunk_keys())
        return np.array(int(of_keys(table, keys) - of_keys(table, shrunk)), np.int64)

    (total,) = method_call(variable, method, run, [], [tf.int64], [[]])
    return total


def _clear(variable: KvVariable) -> Any:
    share = variable.share
    what = f"clear of {variable.name!r}"
    return array_call(variable, what, lambda table: _remove_all(table, share))


def _remove_all(table: EmbeddingTable, share: Share) -> None:
    """Removes the keys of a share, and forgets seen keys without a row."""
    if share.is_whole:
        table.clear()
    else:
        with_lock(table, lambda: table.erase(_known_keys(table, share)))


def _remove_before(table: EmbeddingTable, share: Share, seconds: float) -> Array:
    """Removes and returns the keys of a share that were not seen for some time."""
    keys = _known_keys(table, share)
    times = table.times(keys)
    old = keys[(times > 0) & (times <= table.clock.read() - seconds)]
    table.erase(old)
    return old


def _known_keys(table: EmbeddingTable, share: Share) -> Array:
    """Returns the keys of a share that have a row or were seen."""
    keys = [table.export_rows()[0], table.pending_keys()]
    return share.select(table.backend.xp.concatenate(keys))


def _scatter(variable: KvVariable, operation: str, sparse_delta: Any) -> Any:
    if not isinstance(sparse_delta, tf.IndexedSlices):
        raise TypeError(
            f"scatter_{operation} of {variable.name!r} takes a tf.IndexedSlices of keys and rows. "
            f"Received: {type(sparse_delta).__name__}."
        )
    keys = checked_keys(variable, sparse_delta.indices)
    what = f"scatter_{operation}"
    rows = tf.cast(checked_rows(variable, keys, sparse_delta.values, what), variable.dtype)

    _, function = OPERATIONS[operation]

    def run(table: EmbeddingTable, keys: Array, rows: Array) -> None:
        refuse_foreign(table, keys, what)
        if function is None:
            table.insert_or_assign(keys, rows)
        else:
            with_lock(table, partial(_combine, table, function, keys, rows))

    return _done(variable, method_call(variable, what, run, [keys, rows]))


def _done(variable: KvVariable, operation: Any) -> Any:
    """Returns the variable in eager mode, the operation in a graph."""
    return variable if tf.executing_eagerly() else operation


def _combine(
    table: EmbeddingTable, function: Callable[..., np.ndarray], keys: Array, values: Array
) -> None:
    """Applies a function of OPERATIONS to rows, inserting missing ones with initial values.

    Args:
      keys: (n,) of the key type; values of a repeated key are applied in order.
      values: (n, dim) of the rows' storage dtype.
    """
    backend = table.backend
    distinct, inverse = np.unique(backend.to_host(keys), return_inverse=True)
    if not distinct.size:
        return
    # Missing keys get their initial value, and no lookup is counted.
    old = table.lookup(backend.from_host(distinct), insert=False, missing="initial").values
    # Computed in float32, stored in the rows' format.
    rows, deltas = _floats(table, old), _floats(table, values)
    order = np.argsort(inverse, kind="stable")
    number_of_key = inverse[order]
    # First the first value of each key, then the second where there is one, and so on.
    first = np.searchsorted(number_of_key, np.arange(distinct.size))
    place = np.arange(order.size) - first[number_of_key]
    for turn in range(int(place.max()) + 1):
        these = place == turn
        at = number_of_key[these]
        rows[at] = function(rows[at], deltas[order[these]])
    table.insert_or_assign(backend.from_host(distinct), backend.from_host(rows))


def _floats(table: EmbeddingTable, rows: Array) -> np.ndarray:
    """Copies rows of a table to the host as float32."""
    backend = table.backend
    return np.array(backend.to_host(table.row_dtype.to_float32(backend.xp, rows)))
