"""Functions of any table: `sok.export`, `sok.assign`; and which variables are sok's."""

from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf

from sok_lite.bridge import table_exports, writes
from sok_lite.bridge.keras import held
from sok_lite.bridge.keras.training import left_out_of
from sok_lite.bridge.optimizer_states import StateView
from sok_lite.bridge.variable import TableVariable, variable_of_layer
from sok_lite.sok.dynamic_variable import DynamicVariable
from sok_lite.sok.static_variable import FixedVariable

__all__ = ["assign", "export", "filter_variables"]


def export(var: Any, cutoff: float | None = None) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns this rank's keys, ascending, and their rows. No communication.

    Args:
      var: a DynamicVariable or a sok_lite.keras.Table, or a view of an optimizer state of one.
      cutoff: skips keys whose row has every |element| < cutoff, such as 1e-20 for rows that an
        optimizer set to zero; None: keeps all.

    Returns:
      (indices (n,) of the key type, values (n, dimension) of the rows' dtype).

    Raises:
      TypeError: `var` is no DynamicVariable, or the cutoff no number.
      ValueError: the cutoff is not above 0.

    Examples:
      >>> items = sok.DynamicVariable(2, name="item")
      >>> _ = sok.assign(items, [9, 7], [[2.0, 2.0], [1.0, 1.0]])
      >>> keys, rows = sok.export(items)
      >>> keys.numpy().tolist(), rows.numpy().tolist()
      ([7, 9], [[1.0, 1.0], [2.0, 2.0]])
    """
    # Views of states and other tables have this method; TensorFlow's variables do not.
    is_model = held.is_layer(var) and variable_of_layer(var) is var  # its `export` differs
    if hasattr(var, "export") and not is_model:
        return var.export(cutoff=cutoff)
    return table_exports.export(_checked_variable(var, "export"), cutoff)


def assign(var: Any, indices: Any, values: Any, scores: Any = None) -> Any:
    """Sets the rows of keys on this rank, inserting new ones. No communication.

    On several ranks each passes its own keys: those that it owns, or that have a row here.

    Args:
      var: a DynamicVariable or a sok_lite.keras.Table, or a view of an optimizer state of one,
        which needs keys with a row.
      indices: (n,) integers; the last row of a repeated key wins.
      values: (n, dimension).
      scores: (n,) integers >= 0, stored with the keys whatever the strategy; None: as for a lookup,
        which is 0 for a new key of kCustomized. A "hybrid" table refuses a new key whose score is
        below all that it could evict.

    Returns:
      The variable in eager mode, the operation in a graph.

    Raises:
      TypeError: `var` is no DynamicVariable, keys are not integers or rows not floats.
      ValueError: shapes do not match, a key does not fit the key type, other ranks own it and it
        has no row here, a state's key has no row, or a state comes with scores. Nothing has
        changed.

    Examples:
      >>> items = sok.DynamicVariable(2, initializer=0.0, name="item")
      >>> _ = sok.assign(items, [7, 7], [[1.0, 1.0], [2.0, 2.0]])
      >>> tf.nn.embedding_lookup(items, tf.constant([7])).numpy().tolist()
      [[2.0, 2.0]]
    """
    if isinstance(var, StateView):
        if scores is not None:
            raise ValueError(
                f"State {var.name!r} has no scores: keys have. Received: scores={scores!r}. Give "
                "them to sok.assign of the variable."
            )
        return var.assign(indices, values)
    return writes.insert_or_assign(
        _checked_variable(var, "assign"), "sok.assign", indices, values, scores
    )


def _checked_variable(var: Any, what: str) -> TableVariable:
    variable = table_variable(var)
    if variable is None:
        raise TypeError(
            f"sok.{what} takes a sok.DynamicVariable or a sok_lite.keras.Table. Received: "
            f"{type(var).__name__}."
        )
    return variable


def table_variable(value: Any) -> TableVariable | None:
    """Returns the variable that holds the rows of a DynamicVariable or Table; None: neither."""
    variable = variable_of_layer(value)
    if isinstance(variable, DynamicVariable):
        return variable
    is_of_keras = isinstance(variable, TableVariable) and variable.tracked_as_weight
    return variable if is_of_keras else None


def tables_of(value: Any) -> list[Any]:
    """Returns the variables in an argument; each table of a layer or model once.

    Args:
      value: a variable, layer or model, or a list, tuple or dict of these. Anything without a table
        is returned as is.
    """
    listed = list(value.values()) if isinstance(value, Mapping) else value
    listed = listed if isinstance(listed, (list, tuple)) else [listed]
    named = [variable_of_layer(each) for each in listed]
    known = {id(each) for each in named}
    found: list[Any] = []
    for each in named:
        # By name, for one order on all ranks, whatever holds them.
        tables = sorted((table for _, table in held.tables_in(each)), key=lambda table: table.name)
        if not tables or tables[0] is each:  # it has none, or is one
            found.append(each)
        else:
            found += [table for table in tables if id(table) not in known]
            known |= {id(table) for table in tables}
    return found


def filter_variables(vars: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """Splits variables into (sok's, static ones included; others), each in order.

    Raises:
      NotImplementedError: they are all that a Keras 3 model lists, which leaves out a table of the
        model: add it, [*model.trainable_variables, model.table].
    """
    listed = list(vars)
    left_out = left_out_of(listed)
    if left_out is not None:
        raise NotImplementedError(
            f"{left_out} A program that names its tables elsewhere names them here too, and takes "
            "the second list alone."
        )
    ours: list[Any] = []
    others: list[Any] = []
    for var in listed:
        (ours if isinstance(var, (DynamicVariable, FixedVariable)) else others).append(var)
    return ours, others
