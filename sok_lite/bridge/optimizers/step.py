"""A step of an optimizer on tables: one operation per call, and its order."""

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.backend import Array
from sok_lite.bridge.autograph import unconverted
from sok_lite.bridge.host_call import graph_of_function
from sok_lite.bridge.lookup_gradient import WholeGradient, whole_gradient
from sok_lite.bridge.native_update import may_have_plan
from sok_lite.bridge.operation import Outputs, operation
from sok_lite.bridge.optimizers.eager_update import EagerUpdate, EagerUpdates
from sok_lite.bridge.optimizers.fallback_step import FallbackStepHost
from sok_lite.bridge.optimizers.family import FallbackStep, Settings
from sok_lite.bridge.optimizers.host import (
    NOTHING,
    STEP,
    NonFiniteRows,
    RuleHost,
    StepHost,
    TakenStep,
    checked_gradient,
)
from sok_lite.bridge.optimizers.step_lock import LockedStep, StepLock, dense_checks, keep_alive
from sok_lite.bridge.row_gradient import OUT_OF_A_LOOP, are_distinct
from sok_lite.bridge.tf_private import FuncGraph, eager_mode
from sok_lite.bridge.variable import TableVariable

Pairs = list[tuple[tf.IndexedSlices, TableVariable]]


@unconverted
class RowOptimizer(tf.Module):
    """Base of optimizers of tables: the operation, the counters, the states.

    Attributes:
      iterations: int64 variable, number of steps so far; None if `first_step` is.
      on_nonfinite: "allow" or "error".
      stochastic_rounding: whether 16-bit rows are rounded stochastically.
      nonfinite: counter of gradient rows with a NaN or an infinity.
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
        # The step that rows have taken and `iterations` may lack; 0: it has all.
        self._taken = TakenStep()
        self._eager_updates = EagerUpdates()

    @property
    def num_nonfinite(self) -> int:
        """Gradient rows with a NaN or an infinity so far. On a GPU it waits."""
        return self.nonfinite.count

    @num_nonfinite.setter
    def num_nonfinite(self, count: int) -> None:
        self.nonfinite.count = count

    def _count_step(self, step: tf.Tensor) -> Any:
        """Counts a step, eagerly or as an operation of a graph."""
        counted = None if self.iterations is None else self.iterations.assign(step)
        self._taken.step = 0
        return counted

    def _catch_up(self) -> None:
        """Counts a step that was interrupted after its rows changed, in eager mode."""
        if tf.executing_eagerly() and self._taken.step:
            self._count_step(self._taken.step)

    @contextmanager
    def _locked(self, pairs: Pairs) -> Iterator[LockedStep]:
        """Serializes steps, after counting what an interrupted one left uncounted."""
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
          dense: pairs of dense variables, whose gradients are checked before rows change.
          settings: maps the number of past steps to the settings of the update and the learning
            rate. Not called without pairs.
          dense_step: updates the dense variables; None: there are none.
          optimizer: owner of the rows' states.
          count: past steps, by the counter of the dense variables' optimizer; None: only this
            object's.
          go: scalar bool tensor, whether rows change; None: they do. The dense step runs in either
            case.
          batches: number of calls over whose gradients rows step by the mean, in the last call.
          counts_skipped: whether a step without rows counts.
          also: called when the step is counted; returns what else a graph then has to run.
          name: of the operation of a TF1 graph.

        Returns:
          In a TF1 graph, also in a branch or loop of one, the operation; else the result of
          `dense_step`.
        """
        with self._locked(pairs) as locked:
            so_far = self.iterations if count is None else count
            if so_far is None:  # nothing in the step depends on its number
                so_far = tf.constant(0, tf.int64)
            # Read now: the dense step increments the counter.
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
                locked.last.append(tf.convert_to_tensor(count))  # incremented by now
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
        """Updates the rows of all pairs in one operation, and the dense variables; as `_step`.

        If one part fails, the other has not begun: see `EagerUpdate`. In a graph, where these are
        two operations, the rows go first. Returns the operation in a graph, and the dense step's
        result.
        """
        whole = None
        if batches == 1 and isinstance(settings, Settings):
            whole = self._whole_gradient(pairs)
        if whole is not None:
            pairs = [pairs[number] for number in whole.order]
        variables = [variable for _, variable in pairs]
        backend = variables[0].table.backend
        keys, rows = zip(*itertools.starmap(checked_gradient, pairs), strict=True)
        handles = [part.handle for variable in variables for part in variable.resources]
        numbers = [learning_rate, *settings.numbers.values()]
        if not tf.executing_eagerly():
            if optimizer is not None:
                keep_alive(optimizer)
            host = self._host(settings, optimizer, variables, keys)
            inputs, told = [*keys, *rows], [_on_host([step, True if go is None else go, *numbers])]
            if whole is not None:
                host.gradient = whole.call, whole.source
                inputs, told = whole.inputs, [*whole.numbers, *told]
            updated = operation(
                "sok_update",
                handles,
                partial(_run_in_graph, host, batches),
                inputs,
                [],
                backend,
                _name_of(variables),
                waits=host.must_wait,
                numbers=told,
                is_planned_later=True,
            )
            with tf.control_dependencies([updated]):
                return updated, None if dense_step is None else dense_step()
        moves = go is None or bool(go)
        if not moves and batches == 1:
            return None, None if dense_step is None else dense_step()
        plain = [  # variables of Keras before 3.5 have no __float__
            float(each if hasattr(each, "__float__") else tf.convert_to_tensor(each))
            for each in numbers
        ]

        def make() -> EagerUpdate:
            host = self._host(settings, optimizer, variables, keys)
            return EagerUpdate(host, self._taken, backend, _name_of(variables))

        if isinstance(settings, Settings):
            # Kept until the host has them, so that no id is reused.
            references = [weakref.ref(each) for each in (*variables, optimizer) if each is not None]
            known_by = (
                *(batches > 1, optimizer is None, *map(id, references)),
                *(settings.rule, *settings.flags.items(), *settings.numbers),
                *(self.on_nonfinite, self.stochastic_rounding, *map(settings.decays, variables)),
                *((each.dtype, are_distinct(each)) for each in keys),
            )
            update = self._eager_updates.get_or_make(known_by, make)
        else:
            update = make()
        told = [int(step), STEP if moves else NOTHING, *plain]
        return None, update.take(handles, [*keys, *rows], told, batches, dense_step)

    def _whole_gradient(self, pairs: Pairs) -> WholeGradient | None:
        """Returns the gradient whose inputs an update takes; None: keys and rows.

        For native code on a GPU, which then does not wait. Random bits need keys, and an error the
        gradients before rows change.
        """
        is_plain = self.on_nonfinite == "allow" and not self.stochastic_rounding
        if tf.executing_eagerly() or not is_plain or pairs[0][1].table.backend.name == "cpu":
            return None
        whole = whole_gradient([grad for grad, _ in pairs])
        is_native = whole is not None and whole.source.plan is not None
        return whole if is_native and may_have_plan([var.table for _, var in pairs]) else None

    def _host(
        self,
        settings: Settings | FallbackStep,
        optimizer: Any,
        variables: Sequence[TableVariable],
        keys: Sequence[tf.Tensor],
    ) -> StepHost:
        """Returns the host half of an update; arguments as in `_update`."""
        kind: type[StepHost] = RuleHost if isinstance(settings, Settings) else FallbackStepHost
        return kind(settings, self, optimizer, variables, keys)


def _name_of(variables: Sequence[TableVariable]) -> str:
    return f"The update of {', '.join(repr(variable.name) for variable in variables)}"


tf.no_gradient("SokUpdate")


def _run_in_graph(host: StepHost, batches: int, outputs: Outputs, arrays: list[Array]) -> None:
    """The callback of a graph's operation; the last array is from `_on_host`."""
    *gradients, bits = arrays
    told = bits.view(np.float64).tolist()
    if not told[1] and batches == 1:
        return  # rows do not change
    if host.gradient is not None:
        results = host.gradient[1].results(gradients)
        count = len(results) // 2
        gradients = [*results[count:], *results[:count]]
    # TensorFlow's thread may be building a graph.
    with eager_mode() if host.runs_tensorflow else nullcontext():
        host.take(told, gradients, batches)
    if batches == 1:
        host.plan_next(outputs.call, told)


def _on_host(numbers: Sequence[Any]) -> tf.Tensor:
    """Returns numbers as (n,) float64, as int64 bits for Python."""
    tensors = [  # tf would convert a Python number to float32
        tf.constant(number, tf.float64)
        if isinstance(number, (int, float))
        else tf.convert_to_tensor(number)
        for number in numbers
    ]
    with tf.device("CPU:0"):
        stacked = tf.stack([tf.cast(tensor, tf.float64) for tensor in tensors])
        return tf.bitcast(stacked, tf.int64)


def separated(grads_and_vars: Iterable[tuple[Any, Any]]) -> tuple[Pairs, list[tuple[Any, Any]]]:
    """Returns (pairs of dynamic tables that have a gradient, dense pairs)."""
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
