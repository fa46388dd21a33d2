"""How an update rule changes rows: its kernel of kernels/update/ is launched on them.

Rows of 16 bits lose steps smaller than half a unit of their last place where they are rounded to
nearest. By random bits they are rounded up or down, exact in the mean. These bits depend on seed,
key, column and step alone: not on the row number or the order of the rows.
"""

from collections.abc import Sequence
from typing import NamedTuple

from sok_lite.backend import Array
from sok_lite.backend.base import Work, joined_launches
from sok_lite.backend.publish import Action
from sok_lite.engine.optimizers.rule import RuleStep
from sok_lite.engine.rows.column import States
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


def plan_update(steps: Sequence[RowStep], num_nonfinite: Array) -> list[Action]:
    """Returns the launches that take steps of different tables.

    Args:
      num_nonfinite: (1,) int64, grows by the rows whose gradient has a NaN or an infinity.
    """
    return joined_launches(
        (step.store.backend, step.kernel, step.part(num_nonfinite)) for step in steps
    )


def counting_nonfinite(grads: Array, rows: Array | None, num_nonfinite: Array) -> tuple[str, Work]:
    """Returns the kernel that counts gradient rows with a NaN or an infinity, and its work.

    Args:
      grads: (u, dim) float32, C-contiguous.
      rows: (u,) uint32; rows of NO_ROW are not counted. None: every row counts.
      num_nonfinite: (1,) int64, grows by them.
    """
    num_rows, dim = grads.shape
    return "count_nonfinite", Work(num_rows, (rows, grads, dim, num_nonfinite, num_rows))
