"""The host half of an optimizer's step: from arrays of gradients to the engine's step."""

import contextlib
import ctypes
import struct
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.backend import Array, Backend
from sok_lite.backend.base import I64
from sok_lite.bridge.checks import checked_keys
from sok_lite.bridge.host_call import on_device
from sok_lite.bridge.job import other_ranks
from sok_lite.bridge.native_update import UpdateByRule, plan_of
from sok_lite.bridge.operation import OfGradient
from sok_lite.bridge.optimizers.accumulation import accumulation_of
from sok_lite.bridge.optimizers.family import FallbackStep, Settings
from sok_lite.bridge.row_gradient import are_distinct
from sok_lite.bridge.type_spec import alive, live_tables
from sok_lite.bridge.variable import TableVariable
from sok_lite.engine.accumulation import AccumulatedStep
from sok_lite.engine.foreign_keys import RankInfo
from sok_lite.engine.optimizers import UpdateRule
from sok_lite.engine.update import LocalStep, Step, StepOptions, UpdateStep, make_step
from sok_lite.engine.update_rows import Update
from sok_lite.engine.work_counters import UPDATES
from sok_lite.native.plans import forget_plan


def checked_gradient(
    grad: tf.IndexedSlices, variable: TableVariable
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns keys (n,) and rows (n, dimension) float32 of a gradient.

    Raises TypeError for keys that are not integers, ValueError for shapes.
    """
    keys = checked_keys(variable, grad.indices)
    rows = tf.cast(grad.values, tf.float32)
    ranks = (keys.shape.rank, rows.shape.rank)
    if ranks[0] not in (1, None) or ranks[1] not in (2, None):
        raise ValueError(
            f"The gradient of table {variable.table.name!r} must have one row of dimension "
            f"{variable.dimension} for each of its keys (n,). Received: keys {keys.shape}, rows "
            f"{rows.shape}."
        )
    if None in ranks:
        return tf.ensure_shape(keys, [None]), tf.ensure_shape(rows, [None, None])
    return keys, rows


# What an update does: nothing, if rows must not change; a step of rows; a check whether native code
# would take it; a step with a dense part. As in kernels/ops/update.h.
NOTHING, STEP, CHECK, WHOLE = range(4)

# Memory that native code writes, by address. Never freed: an update may be in progress when the
# optimizer is gone.
_written: dict[int, Any] = {}


class TakenStep(ctypes.Structure):
    """The number of the last step of the rows; 0: the optimizer's counter has it."""

    step: int
    _fields_ = (("step", ctypes.c_int64),)


class NonFiniteRows:
    """Counts gradient rows with a NaN or an infinity on the device, until read."""

    def __init__(self, count: int = 0) -> None:
        self._before = count
        self._counts: dict[Backend, Array] = {}

    def count_on(self, backend: Backend) -> Array:
        """Returns (1,) int64 for kernels to add to."""
        if backend not in self._counts:
            self._counts.setdefault(backend, backend.xp.zeros(1, np.int64))
        return self._counts[backend]

    def __reduce__(self) -> Any:
        return NonFiniteRows, (self.count,)  # a copy counts by itself

    def word(self, backend: Backend) -> int:
        """Returns the address of the counter, which is never freed."""
        count = self.count_on(backend)
        address = backend.address(count)
        _written[address] = count
        return address

    @property
    def count(self) -> int:
        """Rows counted so far, on all backends. Waits for the kernels."""
        counts = list(self._counts.items())
        return self._before + sum(on_device(backend, int, count[0]) for backend, count in counts)

    @count.setter
    def count(self, count: int) -> None:
        self._before += count - self.count


class StepHost:
    """The host half of an update. Holds no tensor and keeps no variable or optimizer alive.

    Args:
      owner: has `on_nonfinite`, `stochastic_rounding` and the counter `nonfinite`.
      optimizer: owner of the rows' states.
      variables, keys: one per gradient; only facts known from the graph are kept of keys.

    Attributes:
      runs_tensorflow: whether the step runs TensorFlow operations, which read what kernels write.
      has_plan: whether native code may take the next step.
      gradient: the lookup's call and its gradient, if the update takes that gradient's inputs in
        place of keys and rows.
    """

    runs_tensorflow = has_plan = False
    gradient: tuple[int, OfGradient] | None = None

    def __init__(
        self,
        settings: Settings | FallbackStep,
        owner: Any,
        optimizer: Any,
        variables: Sequence[TableVariable],
        keys: Sequence[tf.Tensor],
    ) -> None:
        self._owner = weakref.ref(owner)
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)
        self._variables = [weakref.ref(variable) for variable in variables]
        pairs = zip(keys, variables, strict=True)
        # True for int64 keys unchanged from a lookup; the engine checks others.
        self._of_gradients = [
            are_distinct(each) and each.dtype == variable.key_type for each, variable in pairs
        ]
        self._names = list(settings.numbers)
        self._decays = [settings.decays(variable) for variable in variables]
        self._on_nonfinite = owner.on_nonfinite
        self._stochastic_rounding = owner.stochastic_rounding
        self._backend: Backend = variables[0].table.backend

    def take(
        self,
        told: Sequence[Any],
        arrays: Sequence[Array],
        batches: int,
        dense_step: Callable[[], Any] | None = None,
        note: Callable[[], None] | None = None,
    ) -> Any:
        """Takes a step of rows and dense variables; returns the result of the dense step.

        Args:
          told: number of the step, what to do, learning rate, hyperparameters.
          arrays: of the backend, the keys of each gradient, then the rows of each.
          batches: number of calls over whose gradients rows step by the mean, in the last call.
          dense_step: updates the dense variables once the step of the rows cannot fail any more.
          note: called with the change of the rows.
        """
        begun = time.perf_counter()
        number, doing, *numbers = told
        if doing != NOTHING:
            rows_step = self.step(numbers, int(number), arrays, batches)
        else:
            rows_step = self.accumulate(int(number), arrays)
        done = None
        if dense_step is not None:
            rows_step.prepare()
            paused = time.perf_counter()
            done = dense_step()
            begun += time.perf_counter() - paused
        rows_step.commit(note)
        UPDATES.add(time.perf_counter() - begun)
        return done

    def step(
        self, numbers: Sequence[float], number: int, arrays: Sequence[Array], batches: int = 1
    ) -> Step:
        """Returns a step to be taken.

        `numbers` are the learning rate and hyperparameters, `number` is 1 for the first step, and
        `batches` that of the step, with gradients of the earlier ones added up.
        """
        raise NotImplementedError

    def accumulate(self, number: int, arrays: Sequence[Array]) -> Step:
        """Returns a step that only accumulates gradients, for the step of a number."""
        updates, _ = self._updates(lambda decays: None, arrays)
        return accumulation_of(updates[0].optimizer).add(updates, self._options(0.0, number))

    def must_wait(self) -> bool:
        """Whether an update waits for its kernels.

        A later call of Python frees what it leaves on a GPU, and a native one would not.
        """
        return self.runs_tensorflow or self.has_plan

    def plan_next(self, call: int, told: Sequence[Any], taken: TakenStep | None = None) -> None:
        """Registers a native plan for the next step with the same settings, if possible.

        `call` has taken a step as `told`; `taken` receives the number of a step.
        """

    def _of_batches(self, step: LocalStep, batches: int) -> Step:
        """Returns the step of several batches from the step of the last one."""
        return AccumulatedStep(step, accumulation_of(step.updates[0].optimizer), batches)

    def _options(self, learning_rate: float, number: int) -> StepOptions:
        """Returns the options of a step."""
        owner, comm = self._owner(), other_ranks()
        return StepOptions(
            learning_rate,
            number,
            self._on_nonfinite,
            self._stochastic_rounding,
            None if owner is None else owner.nonfinite.count_on(self._backend),
            # An elastic job may change it.
            None if comm is None else RankInfo(comm.rank, comm.size),
        )

    def _updates(
        self, rule: Callable[[bool], UpdateRule | None], arrays: Sequence[Array], batches: int = 1
    ) -> tuple[list[Update], list[bool]]:
        """Returns the update of each table by its rule, and whether weight decay applies to it.

        With several batches, tables without a gradient in the last one take part.
        """
        optimizer = None if self._optimizer is None else alive(self._optimizer)
        tables, decays = live_tables(self._variables), self._decays
        count, of_gradients = len(tables), self._of_gradients
        keys = [  # the engine checks and converts the keys that are not known to be distinct
            table.key_dtype.to_int64(table.backend.xp, its)
            if of_gradient and its.dtype != I64
            else its
            for table, its, of_gradient in zip(tables, arrays[:count], of_gradients, strict=True)
        ]
        grads = list(arrays[count:])
        if batches > 1:
            known = accumulation_of(optimizer).variables
            others = {var.table: its for var, its in known.items() if var.table not in tables}
            tables, decays = [*tables, *others], [*decays, *others.values()]
            keys = [*keys, *(table.backend.xp.zeros(0, np.int64) for table in others)]
            grads = [*grads, *(t.backend.xp.zeros((0, t.dim), np.float32) for t in others)]
            of_gradients = [*of_gradients, *[False] * len(others)]
        updates = [
            Update(table, rule(decay), its_keys, its_grads, optimizer, of_gradient)
            for table, decay, its_keys, its_grads, of_gradient in zip(
                tables, decays, keys, grads, of_gradients, strict=True
            )
        ]
        return updates, decays


class RuleHost(StepHost):
    """The host half of an update by a rule."""

    def __init__(self, settings: Settings, *arguments: Any) -> None:
        super().__init__(settings, *arguments)
        self._rule = partial(settings.rule, **settings.flags)
        # From the last step: most steps have the same numbers.
        self._last: tuple[list[float], tuple[UpdateRule, UpdateRule]] | None = None
        # Key of the last step that native code knows.
        self._planned: list[Any] | None = None
        self._until_gone: weakref.ref[Any] | None = None

    def step(
        self, numbers: Sequence[float], number: int, arrays: Sequence[Array], batches: int = 1
    ) -> Step:
        """Returns a step to be taken; see StepHost."""
        learning_rate, *values = numbers
        decayed, undecayed = self._rules(values)
        updates, _ = self._updates(lambda decays: decayed if decays else undecayed, arrays, batches)
        options = self._options(learning_rate, number)
        if batches > 1:
            return self._of_batches(UpdateStep(updates, options), batches)
        return make_step(updates, options)

    def plan_next(self, call: int, told: Sequence[Any], taken: TakenStep | None = None) -> None:
        """Registers a native plan for the next step with the same settings; see StepHost."""
        # The step was taken: a failure here must not look like one of the step.
        with contextlib.suppress(Exception):
            self._plan_next(call, list(told[3:]), taken)

    def _plan_next(self, call: int, values: list[float], taken: TakenStep | None) -> None:
        owner, backend = self._owner(), self._backend
        if owner is None or self._on_nonfinite != "allow":
            return
        tables = live_tables(self._variables)
        settings = struct.pack(f"{len(values)}d", *values)
        known_by = [call, settings]
        if self._planned == [*known_by, *(table.store.record.states for table in tables)]:
            return  # the plan exists, or is not possible
        update = UpdateByRule(
            tables,
            [alive(each).key_type.as_datatype_enum for each in self._variables],
            *self._rules(values),
            self._decays,
            self._of_gradients,
            self._stochastic_rounding,
            None if self._optimizer is None else alive(self._optimizer),
            self._names,
            settings,
            owner.nonfinite.word(backend),
            0 if taken is None else ctypes.addressof(taken),
            0 if self.gradient is None else self.gradient[0],
        )
        if taken is not None:
            _written[ctypes.addressof(taken)] = taken
        plan = plan_of(update)
        if plan is not None:
            if update.optimizer is not None:
                # Python rejects steps of an optimizer that is gone.
                self._until_gone = weakref.ref(update.optimizer, lambda _: forget_plan(call))
            plan.note(call)
            self.has_plan = True
        self._planned = [*known_by, *(table.store.record.states for table in tables)]

    def _rules(self, values: list[float]) -> tuple[UpdateRule, UpdateRule]:
        """Returns the rules with and without weight decay."""
        last = self._last  # another thread may have other numbers
        if last is not None and values == last[0]:
            return last[1]
        rule = self._rule(**dict(zip(self._names, values, strict=True)))
        rules = rule, replace(rule, weight_decay=0.0) if rule.weight_decay else rule
        self._last = values, rules
        return rules
