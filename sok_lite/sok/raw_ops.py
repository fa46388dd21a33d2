"""`sok.raw_ops`: SOK's operations by name, as functions of handles.

A handle is `variable.handle` of a DynamicVariable, or made by `dummy_var_handle` and given a table
by `dummy_var_initialize`. Everything acts on this rank's part and works in eager mode, tf.functions
and TF1 graphs. Further attributes of SOK's operations are accepted: `dtype` and `key_type` must be
the table's; `name` has no effect. Operations that write return None in eager mode, the operation in
a graph.
"""

import json
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import tensorflow as tf

from sok_lite.bridge import table_exports, table_ops, writes
from sok_lite.bridge.autograph import unconverted_function
from sok_lite.bridge.checks import integer_keys
from sok_lite.bridge.local_lookup import local_lookup, local_lookup_and_evict
from sok_lite.bridge.table_call import method_call
from sok_lite.bridge.tf_private import UninitializedVariable
from sok_lite.bridge.variable import variable_of
from sok_lite.engine.table import EmbeddingTable
from sok_lite.sok.dynamic_variable import DynamicVariable

__all__ = [
    "dist_select",
    "dummy_var_assign",
    "dummy_var_export",
    "dummy_var_export_if",
    "dummy_var_handle",
    "dummy_var_initialize",
    "dummy_var_scatter_add",
    "dummy_var_scatter_update",
    "dummy_var_shape",
    "dummy_var_sparse_read",
    "dummy_var_sparse_read_evict",
    "gather_ex",
    "group_lookup",
    "hotness_calculate",
    "lookup_backward",
    "lookup_forward",
    "lookup_forward_dynamic",
    "lookup_forward_embedding_var_gpu",
    "lookup_forward_variable",
    "postprocessing_backward",
    "postprocessing_forward",
    "preprocessing_forward",
    "preprocessing_forward_with_weight",
    "reorder",
]


# ---- handles, of variables or with their own table -----------------------------------------------

# Attributes of a handle from `dummy_var_handle`: its facts, and the variable that it keeps. The
# variable refers to the handle weakly, so the table goes with the handle.
_FACTS = "_sok_lite_facts"
_KEPT = "_sok_lite_kept"


class _Facts(NamedTuple):
    dimension: int
    key_type: tf.DType
    dtype: tf.DType
    shared_name: str


class _OfHandle(DynamicVariable):
    """The variable of a handle from `dummy_var_handle`, by which TensorFlow identifies it."""

    def __init__(self, handle: tf.Tensor, *args: Any, **kwargs: Any) -> None:
        self._weak_handle = weakref.ref(handle)
        super().__init__(*args, **kwargs)

    @property
    def _true_handle(self) -> tf.Tensor:
        return self._weak_handle()

    @_true_handle.setter
    def _true_handle(self, handle: tf.Tensor) -> None:
        """Ignores the handle that TensorFlow made."""


# Eager mode: by (container, shared_name), so two handles of a name share a table.
_shared: "weakref.WeakValueDictionary[tuple[str, str], Any]" = weakref.WeakValueDictionary()


@unconverted_function
def dummy_var_handle(
    container: str = "DummyVarContainer",
    shared_name: str = "",
    shape: Any = None,
    key_type: Any = tf.int64,
    dtype: Any = tf.float32,
    name: str | None = None,
) -> tf.Tensor:
    """Returns a handle; `dummy_var_initialize` gives it a table.

    The table lives as long as the handle. TensorFlow keeps the graph of a tf.function that reads
    rows for ever, for its gradient, and with it the handle; a DynamicVariable is not kept.

    While a tf.function is traced, the handle is made outside of it: that of its `shared_name`, or a
    new one per trace.

    Args:
      container, shared_name: in eager mode equal ones return the same handle, unless `shared_name`
        is empty.
      shape: (None, dimension).
      key_type, dtype: of keys and rows, as for DynamicVariable.

    Raises:
      ValueError: another shape, or the handle of that name has other facts.
    """
    shape = tf.TensorShape(shape)
    dim = tf.compat.dimension_value(shape[1]) if shape.rank == 2 else None
    if not dim:
        raise ValueError(
            "dummy_var_handle takes a shape of rank 2, (None, dimension), with a known dimension "
            f"above 0. Received: shape={shape}."
        )
    facts = _Facts(dim, tf.as_dtype(key_type), tf.as_dtype(dtype), shared_name)
    with tf.init_scope():
        return _handle(container, facts)


def _handle(container: str, facts: _Facts) -> tf.Tensor:
    """Returns a handle in eager mode or in a TF1 graph."""
    shared_name = facts.shared_name
    is_eager = tf.executing_eagerly()
    handle = _shared.get((container, shared_name)) if is_eager and shared_name else None
    if handle is not None:
        if getattr(handle, _FACTS) != facts:
            raise ValueError(
                f"The handle {shared_name!r} of container {container!r} is of "
                f"{getattr(handle, _FACTS)}. Received: {facts}. Use another shared_name."
            )
        return handle
    empty = {"dtype": facts.dtype, "shape": [0, facts.dimension]}
    if is_eager:
        handle = UninitializedVariable(name="sok_handle", **empty).handle
        if shared_name:
            _shared[container, shared_name] = handle
    else:
        # TensorFlow's variable of that name must be another one.
        handle = tf.raw_ops.VarHandleOp(container=container, shared_name=shared_name, **empty)
    setattr(handle, _FACTS, facts)
    return handle


@unconverted_function
def dummy_var_initialize(
    resource: tf.Tensor,
    initializer: Any,
    var_type: str,
    unique_name: str,
    key_type: Any = tf.int64,
    dtype: Any = tf.float32,
    config: str = "{}",
    name: str | None = None,
) -> Any:
    """Gives a handle its table. In a graph, run the operation before others of the handle.

    Args:
      initializer: a string as for DynamicVariable, also as a tensor, or numbers (also a list or
        array), of which the first counts.
      unique_name: of the table; also seeds the rows.
      config: options of DynamicVariable, as JSON.

    Raises:
      RuntimeError: the handle has a table.
      TypeError, ValueError: as DynamicVariable, or types other than the handle's.
    """
    facts = getattr(resource, _FACTS, None)
    if variable_of(resource) is not None:
        raise RuntimeError(
            "DummyVar has already been initialized. This might be caused by that "
            "dummy_var_initialize is called more than once for one handle."
        )
    if facts is None:
        raise ValueError(
            "dummy_var_initialize takes what dummy_var_handle gave. " + _received(resource)
        )
    types = (tf.as_dtype(key_type), tf.as_dtype(dtype))
    if types != (facts.key_type, facts.dtype):
        raise ValueError(
            f"The handle was made for keys of {facts.key_type.name} and rows of "
            f"{facts.dtype.name}. Received: {types[0].name} and {types[1].name}."
        )
    variable = _OfHandle(
        resource,
        facts.dimension,
        initializer=_first(initializer),
        var_type=var_type,
        name=unique_name,
        key_type=facts.key_type,
        dtype=facts.dtype,
        trainable=False,  # tapes watch the handle explicitly
        **json.loads(config),
    )
    setattr(resource, _KEPT, variable)
    # Read in graphs, for gradients to find their way.
    nothing = tf.zeros([0, facts.dimension], facts.dtype)
    return tf.raw_ops.AssignVariableOp(resource=resource, value=nothing)


def _first(initializer: Any) -> Any:
    """Returns a string, or the first of several numbers; else the argument."""
    if tf.is_tensor(initializer):
        if isinstance(initializer, tf.Variable) and tf.executing_eagerly():
            initializer = initializer.numpy()
        constant = tf.get_static_value(initializer)
        if constant is None:
            return initializer  # DynamicVariable reports what it expects
        initializer = constant
    if isinstance(initializer, (list, tuple, np.ndarray, np.generic)):
        initializer = np.asarray(initializer).reshape(-1)[:1].tolist()
        initializer = initializer[0] if initializer else ""
    return initializer.decode() if isinstance(initializer, bytes) else initializer


def _variable_with(resource: Any, key_type: Any = None, dtype: Any = None) -> DynamicVariable:
    """Returns the variable of a handle; raises if its types differ."""
    if not tf.is_tensor(resource) or resource.dtype != tf.resource:
        raise TypeError(
            "sok.raw_ops take the handle of a DynamicVariable, `variable.handle`. "
            + _received(resource)
        )
    variable = variable_of(resource)
    if not isinstance(variable, DynamicVariable):
        if hasattr(resource, _FACTS):
            raise ValueError("The handle has no table yet. Call dummy_var_initialize first.")
        raise ValueError(
            "The handle is that of no table: it belongs to another variable, to one that is "
            "gone, or it is a copy, such as the argument of a tf.function. Give `variable.handle` "
            "itself."
        )
    for what, wanted, has in [
        ("key_type", key_type, variable.key_type),
        ("dtype", dtype, variable.dtype),
    ]:
        if wanted is not None and tf.as_dtype(wanted) != has:
            raise ValueError(
                f"`{what}` of {variable.name!r} is {has.name}. Received: {what}={wanted!r}."
            )
    return variable


def _received(value: Any) -> str:
    return f"Received: {type(value).__name__}."


def _is_of_table(handle: Any) -> bool:
    """Whether a handle is of a table, or was made for one."""
    return variable_of(handle) is not None or hasattr(handle, _FACTS)


# ---- operations ----------------------------------------------------------------------------------


class DummyVarExport(NamedTuple):
    """(n,) keys, and (n, dimension) rows."""

    indices: tf.Tensor
    values: tf.Tensor


class DummyVarSparseReadEvict(NamedTuple):
    """(n, dimension) rows, (m,) evicted keys, (m, dimension) their last rows."""

    output: tf.Tensor
    evict_keys: tf.Tensor
    evict_values: tf.Tensor


class DistSelect(NamedTuple):
    """(n,) keys by rank, (n,) int32 original positions, (num_splits,) int32 keys per rank."""

    keys: tf.Tensor
    order: tf.Tensor
    splits: tf.Tensor


# ---------------------------------------------------------------- of tables


@unconverted_function
def dummy_var_shape(
    resource: tf.Tensor,
    out_type: Any = tf.int32,
    key_type: Any = None,
    dtype: Any = None,
    name: str | None = None,
) -> tf.Tensor:
    """Returns [rows on this rank, dimension] of an integer type."""
    return tf.cast(table_ops.size(_variable_with(resource, key_type, dtype)), out_type)


@unconverted_function
def dummy_var_assign(
    resource: tf.Tensor, indices: Any, values: Any, name: str | None = None
) -> Any:
    """Sets the rows of keys, inserting new ones; the last row of a repeated key wins."""
    variable = _variable_with(resource)
    return _operation(writes.insert_or_assign(variable, "dummy_var_assign", indices, values))


@unconverted_function
def dummy_var_export(
    resource: tf.Tensor, key_type: Any = None, dtype: Any = None, name: str | None = None
) -> DummyVarExport:
    """Returns this rank's keys, ascending, and their rows."""
    return DummyVarExport(*table_exports.export(_variable_with(resource, key_type, dtype)))


@unconverted_function
def dummy_var_export_if(
    resource: tf.Tensor,
    threshold: Any,
    key_type: Any = None,
    dtype: Any = None,
    name: str | None = None,
) -> DummyVarExport:
    """Returns the keys, ascending, whose score is above a threshold, and their rows.

    Scores are uint64, of `variable.scores`: not times as in SOK, but numbers of lookups for kLru.
    """
    variable = _variable_with(resource, key_type, dtype)
    threshold = tf.reshape(tf.cast(threshold, tf.uint64), [1])

    def export(table: EmbeddingTable, threshold: Any) -> Any:
        return table.export_if(lambda entries: entries.scores > threshold)

    indices, values = method_call(
        variable,
        "dummy_var_export_if",
        export,
        [threshold],
        [variable.key_type, variable.dtype],
        [[None], [None, variable.dimension]],
    )
    return DummyVarExport(indices, values)


@unconverted_function
def dummy_var_sparse_read(
    resource: tf.Tensor, indices: Any, dtype: Any = None, name: str | None = None
) -> tf.Tensor:
    """Returns the rows of keys, inserting new ones, as `tf.nn.embedding_lookup`.

    Its gradient, for the handle and so its variable, is an IndexedSlices of these keys.
    """
    return local_lookup(_variable_with(resource, dtype=dtype), indices)


@unconverted_function
def dummy_var_sparse_read_evict(
    resource: tf.Tensor, indices: Any, dtype: Any = None, name: str | None = None
) -> DummyVarSparseReadEvict:
    """Returns the rows of keys, and the keys and rows that were evicted for new ones."""
    variable = _variable_with(resource, dtype=dtype)
    return DummyVarSparseReadEvict(*local_lookup_and_evict(variable, indices))


@unconverted_function
def dummy_var_scatter_add(
    resource: tf.Tensor, indices: Any, updates: Any, name: str | None = None
) -> Any:
    """Adds to the rows of keys in the table; rows of repeated keys are summed."""
    return _scatter(writes.scatter_add, resource, indices, updates)


@unconverted_function
def dummy_var_scatter_update(
    resource: tf.Tensor, indices: Any, updates: Any, name: str | None = None
) -> Any:
    """Sets the rows of keys in the table; the last row of a repeated key wins."""
    return _scatter(writes.scatter_update, resource, indices, updates)


def _scatter(scatter: Callable[..., Any], resource: Any, indices: Any, updates: Any) -> Any:
    variable = _variable_with(resource)
    updates = tf.convert_to_tensor(updates, dtype_hint=variable.dtype)
    return _operation(scatter(variable, tf.IndexedSlices(updates, tf.convert_to_tensor(indices))))


def _operation(done: Any) -> Any:
    return None if tf.executing_eagerly() else done


@unconverted_function
def group_lookup(
    handles: Sequence[tf.Tensor], indices: Sequence[Any], dtype: Any = None, name: str | None = None
) -> list[tf.Tensor]:
    """Returns the rows of each handle's own keys, on this rank only.

    Args:
      handles: of dynamic and dense variables, mixed.
      indices: as many tensors of keys, or row numbers; else ValueError.
      dtype: of the results; None: the table's, and tf.float32 for a dense variable.
    """
    if len(handles) != len(indices):
        raise ValueError(
            "group_lookup takes as many `indices` as `handles`. "
            f"Received: {len(handles)} handles and {len(indices)} indices."
        )
    rows = []
    for handle, keys in zip(handles, indices, strict=True):
        if not _is_of_table(handle):
            found = tf.raw_ops.ResourceGather(
                resource=handle, indices=tf.convert_to_tensor(keys), dtype=dtype or tf.float32
            )
        else:
            found = dummy_var_sparse_read(handle, keys)
        rows.append(found if dtype is None else tf.cast(found, dtype))
    return rows


# ---------------------------------------------------------------- of keys and rows alone


def dist_select(indices: Any, num_splits: int, name: str | None = None) -> DistSelect:
    """Groups keys by owner rank: key mod `num_splits`, never negative.

    Each group keeps its order. `reorder(rows, order)` restores the order of `indices`.

    Args:
      indices: (n,) integers.

    Raises:
      TypeError: keys are not integers. ValueError: no ranks.
    """
    if num_splits < 1:
        raise ValueError(f"`num_splits` must be at least 1. Received: num_splits={num_splits}.")
    keys = integer_keys(indices, "The keys of dist_select", "int64 or int32")
    owners = tf.cast(tf.math.floormod(keys, tf.cast(num_splits, keys.dtype)), tf.int32)
    groups = tf.dynamic_partition(tf.range(tf.size(keys)), owners, int(num_splits))
    order = tf.concat(groups, 0)
    splits = tf.stack([tf.size(group) for group in groups])
    return DistSelect(tf.gather(keys, order), order, splits)


def reorder(embedding: Any, order: Any, name: str | None = None) -> tf.Tensor:
    """Scatters rows (n, ...): `out[order[i]] = embedding[i]`; `order` is an int32 permutation."""
    embedding, order = tf.convert_to_tensor(embedding), tf.convert_to_tensor(order)
    result = tf.scatter_nd(order[:, None], embedding, tf.shape(embedding, order.dtype))
    return tf.ensure_shape(result, embedding.shape)


def gather_ex(x: Any, idx: Any, name: str | None = None) -> tf.Tensor:
    """Gathers rows (n, ...) by int32 numbers: `out[i] = x[idx[i]]`. It undoes `reorder`."""
    return tf.gather(x, idx)


def hotness_calculate(
    row_length_buffer: Any, num_gpus: int, num_lookups: int, name: str | None = None
) -> tf.Tensor:
    """Returns the maximum row length of each lookup, over all ranks.

    Args:
      row_length_buffer: (num_gpus * num_lookups * batch,) integers: the row lengths of each lookup
        of rank 0, then of rank 1, and so on.

    Returns:
      (num_lookups,) int32.
    """
    lengths = tf.reshape(row_length_buffer, [num_gpus, num_lookups, -1])
    longest = tf.reduce_max(tf.cast(lengths, tf.int32), [0, 2])
    return tf.maximum(longest, 0)  # without rows


# ---------------------------------------------------------------- stages of SOK's lookup


def _refused(name: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"sok.raw_ops.{name} is not there: it is a stage of SOK's own lookup_sparse, whose "
            "stages are others here. Use sok.lookup_sparse, which has gradients."
        )

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__doc__ = "Raises NotImplementedError: use `sok.lookup_sparse`."
    return refuse


preprocessing_forward = _refused("preprocessing_forward")
preprocessing_forward_with_weight = _refused("preprocessing_forward_with_weight")
lookup_forward = _refused("lookup_forward")
lookup_forward_variable = _refused("lookup_forward_variable")
lookup_forward_dynamic = _refused("lookup_forward_dynamic")
lookup_forward_embedding_var_gpu = _refused("lookup_forward_embedding_var_gpu")
lookup_backward = _refused("lookup_backward")
postprocessing_forward = _refused("postprocessing_forward")
postprocessing_backward = _refused("postprocessing_backward")
