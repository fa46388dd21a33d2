"""`DECheckpoint`: a `tf.train.Checkpoint` with folders for the files of variables."""

import os
from typing import Any

import tensorflow as tf

from sok_lite.bridge.keras.saving import saved_by
from sok_lite.dynamic_embedding.checkpoint_folder import WrittenFolders, folder_beside, opened
from sok_lite.dynamic_embedding.tables import HashTable
from sok_lite.dynamic_embedding.train.ranks_together import write_together


class DECheckpoint(tf.train.Checkpoint):
    """A `tf.train.Checkpoint` for variables with a `FileSystemSaver` too, of one rank or of many.

    Their files are in the folder `TFRADynamicEmbedding-<step>` beside the checkpoint of that step,
    or in `TFRADynamicEmbedding` where the name has no step. In a job of several ranks rank 0 writes
    the dense variables and every rank its files, and every rank must save and restore; all must see
    the same folder. A `tf.train.CheckpointManager` works, on every rank too: the folder of a
    checkpoint that this object has written and the manager has removed goes with the next save.

    For eager mode and tf.function. In a graph of TF1 use `DEHvdSaver`.

    Args:
      root, **kwargs: of `tf.train.Checkpoint`.
    """

    def __init__(self, root: Any = None, **kwargs: Any) -> None:
        super().__init__(root, **kwargs)
        self._written_folders = WrittenFolders()

    def save(self, file_prefix: Any, options: Any = None) -> Any:
        """Writes a checkpoint with the next number behind `file_prefix`; returns its path."""
        _refuse_background(options)
        return super().save(file_prefix, options)

    def write(self, file_prefix: Any, options: Any = None) -> Any:
        """Writes a checkpoint that is named `file_prefix`; returns its path."""
        _refuse_background(options)
        return super().write(file_prefix, options)

    # What save(), write() and a CheckpointManager come to.
    def _write(self, file_prefix: Any, options: Any = None) -> Any:
        _refuse_graphs()
        prefix = os.fspath(file_prefix)

        def write() -> Any:
            return super(DECheckpoint, self)._write(prefix, options)

        tables = [each for each in saved_by(self).values() if isinstance(each, HashTable)]
        path = write_together("de.train.Checkpoint", prefix, tables, write, self._written_folders)
        return prefix if path is None else path

    # What read() and restore() come to.
    def read(self, save_path: Any, options: Any = None) -> Any:
        """Restores what `write` has written; returns TensorFlow's load status."""
        if save_path is None:
            return super().read(save_path, options)
        _refuse_graphs()
        with opened(folder_beside(save_path)):
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
