"""Handles of tables: which variable one is of, and those that belong to no variable yet."""

import json
import weakref
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from sok_lite.bridge.tf_private import UninitializedVariable
from sok_lite.bridge.variable import variable_of
from sok_lite.sok.dynamic_variable import DynamicVariable

__all__ = ["dummy_var_handle", "dummy_var_initialize", "is_of_table", "variable_with"]

# Attributes of a handle that `dummy_var_handle` made: what it is to be of, and the variable that
# it then keeps. The variable refers to the handle weakly, so the table goes when the handle does.
_FACTS = "_sok_lite_facts"
_KEPT = "_sok_lite_kept"


class _Facts(NamedTuple):
    dimension: int
    key_type: tf.DType
    dtype: tf.DType
    shared_name: str


class _OfHandle(DynamicVariable):
    """The variable of a handle that `dummy_var_handle` made: TensorFlow knows it by that one."""

    def __init__(self, handle: tf.Tensor, *args: Any, **kwargs: Any) -> None:
        self._weak_handle = weakref.ref(handle)
        super().__init__(*args, **kwargs)

    @property
    def _true_handle(self) -> tf.Tensor:
        return self._weak_handle()

    @_true_handle.setter
    def _true_handle(self, handle: tf.Tensor) -> None:
        """Leaves out the handle that TensorFlow has made."""


# In eager mode, by (container, shared_name): two handles of one name are of one table.
_shared: "weakref.WeakValueDictionary[tuple[str, str], Any]" = weakref.WeakValueDictionary()


def dummy_var_handle(
    container: str = "DummyVarContainer",
    shared_name: str = "",
    shape: Any = None,
    key_type: Any = tf.int64,
    dtype: Any = tf.float32,
    name: str | None = None,
) -> tf.Tensor:
    """Returns a handle, which has no table before `dummy_var_initialize`.

    The table lives as long as the handle. A tf.function that reads rows keeps the handle, and
    TensorFlow keeps the graph of such a function for ever, for its gradient; a DynamicVariable is
    not kept.

    While a tf.function is traced, the handle is made outside of it: that of its `shared_name`, or a
    new one in each trace.

    Args:
      container, shared_name: in eager mode two calls with equal ones give one handle, unless
        `shared_name` is empty.
      shape: (None, dimension).
      key_type, dtype: of keys and rows, as of DynamicVariable.

    Raises:
      ValueError: a shape of another kind, or the handle of that name is of another one.
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
    """Returns a handle in eager mode or in a graph of TF1."""
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
        # TensorFlow's own variable of that name would be another one.
        handle = tf.raw_ops.VarHandleOp(container=container, shared_name=shared_name, **empty)
    setattr(handle, _FACTS, facts)
    return handle


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
    """Gives a handle its table. In a graph the operation is to be run before any other of it.

    Args:
      resource: what `dummy_var_handle` gave.
      initializer: a string as of DynamicVariable, also as a tensor, or numbers, also as a list or
        an array: the first counts.
      var_type: "hbm" or "hybrid".
      unique_name: of the table. It also seeds the rows.
      key_type, dtype: as of the handle.
      config: the options of DynamicVariable, as JSON.

    Raises:
      RuntimeError: the handle has a table.
      TypeError, ValueError: as DynamicVariable raises, or the types are not those of the handle.
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
        trainable=False,  # a tape is told to watch the handle
        **json.loads(config),
    )
    setattr(resource, _KEPT, variable)
    # Read in graphs, so that a gradient can find its way.
    nothing = tf.zeros([0, facts.dimension], facts.dtype)
    return tf.raw_ops.AssignVariableOp(resource=resource, value=nothing)


def _first(initializer: Any) -> Any:
    """Returns a string, or the first number of what holds several; else the argument."""
    if tf.is_tensor(initializer):
        if isinstance(initializer, tf.Variable) and tf.executing_eagerly():
            initializer = initializer.numpy()
        constant = tf.get_static_value(initializer)
        if constant is None:
            return initializer  # DynamicVariable says what is expected
        initializer = constant
    if isinstance(initializer, (list, tuple, np.ndarray, np.generic)):
        initializer = np.asarray(initializer).reshape(-1)[:1].tolist()
        initializer = initializer[0] if initializer else ""
    return initializer.decode() if isinstance(initializer, bytes) else initializer


def variable_with(resource: Any, key_type: Any = None, dtype: Any = None) -> DynamicVariable:
    """Returns the variable of a handle, or raises where its types are not these."""
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


def is_of_table(handle: Any) -> bool:
    """Whether it is the handle of a table, or was made for one."""
    return variable_of(handle) is not None or hasattr(handle, _FACTS)
