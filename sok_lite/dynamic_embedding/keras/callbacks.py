"""Callbacks of `model.fit` for several ranks: saving, and equal initial dense weights."""

import functools
import math
import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.bridge.collectives import broadcast
from sok_lite.bridge.keras import held
from sok_lite.bridge.keras.classes import made_class, root_of
from sok_lite.bridge.serving.models import functions_of
from sok_lite.dynamic_embedding.keras.models import check_savable, checked_path, de_hvd_save_model
from sok_lite.dynamic_embedding.ranks import communicator
from sok_lite.dynamic_embedding.trainable import TrainableWrapper

__all__ = [
    "DEHvdBroadcastGlobalVariablesCallback",
    "DEHvdModelCheckpoint",
    "ModelCheckpoint",
    "callbacks_for",
]


def callbacks_for(package: Any) -> SimpleNamespace:
    """Returns the callbacks for `keras`, `tf_keras` or `tf.keras` (as here), or TypeError."""
    return _callbacks_of(root_of(package))


@functools.cache
def _callbacks_of(package: Any) -> SimpleNamespace:
    callbacks = package.callbacks
    checkpoint = _class_of(_ModelCheckpoint, callbacks.ModelCheckpoint)
    return SimpleNamespace(
        DEHvdBroadcastGlobalVariablesCallback=_class_of(
            _DEHvdBroadcastGlobalVariablesCallback, callbacks.Callback
        ),
        DEHvdModelCheckpoint=checkpoint,
        ModelCheckpoint=checkpoint,
    )


def _class_of(part: type, base: type) -> Any:
    return made_class(part.__name__.lstrip("_"), part, base)


class _OfAllRanks:
    """A proxy of a model whose `save` saves the tables of all ranks."""

    def __init__(self, model: Any, signatures: Any, options: Any) -> None:
        self._model = model
        self._more = {"signatures": signatures, "options": options}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def save(self, filepath: Any, overwrite: bool = True, **_: Any) -> None:
        de_hvd_save_model(self._model, filepath, overwrite, **self._more)

    save_weights = save


class _ModelCheckpoint:
    """Saves the model with the tables of all ranks, whenever Keras' ModelCheckpoint would.

    Every rank must have the callback; the metrics of rank 0 decide when to save. Models that cannot
    be saved are rejected before the first batch.

    Args:
      filepath: its ending selects the format, such as ".keras" or ".weights.h5"; it may have fields
        of metrics.
      *args, **kwargs: of Keras' `ModelCheckpoint`.
      signatures: of a SavedModel; None: the model's call.
      options: a tf.train.CheckpointOptions for ".ckpt", a tf.saved_model.SaveOptions for a
        SavedModel.

    Raises:
      NotImplementedError, TypeError, ValueError: an unsupported format, or signatures or options
        that do not match it.
    """

    def __init__(
        self, filepath: Any, *args: Any, signatures: Any = None, options: Any = None, **kwargs: Any
    ) -> None:
        checked_path(filepath, signatures, options)
        self._signatures, self._save_options = signatures, options
        path = os.fspath(filepath)
        # Keras 3 accepts no other formats.
        is_known = kwargs.get("save_weights_only") or path.endswith((".keras", ".h5"))
        super().__init__(path if is_known else f"{path}.keras", *args, **kwargs)  # type: ignore[call-arg]
        self.filepath = path

    def set_model(self, model: Any) -> None:
        check_savable(model, checked_path(self.filepath, self._signatures, self._save_options))
        if self._signatures is not None:
            functions_of(model, self._signatures)
        super().set_model(  # type: ignore[misc]
            _OfAllRanks(model, self._signatures, self._save_options)
        )

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, _of_first_rank(logs))  # type: ignore[misc]

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        # Per batch only if it saves per batch: it costs an exchange.
        if self.save_freq != "epoch":  # type: ignore[attr-defined]
            logs = _of_first_rank(logs)
        super().on_train_batch_end(batch, logs)  # type: ignore[misc]


def _of_first_rank(logs: Any) -> dict[str, Any]:
    """Returns the metrics of rank 0. Every rank must call it, with the same metric names."""
    logs = dict(logs or {})
    if not logs or communicator("ModelCheckpoint").size == 1:
        return logs
    names = sorted(logs)
    numbers = np.array([_number(logs[name]) for name in names], np.float64)
    return dict(zip(names, broadcast(numbers, 0).numpy().tolist(), strict=True))


def _number(value: Any) -> float:
    array = np.asarray(value)
    return float(array) if array.size == 1 else math.nan


class _DEHvdBroadcastGlobalVariablesCallback:
    """Broadcasts one rank's dense weights and optimizer variables after the first batch.

    By then the optimizer has its variables. Tables stay as they are: each rank has its own.

    Args:
      root_rank: the broadcasting rank.
      device: not used.
      local_variables: variables that each rank keeps, or None.
    """

    def __init__(
        self, root_rank: int = 0, device: str = "", local_variables: Sequence[Any] | None = None
    ) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.broadcast_done = False
        self._local = list(local_variables or [])

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcasts, once."""
        if self.broadcast_done:
            return
        self.broadcast_done = True
        if communicator("DEHvdBroadcastGlobalVariablesCallback").size == 1:
            return
        model = self.model  # type: ignore[attr-defined]
        ours = held.variables_of(getattr(model, "optimizer", None))
        for variable in [*model.weights, *ours]:
            is_local = any(variable is each for each in self._local)
            if not is_local and not isinstance(variable, TrainableWrapper):
                variable.assign(broadcast(tf.convert_to_tensor(variable), self.root_rank))


_of_program = callbacks_for(tf.keras)
ModelCheckpoint = _of_program.ModelCheckpoint
DEHvdModelCheckpoint = _of_program.DEHvdModelCheckpoint
DEHvdBroadcastGlobalVariablesCallback = _of_program.DEHvdBroadcastGlobalVariablesCallback
