"""How an update rule changes rows: its kernel of kernels/update/ is launched on them.

Rows of 16 bits lose steps smaller than half a unit of their last place where they are rounded to
nearest. By random bits they are rounded up or down, exact in the mean. These bits depend on seed,
key, column and step alone: not on the row number or the order of the rows.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.base import F32, I64, U32, Words, Work
from sok_lite.backend.publish import Action
from sok_lite.engine.optimizers.rule import RuleStep
from sok_lite.engine.pieces import addresses_of, chosen, shapes_of
from sok_lite.engine.rows.access import store_words
from sok_lite.engine.rows.state_owner import States
from sok_lite.engine.rows.store import RowStore


class RowStep(NamedTuple):
    """A step of some rows of a table.

    Attributes:
      store: has the rows.
      states: of the rule, and maybe others.
      step: what to do with them.
      rows: (u,) uint32, distinct; NO_ROW is skipped.
      grads: (u, dim) float32, C-contiguous, one per row, already summed over duplicates.
      rounding: of float16 and bfloat16 rows, by random bits: keys (u,) int64, C-contiguous, one of
        each row, and a seed, 64 bits that stand for the table; None: to nearest even. Rows of
        float32 and float64, and states, are never rounded further.
    """

    store: RowStore
    states: States
    step: RuleStep
    rows: Array
    grads: Array
    rounding: tuple[Array, int] | None = None

    @property
    def noise(self) -> tuple[Array | None, int]:
        """Returns keys and seed of the rounding, where there is one."""
        return self.rounding if self.rounding and self.store.row_dtype.is_half else (None, 0)

    @property
    def kernel(self) -> str:
        """Returns the name of the kernel that takes the step."""
        form = "" if self.noise[0] is None else "_stochastic"
        return f"{self.step.rule.kernel}{form}_{self.store.row_dtype.suffix}"

    def pointers(self, column: str) -> Array | None:
        """Returns the chunk addresses of a state's column; None: the step has no such state."""
        return self.states[column].pointers if column in self.step.states else None

    def part(self, num_nonfinite: Array) -> Work:
        """Returns the work of the kernel; `num_nonfinite`, (1,) int64, grows by such rows."""
        num_rows = len(self.rows)
        states = map(self.pointers, self.step.rule.columns)
        columns = (self.store.column("value").pointers, *states)
        where = (*columns, self.store.chunk_shift, self.store.dim, self.rows, self.grads)
        how = (num_nonfinite, *self.noise, self.step.number, *self.step.scalars)
        return Work(num_rows, (*where, *how, num_rows))


class RowSteps(NamedTuple):
    """Steps of rows of several tables, as columns of `RowStep`: one entry for each table.

    Attributes:
      backends: of the tables.
      stores, states, steps, rows, grads: the attributes of `RowStep`, of each step.
      rounding: keys and seeds of stochastic rounding, of each step; None: to nearest even.
    """

    backends: Sequence[Backend]
    stores: Sequence[RowStore]
    states: Sequence[States]
    steps: Sequence[RuleStep]
    rows: Sequence[Array]
    grads: Sequence[Array]
    rounding: tuple[Sequence[Array], Sequence[int]] | None = None

    def some(self, numbers: Sequence[int]) -> "RowSteps":
        """Returns the steps of some tables."""
        columns, rounding = chosen(self[:-1], numbers), None
        if self.rounding is not None:
            keys, seeds = chosen(self.rounding, numbers)
            rounding = keys, seeds
        return RowSteps(*columns)._replace(rounding=rounding)

    def of(self, number: int) -> RowStep:
        """Returns the step of one table."""
        rounding = None
        if self.rounding is not None:
            keys, seeds = self.rounding
            rounding = keys[number], seeds[number]
        of_rows = (self.rows[number], self.grads[number])
        return RowStep(
            self.stores[number], self.states[number], self.steps[number], *of_rows, rounding
        )


def plan_update(steps: RowSteps, num_nonfinite: Array) -> list[Action]:
    """Returns the launches that take steps of different tables.

    Args:
      num_nonfinite: (1,) int64, grows by the rows whose gradient has a NaN or an infinity.
    """
    halves = [False] * len(steps.stores)
    if steps.rounding is not None:
        halves = [store.row_dtype.is_half for store in steps.stores]
    columns = (steps.backends, steps.stores, steps.steps, halves)
    kernels = [
        (
            backend,
            f"{step.rule.kernel}{'_stochastic' if half else ''}_{store.row_dtype.suffix}",
            half,
        )
        for backend, store, step, half in zip(*columns, strict=True)
    ]
    return [
        launch
        for kernel in dict.fromkeys(kernels)
        for launch in _plan_update(*kernel, _of_kernel(steps, kernels, kernel), num_nonfinite)
    ]


def _of_kernel(steps: RowSteps, kernels: Sequence[Any], kernel: Any) -> RowSteps:
    """Returns the steps that one kernel takes."""
    if kernels.count(kernel) == len(kernels):
        return steps
    return steps.some([i for i, each in enumerate(kernels) if each == kernel])


def _plan_update(
    backend: Backend, kernel: str, half: bool, steps: RowSteps, num_nonfinite: Array
) -> list[Action]:
    words = store_words(steps.stores)
    states: list[Words] = [
        np.array(
            [
                its[name].record.chunks if name in step.states else 0
                for its, step in zip(steps.states, steps.steps, strict=True)
            ],
            np.int64,
        )
        for name in steps.steps[0].rule.columns
    ]
    num_rows = [shape[0] for shape in shapes_of(steps.rows)]
    noise: list[Words] = [0, 0]
    if half and steps.rounding is not None:
        keys, numbers = steps.rounding
        seeds = np.array([number & 0xFFFFFFFFFFFFFFFF for number in numbers], np.uint64)
        noise = [addresses_of(backend, keys, I64), seeds.view(np.int64)]
    # Most steps have one rule, and its numbers are the same for all tables.
    order = list(map(id, steps.steps))
    distinct = dict(zip(order, steps.steps, strict=True))
    numbers_of = {number: _words(step) for number, step in distinct.items()}
    arguments: list[Words] = [
        *(words[:, 0], *states, words[:, 1:3]),
        addresses_of(backend, steps.rows, U32),
        *(addresses_of(backend, steps.grads, F32), backend.address(num_nonfinite)),
        *noise,
        np.array([numbers_of[number] for number in order], np.int64),
        np.array(num_rows, np.int64),
    ]
    return backend.joined_columns(kernel, num_rows, arguments, (steps, num_nonfinite))


def _words(step: RuleStep) -> list[int]:
    """Returns the numbers of a step as a kernel takes them."""
    floats = np.array(step.scalars, np.float32).view(np.uint32).tolist()
    pairs = zip(step.scalars, floats, strict=True)
    return [step.number, *[x if type(x) is int else bits for x, bits in pairs]]


def counting_nonfinite(grads: Array, rows: Array | None, num_nonfinite: Array) -> tuple[str, Work]:
    """Returns the kernel that counts gradient rows with a NaN or an infinity, and its work.

    Args:
      grads: (u, dim) float32, C-contiguous.
      rows: (u,) uint32; rows of NO_ROW are not counted. None: every row counts.
      num_nonfinite: (1,) int64, grows by them.
    """
    num_rows, dim = grads.shape
    return "count_nonfinite", Work(num_rows, (rows, grads, dim, num_nonfinite, num_rows))
