"""Steps of an optimizer without an update rule: a copy of it updates the rows.

In each step the rows with a gradient, and their states, become dense variables. A new copy of the
optimizer is built on them and takes the step; their new values are written back. To the optimizer
all tables together are one model: the copy is built on every table seen so far, in order of
appearance, and updates those in the step.

Per-row variables of the copy, such as a momentum, are states of the rows; see state_discovery.py.
Other variables, such as a count or a product, are carried from step to step.
"""

import io
import threading
import weakref
import zipfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from sok_lite.backend import Array, Backend
from sok_lite.bridge.optimizers.clones import CannotStepError, refuse_inner_optimizers
from sok_lite.bridge.optimizers.family import FallbackStep, Family
from sok_lite.bridge.optimizers.host import StepHost
from sok_lite.bridge.optimizers.state_discovery import (
    Built,
    Shape,
    Trial,
    TrialSteps,
    assign,
    value_of,
)
from sok_lite.bridge.tensor import to_array, to_tensor
from sok_lite.engine.gathered_update import Gathered, GatheredStep, Stepped
from sok_lite.engine.optimizer_states import State
from sok_lite.engine.rows.column import Kinds
from sok_lite.engine.table import EmbeddingTable
from sok_lite.engine.update import Step


class Now(NamedTuple):
    """An optimizer's settings in step number `step`, 1 for the first; `numbers` may change."""

    step: int
    learning_rate: float
    numbers: Mapping[str, float]


class CarriedState(tf.train.experimental.PythonState):
    """An optimizer's variables other than states of rows, by name; see `carried_by`."""

    def __init__(self) -> None:
        self.values: dict[str, np.ndarray] = {}

    def serialize(self) -> bytes:
        """Returns it as the bytes of an npz file."""
        file = io.BytesIO()
        np.savez(file, **self.values)  # type: ignore[arg-type]
        return file.getvalue()

    def deserialize(self, string_value: bytes) -> None:
        """Reads the bytes of an npz file, or raises ValueError."""
        self.values = self.read(string_value)

    @staticmethod
    def read(data: bytes) -> dict[str, np.ndarray]:
        """Returns the values from `serialize`d bytes, or raises ValueError."""
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as file:
                return dict(file)
        except (ValueError, EOFError, OSError, AttributeError, zipfile.BadZipFile) as error:
            raise ValueError(f"No npz file of an optimizer's numbers ({error}).") from error


_carried: "weakref.WeakKeyDictionary[Any, CarriedState]" = weakref.WeakKeyDictionary()


def carried_by(optimizer: Any) -> CarriedState:
    """Returns an optimizer's carried variables, always the same object; empty with a rule."""
    return _carried.setdefault(optimizer, CarriedState())


class _Known(NamedTuple):
    """The tables that an optimizer has seen, in order of appearance, and the trial on them."""

    tables: "Sequence[weakref.ref[EmbeddingTable]]" = ()
    shapes: Sequence[Shape] = ()
    trial: Trial = Trial()

    @property
    def states(self) -> list[State]:
        """The states of all tables."""
        return [role for role in self.trial.roles if isinstance(role, State)]

    def number_of(self, table: EmbeddingTable) -> int:
        """Returns the position of a table."""
        return next(i for i, reference in enumerate(self.tables) if reference() is table)


class FallbackSteps:
    """An optimizer's own steps, and variables that it carries. Does not keep it alive."""

    def __init__(self, optimizer: Any, family: Family) -> None:
        refuse_inner_optimizers(optimizer)
        self.carried = carried_by(optimizer)
        self._family = family
        self._config = dict(family.config(optimizer))
        # Replaced as a whole, with the lock: several wrappers may share an optimizer.
        self._known = _Known()
        self._lock = threading.Lock()

    def try_out(self, optimizer: Any, now: Now) -> None:
        """Raises NotImplementedError, with the reason, if the optimizer cannot step on rows."""
        if self._known.tables:
            return
        try:
            trial = self._trial(optimizer, now, [Shape("rows", 2)])
        except CannotStepError as error:
            # It may look variables up by name, and does not know these trial tables.
            if not isinstance(error.__cause__, KeyError):
                raise
        else:
            self._known = self._known._replace(trial=trial)

    def know(self, optimizer: Any, now: Now, tables: Iterable[EmbeddingTable]) -> None:
        """Makes the states of tables known; raises NotImplementedError as `try_out`."""
        with self._lock:
            known_tables = [reference() for reference in self._known.tables]
            known = {id(table): table for table in known_tables if table is not None}
            every = known | {id(table): table for table in tables}
            if len(every) > len(known):
                shapes = [Shape(table.name, table.dim) for table in every.values()]
                trial = self._trial(optimizer, now, shapes)
                self._known = _Known(list(map(weakref.ref, every.values())), shapes, trial)

    def kinds(self, table: EmbeddingTable) -> Kinds:
        """Returns the states of a known table."""
        known = self._known
        number = known.number_of(table)
        return {role.name: (role.dim, role.initial) for role in known.states if role.rows == number}

    @property
    def state_names(self) -> list[str]:
        """The names of rows' states, as far as a trial has shown them."""
        return list(dict.fromkeys(role.name for role in self._known.states))

    def _trial(self, optimizer: Any, now: Now, shapes: Sequence[Shape]) -> Trial:
        make = partial(self._copy, optimizer, now)
        return TrialSteps(optimizer, self._family, make).trial(shapes)

    def _copy(self, optimizer: Any, now: Now, followed: Collection[str]) -> Any:
        rest = (now.learning_rate, now.numbers, followed)
        return self._family.make(optimizer, self._config, *rest)

    def step(
        self,
        optimizer: Any,
        now: Now,
        undecayed: Collection[EmbeddingTable],
        parts: Sequence[Gathered],
    ) -> tuple[list[Stepped], Callable[[], None]]:
        """Takes a step on gathered rows of known tables; `undecayed` ones have no weight decay.

        A table without rows in the step gets one row of zeros without a gradient, which is dropped:
        the carried variables must change on a rank without rows too.
        """
        backend, known = parts[0].table.backend, self._known
        by_number = {known.number_of(part.table): part for part in parts}

        def tensor(array: Array, initial: float = 0.0) -> tf.Tensor:
            if not len(array):
                return tf.fill((1, array.shape[1]), initial)
            return to_tensor(array, tf.float32, backend)

        rows = [tf.zeros((0, shape.dim)) for shape in known.shapes]
        for number, part in by_number.items():
            rows[number] = tensor(part.rows)
        grads = [tensor(part.grads) for part in parts]
        values: dict[State | str, tf.Tensor] = {
            role: tensor(by_number[role.rows].states[role.name], role.initial)
            for role in known.states
            if role.rows in by_number
        }
        backend.synchronize()  # TensorFlow reads them on a stream of its own
        values.update((name, tf.constant(value)) for name, value in self.carried.values.items())
        copy = self._copy(optimizer, now, known.trial.followed)
        without = list(map(known.number_of, undecayed))
        built = Built(self._family, copy, known.shapes, rows, without)
        own = {role: v for role, (_, v) in zip(known.trial.roles, built.own, strict=True)}
        for role in own.keys() & values.keys():
            assign(own[role], values[role])
        built.step(by_number, grads, now.step)
        stepped = [
            Stepped(
                _array(built.rows[number], backend, part.rows),
                {
                    role.name: _array(variable, backend, part.states[role.name])
                    for role, variable in own.items()
                    if isinstance(role, State) and role.rows == number
                },
            )
            for number, part in by_number.items()
        ]
        carried = {role: value_of(each) for role, each in own.items() if isinstance(role, str)}

        def note() -> None:
            self.carried.values = {**self.carried.values, **carried}

        return stepped, note


def _array(variable: Any, backend: Backend, like: Array) -> Array:
    """Returns the value of a variable as float32, in the shape of `like`."""
    tensor = tf.cast(tf.convert_to_tensor(variable), tf.float32)[: len(like)]
    return backend.xp.ascontiguousarray(to_array(tensor, backend).reshape(like.shape))


_all_steps: "weakref.WeakKeyDictionary[Any, FallbackSteps]" = weakref.WeakKeyDictionary()


def fallback_steps(settings: FallbackStep) -> FallbackSteps:
    """Returns the steps of an optimizer, always the same object."""
    steps = _all_steps.get(settings.optimizer)
    if steps is None:
        steps = _all_steps[settings.optimizer] = FallbackSteps(settings.optimizer, settings.family)
    return steps


class FallbackStepHost(StepHost):
    """The host half of an optimizer's own step."""

    runs_tensorflow = True

    def __init__(self, settings: FallbackStep, *arguments: Any) -> None:
        super().__init__(settings, *arguments)
        self._steps = fallback_steps(settings)

    def step(
        self, numbers: Sequence[float], number: int, arrays: Sequence[Array], batches: int = 1
    ) -> Step:
        """Returns a step to be taken; see StepHost."""
        learning_rate, *values = numbers
        now = Now(number, learning_rate, dict(zip(self._names, values, strict=True)))
        updates, all_decay = self._updates(lambda decays: None, arrays, batches)
        optimizer, tables = updates[0].optimizer, [each.table for each in updates]
        self._steps.know(optimizer, now, tables)
        undecayed = {
            id(table): table for table, decays in zip(tables, all_decay, strict=True) if not decays
        }
        function = partial(self._steps.step, optimizer, now, list(undecayed.values()))
        options = self._options(learning_rate, number)
        step = GatheredStep(updates, self._steps.kinds, function, options)
        return self._of_batches(step, batches) if batches > 1 else step
