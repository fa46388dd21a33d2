"""Keras' callbacks with tables: which need help, and what is rejected before `fit` begins.

A callback that cannot save a table would fail only after the first epoch, which may take hours; an
optimizer that cannot train one, only after the first batch has inserted its keys.
"""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import tensorflow as tf

from sok_lite.bridge.job import other_ranks
from sok_lite.bridge.keras import held, hooks
from sok_lite.bridge.keras.held import kept_tables, names_of
from sok_lite.bridge.keras.saving import check_path, refuse_several_ranks
from sok_lite.bridge.keras.training import has_custom_step
from sok_lite.bridge.optimizers.loss_scale import inner_of
from sok_lite.bridge.optimizers.settings import refuse_unsupported
from sok_lite.comm import Communicator
from sok_lite.comm.protocol import allgather_texts
from sok_lite.engine.callers import warn

# Each row becomes a column of pixels, at most so many in a PNG.
_MOST_ROWS_OF_AN_IMAGE = 1_000_000
# Attribute of Horovod's callback that broadcasts one rank's weights.
_BROADCASTS = "broadcast_done"


def help_callbacks(name: str, package: Any) -> None:
    """Adapts callbacks of a Keras to tables: TensorBoard, and files of several ranks."""
    callbacks = package.callbacks
    hooks.around(callbacks.TensorBoard, "on_epoch_end", _show_rows)
    backup = callbacks.BackupAndRestore
    if name == "tf_keras":
        hooks.around(backup, "on_train_begin", _refuse_backups)
    else:
        hooks.around(backup, "on_train_begin", _make_backup_folder)
        hooks.around(backup, "on_train_end", _delete_backups_once)
        hooks.around(callbacks.ModelCheckpoint, "__init__", _make_folder)


def _show_rows(call: Any, self: Any, epoch: int, logs: Any = None) -> Any:
    if not self.histogram_freq or epoch % self.histogram_freq != 0:
        return call(self, epoch, logs)
    write_images, tables = self.write_images, kept_tables(self.model)
    unfit = [table for table in tables if not 0 < table.shape[0] <= _MOST_ROWS_OF_AN_IMAGE]
    if write_images and unfit:
        self.write_images = False
        warn(
            f"TensorBoard writes no images in this epoch: {names_of(unfit)} would be one of no "
            f"row or of more than {_MOST_ROWS_OF_AN_IMAGE:,}.",
        )
    try:
        with ExitStack() as stack:
            for table in tables:
                stack.enter_context(table.showing_rows())
            return call(self, epoch, logs)
    finally:
        self.write_images = write_images


def check_fit(model: Any, package: Any, callbacks: Sequence[Any], tables: Sequence[Any]) -> None:
    """Raises if a callback of Keras cannot handle tables, or the optimizer cannot train them.

    NotImplementedError: a ModelCheckpoint in an unsupported format, an OrbaxCheckpoint, Horovod's
    callback that broadcasts weights, or an optimizer setting without effect on rows (`use_ema`).
    """
    optimizer = getattr(model, "optimizer", None)
    is_trained = any(table.trainable for table in tables)
    if optimizer is not None and has_custom_step(model) and is_trained:
        refuse_unsupported(inner_of(optimizer))
    orbax = getattr(package.callbacks, "OrbaxCheckpoint", ())
    for callback in callbacks:
        if type(callback) is package.callbacks.ModelCheckpoint:  # a subclass may save otherwise
            method = "save_weights" if callback.save_weights_only else "save"
            check_path(package.__name__, method, callback.filepath, tables)
        elif isinstance(callback, orbax):
            raise NotImplementedError(
                f"OrbaxCheckpoint saves dense values alone, and would lose the keys of "
                f"{names_of(tables)}. Use ModelCheckpoint with a path that ends in .keras or "
                ".weights.h5."
            )
        elif held.is_horovods(type(callback)) and hasattr(callback, _BROADCASTS):
            raise NotImplementedError(
                f"{type(callback).__name__} of Horovod reads every weight as a dense tensor, and "
                f"{names_of(tables)} is none: its rows are spread over the ranks. Give fit() "
                "sok_lite.keras.AllRanks() in its place, as the first callback."
            )


# ---- files of all ranks in one path --------------------------------------------------------------


def _refuse_backups(call: Any, self: Any, logs: Any = None) -> Any:
    """Rejects several ranks in tf_keras, whose backup is a TensorFlow checkpoint of one rank."""
    tables = held.kept_tables(self.model)
    if tables:
        refuse_several_ranks("BackupAndRestore of tf_keras", tables)
    return call(self, logs)


def _make_backup_folder(call: Any, self: Any, logs: Any = None) -> Any:
    """Makes the backup folder on all ranks: Keras 3 fails if two ranks make it at once."""
    comm = _ranks_of(self)
    if comm is not None:
        _check_backup_folder(comm, self.backup_dir)
    done = call(self, logs)
    if comm is not None:
        tf.io.gfile.makedirs(self.backup_dir)
    return done


def _check_backup_folder(comm: Communicator, folder: Any) -> None:
    """Raises, on all ranks, if ranks see different files and so would restore differently."""
    files = sorted(tf.io.gfile.listdir(folder)) if tf.io.gfile.isdir(folder) else []
    text = f"{str(folder)!r} with {', '.join(files) or 'no files'}"
    found = allgather_texts(comm, text, "BackupAndRestore")
    if len(set(found)) > 1:
        raise ValueError(
            "BackupAndRestore must have one folder that all ranks see, for rank 0 writes the rows "
            f"of all ranks there. Received, by rank: {'; '.join(found)}."
        )


def _delete_backups_once(call: Any, self: Any, logs: Any = None) -> Any:
    comm = _ranks_of(self)
    if comm is None:
        return call(self, logs)
    comm.barrier()  # all have finished writing
    if comm.rank == 0:
        call(self, logs)
    comm.barrier()  # none finds it in a later `fit`
    return None


def _make_folder(call: Any, self: Any, /, filepath: Any, *args: Any, **kwargs: Any) -> None:
    """Makes the folder of a ModelCheckpoint on each rank, if its name is known."""
    call(self, filepath, *args, **kwargs)
    folder = os.path.dirname(str(filepath))
    if folder and "{" not in folder and other_ranks() is not None:
        tf.io.gfile.makedirs(folder)


def _ranks_of(callback: Any) -> Communicator | None:
    """Returns the ranks, if there are several and the callback's model has tables; else None."""
    comm = other_ranks()
    return comm if comm is not None and held.kept_tables(callback.model) else None
