"""What `tf.nn.embedding_lookup` and its kin end in: rows of this rank's table, with gradient."""

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.host_call import host_call, refuse_replicas
from sok_lite.inference import checked_missing, checked_training, reading
from sok_lite.row_gradient import row_gradient, size_tensor
from sok_lite.tensor import empty, to_array, to_tensor
from sok_lite.variable_spec import alive


def local_lookup(
    variable: Any, keys: Any, training: bool | None = None, missing: str | None = None
) -> tf.Tensor:
    """Returns the rows of keys in this rank's table. No communication.

    Args:
      variable: the table.
      keys: integers of any shape.
      training: whether new keys are inserted; None: unless `sok.inference_mode` is open.
      missing: what a key gives that has no row: "initial" or "zeros".

    Returns:
      keys.shape + [dimension], of the rows' dtype. The gradient is an IndexedSlices of the keys as
      given, flat, with float32 rows.

    Raises:
      TypeError: keys are no integers.
      ValueError: a key does not fit the key type, or the variable is one of a list.
    """
    refuse_partitions(variable)
    training, missing = checked_training(training), checked_missing(missing)
    dim, dtype, backend = variable.dimension, variable.dtype, variable.table.backend

    def look_up(table: Any, keys: Any) -> Sequence[tf.Tensor]:
        insert, absent = reading(training, missing)
        rows = empty((*keys.shape, dim), dtype, backend)
        flat_rows = rows.reshape(-1, dim)
        table.lookup(keys.reshape(-1), out=flat_rows, insert=insert, missing=absent)
        return (to_tensor(rows, dtype, backend),)

    return _differentiable(variable, keys, look_up, [dtype], [])


def local_lookup_and_evict(variable: Any, keys: Any) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Does what `local_lookup` does and returns also what lost its place for it.

    Returns:
      (keys.shape + [dimension] rows, (m,) evicted keys, (m, dimension) their last rows).
    """
    dim, dtype, key_type = variable.dimension, variable.dtype, variable.key_type
    backend = variable.table.backend

    def look_up(table: Any, keys: Any) -> Sequence[tf.Tensor]:
        insert, absent = reading(None, None)
        rows = empty((*keys.shape, dim), dtype, backend)
        flat, flat_rows = keys.reshape(-1), rows.reshape(-1, dim)
        if insert:
            _, (evicted_keys, evicted_rows, _) = table.lookup_and_evict(flat, out=flat_rows)
        else:
            table.lookup(flat, out=flat_rows, insert=insert, missing=absent)
            evicted_keys = table.key_dtype.from_int64(backend.xp, backend.xp.empty(0, np.int64))
            evicted_rows = flat_rows[:0]
        return (
            to_tensor(rows, dtype, backend),
            to_tensor(evicted_keys, key_type, backend),
            to_tensor(evicted_rows, dtype, backend),
        )

    dtypes = [dtype, key_type, dtype]
    rows, *evicted = _differentiable(variable, keys, look_up, dtypes, [[None], [None, dim]])
    return rows, *evicted


def _differentiable(
    variable: Any,
    keys: Any,
    look_up: Callable[[Any, Any], Sequence[tf.Tensor]],
    dtypes: list[tf.DType],
    other_shapes: list[list[int | None]],
) -> Any:
    """Returns what a lookup gives, a tuple if it is more than the rows; these have a gradient.

    Args:
      variable: the table.
      keys: integers of any shape.
      look_up: takes the engine's table and an array of keys; gives keys.shape + [dim], and more.
      dtypes: of all that it gives.
      other_shapes: of what it gives beside the rows.
    """
    keys = checked_keys(variable, keys)
    name, dim, key_type = variable.name, variable.dimension, variable.key_type
    backend = variable.table.backend
    reference = weakref.ref(variable)

    def run(key_tensor: tf.Tensor) -> Sequence[tf.Tensor]:
        table = alive(reference).table
        return *look_up(table, to_array(key_tensor, backend)), size_tensor(table)

    @tf.custom_gradient
    def read(source: tf.Tensor, keys: tf.Tensor) -> Any:
        rows, *others, size = host_call(
            run, [keys], [*dtypes, tf.int32], backend, f"A lookup in {name!r}"
        )
        rows.set_shape(keys.shape.concatenate([dim]))
        for other, shape in zip(others, other_shapes, strict=True):
            other.set_shape(shape)
        size.set_shape([2])

        def grad(row_grads: tf.Tensor, *_: tf.Tensor) -> Any:
            refuse_replicas(f"The gradient of a lookup in {name!r}")
            flat_grads = tf.cast(tf.reshape(row_grads, [-1, dim]), tf.float32)
            # A session runs only what it needs, and a gradient may need no row: the lookup must
            # run all the same, or an update would not find the key.
            is_pruned = not tf.executing_eagerly() and not tf.inside_function()
            with tf.control_dependencies([size] if is_pruned else []):
                flat_keys = tf.cast(tf.reshape(keys, [-1]), key_type)
            # A copy: the size belongs to the graph of the forward.
            return row_gradient(name, flat_keys, flat_grads, tf.identity(size)), None

        # A tuple of one costs TensorFlow 12 of 184 microseconds.
        return ((rows, *others) if others else rows), grad

    return read(variable.gradient_source(), keys)


def refuse_partitions(variable: Any) -> None:
    """Raises if tf.nn.embedding_lookup was given a list of variables.

    TensorFlow then takes them for the parts of one table, changes the keys and asks each part in
    turn. Nothing but the caller's frame tells such a read from another.
    """
    frame: Any = sys._getframe(1)
    for _ in range(16):
        if frame is None:
            return
        if frame.f_code.co_name == "_embedding_lookup_and_transform":
            params = frame.f_locals.get("params")
            if isinstance(params, list) and len(params) > 1:
                raise ValueError(
                    "tf.nn.embedding_lookup takes one sok.DynamicVariable. Received: a list of "
                    f"{len(params)}, among them {variable.name!r}. TensorFlow would spread the "
                    "keys over them. Look each up by itself, or all with sok.lookup_sparse."
                )
            return
        frame = frame.f_back


def without_keras(value: Any) -> Any:
    """Returns the tensor of a Keras variable; anything else as it is.

    Such a variable passes for a tensor, but its dtype is a text.
    """
    if tf.is_tensor(value) and isinstance(value.dtype, str):
        return tf.convert_to_tensor(value)
    return value


def checked_keys(variable: Any, keys: Any) -> tf.Tensor:
    """Returns keys as a tensor of integers that the table accepts.

    Raises:
      TypeError: they are not integers.
    """
    keys = without_keras(keys)
    if not tf.is_tensor(keys):
        array = np.asarray(keys)
        if array.size == 0 and array.dtype == np.float64:
            array = array.astype(np.int64)  # NumPy's dtype for an empty list
        keys = tf.convert_to_tensor(array) if array.dtype.kind in "iuf" else array
    dtype = getattr(keys, "dtype", None)
    if not isinstance(dtype, tf.DType) or not dtype.is_integer:
        name = dtype.name if isinstance(dtype, (tf.DType, np.dtype)) else type(keys).__name__
        raise TypeError(
            f"Keys of {variable.name!r} must be integers ({variable.key_type.name}). "
            f"Received: {name}. Cast them first if they really are keys."
        )
    return keys
