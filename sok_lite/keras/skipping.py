"""Batches that are read and not trained on: those that a run did before it was broken off."""

from typing import Any


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
