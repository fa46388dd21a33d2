"""The formats that models are saved in, by the end of a path: what fits one, and what does not."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf

from sok_lite.bridge.keras.held import tables_in
from sok_lite.bridge.keras.weights import check_saving
from sok_lite.bridge.serving.as_a_whole import as_a_whole
from sok_lite.dynamic_embedding.savers import FileSystemSaver
from sok_lite.dynamic_embedding.trainable import TrainableWrapper
from sok_lite.engine.files.beside import in_place_of
from sok_lite.engine.local_path import local_path

WEIGHTS, MODEL, CHECKPOINT = ".weights.h5", ".keras", ".ckpt"
_OLD = (".h5", ".hdf5")
# Any other path is a folder with TensorFlow's SavedModel.
FORMATS = (MODEL, WEIGHTS, CHECKPOINT)


def checked_path(filepath: Any, signatures: Any, options: Any) -> Path:
    """Returns the path, or raises where `de_save_model` writes no such format, or not with these.

    The arguments are those of `de_save_model`.
    """
    path = Path(local_path(filepath, "filepath"))
    if path.suffix in _OLD and not path.name.endswith(WEIGHTS):
        raise NotImplementedError(
            f"Keras' older format cannot hold a table. Received: filepath={str(filepath)!r}. Save "
            "to a path that ends in .keras (the model), .weights.h5 (weights and tables) or .ckpt "
            "(a directory with a checkpoint), or in none of these (a directory with a SavedModel)."
        )
    if signatures is not None and path.name.endswith(FORMATS):
        raise ValueError(
            f"`signatures` are of TensorFlow's SavedModel, {path.name!r} is none. "
            f"Received: signatures={signatures!r}. Leave them out, or save to a path without such "
            "an end."
        )
    if options is not None and path.name.endswith((MODEL, WEIGHTS)):
        raise ValueError(
            f"`options` are of checkpoints and SavedModels, {path.name!r} is none. "
            f"Received: options={options!r}. Leave them out, or save to a path that ends in .ckpt, "
            "or to one without such an end."
        )
    is_checkpoint = path.name.endswith(CHECKPOINT)
    kind = tf.train.CheckpointOptions if is_checkpoint else tf.saved_model.SaveOptions
    if options is not None and not isinstance(options, kind):
        raise TypeError(
            f"`options` for {path.name!r} must be a {kind.__name__}. Received: {options!r}."
        )
    return path


def check_savable(model: Any, path: Path) -> None:
    """Raises if `de_save_model` could not save all of a model, whatever it is trained to be.

    Args:
      path: as `checked_path` gives it.
    """
    if path.name.endswith(CHECKPOINT):
        _check_savers(model, path)
        return
    check_saving("save_model", model)
    if not path.name.endswith(WEIGHTS):
        model.get_config()  # of Keras 3, raises where a class does not say what it was made with


def check_new(path: Path, overwrite: bool) -> None:
    """Raises FileExistsError where something is that is not to be replaced."""
    if not overwrite and path.exists():
        raise FileExistsError(f"{str(path)!r} exists, and is not to be replaced: overwrite=False.")


def _check_savers(model: Any, path: Path) -> None:
    params = [table.params for _, table in tables_in(model) if isinstance(table, TrainableWrapper)]
    elsewhere = [p.name for p in params if isinstance(p.kv_creator.saver, FileSystemSaver)]
    if elsewhere:
        raise NotImplementedError(
            f"{path.name!r} would not have the rows of {elsewhere}: their FileSystemSaver keeps "
            "them in other files. Save with de.train.Checkpoint, or to a path that ends in .keras "
            "or .weights.h5."
        )


@contextlib.contextmanager
def written_as_a_whole(path: Path, is_written: bool) -> Iterator[Path]:
    """Gives where a model is written, which takes its place when all of it is there.

    Args:
      path: as `checked_path` gives it.
      is_written: False: this rank writes none.
    """
    if not is_written:
        yield path
        return
    whole = in_place_of if path.name.endswith((MODEL, WEIGHTS)) else as_a_whole
    with whole(os.path.realpath(path)) as part:
        yield Path(part)
