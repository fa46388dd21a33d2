"""The base of all update rules, a rule in one step, and how it changes rows.

What a step's kernel is called with is reckoned by kernels/update/scalars.h, for native code too.

Only the touched rows change, states included ("lazy"): a row that has no gradient in a step keeps
its momentum as it is.

Rows of 16 bits lose steps smaller than half a unit of their last place where they are rounded to
nearest. By random bits they are rounded up or down, exact in the mean. These bits depend on seed,
key, column and step alone: not on the row number or the order of the rows.
"""

import ctypes
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache, cached_property
from typing import Annotated, Any, ClassVar, NamedTuple, TypeAlias

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.build import find_rules
from sok_lite.backend.launches import Launch
from sok_lite.engine.dtypes import as_float
from sok_lite.engine.rows.column import Kinds, States
from sok_lite.engine.rows.store import RowStore

Scalars = tuple[float | int, ...]  # ints where the kernel takes i64, floats where f32
_MOST = float(np.finfo(np.float32).max)
_ScalarsOut = ctypes.c_double * 9  # kMostScalars

# The numbers of a rule: what a number must be, in the words of the error, and whether it is so.
NotNegative: TypeAlias = Annotated[float, ">= 0", lambda x: x >= 0]
Positive: TypeAlias = Annotated[float, "> 0", lambda x: x > 0]
BelowOne: TypeAlias = Annotated[float, "in [0, 1)", lambda x: 0 <= x < 1]
UpToOne: TypeAlias = Annotated[float, "in [0, 1]", lambda x: 0 <= x <= 1]


class NativeRule(NamedTuple):
    """A rule as native code has it.

    Attributes:
      number: its place in kernels/update/scalars.h.
      values: of its fields, float64.
    """

    number: int
    values: bytes


@dataclass(frozen=True, kw_only=True)
class UpdateRule:
    """The hyper-parameters of an optimizer, and what its kernel is called with.

    A rule is a frozen dataclass, in a file of its own. Its flags select the variants that bear one
    name in Keras 3, tf_keras, legacy tf_keras and TF1: the head of each file says which is which.

    Attributes:
      weight_decay: decoupled weight decay of the touched rows: first `w -= w * lr * weight_decay`,
        then the step, as in Keras 3.
    """

    weight_decay: NotNegative = 0.0

    # Its name without what says the row format; it is in kernels/update/<rule>.cu.
    kernel: ClassVar[str]
    # Columns in the kernel's order; one that `states` lacks is passed as a null pointer.
    columns: ClassVar[tuple[str, ...]] = ()
    # Those with one number for a row; the others have one for each element of it.
    one_a_row: ClassVar[frozenset[str]] = frozenset()
    # Whether a step depends on its number: the states are then worth nothing without the count.
    counts_steps: ClassVar[bool] = False
    # The field that is no setting, but counts the steps of a program; None: there is none.
    counter: ClassVar[str | None] = None
    # What a dense optimizer does to a row without a gradient, and the rule does not; weight decay
    # aside. Every rule says it, since docs/optimizers.md does: "nothing", or a few words.
    lazy: ClassVar[str]
    # What is said of a learning rate with which the rule has no step: {} stands for the rate.
    refused_rate: ClassVar[str]

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is bool:
                self.require(isinstance(value, (bool, np.bool_)), field.name, "True or False")
                continue
            if isinstance(value, (bool, np.bool_)) or not isinstance(
                value, (int, float, np.integer, np.floating)
            ):
                raise TypeError(
                    f"`{field.name}` of {type(self).__name__} must be a number. "
                    f"Received: {field.name}={value!r} of type {type(value).__name__}."
                )
            number = as_float(value)
            self.require(math.isfinite(number), field.name, "finite")
            object.__setattr__(self, field.name, number)
        for field in fields(self):
            limit = getattr(field.type, "__metadata__", None)
            if limit is not None:
                expected, holds = limit
                self.require(holds(getattr(self, field.name)), field.name, expected)
        for state, first in self.states.items():
            if abs(first) > _MOST:
                raise ValueError(
                    f"The state `{state}` of {type(self).__name__} must begin with a number that "
                    f"fits float32, at most {_MOST:.6g}. Received: {first}, which would be an "
                    "infinity. Give the optimizer a smaller one."
                )

    @property
    def states(self) -> dict[str, float]:
        """Returns the state columns beside the values, and what a new row has in them: 0, where a
        rule does not say otherwise."""
        return dict.fromkeys(self.columns, 0.0)

    def kinds(self, dim: int) -> Kinds:
        """Returns the kinds of the states, for rows of `dim` elements."""
        sizes = {name: 1 if name in self.one_a_row else dim for name in self.columns}
        return {name: (sizes[name], initial) for name, initial in self.states.items()}

    def scalars(self, learning_rate: float, step: int) -> Scalars:
        """Returns the numbers the kernel takes, in its order.

        Args:
          learning_rate: of this step, after any schedule.
          step: 1 for the first update (an optimizer's `iterations + 1`).

        Raises:
          ValueError: the rule has no step with this learning rate.
        """
        _, _, function = _native(self.kernel)
        scalars, integers = _ScalarsOut(), ctypes.c_int64()
        of_step = (learning_rate, step, scalars, ctypes.byref(integers))
        count = function(*self.native, *of_step)
        if count == 0:
            rate = self.refused_rate.format(learning_rate)
            raise ValueError(f"{type(self).__name__} {rate}")
        found, are_integers = scalars[:count], integers.value
        if are_integers:
            return (*[int(x) if are_integers >> i & 1 else x for i, x in enumerate(found)],)
        return tuple(found)

    @cached_property
    def native(self) -> NativeRule:
        """The rule as native code has it."""
        numbers = [float(getattr(self, field.name)) for field in fields(self)]
        number, expected, _ = _native(self.kernel)
        if len(numbers) != expected:
            raise NotImplementedError(
                f"{type(self).__name__} must have the fields of its kernel's rule in "
                f"kernels/update/scalars.h, {expected}. Received: {len(numbers)} fields."
            )
        return NativeRule(number, struct.pack(f"{len(numbers)}d", *numbers))

    def __getstate__(self) -> dict[str, Any]:
        return {name: each for name, each in vars(self).items() if name != "native"}

    def require(self, holds: bool, name: str, expected: str) -> None:
        """Raises ValueError where a number is not as expected."""
        if not holds:
            raise ValueError(
                f"`{name}` of {type(self).__name__} must be {expected}. "
                f"Received: {name}={getattr(self, name)!r}."
            )


@cache
def _native(kernel: str) -> tuple[int, int, Callable[..., int]]:
    """Returns the number of a kernel's rule in kernels/update/scalars.h, how many fields it has,
    and what reckons its scalars."""
    # It keeps Python's lock, which others may be long in giving back.
    library = ctypes.PyDLL(str(find_rules()))
    number, pointer = ctypes.c_int64, ctypes.c_void_p
    number_of, scalars = library.sok_rule_number, library.sok_rule_scalars
    number_of.argtypes, number_of.restype = [ctypes.c_char_p, pointer], number
    scalars.argtypes = [number, pointer, ctypes.c_double, number, pointer, pointer]
    scalars.restype = number
    num_fields = number()
    rule = number_of(kernel.encode(), ctypes.byref(num_fields))
    if rule < 0:
        raise NotImplementedError(
            "A rule must have a kernel that kernels/update/scalars.h knows. Received: "
            f"kernel={kernel!r}. Add its formula there."
        )
    return rule, num_fields.value, scalars


class RuleStep(NamedTuple):
    """A rule in one step: what all tables have in common.

    Attributes:
      rule: the update rule.
      states: of the rule.
      number: of the step; 1 for the first.
      scalars: of the rule in this step.
    """

    rule: UpdateRule
    states: dict[str, float]
    number: int
    scalars: Scalars

    def kinds(self, dim: int) -> Kinds:
        """Returns the kinds of its states, for rows of `dim` elements."""
        return self.rule.kinds(dim)


def rule_step(rule: UpdateRule | None, learning_rate: float, number: int) -> RuleStep:
    """Returns a step of a rule.

    Args:
      learning_rate: of this step, after any schedule.
      number: 1 for the first update.

    Raises:
      TypeError: it is no update rule.
      ValueError: learning rate or number are not as the rule needs them.
    """
    if not isinstance(rule, UpdateRule):
        raise TypeError(
            "`rule` must be an update rule of sok_lite.engine.optimizers, such as SGD(). "
            f"Received: {type(rule).__name__}."
        )
    learning_rate = as_float(learning_rate)
    check_step(learning_rate, number)
    scalars = rule.scalars(learning_rate, int(number))
    if [each for each in scalars if not -_MOST <= each <= _MOST]:  # a NaN is none either
        raise ValueError(
            f"What {type(rule).__name__} multiplies by must fit float32. Received: learning_rate="
            f"{learning_rate}, which gives {scalars} with its other numbers."
        )
    return RuleStep(rule, rule.states, int(number), scalars)


def check_step(learning_rate: float, step: int) -> None:
    """Raises ValueError for a learning rate that is not finite or a step below 1."""
    if not math.isfinite(learning_rate):
        raise ValueError(f"`learning_rate` must be finite. Received: {learning_rate!r}.")
    if step < 1:
        raise ValueError(f"`step` must be >= 1, 1 for the first update. Received: {step}.")


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

    def launch(self, num_nonfinite: Array) -> Launch:
        """Returns the launch that takes the step.

        Args:
          num_nonfinite: (1,) int64, grows by the rows whose gradient has a NaN or an infinity.
        """
        num_rows = len(self.rows)
        states = map(self.pointers, self.step.rule.columns)
        columns = (self.store.column("value").pointers, *states)
        where = (*columns, self.store.chunk_shift, self.store.dim, self.rows, self.grads)
        how = (num_nonfinite, *self.noise, self.step.number, *self.step.scalars)
        arguments = (*where, *how, num_rows)
        launch: Launch = self.store.backend.prepared(self.kernel, num_rows, *arguments)
        return launch


def count_nonfinite_launch(
    backend: Backend, grads: Array, rows: Array | None, num_nonfinite: Array
) -> Launch:
    """Returns the launch that counts gradient rows with a NaN or an infinity.

    Args:
      backend: where the arrays live.
      grads: (u, dim) float32, C-contiguous.
      rows: (u,) uint32; rows of NO_ROW are not counted. None: every row counts.
      num_nonfinite: (1,) int64, grows by them.
    """
    num_rows, dim = grads.shape
    arguments = (rows, grads, dim, num_nonfinite, num_rows)
    return backend.prepared("count_nonfinite", num_rows, *arguments)
