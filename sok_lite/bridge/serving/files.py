"""The variables of an exported model as files, written while their values are read.

TensorFlow writes only variables that it holds as a whole. So the variables of tables hold nothing:
parts of their values go to separate files, like the slices of a partitioned variable, and are
merged into the model's checkpoint at the end. Readers get whole variables.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.bridge.tensor import to_tensor
from sok_lite.bridge.tf_private import eager_mode

# Bytes of values held before they are written, and sent from one rank to another.
PIECE_BYTES = 32 << 20
# Of a large model a 1/100 is held: a reader opens all files, and often may open only 1,024.
_MOST_PARTS = 100


class VariableFiles:
    """Files beside a model that is being written, in a new folder of its file system."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._waiting: list[tuple[str, str, tf.Tensor]] = []
        self._waiting_bytes = self._written_bytes = 0
        self._prefixes: list[str] = []

    def add(self, name: str, values: tf.Tensor, first: int, num_rows: int) -> None:
        """Writes rows of a variable, now or later.

        `values` (n, ...) begin with row `first`; each row comes in one call only. In parts no
        float16 and no unsigned integers of 16 bits or more: TensorFlow does not merge them.
        """
        part = ""
        if values.shape.rank and values.shape[0] < num_rows:
            shape = " ".join(map(str, [num_rows, *values.shape[1:]]))
            others = ":-" * (values.shape.rank - 1)
            part = f"{shape} {first},{values.shape[0]}{others}"
        self._waiting.append((name, part, values))
        if values.dtype != tf.string:
            self._waiting_bytes += values.shape.num_elements() * values.dtype.size
        if self._waiting_bytes >= max(PIECE_BYTES, self._written_bytes // _MOST_PARTS):
            self._write()

    def merge_into(self, prefix: str) -> None:
        """Merges them into a checkpoint, which may have its own files; raises tf.errors.OpError."""
        self._write()
        if not self._prefixes:  # a model without tables
            return
        prefixes = list(self._prefixes)
        folder, name = os.path.split(prefix)
        tf.io.gfile.makedirs(folder)
        for file in tf.io.gfile.listdir(folder):
            if file.startswith(f"{name}."):
                own = f"{self._folder}/own{file[len(name) :]}"
                tf.io.gfile.rename(f"{folder}/{file}", own, overwrite=True)
                if file.endswith(".index"):
                    prefixes.append(f"{self._folder}/own")
        with eager_mode(), tf.device("CPU:0"):
            tf.raw_ops.MergeV2Checkpoints(
                checkpoint_prefixes=prefixes, destination_prefix=prefix, delete_old_dirs=False
            )

    def _write(self) -> None:
        if not self._waiting:
            return
        tf.io.gfile.makedirs(self._folder)
        prefix = f"{self._folder}/{len(self._prefixes)}"
        names, parts, values = map(list, zip(*self._waiting, strict=True))
        with eager_mode(), tf.device("CPU:0"):
            tf.raw_ops.SaveV2(
                prefix=prefix, tensor_names=names, shape_and_slices=parts, tensors=values
            )
        self._prefixes.append(prefix)
        self._written_bytes += self._waiting_bytes
        self._waiting, self._waiting_bytes = [], 0


@contextmanager
def beside(part: str | None) -> Iterator[VariableFiles | None]:
    """Yields the files beside a model, removed at the end; None if this rank writes none."""
    if part is None:
        yield None
        return
    folder = f"{part}.values"
    try:
        yield VariableFiles(folder)
    finally:
        if tf.io.gfile.exists(folder):
            tf.io.gfile.rmtree(folder)


class WrittenVariable:
    """A variable of static shape (n, ...) whose value is only in `files`; None: nowhere."""

    def __init__(self, variable: Any, name: str, files: VariableFiles | None) -> None:
        self.variable = variable
        self._name, self._files = name, files

    def write(self, rows: np.ndarray, first: int = 0) -> None:
        """Writes some rows, (n, ...), of the variable's dtype. They must not change afterwards."""
        num_rows = self.variable.shape[0]
        if self._files is None or (len(rows) == 0 and num_rows > 0):
            return
        dtype = self.variable.dtype
        with eager_mode():
            values = to_tensor(rows.view(np.uint16) if dtype == tf.bfloat16 else rows, dtype, None)
        self._files.add(self._name, values, first, num_rows)


def parts(num_rows: int, row_bytes: int) -> Iterator[slice]:
    """Yields slices of rows of at most `PIECE_BYTES`, at least one row."""
    most = max(1, PIECE_BYTES // row_bytes)
    return (slice(first, first + most) for first in range(0, num_rows, most))
