"""The host half of an optimizer's step, and how gradients get there: all variables together."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.backend import Array, Backend
from sok_lite.bridge.checks import checked_keys
from sok_lite.bridge.host_call import on_device
from sok_lite.bridge.job import other_ranks
from sok_lite.bridge.joined import (
    as_int64,
    join,
    join_numbers,
    joined_rows,
    joins_rows,
    listed,
    rows_of,
    shapes_of,
)
from sok_lite.bridge.optimizers.accumulation import accumulation_of
from sok_lite.bridge.optimizers.family import FallbackStep, Settings
from sok_lite.bridge.row_gradient import are_distinct
from sok_lite.bridge.tensor import to_array
from sok_lite.bridge.type_spec import alive, live_tables
from sok_lite.bridge.variable import TableVariable
from sok_lite.engine.accumulation import AccumulatedStep
from sok_lite.engine.foreign_keys import RankInfo
from sok_lite.engine.optimizers import UpdateRule
from sok_lite.engine.pieces import Pieces
from sok_lite.engine.step import HeldStep, Step, StepOptions
from sok_lite.engine.update import UpdateStep, step_of
from sok_lite.engine.update_rows import Updates


def checked_gradient(
    grad: tf.IndexedSlices, variable: TableVariable
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns keys (n,) and rows (n, dimension) float32 of a gradient.

    Raises:
      TypeError: keys are no integers.
      ValueError: shapes that do not fit.
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


def joined_gradients(
    gradients: Sequence[tuple[tf.Tensor, tf.Tensor]], backend: Backend
) -> list[Any]:
    """Returns [lengths; keys of all variables as int64; gradients as `joined_rows` gives them].

    The lengths are the keys of each variable and, where the gradients are joined, their shapes.
    """
    keys = [as_int64(keys) for keys, _ in gradients]
    rows = [rows for _, rows in gradients]
    lengths = [shapes_of(keys)] + ([shapes_of(rows)] if joins_rows(backend) else [])
    return [join_numbers(lengths), join(keys), *joined_rows(rows, backend)]


class NonFiniteRows:
    """Counts gradient rows with a NaN or an infinity where kernels run, until somebody asks."""

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

    @property
    def count(self) -> int:
        """Rows counted so far, on all backends. It waits for the kernels."""
        counts = list(self._counts.items())
        return self._before + sum(on_device(backend, int, count[0]) for backend, count in counts)


class StepHost:
    """The host half of an update. Holds no tensor and keeps no variable or optimizer alive.

    Args:
      settings: of the optimizer.
      owner: has `on_nonfinite`, `stochastic_rounding` and `nonfinite`, which counts on.
      optimizer: whose states the rows have.
      variables: one for each gradient.
      keys: of each gradient; what is known of them while a graph is made is kept.

    Attributes:
      waits: whether TensorFlow gets to read what kernels of the step write.
    """

    waits = True

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
        # Those that are int64 as a lookup gave them; others are checked by the engine.
        self._of_gradients = [
            are_distinct(each) and each.dtype == variable.key_type for each, variable in pairs
        ]
        # Of uint64 keys; those of a gradient are taken as they are.
        self._are_bits = [
            each.dtype == tf.uint64 and not of_gradient
            for each, of_gradient in zip(keys, self._of_gradients, strict=True)
        ]
        self._names = list(settings.numbers)
        self._decays = [settings.decays(variable) for variable in variables]
        self._on_nonfinite = owner.on_nonfinite
        self._stochastic_rounding = owner.stochastic_rounding
        self._backend: Backend = variables[0].table.backend

    def step(
        self, numbers: Sequence[float], number: int, tensors: Sequence[Any], batches: int = 1
    ) -> Step:
        """Returns a step that is yet to be taken.

        Args:
          numbers: learning rate, then hyper-parameters.
          number: 1 for the first.
          tensors: what `joined_gradients` gave.
          batches: of how many it is, whose other gradients were added up.
        """
        raise NotImplementedError

    def adding(self, number: int, tensors: Sequence[Any]) -> Step:
        """Returns a step that adds gradients up, for the step of a number to take.

        Args:
          tensors: what `joined_gradients` gave.
        """
        updates, _ = self._updates(lambda decays: None, tensors)
        return accumulation_of(updates.optimizers[0]).add(updates, self._options(0.0, number))

    def _of_batches(self, step: HeldStep[Any], batches: int) -> Step:
        """Returns the step of so many batches whose last one has a step by itself."""
        return AccumulatedStep(step, accumulation_of(step.updates.optimizers[0]), batches)

    def _options(self, learning_rate: float, number: int) -> StepOptions:
        """Returns what a step is told beside its gradients."""
        owner, comm = self._owner(), other_ranks()
        return StepOptions(
            learning_rate,
            number,
            self._on_nonfinite,
            self._stochastic_rounding,
            None if owner is None else owner.nonfinite.count_on(self._backend),
            # In an elastic job not always the same.
            None if comm is None else RankInfo(comm.rank, comm.size),
        )

    def _updates(
        self, rule: Callable[[bool], UpdateRule | None], tensors: Sequence[Any], batches: int = 1
    ) -> tuple[Updates, list[bool]]:
        """Returns the update of each table by its rule, and on which of them weight decay acts.

        Args:
          rule: takes whether weight decay acts on a table.
          batches: of several, tables take part that have no gradient in the last one.
        """
        optimizer = None if self._optimizer is None else alive(self._optimizer)
        tables, decays = live_tables(self._variables), self._decays
        keys, grads = self._gradients(tensors)
        of_gradients = self._of_gradients
        if batches > 1:
            known = accumulation_of(optimizer).variables
            others = {var.table: its for var, its in known.items() if var.table not in tables}
            tables, decays = [*tables, *others], [*decays, *others.values()]
            keys = [*keys, *(table.backend.xp.zeros(0, np.int64) for table in others)]
            grads = [*grads, *(t.backend.xp.zeros((0, t.dim), np.float32) for t in others)]
            of_gradients = [*of_gradients, *[False] * len(others)]
        rules, optimizers = list(map(rule, decays)), [optimizer] * len(tables)
        return Updates(tables, rules, keys, grads, optimizers, of_gradients), decays

    def _gradients(self, tensors: Sequence[Any]) -> tuple[Sequence[Array], Sequence[Array]]:
        """Returns keys and gradient of each variable."""
        lengths, joined_keys, *joined_grads = tensors
        count = len(self._variables)
        numbers = listed(lengths)
        keys: Sequence[Array] = Pieces.of_sizes(
            to_array(joined_keys, self._backend), numbers[:count]
        )
        shapes = list(zip(numbers[count::2], numbers[count + 1 :: 2], strict=True))
        if True in self._are_bits:
            pairs = zip(keys, self._are_bits, strict=True)
            keys = [its.view(np.uint64) if are_bits else its for its, are_bits in pairs]
        return keys, rows_of(joined_grads, shapes, self._backend)


class RuleHost(StepHost):
    """The host half of an update by a rule."""

    waits = False

    def __init__(self, settings: Settings, *arguments: Any) -> None:
        super().__init__(settings, *arguments)
        self._rule = partial(settings.rule, **settings.flags)
        # Of the last step: most steps have the same numbers.
        self._last: tuple[list[float], tuple[UpdateRule, UpdateRule]] | None = None

    def step(
        self, numbers: Sequence[float], number: int, tensors: Sequence[Any], batches: int = 1
    ) -> Step:
        """Returns a step that is yet to be taken; see StepHost."""
        learning_rate, *values = numbers
        decayed, undecayed = self._rules(values)
        updates, _ = self._updates(
            lambda decays: decayed if decays else undecayed, tensors, batches
        )
        options = self._options(learning_rate, number)
        if batches > 1:
            return self._of_batches(UpdateStep(updates, options), batches)
        return step_of(updates, options)

    def _rules(self, values: list[float]) -> tuple[UpdateRule, UpdateRule]:
        """Returns the rule of tables on which weight decay acts, and that of others."""
        if self._last is None or values != self._last[0]:
            rule = self._rule(**dict(zip(self._names, values, strict=True)))
            undecayed = replace(rule, weight_decay=0.0) if rule.weight_decay else rule
            self._last = values, (rule, undecayed)
        return self._last[1]
