"""The step of an optimizer that no rule follows: a copy of it updates the rows.

In each step the rows that have a gradient, and their states, become dense variables. A new copy of
the optimizer is built on these, takes the step, and what it leaves in them goes back. To the
optimizer all tables together are a model: the copy is built on every table that it has seen, in the
order in which they came, and updates those of the step.

What the copy has for each row, such as a momentum, is a state of the rows; see roles.py. Anything
else, such as a count or a product, goes on from step to step as it is.
"""

import io
import threading
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from sok_lite.backend import Array, Backend
from sok_lite.backend.publish import Action, plan_set
from sok_lite.bridge.optimizers.clones import CannotStepError, refuse_inner_optimizers
from sok_lite.bridge.optimizers.family import Cloning, FallbackStep, Family
from sok_lite.bridge.optimizers.host import StepHost
from sok_lite.bridge.optimizers.state_discovery import (
    Shape,
    State,
    Trial,
    own_variables,
    row_variables,
    tried,
)
from sok_lite.bridge.tensor import to_array, to_tensor
from sok_lite.engine.gathered_update import Gathered, GatheredStep, Stepped
from sok_lite.engine.rows.state_owner import Kinds
from sok_lite.engine.step import Step
from sok_lite.engine.table import EmbeddingTable


class Now(NamedTuple):
    """The settings of an optimizer in one step.

    Attributes:
      step: its number, 1 for the first.
      learning_rate: of this step.
      numbers: other settings that may change.
    """

    step: int
    learning_rate: float
    numbers: Mapping[str, float]


class CarriedState(tf.train.experimental.PythonState):
    """What an optimizer has for its rows beside their states. A checkpoint saves it.

    Attributes:
      values: arrays by name.
    """

    def __init__(self) -> None:
        self.values: dict[str, np.ndarray] = {}

    def serialize(self) -> bytes:
        """Returns it as the bytes of an npz file."""
        file = io.BytesIO()
        np.savez(file, **self.values)  # type: ignore[arg-type]
        return file.getvalue()

    def deserialize(self, string_value: bytes) -> None:
        """Takes it from such bytes."""
        with np.load(io.BytesIO(string_value), allow_pickle=False) as file:
            self.values = dict(file)


class _Known(NamedTuple):
    """The tables that an optimizer has seen.

    Attributes:
      tables: weak references, in the order in which they came.
      shapes: of the same.
      trial: what it showed for them.
    """

    tables: "Sequence[weakref.ref[EmbeddingTable]]" = ()
    shapes: Sequence[Shape] = ()
    trial: Trial = Trial([], frozenset())

    @property
    def states(self) -> list[State]:
        """The states of all tables."""
        return [role for role in self.trial.roles if isinstance(role, State)]

    def number_of(self, table: EmbeddingTable) -> int:
        """Returns the number of a table."""
        return next(i for i, reference in enumerate(self.tables) if reference() is table)


class FallbackSteps:
    """The steps that an optimizer takes itself. It does not keep the optimizer alive.

    Attributes:
      carried: what goes on from step to step, beside the states of rows.
    """

    def __init__(self, optimizer: Any, family: Family) -> None:
        refuse_inner_optimizers(optimizer)
        self.carried = CarriedState()
        self._cloning: Cloning = family.cloning
        self._config = dict(family.cloning.config(optimizer))
        # Replaced as a whole, with the lock: several wrappers may have one optimizer.
        self._known = _Known()
        self._lock = threading.Lock()

    def try_out(self, optimizer: Any, now: Now) -> None:
        """Makes sure that the optimizer can take its steps itself, whatever the tables are.

        Raises:
          NotImplementedError: it cannot, and why.
        """
        if self._known.tables:
            return
        try:
            trial = self._tried(optimizer, now, [Shape("rows", 2)])
        except CannotStepError as error:
            # It may know variables by their names, and these tables it does not know yet.
            if not isinstance(error.__cause__, KeyError):
                raise
        else:
            self._known = self._known._replace(trial=trial)

    def know(self, optimizer: Any, now: Now, tables: Iterable[EmbeddingTable]) -> None:
        """Makes sure that the states of tables are known.

        Raises:
          NotImplementedError: the optimizer cannot take its steps itself, and why.
        """
        with self._lock:
            held = [reference() for reference in self._known.tables]
            known = {id(table): table for table in held if table is not None}
            new = {id(table): table for table in tables if id(table) not in known}
            if not new:
                return
            alive_tables = [*known.values(), *new.values()]
            shapes = [Shape(table.name, table.dim) for table in alive_tables]
            trial = self._tried(optimizer, now, shapes)
            self._known = _Known(list(map(weakref.ref, alive_tables)), shapes, trial)

    def kinds(self, table: EmbeddingTable) -> Kinds:
        """Returns the states of a known table."""
        known = self._known
        number = known.number_of(table)
        return {role.name: (role.size, role.initial) for role in known.states if role[0] == number}

    @property
    def state_names(self) -> list[str]:
        """The names of the states that rows have, as far as a trial has shown them."""
        return list(dict.fromkeys(role.name for role in self._known.states))

    def _tried(self, optimizer: Any, now: Now, shapes: Sequence[Shape]) -> Trial:
        return tried(optimizer, self._cloning, partial(self._copy, optimizer, now), shapes)

    def _copy(self, optimizer: Any, now: Now, followed: Collection[str]) -> Any:
        rest = (now.learning_rate, now.numbers, followed)
        return self._cloning.make(optimizer, self._config, *rest)

    def step(
        self,
        optimizer: Any,
        now: Now,
        undecayed: Collection[EmbeddingTable],
        parts: Sequence[Gathered],
    ) -> tuple[list[Stepped], list[Action]]:
        """Takes a step on rows of known tables; see `gathered_update.StepFunction`.

        Where a table has no row in the step it is one of zeros without a gradient, which goes
        nowhere: what goes on from step to step does so on a rank without rows too.

        Args:
          undecayed: tables that weight decay does not act on.
        """
        backend = parts[0].table.backend
        given, parts = parts, [part if len(part.rows) else self._one_row(part) for part in parts]
        known = self._known
        places = [known.number_of(part.table) for part in parts]
        rows = [tf.zeros((0, shape.dim)) for shape in known.shapes]
        for i, part in zip(places, parts, strict=True):
            rows[i] = to_tensor(part.rows, tf.float32, backend)
        grads = [to_tensor(part.grads, tf.float32, backend) for part in parts]
        held = {
            role: to_tensor(parts[places.index(role.table)].states[role.name], tf.float32, backend)
            for role in known.states
            if role.table in places
        }
        backend.synchronize()  # TensorFlow reads them now, on a stream of its own
        copy = self._copy(optimizer, now, known.trial.followed)
        variables = row_variables(self._cloning, known.shapes, rows)
        without = [variables[known.number_of(table)] for table in undecayed]
        self._cloning.build(copy, variables, without)
        own = [variable for _, variable in own_variables(self._cloning, copy, variables)]
        by_role = dict(zip(known.trial.roles, own, strict=True))
        others = {name: by_role[name] for name in known.trial.roles if isinstance(name, str)}
        for role, states in held.items():
            _assign(by_role[role], states)
        for name, variable in others.items():
            if name in self.carried.values:
                _assign(variable, tf.constant(self.carried.values[name]))
        updated = [variables[i] for i in places]
        self._cloning.apply(copy, list(zip(grads, updated, strict=True)), now.step)
        stepped = [
            Stepped(
                _array(variables[i], backend, part.rows),
                {
                    role.name: _array(by_role[role], backend, part.states[role.name])
                    for role in held
                    if role.table == i
                },
            )
            for i, part in zip(places, given, strict=True)
        ]
        values = {name: _kept(variable) for name, variable in others.items()}
        return stepped, plan_set(self.carried, values={**self.carried.values, **values})

    def _one_row(self, part: Gathered) -> Gathered:
        """Returns a row of zeros, with states as they begin, in place of no row."""
        xp = part.table.backend.xp
        row = xp.zeros((1, part.table.dim), np.float32)
        kinds = self.kinds(part.table)
        states = {
            name: xp.full((1, size), initial, np.float32) for name, (size, initial) in kinds.items()
        }
        return Gathered(part.table, row, xp.zeros_like(row), states)


def _assign(variable: Any, value: tf.Tensor) -> None:
    variable.assign(tf.cast(tf.reshape(value, tuple(variable.shape)), variable.dtype))


def _kept(variable: Any) -> np.ndarray:
    """Returns what a variable holds, of a type that NumPy can save."""
    tensor = tf.convert_to_tensor(variable)
    return (tf.cast(tensor, tf.float32) if tensor.dtype == tf.bfloat16 else tensor).numpy()


def _array(variable: Any, backend: Backend, like: Array) -> Array:
    """Returns what a variable holds as float32, in the shape of `like`."""
    tensor = tf.cast(tf.convert_to_tensor(variable), tf.float32)[: len(like)]
    return backend.xp.ascontiguousarray(to_array(tensor, backend).reshape(like.shape))


_all_steps: "weakref.WeakKeyDictionary[Any, FallbackSteps]" = weakref.WeakKeyDictionary()


def fallback_steps(settings: FallbackStep) -> FallbackSteps:
    """Returns the steps of an optimizer, the same ones each time."""
    steps = _all_steps.get(settings.optimizer)
    if steps is None:
        steps = _all_steps[settings.optimizer] = FallbackSteps(settings.optimizer, settings.family)
    return steps


class FallbackStepHost(StepHost):
    """The host half of a step that an optimizer takes itself."""

    def __init__(self, settings: FallbackStep, *arguments: Any) -> None:
        super().__init__(settings, *arguments)
        self._steps = fallback_steps(settings)

    def step(
        self, numbers: Sequence[float], number: int, tensors: Sequence[Any], batches: int = 1
    ) -> Step:
        """Returns a step that is yet to be taken; see StepHost."""
        learning_rate, *values = numbers
        now = Now(number, learning_rate, dict(zip(self._names, values, strict=True)))
        updates, all_decay = self._updates([None] * len(self._decays), tensors), self._decays
        if batches > 1:
            updates, all_decay = self._mean(updates, batches, lambda decays: None)
        optimizer, tables = updates.optimizers[0], updates.tables
        self._steps.know(optimizer, now, tables)
        undecayed = {
            id(table): table for table, decays in zip(tables, all_decay, strict=True) if not decays
        }
        function = partial(self._steps.step, optimizer, now, list(undecayed.values()))
        options = self._options(learning_rate, number)
        return GatheredStep(updates, self._steps.kinds, function, options)
