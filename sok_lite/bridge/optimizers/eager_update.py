"""Updates of rows in eager mode, which are reused for similar steps.

If one part of a step fails, rows or dense variables, the other has not begun: Python prepares the
step of the rows, runs the dense step, and then commits the rows, which cannot fail any more. Native
code is asked first whether it would take the step of the rows.
"""

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.backend import Array, Backend
from sok_lite.bridge.operation import EagerOperation, Outputs
from sok_lite.bridge.optimizers.host import CHECK, NOTHING, STEP, WHOLE, StepHost, TakenStep
from sok_lite.bridge.type_spec import CallCache

_ASKED_AGAIN = 16  # steps after a refusal by native code


class _Now(SimpleNamespace):
    """The current step: arguments of `StepHost.take`, and `done`, the dense step's result."""

    batches: int
    dense_step: Callable[[], Any] | None
    done: Any


class EagerUpdate:
    """An update of the same tables with the same settings. One thread at a time takes its steps.

    `taken` receives the number of a step when its rows change.
    """

    def __init__(self, host: StepHost, taken: TakenStep, backend: Backend, what: str) -> None:
        self._host, self._now = host, _Now(batches=1, dense_step=None, done=None)
        self._num_refused = 0
        # The operation's callback holds these objects, so none of them may hold the operation.
        run = partial(_run, host, taken, self._now)
        self._operation = EagerOperation(
            *("sok_update", run, [], backend, what),
            num_told=1,
            waits=host.must_wait,
            is_planned_later=True,
        )

    def take(
        self,
        handles: Sequence[tf.Tensor],
        inputs: Sequence[tf.Tensor],
        told: Sequence[float],
        batches: int,
        dense_step: Callable[[], Any] | None,
    ) -> Any:
        """Takes a step of rows and dense variables; returns the result of the dense step.

        `inputs` are the keys of each gradient, then the rows; see `StepHost.take`.
        """
        number, doing, *others = told
        arguments = (handles, inputs)
        if dense_step is not None and doing == STEP:
            if self._asks() and self._runs(*arguments, [number, CHECK, *others]):
                self._num_refused = 0
                done = dense_step()
                self._runs(*arguments, told)
                return done
            told = [number, WHOLE, *others]
        now, before = self._now, vars(self._now).copy()  # of an outer step
        now.batches, now.dense_step, now.done = batches, dense_step, None
        try:
            self._runs(*arguments, told)
            return now.done
        finally:
            vars(now).update(before)

    def _asks(self) -> bool:
        """Whether to ask native code: after a refusal, not in the next steps."""
        if not self._host.has_plan:
            return False
        self._num_refused += 1
        return self._num_refused % _ASKED_AGAIN == 1

    def _runs(
        self, handles: Sequence[tf.Tensor], inputs: Sequence[tf.Tensor], told: Sequence[float]
    ) -> bool:
        """Runs the operation; returns whether native code has done it, or would."""
        with tf.device("CPU:0"):
            bits = tf.constant(np.array(told, np.float64).view(np.int64))
        (is_native,) = self._operation(handles, inputs, [bits])
        return bool(is_native.numpy()[0])


class EagerUpdates:
    """An optimizer's cached updates. Not a dict, which TensorFlow's modules would search."""

    def __init__(self) -> None:
        self._kept = CallCache()

    def __deepcopy__(self, memo: Any) -> "EagerUpdates":
        return EagerUpdates()

    def get_or_make(self, known_by: Any, make: Callable[[], EagerUpdate]) -> EagerUpdate:
        """Returns the cached update, or makes it."""
        update: EagerUpdate = self._kept.get_or_make(known_by, make)
        return update


def _run(
    host: StepHost, taken: TakenStep, now: _Now, outputs: Outputs, arrays: list[Array]
) -> None:
    """The operation's callback if native code does not do the update."""
    *gradients, bits = arrays
    told = bits.view(np.float64).tolist()
    number, doing = int(told[0]), int(told[1])
    outputs.tell(0, np.zeros(1, np.int64))
    if doing == CHECK:
        return

    def note() -> None:
        taken.step = 0 if doing == NOTHING else number

    now.done = host.take(told, gradients, now.batches, now.dense_step, note)
    if now.batches == 1:
        host.plan_next(outputs.call, told, taken)
