"""Saves models with their tables, on one rank or on all, and loads them."""

import contextlib
import json
import os
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.bridge.keras import guard
from sok_lite.bridge.keras.classes import share_in_copies
from sok_lite.bridge.keras.held import layers_in, tables_in
from sok_lite.bridge.keras.model_folders import (
    ModelFolder,
    keep_in_folders,
    look_at_folders,
    look_in_tf_keras,
)
from sok_lite.bridge.keras.weights import check_saving
from sok_lite.bridge.serving.as_a_whole import as_a_whole
from sok_lite.bridge.serving.function import export_functions
from sok_lite.bridge.serving.models import functions_of
from sok_lite.bridge.serving.together import Ranks
from sok_lite.bridge.set_within import set_within
from sok_lite.comm import Communicator
from sok_lite.comm.header import save_by
from sok_lite.comm.protocol import broadcast_bytes
from sok_lite.dynamic_embedding.keras.layers import all_ranks_save, load_rows, save_rows
from sok_lite.dynamic_embedding.ranks import are_several, communicator
from sok_lite.dynamic_embedding.savers import FileSystemSaver
from sok_lite.dynamic_embedding.tables import HashTable
from sok_lite.dynamic_embedding.trainable import TrainableWrapper, tf1_optimizer_in
from sok_lite.engine.files.atomic_write import replacing
from sok_lite.engine.files.disk import explain_full_disk, read_arrays
from sok_lite.engine.local_path import local_path, plain_path

__all__ = ["de_hvd_save_model", "de_save_model", "load_model", "load_weights", "save_model"]

# In TensorFlow's SavedModel, the folder reserved for others.
_IN_SAVED_MODEL = Path("assets.extra") / "model.keras"
_WEIGHTS, _MODEL, _CHECKPOINT = ".weights.h5", ".keras", ".ckpt"
_OLD = (".h5", ".hdf5")
# Any other path is a SavedModel folder.
_FORMATS = (_MODEL, _WEIGHTS, _CHECKPOINT)


def de_save_model(
    model: Any,
    filepath: Any,
    overwrite: bool = True,
    include_optimizer: bool = True,
    signatures: Any = None,
    options: Any = None,
    save_traces: bool = True,
) -> None:
    """Saves a model with the tables of its layers: rows and their optimizer states.

    The model is of Keras 3 or tf_keras, with tables in layers of `de.keras.layers`. `save_traces`
    has no effect. For a folder, `model.save` and `save_model` of tf_keras do the same. On several
    ranks every rank must call it: it then equals `de_hvd_save_model`.

    Args:
      filepath: its ending selects the format: ".keras", the whole model in Keras' format;
        ".weights.h5", weights and tables; ".ckpt", a directory with a TensorFlow checkpoint; any
        other except ".h5", a directory with a SavedModel, which serves without sok_lite. It also
        contains the model in Keras' format, for `load_model` and `load_weights`. An existing target
        is replaced once everything is written.
      overwrite: False: an existing target raises.
      include_optimizer: whether to save the optimizer and its dense states. Row states are saved
        with the rows. A TF1 optimizer is saved in a ".ckpt" only.
      signatures: of the SavedModel: a tf.function with an input_signature, a concrete function, or
        a dict of these by name; None: the model's call, by its inputs or its last call.
      options: a tf.train.CheckpointOptions for ".ckpt", a tf.saved_model.SaveOptions for a
        SavedModel.

    Raises:
      NotImplementedError: a ".h5" file, a ".ckpt" of a table whose creator has a `FileSystemSaver`,
        or a variable outside layers of `de.keras.layers`.
      FileExistsError: the target exists and must not be replaced.
      TypeError: a signature or options of another type.
      ValueError: options or signatures for a format without them, or a model of unknown inputs that
        was never called.
    """
    if are_several():
        de_hvd_save_model(model, filepath, overwrite, include_optimizer, signatures, options)
        return
    path = checked_path(filepath, signatures, options)
    _check_new(path, overwrite)
    check_savable(model, path)
    functions = _functions(model, path, signatures)
    with _replaced_atomically(path, True) as whole:
        _write_served(model, whole, functions, options, None)
        _write(model, whole, include_optimizer, options)
    _remove_files_of_ranks(path, 1)


def de_hvd_save_model(
    model: Any,
    filepath: Any,
    overwrite: bool = True,
    include_optimizer: bool = True,
    signatures: Any = None,
    options: Any = None,
    save_traces: bool = True,
) -> None:
    """Saves a model on rank 0 as `de_save_model` does, and the tables of other ranks beside it.

    Every rank must call it; the path of rank 0 counts, and every rank must be able to write there.
    The tables of rank r of n go to `<filepath>.rank<r>of<n>.npz`; `load_model` and `load_weights`
    read them.

    Arguments and errors as for `de_save_model`. RuntimeError: another rank failed.
    """
    comm = communicator("de_hvd_save_model()")
    with _fail_together(comm):
        path = checked_path(filepath, signatures, options)
    path = Path(os.fsdecode(broadcast_bytes(comm, os.fsencode(path), 0)))
    with _fail_together(comm):  # no rank writes if one refuses
        check_savable(model, path)
        functions = _functions(model, path, signatures)
        if comm.rank == 0:
            _check_new(path, overwrite)
    with _fail_together(comm), contextlib.ExitStack() as stack:
        with _fail_together(comm):  # before they exchange while writing
            whole = stack.enter_context(_replaced_atomically(path, comm.rank == 0))
        _write_served(model, whole, functions, options, comm if comm.size > 1 else None)
        if comm.rank == 0:
            with set_within(all_ranks_save, True):
                _write(model, whole, include_optimizer, options)
            _remove_files_of_ranks(path, comm.size)
        else:
            _write_tables(model, _file_of_rank(path, comm))


save_model = de_save_model


def load_model(
    filepath: Any,
    custom_objects: dict[str, Any] | None = None,
    compile: bool = True,
    safe_mode: bool = True,
    *,
    package: Any = None,
) -> Any:
    """Loads what `de_save_model` or `de_hvd_save_model` wrote; each rank gets its tables.

    Args:
      filepath: a ".keras" file, or a SavedModel directory.
      custom_objects, compile, safe_mode: of Keras' `load_model`.
      package: keras or tf_keras; None: tf.keras.
    """
    path = Path(local_path(filepath, "filepath"))
    comm = _checked_ranks(path)
    models = (tf.keras if package is None else package).models
    guard.tell(share_in_copies)
    model = models.load_model(
        str(_file_in(path)), custom_objects, compile=compile, safe_mode=safe_mode
    )
    _read_tables(model, path, comm)
    return model


def load_weights(model: Any, filepath: Any, **options: Any) -> None:
    """Loads saved weights and tables into a model; each rank gets its own tables.

    The file has any format of `de_save_model`; further options are Keras'. For a folder
    `model.load_weights` does the same.

    Args:
      model: like the saved one. If it was never called, it is built like the saved one, from a
        ".keras" file or a SavedModel.

    Raises:
      ValueError: it was saved by another number of ranks, or from another model; or the model
        cannot be built and must be called first.
    """
    path = checked_path(filepath, None, None)
    comm = _checked_ranks(path)
    if path.name.endswith(_CHECKPOINT):
        _read_checkpoint(model, str(path / "ckpt"))
    else:
        file = _file_in(path)
        _build(model, file)
        _build_optimizer(model)
        model.load_weights(str(file), **options)
    _read_tables(model, path, comm)


# ---- one rank ------------------------------------------------------------------------------------


def _functions(model: Any, path: Path, signatures: Any) -> dict[str, Any]:
    """Returns the functions of a SavedModel by name; {} for other formats."""
    return {} if path.name.endswith(_FORMATS) else functions_of(model, signatures)


def _write_served(
    model: Any, path: Path, functions: dict[str, Any], options: Any, comm: Communicator | None
) -> None:
    """Writes the served part of a SavedModel. Every rank of a job must call it."""
    if functions:
        ranks = Ranks(comm)
        with ranks.together():
            export_functions(model, path, functions, ranks, options=options)


def _file_in(path: Path) -> Path:
    """Returns the file that Keras reads and writes; for a SavedModel one inside it."""
    return path if path.name.endswith(_FORMATS) else path / _IN_SAVED_MODEL


def _write(model: Any, path: Path, include_optimizer: bool, options: Any) -> None:
    path = _file_in(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.name.endswith(_CHECKPOINT):
        with _without_optimizer(model, not include_optimizer):
            _checkpoint(model).write(str(path / "ckpt"), options)
        return
    optimizer = getattr(model, "optimizer", None)
    is_of_tf1 = tf1_optimizer_in(optimizer) is not optimizer  # Keras has no format for it
    with _without_optimizer(model, is_of_tf1 or not include_optimizer):
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


def _build(model: Any, file: Path) -> None:
    """Builds a model without weights as the saved one was, or raises ValueError."""
    if _is_built(model):
        return
    config = _build_config(file)
    reason = None
    if config is not None:
        try:
            model.build_from_config(config)
        except Exception as error:
            reason = error
    if not _is_built(model):
        raise ValueError(
            f"The weights of {model.name!r} are made when it is called first. "
            f"{str(file)!r} does not say what to build it by, or it cannot be built by that. Call "
            "it on a batch, and load the weights then."
        ) from reason
    model.built = True  # Keras 3 leaves that to the first call


def _is_built(model: Any) -> bool:
    # Keras 3 builds only the layers if a model has no inputs.
    return model.built or all(layer.built for layer in layers_in(model))


def _build_config(file: Path) -> Any:
    """Returns how the model in a file was built, or None if unknown."""
    if not file.name.endswith(_MODEL):
        return None
    with zipfile.ZipFile(file) as parts:
        return json.loads(parts.read("config.json")).get("build_config")


def _build_optimizer(model: Any) -> None:
    """Creates optimizer states before the first step: Keras cannot load missing ones."""
    optimizer: Any = getattr(model, "optimizer", None)
    if model.built and hasattr(optimizer, "build") and not getattr(optimizer, "built", False):
        trained = model.trainable_variables
        optimizer.build([each for each in trained if not isinstance(each, TrainableWrapper)])


@contextlib.contextmanager
def _without_optimizer(model: Any, is_left_out: bool) -> Iterator[None]:
    """A context in which a model has no optimizer."""
    optimizer = getattr(model, "optimizer", None)
    if not is_left_out or optimizer is None:
        yield
        return
    model.optimizer = tf.Module()  # TensorFlow keeps tracking an object replaced by None
    model.optimizer = None
    model.get_compile_config = lambda: None
    try:
        yield
    finally:
        del model.get_compile_config
        model.optimizer = optimizer


# ---- the tables of other ranks -------------------------------------------------------------------


@contextlib.contextmanager
def _fail_together(comm: Communicator) -> Iterator[None]:
    """A context that ends when all ranks are done, and raises on all if one failed."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    text = b"" if failure is None else f"{type(failure).__name__}: {failure}".encode()
    texts = comm.allgatherv(np.frombuffer(text, np.uint8), call=save_by("de_hvd_save_model()"))
    if failure is not None:
        raise failure
    if len(texts.rows):
        raise RuntimeError(
            f"Another rank could not save the model: {texts.rows.tobytes().decode()}"
        )


def _file_of_rank(path: Path, comm: Communicator) -> Path:
    return path.with_name(f"{path.name}.rank{comm.rank}of{comm.size}.npz")


def _files_of_ranks(path: Path) -> list[tuple[Path, int, int]]:
    """Returns the rank files beside a file, each with its rank and number of ranks."""
    pattern = re.compile(re.escape(path.name) + r"\.rank(\d+)of(\d+)\.npz")
    folder = path.parent
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    found = [(name, pattern.fullmatch(name)) for name in names]
    return [(folder / name, int(fits[1]), int(fits[2])) for name, fits in found if fits]


def _remove_files_of_ranks(path: Path, size: int) -> None:
    """Removes our rank files that jobs of another size left beside a file."""
    for stale, _, number in _files_of_ranks(path):
        if number != size and _is_own_file(stale):
            stale.unlink()


def _is_own_file(path: Path) -> bool:
    try:
        with np.load(path) as arrays:
            return not arrays.files or "0/name" in arrays.files
    except EOFError:  # empty, so nothing is lost
        return True
    except (OSError, ValueError, zipfile.BadZipFile):
        return False


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
    num_bytes = sum(each.nbytes for each in arrays.values())
    naming = explain_full_disk(os.fspath(path), "the tables", num_bytes)
    with naming, replacing(os.path.realpath(path)) as written, open(written, "xb") as file:
        np.savez(file, **arrays)


def _read_tables(model: Any, path: Path, comm: Communicator) -> None:
    """Loads the tables of a rank other than 0."""
    if comm.rank == 0:
        return
    arrays = read_arrays(_file_of_rank(path, comm))
    variables = _variables_of(model)
    names = [params.name for params in variables]
    saved = [str(arrays[name]) for name in arrays if name.endswith("/name")]
    if names != saved:
        raise ValueError(
            f"{str(path)!r} was saved of a model with the tables {saved}. This one has {names}."
        )
    for number, params in enumerate(variables):
        start = f"{number}/"
        parts = [name for name in arrays if name.startswith(start)]
        load_rows(params, {name.removeprefix(start): arrays[name] for name in parts})


# ---- formats by ending, and what fits them -------------------------------------------------------


def checked_path(filepath: Any, signatures: Any, options: Any) -> Path:
    """Returns the path; raises if `de_save_model` cannot write this format or combination."""
    path = Path(local_path(filepath, "filepath"))
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
    if options is not None and path.name.endswith((_MODEL, _WEIGHTS)):
        raise ValueError(
            f"`options` are of checkpoints and SavedModels, {path.name!r} is none. "
            f"Received: options={options!r}. Leave them out, or save to a path that ends in .ckpt, "
            "or to one without such an end."
        )
    is_checkpoint = path.name.endswith(_CHECKPOINT)
    kind = tf.train.CheckpointOptions if is_checkpoint else tf.saved_model.SaveOptions
    if options is not None and not isinstance(options, kind):
        raise TypeError(
            f"`options` for {path.name!r} must be a {kind.__name__}. Received: {options!r}."
        )
    return path


def check_savable(model: Any, path: Path) -> None:
    """Raises if `de_save_model` could not save all of a model, whatever its training."""
    if path.name.endswith(_CHECKPOINT):
        _check_savers(model, path)
        return
    check_saving("save_model", model)
    if not path.name.endswith(_WEIGHTS):
        model.get_config()  # in Keras 3 raises for a class without a config


def _check_new(path: Path, overwrite: bool) -> None:
    """Raises FileExistsError if the target exists and must not be replaced."""
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
def _replaced_atomically(path: Path, is_written: bool) -> Iterator[Path]:
    """Yields a path to write to (if `is_written`), and moves it into place once complete."""
    if not is_written:
        yield path
        return
    whole = replacing if path.name.endswith((_MODEL, _WEIGHTS)) else as_a_whole
    with whole(os.path.realpath(path)) as part:
        yield Path(part)


# ---- by the names of Keras -----------------------------------------------------------------------


def _is_model_folder(path: Any) -> bool:
    """Whether a path, or an open file, is a SavedModel of `de_save_model`."""
    if not isinstance(path, (str, os.PathLike)):
        return False
    return (Path(plain_path(path)) / _IN_SAVED_MODEL).is_file()


guard.tell(look_at_folders, at_once=False)
look_in_tf_keras()
keep_in_folders(
    (TrainableWrapper, HashTable),
    ModelFolder(de_save_model, load_model, load_weights, _is_model_folder),
)
