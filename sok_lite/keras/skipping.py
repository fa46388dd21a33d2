"""Batches that are read and not trained on: those that a run did before it was broken off."""

import logging
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from sok_lite.bridge.keras.data import shuffles_anew

_log = logging.getLogger("sok_lite")


class _Skipping:
    """Stands for the training function of a model while batches are read and left out."""

    def __init__(self, model: Any, count: int) -> None:
        self.original = model.train_function
        self._model, self._left, self._in_one = model, count, in_one_call(model)

    def __call__(self, iterator: Any) -> Any:
        if self._left <= 0:
            self._model.train_function = self.original
            return self.original(iterator)
        for _ in range(self._in_one):
            next(iterator)
        self._left -= self._in_one
        # Other callbacks look for a loss, which is of no batch. Metrics that the program compiled
        # are built by the first batch: before it they have no result.
        return {"loss": 0.0}


def in_one_call(model: Any) -> int:
    """Returns how many batches one call of the training function takes."""
    in_one = model.steps_per_execution  # of tf_keras a variable
    return int(in_one.numpy() if hasattr(in_one, "numpy") else in_one)


def skip_batches(model: Any, count: int) -> None:
    """Has a model leave out the first batches of its data, and no others."""
    if isinstance(model.train_function, _Skipping):  # of a fit that was broken off meanwhile
        model.train_function = model.train_function.original
    if count:
        model.train_function = _Skipping(model, count)


def is_skipping(model: Any) -> bool:
    """Whether the last batch of a model was left out."""
    return isinstance(model.train_function, _Skipping)


def go_on_in(arguments: dict[str, Any], epoch: int, batch: int) -> None:
    """Has `fit` go on in an epoch; warns where its batches are not those of before the stop.

    Data that shuffles anew has an order for each time that it is begun. How often Keras begins it
    in an epoch depends on its version, so that no order of a later epoch can be had again.

    Args:
      arguments: of `fit`, by name.
      epoch, batch: how many epochs are done, and how many batches of the next.
    """
    first, arguments["initial_epoch"] = arguments.get("initial_epoch", 0), epoch
    data = arguments.get("x")
    if not batch or isinstance(data, Iterator):
        return
    if isinstance(data, tf.data.Dataset):
        is_one = arguments.get("steps_per_epoch") is not None  # begun once, for all epochs
        is_other = epoch > first and not is_one and shuffles_anew(data)
        instead = "Give its shuffle() a seed and reshuffle_each_iteration=False."
    else:
        is_other = bool(arguments.get("shuffle", True))
        instead = "Give fit a tf.data.Dataset, or shuffle=False."
    if is_other:
        _log.warning(
            "The data of fit, a %s, comes in another order than before the stop: of epoch %s some "
            "samples come twice and others not at all. %s",
            type(data).__name__,
            epoch,
            instead,
        )
