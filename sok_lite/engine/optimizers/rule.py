"""Base of all update rules, and the launch of a rule's kernel over rows.

kernels/update/scalars.h computes the scalar arguments of a step's kernel, for native code too.

Updates are lazy: rows without a gradient in a step do not change, nor do their states.

Round to nearest loses steps smaller than half a unit in the last place of 16-bit rows. Stochastic
rounding is exact in the mean. Its random bits depend on seed, key, column and step alone: not on
the row number or the order of the rows.
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

# Types of a rule's numbers: the range in the words of the error, and its check.
NotNegative: TypeAlias = Annotated[float, ">= 0", lambda x: x >= 0]
Positive: TypeAlias = Annotated[float, "> 0", lambda x: x > 0]
BelowOne: TypeAlias = Annotated[float, "in [0, 1)", lambda x: 0 <= x < 1]
UpToOne: TypeAlias = Annotated[float, "in [0, 1]", lambda x: 0 <= x <= 1]


class NativeRule(NamedTuple):
    """A rule for native code: its number in kernels/update/scalars.h, its fields as float64."""

    number: int
    values: bytes


@dataclass(frozen=True, kw_only=True)
class UpdateRule:
    """The hyperparameters of an optimizer, its states and its kernel.

    A rule is a frozen dataclass, in a file of its own. Flags select the variants of Keras 3,
    tf_keras, legacy tf_keras and TF1, which the head of each file lists.

    Attributes:
      weight_decay: decoupled weight decay of the touched rows: first `w -= w * lr * weight_decay`,
        then the step, as in Keras 3.
    """

    weight_decay: NotNegative = 0.0

    # Name in kernels/update/<rule>.cu, without the suffix of the row format.
    kernel: ClassVar[str]
    # State columns in the kernel's order; one that `states` lacks is passed as a null pointer.
    columns: ClassVar[tuple[str, ...]] = ()
    # Columns with one number for a row; the others have one for each element.
    one_a_row: ClassVar[frozenset[str]] = frozenset()
    # Whether a step depends on its number: the states are then useless without the count.
    counts_steps: ClassVar[bool] = False
    # The field that counts the steps of a program and is no setting; None: there is none.
    counter: ClassVar[str | None] = None
    # What a dense optimizer does to a row without a gradient and the rule does not, weight decay
    # aside: "nothing", or a few words for docs/optimizers.md.
    lazy: ClassVar[str]
    # Error for a learning rate with which the rule has no step: {} stands for the rate.
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
        """The state columns and their initial values."""
        return dict.fromkeys(self.columns, 0.0)

    def kinds(self, dim: int) -> Kinds:
        """Returns the kinds of the states, for rows of `dim` elements."""
        sizes = {name: 1 if name in self.one_a_row else dim for name in self.columns}
        return {name: (sizes[name], initial) for name, initial in self.states.items()}

    def scalars(self, learning_rate: float, step: int) -> Scalars:
        """Returns the scalar arguments of the kernel, in its order.

        Args:
          learning_rate: of this step, after any schedule.
          step: 1 for the first update (an optimizer's `iterations + 1`).

        Raises:
          ValueError: the rule has no step with this learning rate.
        """
        _, _, function = _native(self.kernel)
        scalars, integers = _ScalarsOut(), ctypes.c_int64()
        count = function(*self.native, learning_rate, step, scalars, ctypes.byref(integers))
        if count == 0:
            rate = self.refused_rate.format(learning_rate)
            raise ValueError(f"{type(self).__name__} {rate}")
        found, are_integers = scalars[:count], integers.value
        if are_integers:
            return (*[int(x) if are_integers >> i & 1 else x for i, x in enumerate(found)],)
        return tuple(found)

    @cached_property
    def native(self) -> NativeRule:
        """The rule for native code."""
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
        """Raises ValueError for the field `name` unless the condition holds."""
        if not holds:
            raise ValueError(
                f"`{name}` of {type(self).__name__} must be {expected}. "
                f"Received: {name}={getattr(self, name)!r}."
            )


@cache
def _native(kernel: str) -> tuple[int, int, Callable[..., int]]:
    """Returns a rule's number in kernels/update/scalars.h, its number of fields, and the function
    that computes its scalars."""
    # PyDLL keeps the GIL: other threads may be slow to give it back.
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
    """A rule in one step, the same for all tables; `number` is 1 for the first step."""

    rule: UpdateRule
    states: dict[str, float]
    number: int
    scalars: Scalars


def rule_step(rule: UpdateRule | None, learning_rate: float, number: int) -> RuleStep:
    """Returns a step of a rule.

    Args:
      learning_rate: of this step, after any schedule.
      number: 1 for the first update.

    Raises:
      TypeError: `rule` is not an update rule.
      ValueError: the rule has no step with this learning rate or number.
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
      states: of the rule, and maybe others.
      rows: (u,) uint32, distinct; NO_ROW is skipped.
      grads: (u, dim) float32, C-contiguous, one per row, already summed over duplicates.
      rounding: stochastic rounding of float16 and bfloat16 rows: their keys (u,) int64,
        C-contiguous, and the 64-bit seed of the table; None: to nearest even.
    """

    store: RowStore
    states: States
    step: RuleStep
    rows: Array
    grads: Array
    rounding: tuple[Array, int] | None = None

    def launch(self, num_nonfinite: Array) -> Launch:
        """Returns the launch that takes the step.

        Args:
          num_nonfinite: (1,) int64, grows by the rows whose gradient has a NaN or an infinity.
        """
        store, states, (rule, of_rule, number, scalars), rows, grads, rounding = self
        form, keys, seed = "", None, 0
        if rounding is not None and store.row_dtype.is_half:
            form, (keys, seed) = "_stochastic", rounding
        columns = [states[name].pointers if name in of_rule else None for name in rule.columns]
        launch: Launch = store.backend.prepared(
            f"{rule.kernel}{form}_{store.row_dtype.suffix}",
            len(rows),
            *(store.column("value").pointers, *columns, store.chunk_shift, store.dim, rows, grads),
            *(num_nonfinite, keys, seed, number, *scalars, len(rows)),
        )
        return launch


def count_nonfinite_launch(
    backend: Backend, grads: Array, rows: Array | None, num_nonfinite: Array
) -> Launch:
    """Returns the launch that counts gradient rows with a NaN or an infinity.

    Args:
      grads: (u, dim) float32, C-contiguous.
      rows: (u,) uint32; gradients of NO_ROW are not counted. None: all are.
      num_nonfinite: (1,) int64, grows by the count.
    """
    num_rows, dim = grads.shape
    arguments = (rows, grads, dim, num_nonfinite, num_rows)
    return backend.prepared("count_nonfinite", num_rows, *arguments)
