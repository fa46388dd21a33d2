"""Tables among the weights of a Keras layer or model, in `get_weights` and similar methods.

A table that its layer keeps (`tracked_as_weight`) is listed among the weights. Keras would ask it
for a dense array, and silently leave any other table out, which raises here.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import numpy as np

from sok_lite.bridge import stored
from sok_lite.bridge.keras import hooks
from sok_lite.bridge.keras.held import is_kept, kept_tables, names_of, saves_itself, tables_in

# Public methods of models and of layers.
STATE_TREES = ("get_state_tree", "set_state_tree")
OWN_VARIABLES = ("save_own_variables", "load_own_variables")


def wrap_weights(layer: Any, model: Any) -> None:
    """Makes the weights of layers and models include their tables, or raise."""
    for cls in (layer, model):  # tf_keras defines them in both
        hooks.around(cls, "get_weights", _get_weights)
        hooks.around(cls, "set_weights", _set_weights)
    for method in STATE_TREES:
        hooks.around(model, method, hooks.checking, partial(_check_state_tree, method))
    for method in OWN_VARIABLES:
        hooks.around(layer, method, hooks.checking, partial(_check_own_variables, method))


class TableWeights(np.ndarray):
    """The rows (n, dim) of a table, by ascending key, as returned by `get_weights`; read-only.

    It also has the keys and all other content of the table, for `set_weights`. An array computed
    from it does not.
    """

    _arrays: Mapping[str, np.ndarray] | None = None

    @classmethod
    def of(cls, variable: Any) -> "TableWeights":
        """Returns the current content of a table."""
        tensors = variable.saved_tensors()
        arrays: dict[str, np.ndarray] = {}
        stored.write_tensors(arrays, tensors)
        return cls._made(tensors["values"].numpy(), arrays)

    @classmethod
    def _made(cls, rows: np.ndarray, arrays: Mapping[str, np.ndarray]) -> "TableWeights":
        weights = np.array(rows).view(cls)
        weights.flags.writeable = False
        weights._arrays = arrays
        return weights

    def __copy__(self) -> "TableWeights":
        return self

    def __deepcopy__(self, memo: Any) -> "TableWeights":
        return self

    def __reduce__(self) -> Any:
        return TableWeights._made, (np.array(self), self._arrays)

    def tensors_for(self, variable: Any) -> dict[str, Any]:
        """Returns the content for a table; raises ValueError if it was computed or does not fit."""
        arrays = self._arrays
        if arrays is None:
            _refuse_array(variable, self)
        if self.shape[1:] != (variable.dimension,):
            raise ValueError(
                f"The weights of {variable.name!r} must have rows of {variable.dimension}. "
                f"Received: rows of {self.shape[1]}, of another table."
            )
        return stored.read_tensors(arrays, variable.saved_dtypes(), variable.name)


# ---- tables left out ----------------------------------------------------------------------------


def check_saving(method: str, holder: Any) -> None:
    """Raises if Keras would leave a table out of what it saves of a layer or model."""
    tables = [table for _, table in _left_out(holder)]
    if tables:
        _refuse_saving(method, tables)


def _check_own_variables(method: str, layer: Any, *_: Any, **__: Any) -> None:
    """Raises if the layer itself, not one within it, holds tables: Keras calls each in turn."""
    tables = [table for owner, table in _left_out(layer) if owner is layer]
    if tables:
        _refuse_saving(method, tables)


def _left_out(holder: Any) -> list[tuple[Any, Any]]:
    """Returns the tables that Keras would leave out, each with a layer that holds it.

    The layer or model itself may hold a table if a layer within it saves that. Keras calls all
    other layers one by one, in the midst of writing: none may hold a table that it does not save.
    """
    pairs = list(tables_in(holder, by_each=True))
    saved = {id(table) for layer, table in pairs if saves_itself(layer)}
    return [
        (layer, table)
        for layer, table in pairs
        if not saves_itself(layer) and (layer is not holder or id(table) not in saved)
    ]


def check_weights(method: str, layer: Any) -> None:
    """Raises if Keras would not list a table of a layer among its weights."""
    tables = [table for _, table in tables_in(layer) if not is_kept(table)]
    kept = kept_tables(layer)
    if kept:
        listed = layer.weights
        tables += [table for table in kept if not any(each is table for each in listed)]
    if tables and not _left_out(layer):
        raise NotImplementedError(
            f"{method}() has no place for the keys of {names_of(tables)}. Use save_weights() and "
            "load_weights(): those have tables. In place of EarlyStopping(restore_best_weights="
            "True) use ModelCheckpoint(path, save_best_only=True), and load what it saved."
        )
    if tables:
        _refuse_saving(method, tables)


def _check_state_tree(method: str, model: Any, *_: Any, **__: Any) -> None:
    """Raises if a model holds tables: a tree of dense values would have an empty one of each."""
    check_weights(method, model)
    tables = kept_tables(model)
    if tables:
        raise NotImplementedError(
            f"{method}() has no place for the keys of {names_of(tables)}. Use get_weights() and "
            "set_weights(), or save() and load_model(): those have tables and optimizer states."
        )


def _refuse_saving(method: str, tables: list[Any]) -> NoReturn:
    raise NotImplementedError(
        f"{method}() would leave the rows of {names_of(tables)} out: Keras knows its own "
        f"variables, and a {tables[0].kind} is none of them. Save and restore the model with "
        "tf.train.Checkpoint(model=model, tables=[...]), all tables in the list. Or: "
        f"{tables[0].instead_of_save} ModelCheckpoint, EarlyStopping(restore_best_weights=True) "
        "and BackupAndRestore come here too: leave them out, and call the checkpoint's write."
    )


# ---- get_weights, set_weights --------------------------------------------------------------------


def _get_weights(call: Any, self: Any) -> list[Any]:
    check_weights("get_weights", self)
    if not _listed_tables(self):
        return call(self)
    return [TableWeights.of(each) if is_kept(each) else each.numpy() for each in self.weights]


def _set_weights(call: Any, self: Any, weights: Sequence[Any]) -> None:
    check_weights("set_weights", self)
    if not _listed_tables(self):
        call(self, weights)
        return
    variables, values = list(self.weights), list(weights)
    if len(variables) != len(values):
        raise ValueError(
            f"{self.name!r} has {len(variables)} weights, tables among them. "
            f"Received: {len(values)}."
        )
    tables, dense = [], []
    for variable, value in zip(variables, values, strict=True):
        if not is_kept(variable):
            if tuple(variable.shape) != np.shape(value):
                raise ValueError(
                    f"Weight {variable.name!r} of {self.name!r} has shape "
                    f"{tuple(variable.shape)}. Received: {np.shape(value)}."
                )
            dense.append((variable, value))
        elif isinstance(value, TableWeights):
            tables.append((variable, value.tensors_for(variable)))
        else:
            _refuse_array(variable, value)
    for variable, tensors in tables:
        variable.restore_tensors(tensors)
        variable.settle_states()  # as with dense weights, which come without states
    for variable, value in dense:
        variable.assign(value)


def _refuse_array(variable: Any, value: Any) -> NoReturn:
    raise ValueError(
        f"Weight {variable.name!r} is a table, whose rows are known by key: it takes what "
        f"get_weights() gives of a table. Received: an array of shape {np.shape(value)}. Use "
        f"{variable.kind}.assign(keys, rows) for rows of your own."
    )


def _listed_tables(layer: Any) -> list[Any]:
    try:
        return [weight for weight in layer.weights if is_kept(weight)]
    except ValueError:  # tf_keras: no weights before the first batch
        return []
