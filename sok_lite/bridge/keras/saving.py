"""Tables of Keras models in `save`, `save_weights`, `load_weights` and checkpoints.

Keras would leave a table out of a file of an older format, or if the table's holder is not a layer.
The wrapped methods check afterwards that every table was saved or loaded. `tf.train.Checkpoint`
would miss tables in lists and dicts of Keras 3 layers, so these are added.
"""

import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import tensorflow as tf

from sok_lite.bridge.host_call import on_device
from sok_lite.bridge.job import other_ranks
from sok_lite.bridge.keras import held, hooks, model_folders
from sok_lite.bridge.keras.held import CONTAINERS, is_layer, may_hold, names_of, tables_in
from sok_lite.bridge.keras.hooks import is_loading
from sok_lite.bridge.keras.model_folders import ModelFolder
from sok_lite.bridge.keras.weights import check_saving, check_weights
from sok_lite.bridge.set_within import set_within
from sok_lite.bridge.tf_private import CHILDREN, TRACK
from sok_lite.comm.header import save_by
from sok_lite.engine.callers import warn
from sok_lite.engine.files.disk import explain_full_disk
from sok_lite.engine.foreign_keys import refuse_keys_on_several_ranks

# Public methods of models.
SAVING = ("save", "save_weights", "load_weights")

_FORMATS = (".keras", ".weights.h5")
# Whether a method that every rank calls is saving a model.
all_ranks_save: ContextVar[bool] = ContextVar("all_ranks_save", default=False)
# Whether Keras is loading weights without an optimizer.
_no_optimizer: ContextVar[bool] = ContextVar("no_optimizer", default=False)
# Variables of tables saved or loaded since the model's method was called.
_done: ContextVar[list[Any] | None] = ContextVar("tables_done", default=None)


def note(variable: Any) -> None:
    """Records that a table was saved or loaded."""
    done = _done.get()
    if done is not None:
        done.append(variable)


def restores_optimizers() -> bool:
    """Whether Keras restores optimizers, if any, with what it loads."""
    return not (_no_optimizer.get() or hooks.is_loading_uncompiled())


def wrap_files(name: str, model: Any) -> None:
    """Makes models save and load their tables, or raise."""
    for method in SAVING:
        hooks.around(model, method, _save_or_load, name, method)


def keep_tables(name: str, package: Any) -> None:
    """Makes loaded models build all layers with tables, and `export` raise."""
    hooks.around(package.Model, "export", _refuse_export)
    hooks.around(tf.lite.TFLiteConverter, "from_keras_model", hooks.checking, _refuse_lite)
    if name == "keras":
        hooks.around(package.Model, "build_from_config", _build_loaded, package)


# ---- load_model ----------------------------------------------------------------------------------


def _build_loaded(package: Any, call: Any, self: Any, config: Any) -> None:
    """Raises if Keras 3 cannot build a loaded model with tables, and so would skip layers."""
    if not (is_loading() and held.kept_tables(self)):
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


# ---- save, save_weights, load_weights ------------------------------------------------------------


def _save_or_load(
    package: str, method: str, call: Any, self: Any, /, *args: Any, **kwargs: Any
) -> Any:
    arguments = dict(zip(_names_by_place(package, method), args, strict=False)) | kwargs
    tables, filepath = held.kept_tables(self), arguments.get("filepath")
    folder = model_folders.folder_of(self)
    if folder is not None and _is_in_folder(folder, method, arguments):
        if method == "save":
            return model_folders.save(folder, self, arguments)
        return folder.load_weights(self, **arguments)
    if tables and not check_path(package, method, filepath, tables, kwargs.get("save_format")):
        check_weights(method, self)
        _check_left_out(package, method, self, arguments)
        more = args[1:] if args else ()
        rest = {name: value for name, value in kwargs.items() if name != "filepath"}
        may_skip = bool(kwargs.get("skip_mismatch"))
        left = method == "load_weights" and not _loads_optimizers(self)
        with set_within(_no_optimizer, left), _all_done(method, tables, may_skip):
            with _scratch(method, filepath, tables) as path, _naming(path, tables):
                return call(self, path, *more, **rest)
    _check_left_out(package, method, self, arguments)
    return call(self, *args, **kwargs)


def _names_by_place(package: str, method: str) -> tuple[str, ...]:
    """Returns the names of a method's positional parameters."""
    if method == "load_weights":
        return "filepath", "skip_mismatch", "by_name"
    return "filepath", "overwrite", "save_format" if package == "tf_keras" else "zipped"


def _is_in_folder(folder: ModelFolder, method: str, arguments: Mapping[str, Any]) -> bool:
    """Whether a method of a model saves it in a folder, or loads weights from one."""
    filepath = arguments.get("filepath")
    if method == "save":
        return model_folders.is_folder(filepath, arguments)
    return method == "load_weights" and folder.is_one(filepath)


def _loads_optimizers(model: Any) -> bool:
    """Whether `load_weights` restores optimizers: only built ones."""
    return any(held.BUILT_FOR in vars(each) for each in held.optimizers_in(model))


def _check_left_out(package: str, method: str, holder: Any, arguments: Mapping[str, Any]) -> None:
    """Raises if a file would lack a table."""
    filepath = arguments.get("filepath")
    if package == "tf_keras" and method != "save":
        save_format = arguments.get("save_format") if method == "save_weights" else None
        if is_tensorflows_format(filepath, save_format):
            return
    check_saving(method, holder)
    if method == "save" and arguments.get("zipped") is not False:
        _check_format(holder, filepath)


def _check_format(holder: Any, filepath: Any) -> None:
    """Raises if `save` would write a format without tables."""
    tables = [table for _, table in tables_in(holder)]
    if tables and not str(filepath).endswith(".keras") and not str(filepath).startswith("hf://"):
        raise NotImplementedError(
            f"save() to this format would leave the rows of {names_of(tables)} out. "
            f"Received: filepath={str(filepath)!r}. {tables[0].instead_of_save}"
        )


def is_tensorflows_format(filepath: Any, save_format: Any = None) -> bool:
    """Whether tf_keras writes weights as tf.train.Checkpoint does, including tables."""
    if save_format is not None:
        return save_format in ("tf", "tensorflow")
    return not str(filepath).endswith((".h5", ".hdf5", ".keras"))


def check_path(
    package: str, method: str, filepath: Any, tables: Sequence[Any], save_format: Any = None
) -> bool:
    """Raises if a file cannot hold tables; returns whether it is a checkpoint.

    `method` is "save", "save_weights" or "load_weights". NotImplementedError: the format cannot
    hold keys, or those of several ranks.
    """
    # tf_keras writes save_weights("x.keras") as HDF5 in an older format.
    is_older = package == "tf_keras" and method == "save_weights"
    formats = _FORMATS[1:] if is_older else _FORMATS
    if str(filepath).endswith(formats) and save_format not in ("h5", "tf"):
        return False
    if package == "tf_keras" and method != "save" and is_tensorflows_format(filepath, save_format):
        refuse_several_ranks(f"{method}() in TensorFlow's format", tables)
        return True
    instead = tables[0].instead_of_save
    if is_older:
        instead = "Give save_weights() a path that ends in .weights.h5, or save() one in .keras."
    raise NotImplementedError(
        f"{method}() to this format would leave the keys of {names_of(tables)} out. "
        f"Received: filepath={str(filepath)!r}. {instead}"
    )


def refuse_several_ranks(what: str, tables: Sequence[Any]) -> None:
    comm = other_ranks()
    if comm is not None:
        raise NotImplementedError(
            f"{what} has no place for the rows that {names_of(tables)} have on {comm.size} ranks: "
            "each would write over the others'. Have all ranks give ModelCheckpoint, save() or "
            "save_weights() one path that ends in .keras or .weights.h5, and go on from that file "
            "with load_model() or load_weights(), on any number of ranks."
        )


@contextmanager
def _scratch(method: str, filepath: Any, tables: Sequence[Any]) -> Iterator[Any]:
    """Yields the path for this rank: with several, rank 0 writes the file for all.

    Raises ForeignKeysError if a key is on several ranks; no file has changed.
    """
    comm = other_ranks()
    if comm is None or not method.startswith("save"):
        yield filepath
        return
    keyed, what = [each.table for each in tables], f"{method}()"
    # No rank still copies the older file, as BackupAndRestore does.
    comm.barrier(save_by(f"model.{what}"))
    on_device(keyed[0].backend, refuse_keys_on_several_ranks, keyed, comm, what)
    with set_within(all_ranks_save, True):
        if comm.rank == 0:
            yield filepath
        else:
            with tempfile.TemporaryDirectory() as folder:
                yield os.path.join(folder, os.path.basename(str(filepath)))
        comm.barrier()


def _naming(path: Any, tables: Sequence[Any]) -> AbstractContextManager[None]:
    """Names the file and the tables in the error of a full disk."""
    size = sum(each.table.store.used_bytes for each in tables if each.table.var_type != "remote")
    of = f"{size:,} bytes of rows and states on this rank"
    return explain_full_disk(str(path), f"a model with {names_of(tables)}, with {of}")


@contextmanager
def _all_done(method: str, tables: Sequence[Any], may_skip: bool) -> Iterator[None]:
    """Raises if a table is neither saved nor loaded in the block; warns if it may be skipped."""
    done: list[Any] = []
    with set_within(_done, done):
        yield
    missing = [table for table in tables if not any(table is each for each in done)]
    if missing and may_skip:
        warn(
            f"{method}() with skip_mismatch=True has left {names_of(missing)} as it was: the file "
            "has nothing that fits. Keras says what did not.",
        )
    elif missing:
        raise RuntimeError(
            f"{method}() of this version of Keras has left {names_of(missing)} out: Keras finds no "
            "layer in what holds them. Keep the layer of each in an attribute of its own; the file "
            "is of no use."
        )


def _refuse_export(call: Any, self: Any, /, *args: Any, **kwargs: Any) -> Any:
    tables = held.kept_tables(self)
    if tables:
        raise NotImplementedError(
            f"export() would write a model that calls this process for {names_of(tables)}. Use "
            "sok_lite.export_serving(model, path), which needs no sok_lite where it is served."
        )
    return call(self, *args, **kwargs)


def _refuse_lite(converter: Any, model: Any) -> None:
    """Raises before TensorFlow Lite fails to convert tables."""
    tables = [table for _, table in tables_in(model)]
    if tables:
        raise NotImplementedError(
            f"TFLiteConverter.from_keras_model() cannot convert {names_of(tables)}, whose rows are "
            "outside of TensorFlow. Call sok_lite.export_serving(model, path), and then "
            "tf.lite.TFLiteConverter.from_saved_model(path)."
        )


# ---- tf.train.Checkpoint -------------------------------------------------------------------------


def track_tables(method: str, checkpoint: Any, *_: Any, **__: Any) -> None:
    """Makes a checkpoint track the tables in lists and dicts of Keras 3 layers.

    A table's name is then the attribute's and its positions in there, joined by "-". Raises
    NotImplementedError if a table of a layer would still be missing.
    """
    while hidden := _hidden_in(checkpoint):
        for owner, name, value in hidden:
            getattr(owner, TRACK)(value, name, overwrite=True)
    saved = saved_by(checkpoint)
    layers = [value for value in saved.values() if is_layer(value)]
    missing = [table for _, table in tables_in(layers) if id(table) not in saved]
    missing = [table for table in missing if table.is_in_checkpoints]
    if missing:
        raise NotImplementedError(
            f"Checkpoint.{method.lstrip('_')}() would leave the rows of {names_of(missing)} out: "
            "TensorFlow does not find what holds them. Name them beside the model: "
            "tf.train.Checkpoint(model=model, tables=[...])."
        )


def _hidden_in(checkpoint: Any) -> list[tuple[Any, str, Any]]:
    """Returns tables, and layers with tables, that a checkpoint misses: owner, name and value."""
    saved = saved_by(checkpoint)
    return [
        (owner, name, value)
        for owner in saved.values()
        if is_layer(owner)
        for attribute, container in vars(owner).items()
        if isinstance(container, CONTAINERS)
        for name, value in _named(attribute, container)
        if id(value) not in saved and any(True for _ in tables_in(value))
    ]


def saved_by(checkpoint: Any) -> dict[int, Any]:
    """Returns what a checkpoint saves, by id."""
    saved: dict[int, Any] = {}
    stack = [checkpoint]
    while stack:
        value = stack.pop()
        if id(value) not in saved:
            saved[id(value)] = value
            stack += getattr(value, CHILDREN)().values()
    return saved


def _named(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the layers, modules and tables in lists and dicts, each with its position."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _named(f"{name}-{key}", item)
    elif isinstance(value, (list, tuple)):
        for place, item in enumerate(value):
            yield from _named(f"{name}-{place}", item)
    elif isinstance(value, (set, frozenset)):
        ordered = sorted(value, key=lambda item: str(getattr(item, "name", "")))
        yield from _named(name, ordered)
    elif may_hold(value):
        yield name, value
