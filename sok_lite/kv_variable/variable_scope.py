"""`get_kv_variable`: returns the variable of a name in its variable scope, or makes it."""

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.backend import Backend
from sok_lite.bridge.autograph import unconverted_function
from sok_lite.bridge.checks import checked_dtype
from sok_lite.bridge.keras import hooks
from sok_lite.bridge.tf_private import INIT_FROM_CHECKPOINT
from sok_lite.bridge.variable import table_for_variable
from sok_lite.engine.dtypes import check_integer, is_integer
from sok_lite.engine.initializer import MatrixInitializer
from sok_lite.engine.initializer_spec import make_initializer
from sok_lite.engine.table import EmbeddingTable, make_table
from sok_lite.kv_variable.kv_variable_ops import KvVariable
from sok_lite.kv_variable.kv_variable_options import KvOptions
from sok_lite.kv_variable.partitioned import PartitionedKvVariable
from sok_lite.kv_variable.saveable import GRAPH_COLLECTION

__all__ = ["get_kv_variable"]

# In eager mode. A TF1 graph has its collection.
_by_name: "weakref.WeakValueDictionary[str, KvVariable]" = weakref.WeakValueDictionary()
_naming = threading.RLock()

_KEY_DTYPES = (tf.int64, tf.int32)
_VALUE_DTYPES = (tf.float32, tf.float16, tf.bfloat16)
# The number of rows for initializers that scale by the shape of the weight, as in TFPlus.
_NUM_ROWS = 10000


@unconverted_function
def get_kv_variable(
    name: str,
    embedding_dim: Any = None,
    key_dtype: Any = tf.int64,
    value_dtype: Any = tf.float32,
    initializer: Any = None,
    trainable: bool | None = None,
    collections: Sequence[str] | None = None,
    partitioner: Callable[..., Sequence[int]] | None = None,
    constraint: Any = None,
    *,
    regularizer: Callable[[Any], Any] | None = None,
    enter_threshold: int = 0,
    kv_options: KvOptions | None = None,
) -> KvVariable:
    """Returns the variable of a name in the open variable scope, or makes it.

    In TF1 names belong to the graph. In eager mode they belong to the process while the program
    keeps the variable, and every scope reuses, as in TensorFlow.

    The initial value of a key's row is a function of the seed (of the graph or initializer), the
    name and the key: the same for any number of partitions and ranks.

    `tf.compat.v1.train.init_from_checkpoint` and `warm_start` restore no KvVariable; the former
    raises for a scope that has one. After initialization call
    `tf.compat.v1.train.Saver([KvVariableSaveable(v, "its name there")]).restore(session, path)`.

    Args:
      name: within the scope.
      embedding_dim: length of a row; not needed for an existing variable.
      key_dtype: tf.int64 (also int) or tf.int32.
      value_dtype: tf.float32, tf.float16 or tf.bfloat16.
      initializer: of Keras or TensorFlow, or a tensor of static shape: one number, a row, or rows
        to choose from by key. None: the scope's, else Glorot uniform for a [10000, embedding_dim]
        matrix, as in TFPlus.
      trainable: whether it is trained; None: it is.
      collections: graph collections to add it to; None: [GraphKeys.GLOBAL_VARIABLES]. Trainable
        ones are also in GraphKeys.TRAINABLE_VARIABLES.
      partitioner: maps a shape and a dtype to the number of partitions per axis, such as
        `tf.compat.v1.fixed_size_partitioner(n)`; None: the scope's, if any.
      constraint: must be None.
      regularizer: called with the variable; its result is added to GraphKeys.REGULARIZATION_LOSSES.
        It reads all rows. None: the scope's.
      enter_threshold: times that training must see a key before it gets a row; 0 and 1: once.
      kv_options: where the rows are kept; None: in one memory.

    Returns:
      A `KvVariable`, or with a partitioner a `PartitionedKvVariable`.

    Raises:
      ValueError: the variable exists and the scope does not reuse, or the reverse; it exists in
        another form, with another enter_threshold or number of partitions; the graph has another
        kind of variable of its name; an argument out of range.
      TypeError: an argument of a wrong type.
      NotImplementedError: a constraint, or partitions along the row.

    Examples:
      >>> items = kv.get_kv_variable("item", 2, initializer=keras.initializers.Ones())
      >>> tf.nn.embedding_lookup(items, tf.constant([[7, 9]], tf.int64)).numpy().tolist()
      [[[1.0, 1.0], [1.0, 1.0]]]
    """
    _check_types(name, trainable, collections, partitioner, regularizer)
    scope = tf.compat.v1.get_variable_scope()
    full_name = f"{scope.name}/{name}" if scope.name else name
    keys, values = _checked_key_dtype(key_dtype), _checked_value_dtype(value_dtype)
    threshold = _checked_threshold(enter_threshold)
    options = KvOptions() if kv_options is None else kv_options
    if not isinstance(options, KvOptions):
        raise TypeError(f"`kv_options` must be a KvOptions or None. Received: {options!r}.")
    if constraint is not None or scope.constraint is not None:
        raise NotImplementedError(
            f"KvVariable has no constraints: an update touches single rows. Received: "
            f"constraint={constraint or scope.constraint!r} for {full_name!r}. Leave it out, "
            "and clip what you look up, as by max_norm."
        )
    with _naming:
        found = _find_variable(full_name, scope.reuse)
        if found is not None:
            _check_form(found, embedding_dim, keys, values)
            _check_keeping(found, threshold, partitioner or scope.partitioner)
            return found
        _check_no_other(full_name)
        regularizer = scope.regularizer if regularizer is None else regularizer
        if regularizer is not None:
            _check_collected(full_name)
        dim = _checked_dim(embedding_dim)
        if initializer is None:
            initializer = scope.initializer
        table = _table(full_name, dim, keys, values, initializer, threshold, options)
        count = _num_partitions(partitioner or scope.partitioner, dim, values)
        made = _variable(table, full_name, trainable, collections, options, count)
        if regularizer is not None:
            _regularize(made, regularizer)
        if tf.executing_eagerly() or tf.inside_function():
            _by_name[full_name] = made
        else:
            tf.compat.v1.add_to_collection(GRAPH_COLLECTION, made)
            hooks.around(*INIT_FROM_CHECKPOINT, _refuse_scopes)
        return made


def _refuse_scopes(call: Any, path: Any, assignment_map: Any, /) -> Any:
    """Raises if `init_from_checkpoint` gets a scope that has a KvVariable in this graph.

    TensorFlow looks for its own variables there, and would silently leave the table empty.
    """
    items = assignment_map.items() if isinstance(assignment_map, Mapping) else assignment_map
    pairs = list(items)
    tables = [each.saved.name for each in tf.compat.v1.get_collection(GRAPH_COLLECTION)]
    for _, scope in pairs:
        if not isinstance(scope, str) or not scope.endswith("/"):
            continue
        within = [name for name in tables if f"/{name}".startswith(f"/{scope.lstrip('/')}")]
        if within:
            raise NotImplementedError(
                f"init_from_checkpoint() of the scope {scope!r} would leave "
                f"{', '.join(map(repr, within))} empty: the rows of a KvVariable are known by key "
                "and are no initial value. Name the other variables in place of the scope, "
                "initialize, and then call Saver([KvVariableSaveable(v, name)])."
                "restore(session, path), with the name that the checkpoint has."
            )
    return call(path, pairs)


def _find_variable(name: str, reuse: Any) -> KvVariable | None:
    """Returns the variable of a name, if the scope permits finding it."""
    if tf.executing_eagerly() or tf.inside_function():
        # Scopes made in eager mode reuse; one that TensorFlow made earlier may not say so.
        found = _by_name.get(name)
    else:
        variables = tf.compat.v1.get_collection(GRAPH_COLLECTION)
        found = next((each for each in variables if each.saved.name == name), None)
        if found is not None and not reuse:
            raise ValueError(
                f"Variable {name} already exists, disallowed. Did you mean to set reuse=True or "
                "reuse=tf.AUTO_REUSE in VarScope?"
            )
    if found is None and reuse is True:
        raise ValueError(
            f"Variable {name} does not exist, or was not created with get_kv_variable(). Did you "
            "mean to set reuse=tf.AUTO_REUSE in VarScope?"
        )
    return found


def _check_no_other(name: str) -> None:
    """Raises ValueError if the graph has another kind of variable of a name."""
    if tf.executing_eagerly() or tf.inside_function():
        return
    taken = {f"{name}:0", f"{name}/part_0:0"}
    others = [
        each.name
        for each in tf.compat.v1.global_variables()
        if each.name in taken and not isinstance(each, KvVariable)
    ]
    if others:
        raise ValueError(
            f"Variable {name} already exists and is no KvVariable: {others[0]!r} was not created "
            "with get_kv_variable(). Give one of them another name."
        )


def _check_form(found: KvVariable, dim: Any, keys: tf.DType, values: tf.DType) -> None:
    """Raises ValueError if an existing variable differs from the request."""
    has = (found.embedding_dim, found.key_dtype.name, found.dtype.name)
    wants = (has[0] if dim is None else _checked_dim(dim), keys.name, values.name)
    if has != wants:
        raise ValueError(
            f"Trying to share variable {found.saved.name}, but it has {has} for "
            f"(embedding_dim, key_dtype, value_dtype). Received: {wants}."
        )


def _check_keeping(found: KvVariable, threshold: int, partitioner: Any) -> None:
    """Raises ValueError if a variable admits or partitions keys otherwise than explicitly asked."""
    has = found.enter_threshold
    if threshold and max(has, 1) != threshold:
        raise ValueError(
            f"Trying to share variable {found.saved.name}, but it has enter_threshold={has}. "
            f"Received: enter_threshold={threshold}."
        )
    count = _num_partitions(partitioner, found.embedding_dim, found.dtype)
    parts = len(found) if isinstance(found, PartitionedKvVariable) else None
    if count not in (None, parts):
        raise ValueError(
            f"Trying to share variable {found.saved.name}, but it has "
            f"{'no' if parts is None else parts} partitions. Received: a partitioner that gives "
            f"{count}."
        )


def _table(
    name: str,
    dim: int,
    keys: tf.DType,
    values: tf.DType,
    initializer: Any,
    threshold: int,
    options: KvOptions,
) -> EmbeddingTable:
    first_values = _initial_value(initializer, dim)
    seed, _ = tf.compat.v1.get_seed(0)

    def make(backend: Backend) -> EmbeddingTable:
        return make_table(
            "hybrid",
            backend,
            dim,
            initializer=first_values,
            key_type=keys.name,
            dtype=values.name,
            name=name,
            seed=int(seed or 0),
            **options.table_options(threshold),
        )

    return table_for_variable(KvVariable.kind, make)


def _num_partitions(partitioner: Any, dim: int, dtype: tf.DType) -> int | None:
    """Returns the number of partitions; None: not partitioned."""
    if partitioner is None:
        return None
    counts = list(partitioner(shape=tf.TensorShape([_NUM_ROWS, dim]), dtype=dtype))
    if len(counts) not in (1, 2) or min(counts) < 1:
        raise ValueError(
            "`partitioner` must give the number of partitions along the axes of [keys, "
            f"{dim}]. Received: {counts}."
        )
    if counts[1:] not in ([], [1]):
        raise NotImplementedError(
            f"A KvVariable is partitioned by its keys. Received: {counts} partitions, which cut "
            "rows. Use a partitioner of axis 0."
        )
    return int(counts[0])


def _variable(
    table: EmbeddingTable,
    name: str,
    trainable: bool | None,
    collections: Sequence[str] | None,
    options: KvOptions,
    count: int | None,
) -> KvVariable:
    arguments: dict[str, Any] = {
        "name": name,
        "trainable": True if trainable is None else bool(trainable),
        "collections": (
            [tf.compat.v1.GraphKeys.GLOBAL_VARIABLES] if collections is None else collections
        ),
        "options": options,
    }
    with tf.compat.v1.name_scope(None), tf.init_scope():  # named by variable scopes only
        if count is None:
            return KvVariable(table, **arguments)
        return PartitionedKvVariable(table, **arguments, num_partitions=count)


def _check_collected(name: str) -> None:
    """Raises NotImplementedError if nothing collects a regularizer's loss."""
    if tf.executing_eagerly() or tf.inside_function():
        raise NotImplementedError(
            f"A regularizer of {name!r} belongs to a TF1 graph, which collects its losses. Leave "
            "it out, and add the loss in your step."
        )


def _regularize(variable: KvVariable, regularizer: Callable[[Any], Any]) -> None:
    try:
        loss = regularizer(variable)
    except BaseException:
        _forget(variable)
        raise
    if loss is not None:
        tf.compat.v1.add_to_collection(tf.compat.v1.GraphKeys.REGULARIZATION_LOSSES, loss)


def _forget(variable: KvVariable) -> None:
    """Removes a variable from all collections of its graph."""
    graph = variable.graph
    for key in graph.get_all_collection_keys():
        members = graph.get_collection_ref(key)
        members[:] = [each for each in members if not any(each is part for part in variable.parts)]


# ---- arguments, checked before anything is made --------------------------------------------------


def _check_types(
    name: Any, trainable: Any, collections: Any, partitioner: Any, regularizer: Any
) -> None:
    """Raises TypeError for a wrong type, ValueError for an empty name."""
    if not isinstance(name, str):
        raise TypeError(f"`name` must be a text. Received: name={name!r}.")
    if not name:
        raise ValueError("`name` must not be empty. Received: name=''.")
    if trainable is not None and not isinstance(trainable, (bool, np.bool_)):
        raise TypeError(
            f"`trainable` must be True, False or None. Received: trainable={trainable!r}."
        )
    if collections is not None and not (
        isinstance(collections, (list, tuple))
        and all(isinstance(each, str) for each in collections)
    ):
        raise TypeError(
            "`collections` must be a list or tuple of the names of collections, or None. "
            f"Received: collections={collections!r}."
        )
    for what, function in (("partitioner", partitioner), ("regularizer", regularizer)):
        if function is not None and not callable(function):
            raise TypeError(f"`{what}` must be callable or None. Received: {what}={function!r}.")


def _checked_key_dtype(dtype: Any) -> tf.DType:
    """Returns the key type. Python's int is int64."""
    key_dtype = tf.int64 if dtype is int else checked_dtype("key_dtype", dtype)
    if key_dtype not in _KEY_DTYPES:
        raise ValueError(
            f"`key_dtype` must be tf.int64 or tf.int32. Received: {key_dtype.name}. Hash texts to "
            "numbers first, as by tf.strings.to_hash_bucket_fast."
        )
    return key_dtype


def _checked_value_dtype(dtype: Any) -> tf.DType:
    value_dtype = checked_dtype("value_dtype", dtype)
    if value_dtype not in _VALUE_DTYPES:
        known = ", ".join(f"tf.{each.name}" for each in _VALUE_DTYPES)
        raise ValueError(f"`value_dtype` must be one of {known}. Received: {value_dtype.name}.")
    return value_dtype


def _checked_dim(embedding_dim: Any) -> int:
    """Returns the length of a row, which may be a list or TensorShape of one number."""
    if isinstance(embedding_dim, tf.TensorShape):
        embedding_dim = embedding_dim.as_list()
    if isinstance(embedding_dim, (list, tuple)) and len(embedding_dim) == 1:
        (embedding_dim,) = embedding_dim
    if isinstance(embedding_dim, tf.compat.v1.Dimension):
        embedding_dim = embedding_dim.value
    if not is_integer(embedding_dim):
        raise TypeError(
            "`embedding_dim` must be an integer, the length of a row. "
            f"Received: embedding_dim={embedding_dim!r}."
        )
    check_integer("embedding_dim", embedding_dim, 1)
    return int(embedding_dim)


def _checked_threshold(enter_threshold: Any) -> int:
    if not is_integer(enter_threshold):
        raise TypeError(
            "`enter_threshold` must be an integer, how often a key must be seen to get a row. "
            f"Received: enter_threshold={enter_threshold!r}."
        )
    if enter_threshold < 0:
        raise ValueError(
            f"`enter_threshold` must not be negative. Received: enter_threshold={enter_threshold}."
        )
    return int(enter_threshold)


def _initial_value(initializer: Any, dim: int) -> Any:
    """Returns an initializer of the engine, or ValueError for an unknown or unsuitable shape.

    It may be of Keras, tf_keras or TensorFlow, its class, or a function that returns a tensor or an
    initializer; None: Glorot uniform; a tensor or array of one number, of `dim`, or of rows (n,
    dim), of which each key takes one.
    """
    if initializer is None:
        initializer = tf.compat.v1.glorot_uniform_initializer()
    if isinstance(initializer, type):
        initializer = initializer()
    if isinstance(initializer, str):
        initializer = tf.keras.initializers.get(initializer)
    if callable(initializer) and not hasattr(initializer, "get_config"):
        initializer = _call(initializer, dim)
    if hasattr(initializer, "get_config"):
        return make_initializer(initializer, dim, row_shape=(_NUM_ROWS, dim))
    if tf.is_tensor(initializer):
        if not initializer.shape.is_fully_defined():
            raise ValueError(
                "A tensor for `initializer` must have a static shape. "
                f"Received: shape {initializer.shape}."
            )
        initializer = _array_of(initializer)
    rows = np.asarray(initializer, np.float64)
    if rows.ndim == 2 and rows.shape[0] and rows.shape[1] == dim:
        if (rows != rows[0]).any():
            return MatrixInitializer(rows)
        rows = rows[0]
    if rows.size != 1 and rows.shape != (dim,):
        raise ValueError(
            f"A tensor for `initializer` must have one number, shape ({dim},), or rows "
            f"(n, {dim}). Received: shape {rows.shape}."
        )
    return make_initializer(float(rows.reshape(-1)[0]) if rows.size == 1 else rows, dim)


def _call(function: Any, dim: int) -> Any:
    try:
        return function([1, dim], tf.float32)
    except TypeError:
        return function()


def _array_of(tensor: tf.Tensor) -> np.ndarray:
    if hasattr(tensor, "numpy"):
        return np.asarray(tensor.numpy())
    constant = tf.get_static_value(tensor)
    if constant is not None:
        return np.asarray(constant)
    try:
        with tf.compat.v1.Session(graph=tensor.graph) as session:
            return np.asarray(session.run(tensor))
    except (tf.errors.OpError, AttributeError) as error:
        raise ValueError(
            "A tensor for `initializer` must be known when the variable is made. "
            f"Received: {tensor!r}. ({error})"
        ) from error
