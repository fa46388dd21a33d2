"""Tables among the weights of a Keras layer or model: what `get_weights` and `save` do with them.

A table that its layer keeps (`kept_by_layer`) is listed among the weights. Keras would ask it for a
dense array, or leave it out of a file of an older format. The methods wrapped here know better, and
look afterwards whether what was saved or loaded had every table in it.
"""

import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from sok_lite.bridge import stored
from sok_lite.bridge.job import other_ranks
from sok_lite.bridge.keras import guard, held, hooks
from sok_lite.bridge.keras.held import is_kept, names_of

_FORMATS = (".keras", ".weights.h5")
# The variables of tables that were saved or loaded since the call of a model's method began.
_all_ranks_save: ContextVar[bool] = ContextVar("all_ranks_save", default=False)
_done: ContextVar[list[Any] | None] = ContextVar("tables_done", default=None)


class TableWeights(np.ndarray):
    """The rows (n, dim) of a table, by ascending key, as `get_weights` gives them; read-only.

    It has the keys and all else that the table holds with it, for `set_weights`. An array computed
    from it has not.
    """

    _arrays: Mapping[str, np.ndarray] | None = None

    @classmethod
    def of(cls, variable: Any) -> "TableWeights":
        """Returns what a table holds now."""
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
        """Returns what a table is to hold.

        Raises:
          ValueError: this was computed, or is of a table with other types or another dim.
        """
        arrays = self._arrays
        if arrays is None:
            _refuse_array(variable, self)
        if self.shape[1:] != (variable.dimension,):
            raise ValueError(
                f"The weights of {variable.name!r} must have rows of {variable.dimension}. "
                f"Received: rows of {self.shape[1]}, of another table."
            )
        return stored.read_tensors(arrays, variable.saved_dtypes(), variable.name)


def note(variable: Any) -> None:
    """Says that a table was saved, or loaded."""
    done = _done.get()
    if done is not None:
        done.append(variable)


def keep_tables() -> None:
    """Has each Keras keep the tables among its weights."""
    guard.tell(_wrap_keras)


def _wrap_keras(name: str, package: Any) -> None:
    layer, model, callbacks = package.layers.Layer, package.Model, package.callbacks
    for cls in (layer, model):
        hooks.around(cls, "get_weights", _getting_weights)
        hooks.around(cls, "set_weights", _setting_weights)
    for method in ("save", *guard.SAVING[1:]):
        hooks.around(model, method, _with_tables, name, method)
    hooks.around(model, "export", _refusing_export)
    backup = callbacks.BackupAndRestore
    if name == "tf_keras":
        hooks.around(backup, "on_train_begin", _refusing_backups)
    else:
        hooks.around(model, "build_from_config", _building, package)
        hooks.around(backup, "on_train_begin", _making_backup_folder)
        hooks.around(backup, "on_train_end", _deleting_backups_once)
        hooks.around(callbacks.ModelCheckpoint, "__init__", _making_folder)


# ---- load_model ----------------------------------------------------------------------------------


def _building(package: Any, call: Any, self: Any, config: Any) -> None:
    """Keras 3 goes on where it cannot build a model that it loads, and leaves out what is unbuilt.

    Of a model without tables that is for Keras to say.
    """
    if not (guard.is_loading() and held.kept_tables(self)):
        call(self, config)
        return
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        call(self, config)
    for each in told:
        warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
    if not any("cannot be built" in str(each.message) for each in told):
        return
    defaults = {hooks.owner_of(cls, "build") for cls in (package.layers.Layer, package.Model)}
    unbuilt = [
        layer.name
        for layer in held.layers_in(self)
        if not layer.built and hooks.owner_of(type(layer), "build") not in defaults
    ]
    if unbuilt:
        raise NotImplementedError(
            f"load_model() would leave what the file has of {', '.join(map(repr, unbuilt))} "
            f"out: Keras builds {self.name!r} by its call() on dense floats in place of its "
            "inputs, and that raised. Make the model by its class, call it on a batch, and "
            "load_weights() of the same file. Or give the class a build_from_config() that "
            "builds its layers."
        )


# ---- get_weights, set_weights --------------------------------------------------------------------


def _getting_weights(call: Any, self: Any) -> list[Any]:
    if not _listed(self):
        return call(self)
    guard.check_weights("get_weights", self)
    return [TableWeights.of(each) if is_kept(each) else _array(each) for each in self.weights]


def _setting_weights(call: Any, self: Any, weights: Sequence[Any]) -> None:
    if not _listed(self):
        call(self, weights)
        return
    guard.check_weights("set_weights", self)
    variables, given = list(self.weights), list(weights)
    if len(variables) != len(given):
        raise ValueError(
            f"{self.name!r} has {len(variables)} weights, tables among them. "
            f"Received: {len(given)}."
        )
    tables, dense = [], []
    for variable, value in zip(variables, given, strict=True):
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
    for variable, value in dense:
        variable.assign(value)


def _refuse_array(variable: Any, value: Any) -> NoReturn:
    raise ValueError(
        f"Weight {variable.name!r} is a table, whose rows are known by key: it takes what "
        f"get_weights() gives of a table. Received: an array of shape {np.shape(value)}. Use "
        f"{variable.kind}.assign(keys, rows) for rows of your own."
    )


def _array(weight: Any) -> np.ndarray:
    return weight.numpy()


# ---- save, save_weights, load_weights ------------------------------------------------------------


def _with_tables(
    package: str, method: str, call: Any, self: Any, /, filepath: Any, *args: Any, **kwargs: Any
) -> Any:
    tables = held.kept_tables(self)
    if not tables:
        return call(self, filepath, *args, **kwargs)
    if check_path(package, method, filepath, tables, kwargs.get("save_format")):
        return call(self, filepath, *args, **kwargs)
    guard.check_weights(method, self)
    may_skip = bool(kwargs.get("skip_mismatch"))
    with _all_done(method, tables, may_skip), _scratch(method, filepath) as path:
        return call(self, path, *args, **kwargs)


def check_path(
    package: str, method: str, filepath: Any, tables: Sequence[Any], save_format: Any = None
) -> bool:
    """Raises where a file would have no place for tables; returns whether it is a checkpoint.

    Args:
      package: name of the Keras.
      method: "save", "save_weights" or "load_weights", of a model.
      filepath, save_format: as given to it.
      tables: of the model.

    Raises:
      NotImplementedError: the format has no place for keys, or none for those of several ranks.
    """
    # tf_keras takes save_weights("x.keras") for HDF5 of an older form.
    is_older = package == "tf_keras" and method == "save_weights"
    formats = _FORMATS[1:] if is_older else _FORMATS
    if str(filepath).endswith(formats) and save_format not in ("h5", "tf"):
        return False
    if (
        package == "tf_keras"
        and method != "save"
        and guard.is_tensorflows_format(filepath, save_format)
    ):
        _refuse_several_ranks(f"{method}() in TensorFlow's format", tables)
        return True
    instead = tables[0].instead_of_save
    if is_older:
        instead = "Give save_weights() a path that ends in .weights.h5, or save() one in .keras."
    raise NotImplementedError(
        f"{method}() to this format would leave the keys of {names_of(tables)} out. "
        f"Received: filepath={str(filepath)!r}. {instead}"
    )


def _refuse_several_ranks(what: str, tables: Sequence[Any]) -> None:
    comm = other_ranks()
    if comm is not None:
        raise NotImplementedError(
            f"{what} has no place for the rows that {names_of(tables)} have on {comm.size} ranks: "
            "each would write over the others'. Have all ranks give ModelCheckpoint, save() or "
            "save_weights() one path that ends in .keras or .weights.h5, and go on from that file "
            "with load_model() or load_weights(), on any number of ranks."
        )


@contextmanager
def _scratch(method: str, filepath: Any) -> Iterator[Any]:
    """Gives where this rank reads or writes: of several the first writes, with the rows of all."""
    comm = other_ranks()
    if comm is None or not method.startswith("save"):
        yield filepath
        return
    token = _all_ranks_save.set(True)
    try:
        comm.barrier()  # no rank is still copying the older file, as BackupAndRestore does
        if comm.rank == 0:
            yield filepath
        else:
            with tempfile.TemporaryDirectory() as folder:
                yield os.path.join(folder, os.path.basename(str(filepath)))
        comm.barrier()
    finally:
        _all_ranks_save.reset(token)


def do_all_ranks_save() -> bool:
    """Whether a model is being saved by a method that every rank calls."""
    return _all_ranks_save.get()


@contextmanager
def _all_done(method: str, tables: Sequence[Any], may_skip: bool) -> Iterator[None]:
    """Raises if a table was neither saved nor loaded within; warns if it may be skipped."""
    done: list[Any] = []
    token = _done.set(done)
    try:
        yield
    finally:
        _done.reset(token)
    missing = [table for table in tables if not any(table is each for each in done)]
    if missing and may_skip:
        warnings.warn(
            f"{method}() with skip_mismatch=True has left {names_of(missing)} as it was: the file "
            "has nothing that fits. Keras says what did not.",
            stacklevel=6,
        )
    elif missing:
        raise RuntimeError(
            f"{method}() of this version of Keras has left {names_of(missing)} out: Keras finds no "
            "layer in what holds them. Keep the layer of each in an attribute of its own; the file "
            "is of no use."
        )


def _refusing_export(call: Any, self: Any, /, *args: Any, **kwargs: Any) -> Any:
    tables = held.kept_tables(self)
    if tables:
        raise NotImplementedError(
            f"export() would write a model that calls this process for {names_of(tables)}. Use "
            "sok_lite.export_serving(model, path), which needs no sok_lite where it is served."
        )
    return call(self, *args, **kwargs)


# ---- callbacks that every rank has, with one path ------------------------------------------------


def _refusing_backups(call: Any, self: Any, logs: Any = None) -> Any:
    """Of tf_keras, whose backup is a checkpoint of TensorFlow: of one rank."""
    tables = held.kept_tables(self.model)
    if tables:
        _refuse_several_ranks("BackupAndRestore of tf_keras", tables)
    return call(self, logs)


def _making_backup_folder(call: Any, self: Any, logs: Any = None) -> Any:
    """Keras 3 makes a folder where it finds none: two ranks that find none both would."""
    if _is_of_all_ranks(self):
        _check_backup_folder(self.backup_dir)
    done = call(self, logs)
    if _is_of_all_ranks(self):
        tf.io.gfile.makedirs(self.backup_dir)
    return done


def _check_backup_folder(folder: Any) -> None:
    """Raises, on all ranks, where some would restore what others do not find."""
    comm = other_ranks()
    assert comm is not None
    files = sorted(tf.io.gfile.listdir(folder)) if tf.io.gfile.isdir(folder) else []
    text = f"{str(folder)!r} with {', '.join(files) or 'no files'}"
    gathered = comm.allgatherv(np.frombuffer(text.encode(), np.uint8), call="BackupAndRestore")
    found = [part.tobytes().decode() for part in gathered.by_rank()]
    if len(set(found)) > 1:
        raise ValueError(
            "BackupAndRestore must have one folder that all ranks see, for rank 0 writes the rows "
            f"of all ranks there. Received, by rank: {'; '.join(found)}."
        )


def _deleting_backups_once(call: Any, self: Any, logs: Any = None) -> Any:
    if not _is_of_all_ranks(self):
        return call(self, logs)
    comm = other_ranks()
    assert comm is not None
    comm.barrier()  # all have written what they write there
    if comm.rank == 0:
        call(self, logs)
    comm.barrier()  # none finds it in a next `fit`
    return None


def _making_folder(call: Any, self: Any, /, filepath: Any, *args: Any, **kwargs: Any) -> None:
    """As `_making_backup_folder`, where the name of the folder is known from the start."""
    call(self, filepath, *args, **kwargs)
    folder = os.path.dirname(str(filepath))
    if folder and "{" not in folder and other_ranks() is not None:
        tf.io.gfile.makedirs(folder)


def _is_of_all_ranks(callback: Any) -> bool:
    return other_ranks() is not None and bool(held.kept_tables(callback.model))


# ---- which tables --------------------------------------------------------------------------------


def _listed(layer: Any) -> list[Any]:
    try:
        return [weight for weight in layer.weights if is_kept(weight)]
    except ValueError:  # tf_keras: there are no weights before the first batch
        return []
