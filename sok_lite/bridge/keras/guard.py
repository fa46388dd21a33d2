"""What Keras would do with a model that holds tables and leave these out: refused by name.

Keras 3 knows its own variables only, so that `fit` would leave a table untrained and `save` would
leave it out, without a word. Nothing of a table is asked on the way. So the methods that a program
calls, all of them public, check the model first; they are wrapped when the program has imported
Keras and uses a table. A model without tables is not treated otherwise than before. A lookup also
asks whether Keras' own training step makes it, for a model may use a table that it does not hold.
What passes is a table that the model lists among its weights, where its optimizer trains it.

Keras 3 and tf_keras may both be there, or neither: this module imports none.
"""

import inspect
import sys
import threading
from collections.abc import Callable, Container
from types import CodeType
from typing import Any, NoReturn

import tensorflow as tf

from sok_lite.bridge.keras import hooks
from sok_lite.bridge.keras.called import note_calls
from sok_lite.bridge.keras.held import (
    PACKAGES,
    is_kept,
    kept_tables,
    know_layers,
    names_of,
    optimizers_in,
    package_of,
    saves_itself,
    tables_in,
)
from sok_lite.bridge.keras.ids import TAKING_ARRAYS, refuse_changed_ids
from sok_lite.bridge.keras.tracked import have_all_tracked
from sok_lite.bridge.tf_private import CHECKPOINT, callers

# ---- the public names of other packages that this module relies on; a test looks at each ---------

# Public: what a program calls to train and to save, on models and on layers.
TRAINING = ("compile", "make_train_function", "train_step", "train_function")
SAVING = ("save", "save_weights", "load_weights")
WEIGHTS = ("get_weights", "set_weights")
STATE_TREES = ("get_state_tree", "set_state_tree")
OWN_VARIABLES = ("save_own_variables", "load_own_variables")

# An attribute of optimizers whose steps all ranks take: "mean" where they are of the mean of all
# ranks' losses, "sum" where gradients of dense variables are summed and those of tables are not.
OVER_RANKS = "_sok_lite_over_ranks"

_guarded: set[str] = set()
_lock = threading.Lock()
_in_own_step = threading.local()
_step_codes: set[CodeType] = set()
_clone_codes: set[CodeType] = set()
_load_codes: set[CodeType] = set()
_told: list[Callable[[str, Any], None]] = []


def tell(function: Callable[[str, Any], None]) -> None:
    """Calls a function with name and module of each Keras, once it is known here. Once a function.

    That is when a program that has imported it makes a table, or looks rows up.
    """
    if function in _told:
        return
    watch()
    _told.append(function)
    for name in _guarded:
        function(name, sys.modules[name])


def watch() -> bool:
    """Guards each Keras that the program has imported by now; returns whether one is new."""
    is_new = False
    for name in PACKAGES:
        if name in sys.modules and name not in _guarded:
            is_new |= _guard(name, sys.modules[name])
    return is_new


def refuse_own_step(variable: Any) -> None:
    """Raises in a lookup that Keras' own training step makes, if it would not train the table."""
    model = getattr(_in_own_step, "model", None)
    if watch() and model is None:
        # A Keras that is first seen here may be within the step already.
        frame = _caller_among(_step_codes)
        model = None if frame is None else frame.f_locals.get("self")
    if model is None or not variable.trainable:
        return
    if package_of(model) in variable.left_out_by and not _is_known_to(model, variable):
        _refuse_training([variable])


def refuse_clone() -> None:
    """Raises where `clone_model` makes a table."""
    watch()
    if is_cloning():
        raise NotImplementedError(
            "clone_model() would make a model whose tables are new: no row is copied. Make the "
            "model by its class, export the rows of the old tables and assign them to the new ones."
        )


def is_cloning() -> bool:
    """Whether `clone_model` is among the callers."""
    return _caller_among(_clone_codes) is not None


def is_loading() -> bool:
    """Whether `load_model` is among the callers."""
    return _caller_among(_load_codes) is not None


def _caller_among(codes: Container[CodeType]) -> Any:
    """Returns the frame of a caller that is one of some functions, by their code; or None."""
    return next((frame for frame in callers() if frame.f_code in codes), None)


# ---- what the wrapped methods check --------------------------------------------------------------


def _check_training(model: Any, force: bool = False) -> None:
    if getattr(model, "train_function", None) is not None and not force:
        return  # checked when it was made
    held = [table for _, table in tables_in(model)]
    if has_own_step(model):
        tables = [table for table in held if table.trainable]
        left_out = [table for table in tables if not _is_known_to(model, table)]
        if left_out:
            _refuse_training(left_out)
    if any(getattr(type(table), "averages_over_ranks", False) for table in held):
        # A step of a program's own may have another optimizer for what is dense.
        for optimizer in optimizers_in(model):
            vars(optimizer)[OVER_RANKS] = "mean"


def has_own_step(model: Any) -> bool:
    """Whether a model trains by Keras' own training step."""
    return hooks.is_theirs(model.train_step)


def _check_compiled(model: Any) -> None:
    """Raises if a model was compiled to train, and its own step would leave a table untrained."""
    if getattr(model, "optimizer", None) is not None and model.trainable:
        _check_training(model, force=True)


def _is_known_to(model: Any, table: Any) -> bool:
    """Whether Keras' own step does with a table what it does with a weight.

    It trains the table, for the model lists it and its optimizer trains such tables; or it leaves
    it as it is, for the table is in a layer that is frozen.
    """
    is_trained = table.is_trained_by(getattr(model, "optimizer", None))
    try:
        trained, left = model.trainable_variables, model.non_trainable_variables
    except ValueError:  # tf_keras: the model has no weights before its first batch
        return is_trained or _is_frozen(model, table)
    if _is_among(trained, table):
        return is_trained
    return _is_among(left, table) or _is_frozen(model, table)


def _is_frozen(model: Any, table: Any) -> bool:
    """Whether a model holds a table in layers that are frozen, and in no other."""
    layers = [layer for layer, held in tables_in(model, by_each=True) if held is table]
    return bool(layers) and not any(layer.trainable for layer in layers)


def _is_among(variables: list[Any], table: Any) -> bool:
    return any(variable is table for variable in variables)


def _refuse_training(tables: list[Any]) -> NoReturn:
    raise NotImplementedError(
        f"Keras' own training step would leave {names_of(tables)} untrained: it updates the "
        f"weights that Keras knows, and a {tables[0].kind} is none of them. "
        f"{tables[0].instead_of_own_step} A table that is not to be trained is made with "
        "trainable=False, or is in a layer that is frozen. For evaluate() and predict() alone, "
        "compile(optimizer=None) or set model.trainable = False before."
    )


def check_saving(method: str, holder: Any) -> None:
    """Raises if Keras would leave a table out of what it saves of a layer or model."""
    tables = [table for _, table in _left_out(holder)]
    if tables:
        _refuse_saving(method, tables)


def _check_own_variables(method: str, layer: Any) -> None:
    """As `check_saving`, of what the layer holds itself: Keras asks each layer in turn."""
    tables = [table for owner, table in _left_out(layer) if owner is layer]
    if tables:
        _refuse_saving(method, tables)


def _left_out(holder: Any) -> list[tuple[Any, Any]]:
    """Returns the tables that Keras would leave out, each with a layer that holds it.

    The layer or model itself may hold a table beside a layer of it which saves that. Keras asks all
    others one by one, in the midst of writing: none of them may hold one that it does not save.
    """
    held = list(tables_in(holder, by_each=True))
    saved = {id(table) for layer, table in held if saves_itself(layer)}
    return [
        (layer, table)
        for layer, table in held
        if not saves_itself(layer) and (layer is not holder or id(table) not in saved)
    ]


def _check_format(holder: Any, filepath: Any) -> None:
    """Raises if `save` would write a format that has no place for the tables of a model."""
    tables = [table for _, table in tables_in(holder)]
    if tables and not str(filepath).endswith(".keras") and not str(filepath).startswith("hf://"):
        raise NotImplementedError(
            f"save() to this format would leave the rows of {names_of(tables)} out. "
            f"Received: filepath={str(filepath)!r}. {tables[0].instead_of_save}"
        )


def check_weights(method: str, layer: Any) -> None:
    """Raises if Keras would not have a table of a layer among its weights."""
    tables = [table for _, table in tables_in(layer) if not is_kept(table)]
    kept = kept_tables(layer)
    if kept:
        listed = layer.weights
        tables += [table for table in kept if not _is_among(listed, table)]
    if tables:
        _refuse_saving(method, tables)


def _check_state_tree(method: str, model: Any) -> None:
    """Raises where a model holds tables: a tree of dense values would have an empty one of each."""
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


def is_tensorflows_format(filepath: Any, save_format: Any = None) -> bool:
    """Whether tf_keras writes weights as tf.train.Checkpoint does, tables included."""
    if save_format is not None:
        return save_format in ("tf", "tensorflow")
    return not str(filepath).endswith((".h5", ".hdf5", ".keras"))


# ---- around Keras' methods -----------------------------------------------------------------------


def _guard(name: str, package: Any) -> bool:
    with _lock:
        model = getattr(package, "Model", None)
        if name in _guarded or model is None:  # None: while Keras is being imported
            return False
        for method in CHECKPOINT:
            hooks.around(tf.train.Checkpoint, method, _checking_by_name, have_all_tracked, method)
        _guarded.add(name)
        layer, models = package.layers.Layer, package.models
        know_layers(layer)
        if hooks.around(model, "train_step", _in_step) is not None:
            _step_codes.add(inspect.unwrap(model.train_step).__code__)
        if name == "keras":
            note_calls(model)
        _clone_codes.add(inspect.unwrap(models.clone_model).__code__)
        _load_codes.add(inspect.unwrap(models.load_model).__code__)
        hooks.around(model, "compile", _compiling)
        hooks.around(model, "make_train_function", _checking, _check_training)
        for method in TAKING_ARRAYS:
            hooks.around(model, method, _checking, refuse_changed_ids)
        for method in SAVING:
            hooks.around(model, method, _saving, name, method)
        for method in WEIGHTS:
            for cls in (layer, model):  # tf_keras has one of its own for each
                hooks.around(cls, method, _checking_by_name, check_weights, method)
        for method in STATE_TREES:
            hooks.around(model, method, _checking_by_name, _check_state_tree, method)
        for method in OWN_VARIABLES:
            hooks.around(layer, method, _checking_by_name, _check_own_variables, method)
    for function in _told:
        function(name, package)
    return True


def _checking(
    check: Callable[..., None], call: Any, self: Any, /, *args: Any, **kwargs: Any
) -> Any:
    check(self, *args, **kwargs)
    return call(self, *args, **kwargs)


def _checking_by_name(
    check: Callable[[str, Any], None],
    method: str,
    call: Any,
    self: Any,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    check(method, self)
    return call(self, *args, **kwargs)


def _compiling(call: Any, self: Any, /, *args: Any, **kwargs: Any) -> Any:
    done = call(self, *args, **kwargs)
    _check_compiled(self)
    return done


def _in_step(call: Any, self: Any, /, *args: Any, **kwargs: Any) -> Any:
    outer = getattr(_in_own_step, "model", None)
    _in_own_step.model = self
    try:
        return call(self, *args, **kwargs)
    finally:
        _in_own_step.model = outer


def _saving(package: str, method: str, call: Any, self: Any, /, *args: Any, **kwargs: Any) -> Any:
    third = "save_format" if package == "tf_keras" else "zipped"
    arguments = dict(zip(("filepath", "overwrite", third), args, strict=False)) | kwargs
    is_checkpoint = False
    if package == "tf_keras" and method != "save":
        save_format = arguments.get("save_format") if method == "save_weights" else None
        is_checkpoint = is_tensorflows_format(arguments.get("filepath"), save_format)
    if not is_checkpoint:
        check_saving(method, self)
        if method == "save" and arguments.get("zipped") is not False:
            _check_format(self, arguments.get("filepath"))
    return call(self, *args, **kwargs)
