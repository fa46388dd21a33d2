"""Folders in which an API keeps Keras models with tables, through Keras' own functions.

A SavedModel of TensorFlow or tf_keras cannot hold tables. An API that can write one registers here:
then it implements `model.save(folder)`, `model.load_weights(folder)` and
`tf.saved_model.save(model, folder)`, and with tf_keras also `save_model(model, folder)` and
`load_model(folder)`. Keras 3 has no SavedModels: its two functions raise first.
"""

import contextlib
import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from sok_lite.bridge.keras import held, hooks
from sok_lite.bridge.tf_private import SAVED_MODELS, SAVED_MODELS_OF_TF_KERAS


class ModelFolder(NamedTuple):
    """An API's functions for folders of models.

    Attributes:
      save: takes a model, a path, and tf_keras' `save_model` arguments for a SavedModel.
      load_model: takes a path, `custom_objects`, `compile`, `safe_mode` and `package`, a Keras.
      load_weights: takes a model, a path, and the arguments of Keras' `load_weights`.
      is_one: whether there is such a folder at a path.
    """

    save: Callable[..., None]
    load_model: Callable[..., Any]
    load_weights: Callable[..., Any]
    is_one: Callable[[Any], bool]


# Endings of other Keras formats, and of TensorFlow's checkpoints.
_ENDS = (".keras", ".h5", ".hdf5", ".ckpt")

_models: list[type] = []
# By the classes of the tables.
_folders: dict[tuple[type, ...], ModelFolder] = {}


def keep_in_folders(tables: tuple[type, ...], folder: ModelFolder) -> None:
    """Saves models in folders if all their tables are of some classes."""
    _folders[tables] = folder


def look_at_folders(name: str, package: Any) -> None:
    """Makes TensorFlow and tf_keras save and load such folders; for `guard.tell`."""
    _models.append(package.Model)
    hooks.around(*SAVED_MODELS, _export_model)
    if name == "tf_keras":
        look_in_tf_keras()


def look_in_tf_keras() -> None:
    """Makes tf_keras use such folders: a program may load a model before it creates a table."""
    if "tf_keras" not in sys.modules:
        return
    with contextlib.suppress(ImportError):  # another version
        module = importlib.import_module(SAVED_MODELS_OF_TF_KERAS)
        hooks.around(module, "save_model", _save_model)
        hooks.around(module, "load_model", _load_model)


def folder_of(model: Any) -> ModelFolder | None:
    """Returns the folder functions for a model's tables; None if it has none, or others."""
    tables = [table for _, table in held.tables_in(model)]
    for classes, folder in _folders.items():
        if tables and all(isinstance(table, classes) for table in tables):
            return folder
    return None


def is_folder(filepath: Any, options: Mapping[str, Any]) -> bool:
    """Whether the arguments of `save` mean a SavedModel; `options` are those by name."""
    path, save_format = str(filepath), options.get("save_format")
    if path.endswith(_ENDS) or path.startswith("hf://") or options.get("zipped") is False:
        return False
    return not save_format or save_format in ("tf", "tensorflow")


def save(folder: ModelFolder, model: Any, arguments: Mapping[str, Any]) -> None:
    """Saves a model in a folder, with the arguments of Keras' method."""
    ours = {
        name: value for name, value in arguments.items() if name not in ("save_format", "zipped")
    }
    folder.save(model, **ours)


def _save_model(call: Any, model: Any, filepath: Any, /, *args: Any, **kwargs: Any) -> Any:
    folder = folder_of(model)
    if folder is None or not is_folder(filepath, kwargs):
        return call(model, filepath, *args, **kwargs)
    return save(folder, model, {"filepath": filepath, **kwargs})


def _load_model(call: Any, filepath: Any, /, *args: Any, **kwargs: Any) -> Any:
    folder = next((each for each in _folders.values() if each.is_one(filepath)), None)
    if folder is None:
        return call(filepath, *args, **kwargs)
    known = ("custom_objects", "compile")
    ours: dict[str, Any] = {name: kwargs[name] for name in known if name in kwargs}
    # tf_keras does not pass on its other arguments.
    ours["safe_mode"] = hooks.is_loading_safely()
    return folder.load_model(filepath, **ours, package=sys.modules["tf_keras"])


def _export_model(
    call: Any,
    obj: Any,
    export_dir: Any,
    signatures: Any = None,
    options: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Wraps the function behind `tf.saved_model.save`, which returns the saved nodes."""
    folder = folder_of(obj) if isinstance(obj, tuple(_models)) else None
    if folder is None:
        return call(obj, export_dir, signatures, options, *args, **kwargs)
    folder.save(obj, export_dir, signatures=signatures, options=options)
    return [], {}
