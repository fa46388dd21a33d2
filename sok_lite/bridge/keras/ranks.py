"""`fit` on several ranks: equal dense weights, equal steps, joint logs, one file."""

import inspect
import sys
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.bridge.collectives import allgather, allreduce, broadcast
from sok_lite.bridge.job import other_ranks
from sok_lite.bridge.keras import data, held, hooks
from sok_lite.bridge.keras.callbacks import check_fit
from sok_lite.bridge.keras.classes import made_class
from sok_lite.bridge.variable import TableVariable
from sok_lite.comm.protocol import Communicator, RanksDifferError, allgather_texts

# Attribute of models: whether an `AllRanks` callback makes their weights equal.
_IS_TOLD = "_sok_lite_all_ranks"


class RankChecksPart:
    """A callback that checks that the ranks of `fit` agree; `fit` adds it by itself.

    Before each epoch it checks that all ranks have equally many steps; after the first step and
    each epoch, that trained dense weights are still equal. It warns once if all ranks train the
    same rows. On one rank it does nothing.

    Attributes:
      given: the fingerprint of the arrays passed to `fit`, (2,) int64.

    Raises:
      RanksDifferError: in `fit`, on all ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self._has_looked = self._has_warned = False
        self.given = data.data_fingerprint(())

    def on_train_begin(self, logs: Any = None) -> None:
        """Resets the checks."""
        self._has_looked = self._has_warned = False

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Checks once that trained weights are equal, and rows are not."""
        if not self._has_looked:
            self._has_looked = True
            self._check_trained()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Raises if the ranks' numbers of steps differ."""
        if other_ranks() is None:
            return
        steps = self.params.get("steps")  # type: ignore[attr-defined]
        facts = np.array([[-1 if steps is None else steps, *self.given]], np.int64)
        gathered = allgather(facts, "an epoch of fit()").numpy()
        all_steps = gathered[:, 0].tolist()
        if len(set(all_steps)) > 1:
            raise RanksDifferError(
                "All ranks must have as many steps in an epoch: each step needs every rank. "
                f"Received: {all_steps} steps, by rank (-1: unknown). Give fit() "
                "sok_lite.keras.shard(batches) if all ranks have the same batches, "
                "sok_lite.keras.equal_steps(batches) if each has its own, or steps_per_epoch."
            )
        self._has_warned |= data.warn_if_same(gathered[:, 1:], "the same arrays")
        self.given = data.data_fingerprint(())

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Checks that trained weights are equal."""
        self._check_trained()

    def _check_trained(self) -> None:
        """Raises, on all ranks, if training has made the dense weights of ranks differ."""
        if other_ranks() is None:
            return
        model = self.model  # type: ignore[attr-defined]
        gathered = _gather_facts(model.trainable_weights, data.first_batch(model))
        if (gathered[:, 0] != gathered[0, 0]).any():
            raise RanksDifferError(
                f"The dense weights of {model.name!r} are no longer equal on all ranks: its "
                "train_step applied gradients that were not averaged over ranks. Keep each "
                "optimizer in an attribute of the model, and do not change it after compile(): "
                "fit() averages theirs."
            )
        if not self._has_warned:
            self._has_warned = data.warn_if_same(gathered[:, 1:], "the same rows in a first batch")


class AllRanksPart(RankChecksPart):
    """A callback of `fit` on several ranks, the first in its list. Every rank must have it.

    It broadcasts rank 0's dense weights and optimizer variables, and averages the logs of an epoch
    over ranks for the callbacks after it; metrics are of all ranks anyway. On one rank it does
    nothing.

    Raises:
      RanksDifferError: in `fit`, on all ranks: models or numbers of steps differ, or a custom step
        has trained dense weights on each rank by itself.
    """

    _of_every_rank = True

    def __init__(self) -> None:
        super().__init__()
        self._are_equal = False

    def set_model(self, model: Any) -> None:
        """Notes that weights may differ before training."""
        super().set_model(model)  # type: ignore[misc]
        object.__setattr__(model, _IS_TOLD, True)

    def on_train_begin(self, logs: Any = None) -> None:
        """Makes weights equal, if they are built."""
        super().on_train_begin(logs)
        self._are_equal = False
        if other_ranks() is not None and self.model.built:  # type: ignore[attr-defined]
            self._make_equal()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Makes weights equal that the first batch has built; checks once that they stay so."""
        if self._are_equal:
            super().on_train_batch_end(batch, logs)
        else:
            self._make_equal()

    def _make_equal(self) -> None:
        self._are_equal = True
        if other_ranks() is None:
            return
        model = self.model  # type: ignore[attr-defined]
        ours = held.variables_of(getattr(model, "optimizer", None))
        dense = _dense(_weights(model)) + _dense(ours)
        _check_alike(model, dense)
        for variable in dense:
            variable.assign(broadcast(tf.convert_to_tensor(variable), 0))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Averages the logs over ranks."""
        super().on_epoch_end(epoch, logs)
        if other_ranks() is None or not logs:
            return
        names = sorted(logs)
        numbers = np.array([np.mean(np.asarray(logs[name], np.float64)) for name in names])
        mean = allreduce(tf.constant(numbers), "average").numpy().tolist()
        logs.update(zip(names, mean, strict=True))


# ---- before training -----------------------------------------------------------------------------


def check_ranks(name: str, package: Any) -> None:
    """Makes models check, before and during training, that several ranks agree.

    `make_train_function` checks that dense weights are equal; `fit` checks its callbacks and the
    ranks' steps, also without `AllRanks`.
    """
    checks = made_class("RankChecks", RankChecksPart, package.callbacks.Callback)
    hooks.around(package.Model, "make_train_function", _with_equal_weights)
    hooks.around(package.Model, "fit", _with_checks, package, checks)


def _with_equal_weights(call: Any, self: Any, /, *args: Any, **kwargs: Any) -> Any:
    is_told = getattr(self, _IS_TOLD, False)
    if other_ranks() is not None and not is_told and held.kept_tables(self):
        _check_equal(self)
    return call(self, *args, **kwargs)


def _with_checks(
    package: Any, checks: Any, call: Any, self: Any, /, *args: Any, **kwargs: Any
) -> Any:
    tables = held.kept_tables(self)
    if not tables:
        return call(self, *args, **kwargs)
    bound = inspect.signature(package.Model.fit).bind(self, *args, **kwargs)
    named: Any = bound.arguments.get("callbacks")
    is_list = isinstance(named, package.callbacks.CallbackList)
    callbacks = named.callbacks if is_list else tf.nest.flatten(named or [])
    check_fit(self, package, callbacks, tables)
    comm = other_ranks()
    if comm is not None:
        _check_callbacks(comm, package, callbacks)
        looking = [each for each in callbacks if isinstance(each, RankChecksPart)]
        if not (is_list or looking):
            looking = [checks()]
            bound.arguments["callbacks"] = [*looking, *callbacks]
        given = data.data_fingerprint([bound.arguments.get("x"), bound.arguments.get("y")])
        for each in looking:
            each.given = given
        data.watch_first_batch(self)
    return call(*bound.args, **bound.kwargs)


def _check_callbacks(comm: Communicator, package: Any, callbacks: Sequence[Any]) -> None:
    """Raises, on all ranks, if only some have a callback that every rank must have."""
    of_keras = (package.callbacks.ModelCheckpoint, package.callbacks.BackupAndRestore)
    names = [
        type(each).__name__
        for each in callbacks
        # A subclass of Keras' may save in another way.
        if type(each) in of_keras or getattr(each, "_of_every_rank", False)
    ]
    found = allgather_texts(comm, ", ".join(sorted(names)) or "none", "the callbacks of fit()")
    if len(set(found)) > 1:
        raise RanksDifferError(
            "Every rank must give fit() the callbacks that save, or look at all ranks, for each "
            f"rank has rows of its own. Received, by rank: {'; '.join(found)}. Give them to all "
            "ranks, with the same arguments: rank 0 alone writes the file of ModelCheckpoint."
        )


def _check_equal(model: Any) -> None:
    if model.built and _are_equal(_weights(model)):
        return
    raise RanksDifferError(
        f"The dense weights of {model.name!r} must be equal on all ranks before training. "
        "Received: different ones on another rank, or weights that are not built yet. Give fit() "
        "sok_lite.keras.AllRanks() as its first callback."
    )


def _check_alike(model: Any, dense: list[Any]) -> None:
    """Raises, on all ranks, if models differ."""
    kinds = [(tuple(each.shape), tf.as_dtype(each.dtype).name) for each in dense]
    kinds_here = np.array([[len(kinds), zlib.crc32(repr(kinds).encode())]], np.int64)
    facts = allgather(kinds_here, "the model of fit()").numpy()
    if (facts != facts[0]).any():
        here = ", ".join(f"{dtype}{list(shape)}" for shape, dtype in kinds)
        raise RanksDifferError(
            "All ranks must have the same model and optimizer. Received: dense weights and "
            f"optimizer variables of {model.name!r} that differ in number or shape, "
            f"{facts[:, 0].tolist()} of them by rank. On this rank: {here}. Make the same model "
            "and optimizer on every rank."
        )


def _weights(model: Any) -> list[Any]:
    """Returns the weights of a model, without tf_keras' variables of metrics."""
    metric = sys.modules[held.package_of(model) or "keras"].metrics.Metric
    metrics = [layer for layer in held.layers_in(model) if isinstance(layer, metric)]
    of_metrics = {id(variable) for each in metrics for variable in each.variables}
    return [weight for weight in model.weights if id(weight) not in of_metrics]


def _dense(weights: Any) -> list[Any]:
    return [each for each in weights if not isinstance(each, TableVariable)]


def _are_equal(weights: Any) -> bool:
    """Whether dense weights are bit-identical on all ranks. Every rank must call it."""
    sums = _gather_facts(weights, ())
    return bool((sums == sums[0]).all())


def _gather_facts(weights: Any, more: Sequence[int]) -> np.ndarray:
    """Gathers a hash of dense weights and more numbers, (num_ranks, 1 + len(more)) int64."""
    sums = [zlib.crc32(np.ascontiguousarray(each.numpy()).tobytes()) for each in _dense(weights)]
    facts = np.array([[hash(tuple(sums)), *more]], np.int64)
    return allgather(facts, "the dense weights of fit()").numpy()
