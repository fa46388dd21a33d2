"""`DEHvdSaver`: a `tf.compat.v1.train.Saver` with folders for the files of variables."""

from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.dynamic_embedding.checkpoint_folder import WrittenFolders, folder_beside, opened
from sok_lite.dynamic_embedding.train.ranks_together import write_together
from sok_lite.dynamic_embedding.variable import GraphKeys


class DEHvdSaver(tf.compat.v1.train.Saver):
    """A saver of TF1 for variables with a `FileSystemSaver` too, of one rank or of many.

    The files of variables are in the folder `TFRADynamicEmbedding-<step>` beside the checkpoint of
    that step. In a job of several ranks rank 0 writes the dense variables and every rank its files:
    every rank must save and restore, and all must see the same folder.

    Args:
      *args, **kwargs: of `tf.compat.v1.train.Saver`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_padded = bool(kwargs.get("pad_step_number", False))
        self._written_folders = WrittenFolders()

    def save(
        self, sess: Any, save_path: str, global_step: Any = None, *args: Any, **kwargs: Any
    ) -> str:
        """Writes a checkpoint, and the files of variables beside it.

        Args:
          sess: the session.
          save_path: what the checkpoint's name begins with.
          global_step: a number, tensor or variable that is put behind it.
          *args, **kwargs: further ones of `tf.compat.v1.train.Saver.save`.

        Returns:
          What the checkpoint's files start with, on every rank.
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
        path = write_together("de.train.DEHvdSaver", prefix, tables, write, self._written_folders)
        return prefix if path is None else path

    def restore(self, sess: Any, save_path: str) -> None:
        """Restores a checkpoint, with the files of variables beside it."""
        with opened(folder_beside(save_path)):
            super().restore(sess, save_path)
