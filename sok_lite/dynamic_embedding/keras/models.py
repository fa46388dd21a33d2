"""Saving models with their tables, on one rank or on all, and loading them."""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.bridge.serving.function import export_functions
from sok_lite.bridge.serving.models import functions_of
from sok_lite.bridge.serving.together import Ranks
from sok_lite.comm import Communicator
from sok_lite.dynamic_embedding.keras.stored import all_ranks_save, load_rows, save_rows
from sok_lite.dynamic_embedding.ranks import communicator
from sok_lite.dynamic_embedding.savers import FileSystemSaver
from sok_lite.dynamic_embedding.trainable import TrainableWrapper

__all__ = ["de_hvd_save_model", "de_save_model", "load_model", "load_weights", "save_model"]

_WEIGHTS, _MODEL, _CHECKPOINT = ".weights.h5", ".keras", ".ckpt"
_OLD = (".h5", ".hdf5")
_FORMATS = (_MODEL, _WEIGHTS, _CHECKPOINT)
# Of TensorFlow's SavedModel: a folder that it leaves to others.
_IN_SAVED_MODEL = Path("assets.extra") / "model.keras"


def de_save_model(
    model: Any,
    filepath: Any,
    overwrite: bool = True,
    include_optimizer: bool = True,
    signatures: Any = None,
    options: Any = None,
    save_traces: bool = True,
) -> None:
    """Saves a model with the tables of its layers: rows, and their optimizer states.

    Args:
      model: of Keras 3 or tf_keras, whose tables are in layers of `de.keras.layers`.
      filepath: its end says what is written: ".keras", the whole model in Keras' format;
        ".weights.h5", weights and tables; ".ckpt", a directory with a TensorFlow checkpoint; any
        other but ".h5", a directory with TensorFlow's SavedModel, which needs no sok_lite to be
        served, see `sok_lite.export_serving`. `load_model` and `load_weights` read it as well: the
        model in Keras' format is in it.
      overwrite: False: what is there is not replaced.
      include_optimizer: whether the optimizer and its dense states are saved. States of rows go
        with the rows.
      signatures: of the SavedModel: a tf.function with an input_signature, or a dict of those by
        name; None: the model's call, by its inputs.
      options: a tf.train.CheckpointOptions, of ".ckpt".
      save_traces: not used: a SavedModel has what its signatures need.

    Raises:
      NotImplementedError: a ".h5" file, or a ".ckpt" of a table whose creator has a
        `FileSystemSaver`.
      FileExistsError: something is there that is not to be replaced.
      TypeError: a signature that is no such function.
      ValueError: options or signatures for a format that has none, or a model that does not say
        what it takes.
    """
    path = _checked(filepath, signatures, options)
    _check_new(path, overwrite)
    _check_savers(model, path)
    _write(model, path, include_optimizer, options)
    _write_served(model, path, signatures, None)
    for stale, _, _ in _files_of_ranks(path):
        stale.unlink()


def de_hvd_save_model(
    model: Any,
    filepath: Any,
    overwrite: bool = True,
    include_optimizer: bool = True,
    signatures: Any = None,
    options: Any = None,
    save_traces: bool = True,
) -> None:
    """Does what `de_save_model` does on rank 0, and saves the tables of each other rank beside it.

    Every rank must call it, with the same path, where all can write. Rank r of n has its tables in
    `<filepath>.rank<r>of<n>.npz`; `load_model` and `load_weights` read them.

    Args, raises: as of `de_save_model`; RuntimeError where another rank could not do its part.
    """
    path = _checked(filepath, signatures, options)
    comm = communicator("de_hvd_save_model()")
    with _together(comm):  # nobody writes where another refuses
        _check_savers(model, path)
        if comm.rank == 0:
            _check_new(path, overwrite)
    with _together(comm):
        if comm.rank == 0:
            with all_ranks_save():
                _write(model, path, include_optimizer, options)
            for stale, _, size in _files_of_ranks(path):
                if size != comm.size:
                    stale.unlink()
        else:
            _write_tables(model, _file_of_rank(path, comm))
    _write_served(model, path, signatures, comm if comm.size > 1 else None)


save_model = de_save_model


def load_model(
    filepath: Any,
    custom_objects: dict[str, Any] | None = None,
    compile: bool = True,
    safe_mode: bool = True,
    *,
    package: Any = None,
) -> Any:
    """Loads what `de_save_model` or `de_hvd_save_model` wrote; each rank has its tables again.

    Args:
      filepath: a ".keras" file, or a directory with a SavedModel.
      custom_objects, compile, safe_mode: see `tf.keras.models.load_model`.
      package: keras or tf_keras; None: tf.keras.

    Raises:
      ValueError: it was saved by another number of ranks.
    """
    path = Path(os.fspath(filepath))
    comm = _checked_ranks(path)
    models = (tf.keras if package is None else package).models
    model = models.load_model(
        str(_file_in(path)), custom_objects, compile=compile, safe_mode=safe_mode
    )
    _read_tables(model, path, comm)
    return model


def load_weights(model: Any, filepath: Any) -> None:
    """Gives a model the weights and tables that were saved; each rank has its own tables again.

    Args:
      model: like the one that was saved. A model that was called once has weights.
      filepath: what was saved, of any of the formats of `de_save_model`.

    Raises:
      ValueError: it was saved by another number of ranks, or of another model.
    """
    path = _checked(filepath, None, None)
    comm = _checked_ranks(path)
    if path.name.endswith(_CHECKPOINT):
        _read_checkpoint(model, str(path / "ckpt"))
    else:
        _build_optimizer(model)
        model.load_weights(str(_file_in(path)))
    _read_tables(model, path, comm)


# ---- one rank ------------------------------------------------------------------------------------


def _checked(filepath: Any, signatures: Any, options: Any) -> Path:
    path = Path(os.fspath(filepath))
    if path.suffix in _OLD and not path.name.endswith(_WEIGHTS):
        raise NotImplementedError(
            f"Keras' older format cannot hold a table. Received: filepath={str(filepath)!r}. Save "
            "to a path that ends in .keras (the model), .weights.h5 (weights and tables) or .ckpt "
            "(a directory with a checkpoint), or in none of these (a directory with a SavedModel)."
        )
    if signatures is not None and path.name.endswith(_FORMATS):
        raise ValueError(
            f"`signatures` are of TensorFlow's SavedModel, {path.name!r} is none. "
            f"Received: signatures={signatures!r}. Leave them out, or save to a path without such "
            "an end."
        )
    if options is not None and not path.name.endswith(_CHECKPOINT):
        raise ValueError(
            f"`options` are of checkpoints, {path.name!r} is none. Received: options={options!r}. "
            "Leave them out, or save to a path that ends in .ckpt."
        )
    return path


def _check_new(path: Path, overwrite: bool) -> None:
    if not overwrite and path.exists():
        raise FileExistsError(f"{str(path)!r} exists, and is not to be replaced: overwrite=False.")


def _check_savers(model: Any, path: Path) -> None:
    if not path.name.endswith(_CHECKPOINT):
        return
    elsewhere = [
        params.name
        for params in _variables_of(model)
        if isinstance(params.kv_creator.saver, FileSystemSaver)
    ]
    if elsewhere:
        raise NotImplementedError(
            f"{path.name!r} would not have the rows of {elsewhere}: their FileSystemSaver keeps "
            "them in other files. Save with de.train.Checkpoint, or to a path that ends in .keras "
            "or .weights.h5."
        )


def _write_served(model: Any, path: Path, signatures: Any, comm: Communicator | None) -> None:
    """Writes what is served of a SavedModel. Every rank of the job must call it, if it has any."""
    if not path.name.endswith(_FORMATS):
        ranks = Ranks(comm)
        with ranks.together():
            export_functions(model, path, functions_of(model, signatures), ranks)


def _file_in(path: Path) -> Path:
    """Returns what Keras reads and writes: of a SavedModel a file in it."""
    return path if path.name.endswith(_FORMATS) else path / _IN_SAVED_MODEL


def _write(model: Any, path: Path, include_optimizer: bool, options: Any) -> None:
    path = _file_in(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.name.endswith(_CHECKPOINT):
        with _without_optimizer(model, not include_optimizer):
            _checkpoint(model).write(str(path / "ckpt"), options)
        return
    with _without_optimizer(model, not include_optimizer):
        if path.name.endswith(_WEIGHTS):
            model.save_weights(str(path), overwrite=True)
        else:
            model.save(str(path), overwrite=True)


def _checkpoint(model: Any) -> tf.train.Checkpoint:
    optimizer = getattr(model, "optimizer", None)
    more = {} if optimizer is None else {"optimizer": optimizer}
    return tf.train.Checkpoint(model=model, **more)


def _read_checkpoint(model: Any, path: str) -> None:
    has_optimizer = any(name.startswith("optimizer/") for name, _ in tf.train.list_variables(path))
    with _without_optimizer(model, not has_optimizer):
        status = _checkpoint(model).read(path)
        status.assert_existing_objects_matched().expect_partial()


def _build_optimizer(model: Any) -> None:
    """Makes the states of an optimizer before its first step: Keras loads none that is missing."""
    optimizer: Any = getattr(model, "optimizer", None)
    if model.built and hasattr(optimizer, "build") and not getattr(optimizer, "built", False):
        trained = model.trainable_variables
        optimizer.build([each for each in trained if not isinstance(each, TrainableWrapper)])


@contextlib.contextmanager
def _without_optimizer(model: Any, is_left_out: bool) -> Iterator[None]:
    """Has a model be as if it was never compiled."""
    optimizer = getattr(model, "optimizer", None)
    if not is_left_out or optimizer is None:
        yield
        return
    model.optimizer = tf.Module()  # TensorFlow goes on tracking what is replaced by None
    model.optimizer = None
    model.get_compile_config = lambda: None
    try:
        yield
    finally:
        del model.get_compile_config
        model.optimizer = optimizer


# ---- the tables of other ranks -------------------------------------------------------------------


@contextlib.contextmanager
def _together(comm: Communicator) -> Iterator[None]:
    """Ends when all ranks have done what is inside, and raises on all where one has failed."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    text = b"" if failure is None else f"{type(failure).__name__}: {failure}".encode()
    texts = comm.allgatherv(np.frombuffer(text, np.uint8), call="de_hvd_save_model")
    if failure is not None:
        raise failure
    if len(texts.rows):
        raise RuntimeError(
            f"Another rank could not save the model: {texts.rows.tobytes().decode()}"
        )


def _file_of_rank(path: Path, comm: Communicator) -> Path:
    return path.with_name(f"{path.name}.rank{comm.rank}of{comm.size}.npz")


def _files_of_ranks(path: Path) -> list[tuple[Path, int, int]]:
    """Returns the files of ranks beside a file: each with its rank and the number of ranks."""
    pattern = re.compile(re.escape(path.name) + r"\.rank(\d+)of(\d+)\.npz")
    folder = path.parent
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    found = [(name, pattern.fullmatch(name)) for name in names]
    return [(folder / name, int(fits[1]), int(fits[2])) for name, fits in found if fits]


def _checked_ranks(path: Path) -> Communicator:
    comm = communicator("Loading a model")
    sizes = {size for _, _, size in _files_of_ranks(path)} or {1}
    if sizes != {comm.size}:
        saved = " and ".join(str(size) for size in sorted(sizes))
        raise ValueError(
            f"{str(path)!r} was saved by {saved} ranks, and there are {comm.size}: each rank loads "
            "the tables that it saved. Start as many ranks."
        )
    return comm


def _variables_of(model: Any) -> list[Any]:
    """Returns the variables of a model's tables, each once, in the order of its weights."""
    shadows = [each for each in model.weights if isinstance(each, TrainableWrapper)]
    return list({id(shadow.params): shadow.params for shadow in shadows}.values())


def _write_tables(model: Any, path: Path) -> None:
    arrays: dict[str, Any] = {}
    for number, params in enumerate(_variables_of(model)):
        arrays[f"{number}/name"] = np.array(params.name)
        store: dict[str, np.ndarray] = {}
        save_rows(params, store)
        arrays |= {f"{number}/{part}": array for part, array in store.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name(f"{path.name}.part")
    with open(written, "wb") as file:
        np.savez(file, **arrays)
    os.replace(written, path)


def _read_tables(model: Any, path: Path, comm: Communicator) -> None:
    """Gives a rank that is not the first its tables."""
    if comm.rank == 0:
        return
    with np.load(_file_of_rank(path, comm)) as arrays:
        variables = _variables_of(model)
        names = [params.name for params in variables]
        saved = [str(arrays[name]) for name in arrays.files if name.endswith("/name")]
        if names != saved:
            raise ValueError(
                f"{str(path)!r} was saved of a model with the tables {saved}. This one has {names}."
            )
        for number, params in enumerate(variables):
            start = f"{number}/"
            parts = [name for name in arrays.files if name.startswith(start)]
            load_rows(params, {name.removeprefix(start): arrays[name] for name in parts})
