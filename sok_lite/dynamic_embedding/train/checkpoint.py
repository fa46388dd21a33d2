"""`DECheckpoint` and `DEHvdSaver`: TensorFlow's own, plus folders for variable files.

Rank 0 writes the dense variables, and every rank its rows.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.bridge import job
from sok_lite.bridge.keras.saving import saved_by
from sok_lite.comm import Communicator
from sok_lite.comm.header import save_by
from sok_lite.comm.launch import launched_ranks
from sok_lite.dynamic_embedding.checkpoint_folder import WrittenFolders, folder_beside, use_folder
from sok_lite.dynamic_embedding.ranks import communicator
from sok_lite.dynamic_embedding.tables import HashTable
from sok_lite.dynamic_embedding.variable import GraphKeys
from sok_lite.engine.files.key_value_names import file_prefix


class DECheckpoint(tf.train.Checkpoint):
    """A `tf.train.Checkpoint` that also supports variables with a `FileSystemSaver`, on any ranks.

    Their files are in the folder `TFRADynamicEmbedding-<step>` beside the checkpoint of that step,
    or `TFRADynamicEmbedding` if the name has no step. Rank 0 writes the dense variables and every
    rank its files; every rank must save and restore, and see the same folder. A
    `tf.train.CheckpointManager` works too, on every rank: when it removes a checkpoint of this
    object, the next save removes the folder.

    For eager mode and tf.function. In a TF1 graph use `DEHvdSaver`.
    """

    def __init__(self, root: Any = None, **kwargs: Any) -> None:
        super().__init__(root, **kwargs)
        self._written_folders = WrittenFolders()

    def save(self, file_prefix: Any, options: Any = None) -> Any:
        """Writes a checkpoint with the next number after `file_prefix`; returns its path."""
        _refuse_background(options)
        return super().save(file_prefix, options)

    def write(self, file_prefix: Any, options: Any = None) -> Any:
        """Writes a checkpoint named `file_prefix`; returns its path."""
        _refuse_background(options)
        return super().write(file_prefix, options)

    # Called by save(), write() and CheckpointManager.
    def _write(self, file_prefix: Any, options: Any = None) -> Any:
        _refuse_graphs()
        prefix = os.fspath(file_prefix)

        def write() -> Any:
            return super(DECheckpoint, self)._write(prefix, options)

        tables = [each for each in saved_by(self).values() if isinstance(each, HashTable)]
        path = _write_together("de.train.Checkpoint", prefix, tables, write, self._written_folders)
        return prefix if path is None else path

    # Called by read() and restore().
    def read(self, save_path: Any, options: Any = None) -> Any:
        """Restores what `write` wrote; returns TensorFlow's load status."""
        if save_path is None:
            return super().read(save_path, options)
        _refuse_graphs()
        with use_folder(folder_beside(save_path)):
            return super().read(save_path, options)


def _refuse_background(options: Any) -> None:
    if options is not None and options.experimental_enable_async_checkpoint:
        raise NotImplementedError(
            "de.train.Checkpoint writes all ranks' files before it returns. Leave "
            "experimental_enable_async_checkpoint out."
        )


def _refuse_graphs() -> None:
    if not tf.executing_eagerly():
        raise NotImplementedError(
            "de.train.Checkpoint is for eager mode. In a graph of TF1 use de.train.DEHvdSaver; "
            "call it outside of a tf.function."
        )


class DEHvdSaver(tf.compat.v1.train.Saver):
    """A TF1 saver that also supports variables with a `FileSystemSaver`, on any ranks.

    Variable files are in the folder `TFRADynamicEmbedding-<step>` beside the checkpoint of that
    step. Rank 0 writes the dense variables and every rank its files; every rank must save and
    restore, and see the same folder.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_padded = bool(kwargs.get("pad_step_number", False))
        self._written_folders = WrittenFolders()

    def save(
        self, sess: Any, save_path: str, global_step: Any = None, *args: Any, **kwargs: Any
    ) -> str:
        """Writes a checkpoint and its variable files; returns their prefix, on every rank.

        Args:
          save_path: prefix of the checkpoint's name.
          global_step: a number, tensor or variable to append.
          *args, **kwargs: further ones of `tf.compat.v1.train.Saver.save`.
        """
        prefix = save_path
        if global_step is not None:
            is_number = isinstance(global_step, (int, np.integer))
            global_step = int(global_step if is_number else sess.run(global_step))
            step = f"{global_step:08d}" if self._is_padded else str(global_step)
            prefix = f"{save_path}-{step}"

        def write() -> Any:
            return super(DEHvdSaver, self).save(sess, save_path, global_step, *args, **kwargs)

        variables = sess.graph.get_collection(GraphKeys.DYNAMIC_EMBEDDING_VARIABLES)
        tables = [variable.rows for variable in variables if variable.checkpoint]
        path = _write_together("de.train.DEHvdSaver", prefix, tables, write, self._written_folders)
        return prefix if path is None else path

    def restore(self, sess: Any, save_path: str) -> None:
        """Restores a checkpoint with the variable files beside it."""
        with use_folder(folder_beside(save_path)):
            super().restore(sess, save_path)


# ---- one checkpoint of all ranks -----------------------------------------------------------------


def _write_together(
    what: str,
    prefix: str,
    tables: Iterable[HashTable],
    write: Callable[[], Any],
    written: WrittenFolders,
) -> Any:
    """Writes a checkpoint and its variable files. Every rank must call it.

    It returns when all ranks have written. If one fails, it raises on all.

    Args:
      what: names the caller in errors.
      write: writes the checkpoint with its files; called on rank 0.

    Returns:
      The result of `write`; None on other ranks.

    Raises:
      ValueError: several ranks and a variable without a `FileSystemSaver`, or two of one name.
      RuntimeError: another rank failed.
    """
    tables = list(tables)
    _check_names(what, tables)
    if launched_ranks() > 1:
        communicator(what)  # connects them if needed
    comm = job.other_ranks()
    with use_folder(folder_beside(prefix)):
        if comm is None:
            result = write()
        else:
            result = _on_all(comm, what, tables, write)
    if comm is None or comm.rank == 0:
        written.note(prefix)
    return result


def _on_all(
    comm: Communicator, what: str, tables: list[HashTable], write: Callable[[], Any]
) -> Any:
    result, failure = None, None
    try:
        _check_have_files(what, tables)
        if comm.rank == 0:
            result = write()
        else:
            # Tensors must have values here, in a TF1 graph too.
            with tf.__internal__.eager_context.eager_mode():
                for table in tables:
                    table.files.write()
    except Exception as error:  # the others wait for this rank
        failure = error
    failed = comm.allgatherv(np.array([failure is not None]), call=save_by(what)).rows
    if failure is not None:
        raise failure
    if failed.any():
        raise RuntimeError(
            f"{what}: the checkpoint is not complete, for rank {int(np.argmax(failed))} has failed "
            "to write its part. See its error."
        )
    return result


def _check_names(what: str, tables: Iterable[HashTable]) -> None:
    """Raises ValueError if two tables would have the same files."""
    names = Counter(file_prefix(table.table.name) for table in tables if table.files is not None)
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        raise ValueError(
            f"{what}: each variable with a FileSystemSaver needs a name of its own, for its files. "
            f"Received: several of {twice[0]!r}. Give `name` to each variable, or layer."
        )


def _check_have_files(what: str, tables: Iterable[HashTable]) -> None:
    without = [table.table.name for table in tables if table.files is None]
    if without:
        raise ValueError(
            f"{what} on several ranks needs a FileSystemSaver for every variable, for each rank "
            f"has rows of its own. Received: {', '.join(map(repr, without))} without one. Make it "
            "with kv_creator=de.CuckooHashTableCreator(saver=de.FileSystemSaver())."
        )
