"""`fit` begins with the epoch of the checkpoint that it goes on from."""

import inspect
from typing import Any

import tensorflow as tf

from sok_lite.bridge.keras import hooks
from sok_lite.keras.checkpoint import CheckpointPart
from sok_lite.keras.skipping import skip_batches


def resume_fit(name: str, package: Any) -> None:
    """Has `fit` begin with the epoch of the checkpoint that a `Checkpoint` goes on from."""
    hooks.around(package.Model, "fit", _resuming, package)


def _resuming(package: Any, call: Any, self: Any, /, *args: Any, **kwargs: Any) -> Any:
    given = inspect.signature(package.Model.fit).bind(self, *args, **kwargs)
    named: Any = given.arguments.get("callbacks")
    is_list = isinstance(named, package.callbacks.CallbackList)
    callbacks = named.callbacks if is_list else tf.nest.flatten(named or [])
    mine = [each for each in callbacks if isinstance(each, CheckpointPart)]
    if len(mine) > 1:
        raise ValueError(f"fit takes one Checkpoint. Received: {len(mine)}.")
    epoch = mine[0].begin(self) if mine else None
    if epoch is not None:
        given.arguments["initial_epoch"] = epoch
    try:
        return call(*given.args, **given.kwargs)
    finally:
        if mine:  # also where it was broken off
            skip_batches(self, 0)
