"""Keras' own callbacks beside tables: one that needs help, and what is refused before `fit` begins.

A callback that cannot save a table would say so after the first epoch, which may take hours; an
optimizer that cannot train one, after the first batch has inserted its keys.
"""

import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from sok_lite.bridge.keras import guard, hooks
from sok_lite.bridge.keras.held import kept_tables, names_of
from sok_lite.bridge.keras.saving import check_path
from sok_lite.bridge.optimizers.loss_scale import inner_of
from sok_lite.bridge.optimizers.settings import refuse_unsupported

# A row is a column of pixels; PNG has no more.
_MOST_ROWS_OF_AN_IMAGE = 1_000_000


def write_histograms_of_rows(name: str, package: Any) -> None:
    """Has TensorBoard make its histograms and images of a table of the rows of this rank."""
    hooks.around(package.callbacks.TensorBoard, "on_epoch_end", _showing_rows)


def _showing_rows(call: Any, self: Any, epoch: int, logs: Any = None) -> Any:
    if not self.histogram_freq or epoch % self.histogram_freq != 0:
        return call(self, epoch, logs)
    write_images, tables = self.write_images, kept_tables(self.model)
    unfit = [table for table in tables if not 0 < table.shape[0] <= _MOST_ROWS_OF_AN_IMAGE]
    if write_images and unfit:
        self.write_images = False
        warnings.warn(
            f"TensorBoard writes no images in this epoch: {names_of(unfit)} would be one of no "
            f"row or of more than {_MOST_ROWS_OF_AN_IMAGE:,}.",
            stacklevel=3,
        )
    try:
        with ExitStack() as stack:
            for table in tables:
                stack.enter_context(table.showing_rows())
            return call(self, epoch, logs)
    finally:
        self.write_images = write_images


def check_fit(model: Any, package: Any, callbacks: Sequence[Any], tables: Sequence[Any]) -> None:
    """Raises where a callback of Keras has no place for tables, or the optimizer cannot train them.

    Args:
      model: that is to be trained.
      package: the Keras.
      callbacks: of `fit`.
      tables: of the model, at least one.

    Raises:
      NotImplementedError: a ModelCheckpoint of another format, an OrbaxCheckpoint, or a setting of
        the optimizer that does not reach rows, such as `use_ema`.
    """
    optimizer = getattr(model, "optimizer", None)
    is_trained = any(table.trainable for table in tables)
    if optimizer is not None and guard.has_own_step(model) and is_trained:
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


guard.tell(write_histograms_of_rows)
