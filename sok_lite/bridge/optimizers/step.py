"""A step of an optimizer on tables: all of a call in one host call, and its place in the order."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.backend.publish import plan_set
from sok_lite.bridge.autograph import unconverted
from sok_lite.bridge.host_call import graph_of_function, host_call, on_device, refuse_replicas
from sok_lite.bridge.host_numbers import HostNumbers
from sok_lite.bridge.optimizers.fallback_step import FallbackStepHost
from sok_lite.bridge.optimizers.family import FallbackStep, Settings
from sok_lite.bridge.optimizers.host import (
    NonFiniteRows,
    RuleHost,
    StepHost,
    checked_gradient,
    joined_gradients,
)
from sok_lite.bridge.optimizers.step_lock import LockedStep, StepLock, dense_checks, keep_alive
from sok_lite.bridge.row_gradient import OUT_OF_A_LOOP
from sok_lite.bridge.tf_private import FuncGraph
from sok_lite.bridge.variable import TableVariable
from sok_lite.engine.step import Step
from sok_lite.engine.work_done import UPDATES

Pairs = list[tuple[tf.IndexedSlices, TableVariable]]


@unconverted
class RowOptimizer(tf.Module):
    """The base of both optimizers: the host call, the counters, the states.

    Attributes:
      iterations: int64 variable, number of steps so far; None where `first_step` is.
      on_nonfinite: "allow" or "error".
      stochastic_rounding: whether rows of 16 bits are rounded at random.
      nonfinite: counts gradient rows with a NaN or an infinity.
    """

    def __init__(
        self, on_nonfinite: str, stochastic_rounding: bool, first_step: int | None = 0
    ) -> None:
        super().__init__()
        if on_nonfinite not in ("allow", "error"):
            raise ValueError(
                f"`on_nonfinite` must be 'allow' or 'error'. Received: {on_nonfinite!r}."
            )
        if not isinstance(stochastic_rounding, bool):
            raise TypeError(
                f"`stochastic_rounding` must be True or False. Received: {stochastic_rounding!r}."
            )
        self.on_nonfinite = on_nonfinite
        self.stochastic_rounding = stochastic_rounding
        self.nonfinite = NonFiniteRows()
        self.iterations: Any = None
        if first_step is not None:
            self.iterations = tf.Variable(
                first_step, dtype=tf.int64, trainable=False, name="sok_iterations"
            )
        self._lock = StepLock()
        # The step that rows have taken and `iterations` may not know of; 0: it knows of all.
        self._taken = SimpleNamespace(step=0)

    @property
    def num_nonfinite(self) -> int:
        """Gradient rows with a NaN or an infinity so far. On a GPU it waits."""
        return self.nonfinite.count

    @num_nonfinite.setter
    def num_nonfinite(self, count: int) -> None:
        self.nonfinite = NonFiniteRows(count)

    def _count_step(self, step: tf.Tensor) -> Any:
        """Counts a step, now or as an operation of a graph."""
        counted = None if self.iterations is None else self.iterations.assign(step)
        self._taken.step = 0
        return counted

    def _catch_up(self) -> None:
        """Counts a step that was interrupted after its rows had moved, in eager mode."""
        if tf.executing_eagerly() and self._taken.step:
            self._count_step(self._taken.step)

    @contextmanager
    def _locked(self, pairs: Pairs) -> Iterator[LockedStep]:
        """Lets one step at a time go on, after what an interrupted one has left uncounted."""
        handles = [handle for _, variable in pairs for handle in variable.handles]
        with self._lock.hold(handles) as step:
            self._catch_up()
            try:
                yield step
            finally:
                self._catch_up()

    def _step(
        self,
        pairs: Pairs,
        dense: Sequence[tuple[Any, Any]],
        settings: Callable[[Any], tuple[Settings | FallbackStep, Any]],
        dense_step: Callable[[], Any] | None,
        *,
        optimizer: Any = None,
        count: Any = None,
        go: Any = None,
        batches: int = 1,
        counts_skipped: bool = False,
        also: Callable[[], list[Any]] = list,
        name: str | None = None,
    ) -> Any:
        """Takes one step on rows and dense variables, one step at a time, and counts it.

        Args:
          pairs: of tables; may be empty.
          dense: pairs of dense variables, whose gradients are looked at before rows move.
          settings: takes how many steps there were; gives the settings of the update and the
            learning rate. Not asked without pairs.
          dense_step: updates the dense variables; None: there are none.
          optimizer: whose states the rows have.
          count: steps so far, by the counter of whoever updates the dense variables; None: this
            object's alone.
          go: scalar tensor of booleans, whether rows are to move; None: they are. The dense step is
            done in either case.
          batches: of how many calls rows move by the mean of their gradients, in the last.
          counts_skipped: whether a step without rows counts.
          also: called when the step is counted; gives what else a graph then has to run.
          name: of the operation of a TF1 graph.

        Returns:
          In a TF1 graph, a branch or a loop of one the operation; else what `dense_step` returns.
        """
        with self._locked(pairs) as locked:
            so_far = self.iterations if count is None else count
            if so_far is None:  # nothing in the step depends on its number
                so_far = tf.constant(0, tf.int64)
            # Read now: the counter of the dense variables goes on when they are updated.
            step = tf.cast(tf.convert_to_tensor(so_far), tf.int64) + 1
            update, done = None, None
            if pairs:
                checks = [] if tf.executing_eagerly() else dense_checks(dense)
                with tf.control_dependencies(checks):
                    update, done = self._update(
                        pairs, *settings(so_far), step, optimizer, dense_step, go, batches
                    )
            elif dense_step is not None:
                done = dense_step()
            with tf.control_dependencies(operations(update)):
                taken = step if go is None or counts_skipped else tf.where(go, step, step - 1)
                counted = [self._count_step(taken), *also()]
            if count is not None and tf.inside_function():
                locked.last.append(tf.convert_to_tensor(count))  # counted on by now
            locked.last += operations(*counted, done)
        if tf.executing_eagerly() or isinstance(graph_of_function(), FuncGraph):
            return done
        return tf.group(*operations(update, done, *counted, locked.end), name=name)

    def _update(
        self,
        pairs: Pairs,
        settings: Settings | FallbackStep,
        learning_rate: Any,
        step: tf.Tensor,
        optimizer: Any,
        dense_step: Callable[[], Any] | None,
        go: Any,
        batches: int,
    ) -> tuple[Any, Any]:
        """Updates the rows of all pairs in one host call, and the dense variables.

        Whichever part fails, the other has not begun: in eager mode the step of the rows is
        prepared, the dense step done, and the rows then changed by what nothing refuses any more.
        In a graph, where that would be two calls, the rows go first.

        Args:
          optimizer: whose states the rows have.
          dense_step: updates the dense variables.
          go: scalar bool tensor, whether rows move; None: they do.
          batches: of how many calls rows move by the mean of their gradients.

        Returns:
          The operation in a graph, and what `dense_step` returns.
        """
        backend = pairs[0][1].table.backend
        variables = [variable for _, variable in pairs]
        what = f"The update of {', '.join(repr(variable.name) for variable in variables)}"
        refuse_replicas(what)
        gradients = [checked_gradient(*pair) for pair in pairs]
        kind: type[StepHost] = RuleHost if isinstance(settings, Settings) else FallbackStepHost
        host = kind(settings, self, optimizer, variables, [keys for keys, _ in gradients])
        numbers = [learning_rate, *settings.numbers.values()]
        inputs = joined_gradients(gradients, backend)
        if not tf.executing_eagerly():
            if optimizer is not None:
                keep_alive(optimizer)
            run, crossing = _in_graph(host, numbers, step, inputs, go, batches)
            update = host_call(run, crossing, [], backend, what, waits=host.waits)
            with tf.control_dependencies([update]):
                return update, None if dense_step is None else dense_step()
        if go is None or bool(go):
            plain = [  # variables of Keras before 3.5 are no numbers yet
                float(each if hasattr(each, "__float__") else tf.convert_to_tensor(each))
                for each in numbers
            ]
            make = partial(host.step, plain, int(step), inputs, batches)
            take = partial(self._take, make, int(step), dense_step)
        elif batches > 1:
            take = partial(self._take, partial(host.adding, int(step), inputs), 0, dense_step)
        else:
            return None, None if dense_step is None else dense_step()
        return None, on_device(backend, take, waits=host.waits)

    def _take(
        self,
        make: Callable[[], Step],
        step: int,
        dense_step: Callable[[], Any] | None,
    ) -> Any:
        """Takes a step of rows and of dense variables in eager mode; returns that of the latter.

        Args:
          make: gives that of rows.
          step: its number; 0: it does not count.
        """
        begun = time.perf_counter()
        rows_step, done = make(), None
        if dense_step is not None:
            rows_step.prepare()
            paused = time.perf_counter()
            done = dense_step()
            begun += time.perf_counter() - paused
        rows_step.commit(plan_set(self._taken, step=step))
        UPDATES.add(time.perf_counter() - begun)
        return done


def _in_graph(
    host: StepHost,
    numbers: Sequence[Any],
    step: tf.Tensor,
    inputs: Sequence[tf.Tensor],
    go: Any,
    batches: int,
) -> tuple[Callable[..., Sequence[tf.Tensor]], list[Any]]:
    """Returns what a host call runs for a step of a graph, and the inputs that it takes."""
    # What the host reads, as one tensor: step, whether rows move, and the settings.
    told = [step, True if go is None else go, *numbers]
    told = [tf.convert_to_tensor(number) for number in _plain(told)]
    with tf.device("CPU:0"):
        stacked = tf.stack([tf.cast(number, tf.float64) for number in told])

    def run(values: Any, *tensors: Any) -> Sequence[tf.Tensor]:
        number, rows_move, *plain = np.asarray(values).tolist()
        if not rows_move and batches == 1:
            return ()
        begun = time.perf_counter()
        if rows_move:
            host.step(plain, int(number), tensors, batches).commit()
        else:
            host.adding(int(number), tensors).commit()
        UPDATES.add(time.perf_counter() - begun)
        return ()

    return run, [HostNumbers(stacked), HostNumbers(inputs[0]), *inputs[1:]]


def separated(grads_and_vars: Iterable[tuple[Any, Any]]) -> tuple[Pairs, list[tuple[Any, Any]]]:
    """Returns (dynamic pairs that have a gradient, dense pairs)."""
    pairs, dense = [], []
    for grad, variable in grads_and_vars:
        if not isinstance(variable, TableVariable):
            dense.append((grad, variable))
        elif isinstance(grad, tf.IndexedSlices):
            pairs.append((grad, variable))
        elif grad is not None:
            raise TypeError(
                f"The gradient of {variable.name!r} must be a tf.IndexedSlices of keys and rows. "
                f"Received: {type(grad).__name__}. If a lookup is in a loop (tf.while_loop, "
                "tf.map_fn, `for` over a tensor) and its gradient is taken outside, TensorFlow "
                f"makes a dense one of it. {OUT_OF_A_LOOP} So does tf.gradients of a table that "
                "has no gradient, with unconnected_gradients='zero': leave that out."
            )
    return pairs, dense


def operations(*results: Any) -> list[Any]:
    """Returns what a graph can wait for; nothing in eager mode."""
    return [] if tf.executing_eagerly() else [result for result in results if result is not None]


def _plain(numbers: Sequence[Any]) -> list[Any]:
    """Returns Python numbers as float64 constants, which tf would make float32."""
    return [
        tf.constant(number, tf.float64) if isinstance(number, (int, float)) else number
        for number in numbers
    ]
