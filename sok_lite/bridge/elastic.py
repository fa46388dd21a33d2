"""Elastic jobs: ranks leave and join, and tables continue from the last commit.

This is Horovod's elastic training with tables: `TableState` is a state of
`horovod.tensorflow.elastic`, and `run` is its decorator, which also catches errors of tables.
docs/elastic.md shows a job.
"""

import contextlib
import functools
import logging
import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf
from horovod.common.elastic import ObjectState
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from horovod.tensorflow.elastic import run as run_of_horovod

from sok_lite.bridge import job
from sok_lite.bridge.host_call import on_device
from sok_lite.bridge.keras import held
from sok_lite.bridge.optimizers.loss_scale import inner_of
from sok_lite.bridge.optimizers.wrapped import WrappedOptimizer
from sok_lite.bridge.static_variable import StaticVariable
from sok_lite.bridge.variable import TableVariable, variable_of_layer
from sok_lite.comm import CommunicatorError
from sok_lite.comm.header import save_by
from sok_lite.comm.protocol import broadcast_bytes
from sok_lite.engine.failure import together
from sok_lite.engine.files.commits import Commits
from sok_lite.engine.local_path import local_path

T = TypeVar("T")
_log = logging.getLogger("sok_lite")
# If ranks make different calls, every attempt fails although no rank has left.
_MOST_IN_VAIN = 10


def run(func: Callable[..., T]) -> Callable[..., T]:
    """Returns a function that resumes from the last commit when a rank leaves or joins.

    As `horovod.tensorflow.elastic.run`, for functions that use tables: if another rank dies in a
    lookup or an update, also inside a `tf.function`, the ranks reconnect, the state is restored
    from the last commit, and `func` is called again. Every rank must call it. Make no collective
    call between `sok_lite.init` and this: a rank that has just joined would make it alone.

    Args:
      func: its first argument is a `TableState`.
    """

    @functools.wraps(func)
    def attempt(state: Any, *args: Any, **kwargs: Any) -> T:
        try:
            with _failures_of_ranks():
                return func(state, *args, **kwargs)
        except HorovodInternalError as error:  # Horovod does not log it
            _log.warning("The job goes on from its last commit, as the ranks failed: %s", error)
            raise

    wrapped: Callable[..., T] = run_of_horovod(attempt)
    return functools.wraps(func)(wrapped)


class TableState(ObjectState):
    """Tables, other variables and values of an elastic job: a state for Horovod.

    A commit saves the keys of all ranks with their rows, optimizer states and times of use, the
    other variables, the optimizer's variables, and the values. After a change of ranks, all resume
    from the last commit, each with the keys that it owns now; a new rank receives everything. Other
    variables and values are saved from one rank: keep them equal on all.

    In memory, each rank keeps its part of the tables and a copy of another rank's, on another
    machine if the job has several. This takes twice the memory of the tables, and four times during
    a commit. It survives the loss of one machine, or, on a single machine, of ranks that are not
    neighbors. With `path` a commit is a checkpoint that `sok_lite.load` reads, and survives the
    loss of all ranks but one.

    Values are attributes: `TableState(tables, step=0).step`. Horovod's own states of models and
    variables are not needed.

    Args:
      variables: one list, equal on all ranks, of tables (also sok_lite.keras.Table), with distinct
        names, and other variables of TensorFlow or Keras.
      optimizer: an OptimizerWrapper, to save its step counts and the variables of the optimizer in
        it; built before if it trains other variables. None: there is none, and tables have no
        optimizer states.
      path: a folder that all ranks see, for commits on disk; a checkpoint there is replaced. None:
        commits are in memory.
      values: other values to save, such as the step number; anything that pickle can save.

    Raises:
      TypeError, ValueError: an argument is not as described.
      RuntimeError: `sok_lite.init` has not connected the ranks.
    """

    def __init__(
        self,
        variables: Any,
        optimizer: WrappedOptimizer | None = None,
        path: str | os.PathLike[str] | None = None,
        **values: Any,
    ) -> None:
        given = variables if isinstance(variables, (list, tuple)) else [variables]
        listed = [variable_of_layer(variable) for variable in given]
        for variable in listed:
            if isinstance(variable, StaticVariable):
                raise TypeError(
                    "TableState takes tables and plain variables. Received: "
                    f"{variable.name!r}, a static variable, whose rows on a rank are for one "
                    "number of ranks. Use a sok_lite.DynamicVariable."
                )
        if not isinstance(optimizer, (WrappedOptimizer, type(None))):
            raise TypeError(
                "`optimizer` must be a sok_lite.OptimizerWrapper. Received: "
                f"{type(optimizer).__name__}. Wrap it."
            )
        self._tables = [variable for variable in listed if isinstance(variable, TableVariable)]
        self._others = [variable for variable in listed if not isinstance(variable, TableVariable)]
        self._optimizer = optimizer
        folder = None if path is None else os.path.abspath(local_path(path))
        self._commits = Commits([variable.table for variable in self._tables], folder)
        self._must_reconnect = False
        self._in_vain = 0
        self._size = job.num_ranks()
        super().__init__(_of_rank_0, lambda: job.communicator().rank, **values)

    def save(self) -> None:
        """Commits without checking for ranks that join or leave. Every rank must call it.

        Raises:
          OSError, MemoryError: a rank cannot save its part. The last commit stays valid.
          ValueError: the optimizer is not built, or is missing although tables have states of one,
            or ranks have different tables.
        """
        self._commit()
        self._in_vain = 0

    def _commit(self) -> None:
        with _failures_of_ranks():
            super().save()
            comm = job.communicator()
            kept = together(
                comm,
                lambda: pickle.dumps((self._variables(), self._saved_state)),
                save_by("commit()"),
            )
            self._on_device(lambda: self._commits.make(comm, kept))

    def commit(self) -> None:
        """Commits, and admits ranks that have joined. Every rank must call it, at the same step.

        Raises:
          OSError, MemoryError: a rank cannot save its part. The last commit stays valid.
          ValueError: the optimizer is not built, or is missing although tables have states of one,
            or ranks have different tables.
          HostsUpdatedInterrupt: ranks have joined or are leaving; `run` catches it.
        """
        self.save()
        with _always_synced():
            super().check_host_updates()

    def check_host_updates(self) -> None:
        """Commits if ranks join or leave. Every rank must call it, at the same step.

        Raises:
          OSError, MemoryError, ValueError: the commit fails, as in `commit()`.
          HostsUpdatedInterrupt: ranks have joined or are leaving; `run` catches it.
        """
        with _failures_of_ranks(), _always_synced():
            try:
                super().check_host_updates()
            except HostsUpdatedInterrupt:
                self.save()
                raise

    def restore(self) -> None:
        """Fails the other ranks' calls after a failure here; then `sync` restores. `run` calls it.

        Raises:
          RuntimeError: too many failures of the same number of ranks without a commit in between.
        """
        job.disconnect()
        self._in_vain += 1
        if self._in_vain >= _MOST_IN_VAIN:
            raise RuntimeError(
                "An elastic job must come from one commit to the next. Received: "
                f"{self._in_vain} failures in a row on {self._size} ranks, with no commit in "
                "between. Look at the reason of the last one, and whether all ranks make the same "
                "calls."
            )

    def reset(self) -> None:
        """Notes that Horovod has restarted. `run` calls it."""
        self._must_reconnect = True

    def sync(self) -> None:
        """Restores the last commit on the current ranks. Every rank must call it.

        Before the first commit all ranks take other variables and values from rank 0, and tables
        stay unchanged.

        Raises:
          RuntimeError: a part of the tables is lost.
          OSError, ValueError, MemoryError: the commit cannot be read, or a rank cannot hold its
            part.
        """
        with _failures_of_ranks():
            if self._must_reconnect:
                job.reconnect()
                self._must_reconnect = False
            comm = job.communicator()
            if comm.size != self._size:
                self._in_vain, self._size = 0, comm.size
            kept = self._on_device(lambda: self._commits.restore(comm))
            if kept is None:
                mine = together(comm, lambda: pickle.dumps((self._variables(), self._saved_state)))
                kept = broadcast_bytes(comm, mine, 0)
            together(comm, lambda: self._take(*pickle.loads(kept)))
        self._commit()

    def _take(self, arrays: Mapping[str, Sequence[np.ndarray]], values: dict[str, Any]) -> None:
        kept = self._other_variables()
        for what, variables in kept.items():
            if [tuple(array.shape) for array in arrays[what]] != [
                tuple(v.shape) for v in variables
            ]:
                raise ValueError(
                    f"The {what} of a TableState must be those that were committed: "
                    f"{_shapes(arrays[what])}. Received: {_shapes(variables)}. Make the same on "
                    "all ranks, and build the optimizer before."
                )
        for what, variables in kept.items():
            for variable, array in zip(variables, arrays[what], strict=True):
                variable.assign(array)
        self._saved_state = values
        super().restore()

    def _variables(self) -> dict[str, list[np.ndarray]]:
        return {
            what: [np.asarray(variable) for variable in variables]
            for what, variables in self._other_variables().items()
        }

    def _other_variables(self) -> dict[str, list[Any]]:
        """Returns all variables that are not tables, by kind."""
        if self._optimizer is None:
            updated = [v.name for v in self._tables if v.table.store.state_names]
            if updated:
                raise ValueError(
                    "A TableState must have the optimizer of its tables, whose step counts go with "
                    f"their states. Received: none, and states of {', '.join(updated)}. Give "
                    "`optimizer`."
                )
            return {"variables": self._others, "variables of the optimizer": []}
        inner = inner_of(self._optimizer.optimizer)
        if self._others and not getattr(inner, "built", True):
            raise ValueError(
                "The optimizer of a TableState with other variables must be built. Received: one "
                "of Keras that is not: it would make its states later, and a commit lacks them. "
                "Call its build() with all variables that are no tables."
            )
        counters = [self._optimizer.iterations, *held.variables_of(inner)]
        return {"variables": self._others, "variables of the optimizer": counters}

    def _on_device(self, function: Callable[[], T]) -> T:
        if not self._tables:
            return function()
        return on_device(self._tables[0].table.backend, function)


def _of_rank_0(value: Any) -> Any:
    return pickle.loads(broadcast_bytes(job.communicator(), pickle.dumps(value), 0))


@contextlib.contextmanager
def _failures_of_ranks() -> Iterator[None]:
    """Translates errors caused by a lost rank to the error that Horovod catches."""
    try:
        yield
    except CommunicatorError as error:
        raise HorovodInternalError(str(error)) from error
    except tf.errors.OpError as error:
        # An error raised in a graph keeps only its text.
        if "CommunicatorError" not in error.message and "Horovod" not in error.message:
            raise
        raise HorovodInternalError(str(error)) from error


@contextlib.contextmanager
def _always_synced() -> Iterator[None]:
    """Makes the remaining ranks sync when others leave: keys change owners."""
    try:
        yield
    except HostsUpdatedInterrupt as interrupt:
        interrupt.skip_sync = False
        raise


def _shapes(arrays: Sequence[Any]) -> str:
    return ", ".join(map(str, (tuple(array.shape) for array in arrays))) or "none"
