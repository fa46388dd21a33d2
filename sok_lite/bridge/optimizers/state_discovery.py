"""The role of an optimizer's variables: states of rows, or values carried from step to step.

A trial shows it: copies of the optimizer are built for tables of unlike sizes and take steps. A
variable with as many rows as a table is a state of its rows.
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from sok_lite.bridge.optimizers.clones import CannotStepError, refusing, settings_in, variables_in
from sok_lite.bridge.optimizers.family import Family
from sok_lite.engine.optimizer_states import State


class Shape(NamedTuple):
    """The facts about a table that a trial of an optimizer needs.

    Attributes:
      name: of the table.
      dim: elements of a row.
    """

    name: str
    dim: int


class Trial(NamedTuple):
    """The result of a trial.

    Attributes:
      roles: of each of a copy's own variables: a state, whose `rows` are the number of its table,
        or the name of what goes on.
      followed: attributes that are settings, which a copy is to have as the optimizer has them.
    """

    roles: Sequence[State | str] = ()
    followed: Collection[str] = ()


class Built:
    """A copy of an optimizer that is built for rows.

    Args:
      family: of it.
      copy: the copy.
      tables: what the optimizer is told of them.
      rows: of each table.
      undecayed: numbers of the tables that weight decay does not act on.

    Attributes:
      copy: the argument.
      rows: a variable for each table, of its name.
      own: (attribute, variable) of the copy, which are neither rows nor settings.
    """

    def __init__(
        self,
        family: Family,
        copy: Any,
        tables: Sequence[Shape],
        rows: Sequence[tf.Tensor],
        undecayed: Iterable[int] = (),
    ) -> None:
        self._family, self.copy = family, copy
        names = [_variable_name(table.name) for table in tables]
        self.rows = [family.variable(*each) for each in zip(rows, names, strict=True)]
        family.build(copy, self.rows, [self.rows[i] for i in undecayed])
        self.own = self._found()

    def _found(self) -> list[tuple[str, Any]]:
        rows = set(map(id, self.rows))
        found = variables_in(self.copy, self._family.not_states)
        return [(name, variable) for name, variable in found if id(variable) not in rows]

    def step(self, numbers: Iterable[int], grads: Iterable[tf.Tensor], step: int) -> None:
        """Takes a step on tables by their numbers; `step` is 1 for the first."""
        updated = [self.rows[number] for number in numbers]
        self._family.apply(self.copy, list(zip(grads, updated, strict=True)), step)

    def late(self) -> list[str]:
        """Returns the attributes with variables that have come since it was built."""
        own = {id(variable) for _, variable in self.own}
        return [name for name, variable in self._found() if id(variable) not in own]

    def name_of(self, variable: Any, table: int) -> str:
        """Returns the name of a state's variable; "": it has none of its own.

        Of rows "user" Keras 3 says "adam/user_momentum", tf_keras "m/user". A name that nobody
        chose, which counts all variables there are, is left out.
        """
        rows = self.rows[table]
        if slot := self._family.name_of_slot(self.copy, variable, rows):
            return slot
        of_rows, name = (getattr(v, "path", v.name).split(":")[0] for v in (rows, variable))
        parts = [part for part in name.split("/") if part != of_rows]
        name = parts[-1].removeprefix(f"{of_rows}_") if parts else ""
        return "" if re.fullmatch(r"[Vv]ariable(_\d+)?", name) else name


def _variable_name(table: str) -> str:
    """Returns the name of a table with what TensorFlow takes in the name of a variable."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", table).lstrip("_-") or "rows"


def value_of(variable: Any) -> np.ndarray:
    """Returns what a variable holds, of a type that NumPy can save."""
    tensor = tf.convert_to_tensor(variable)
    return (tf.cast(tensor, tf.float32) if tensor.dtype == tf.bfloat16 else tensor).numpy()


def assign(variable: Any, value: Any) -> None:
    """Has a variable hold a value, in its own shape and dtype."""
    variable.assign(tf.cast(tf.reshape(value, tuple(variable.shape)), variable.dtype))


class TrialSteps:
    """Steps of copies of an optimizer, which show what it keeps.

    Args:
      optimizer: it.
      family: of it.
      make: takes the attributes that are followed; gives a copy of the optimizer.
    """

    def __init__(
        self, optimizer: Any, family: Family, make: Callable[[Collection[str]], Any]
    ) -> None:
        self._optimizer, self._family, self._make = optimizer, family, make

    def trial(self, tables: Sequence[Shape]) -> Trial:
        """Returns what steps on tables like these show.

        Raises:
          CannotStepError: the optimizer cannot take its steps so.
        """
        sizes = _unlike_sizes([table.dim for table in tables])
        more_tables, more_sizes = [*tables, Shape("one_more", 2)], [*(s + 1 for s in sizes), 3]
        try:
            followed, replaced = self._settings(more_tables, more_sizes)
        except CannotStepError:  # it may know its tables by name
            more_tables, more_sizes = [*tables], more_sizes[:-1]
            followed, replaced = self._settings(more_tables, more_sizes)

        def built(tables: Sequence[Shape] = tables, sizes: Sequence[int] = sizes) -> Built:
            return self._built(self._make(followed), tables, _normal(tables, sizes, 0))

        def two_steps(built: Built, rebuilt: Built | None = None) -> list[np.ndarray]:
            """Takes one step of a copy and another of the same; or of one with its variables."""
            self._step(built, tables, sizes, 1)
            values = _values(built)
            if rebuilt is not None:
                built = rebuilt
                for variable, value in zip(_variables(built), values, strict=True):
                    assign(variable, tf.constant(value))
            self._step(built, tables, sizes, 2)
            numbers = (vars(built.copy).get(name) for name in replaced)
            return [*_values(built), *(np.asarray(n) for n in numbers if tf.is_tensor(n))]

        first = built()
        more = [(name, _sizes(variable)) for name, variable in built(more_tables, more_sizes).own]
        roles = self._roles(first, sizes, tables, more)
        at_once = two_steps(first)
        # One that draws at random never does the same twice: nothing can be told then.
        if not _are_close(at_once, two_steps(built(), built())) and _are_close(
            at_once, two_steps(built())
        ):
            raise CannotStepError(self._optimizer, "hidden")
        return Trial(roles, followed)

    def _built(self, copy: Any, tables: Sequence[Shape], rows: Sequence[tf.Tensor]) -> Built:
        with refusing(self._optimizer, "build"):
            return Built(self._family, copy, tables, rows)

    def _step(self, built: Built, tables: Sequence[Shape], sizes: Sequence[int], step: int) -> None:
        with refusing(self._optimizer, "step"):
            built.step(range(len(tables)), _normal(tables, sizes, step), step)

    def _settings(
        self, tables: Sequence[Shape], sizes: Sequence[int]
    ) -> tuple[frozenset[str], list[str]]:
        """Returns the settings that a step does not change, and numbers that it makes tensors."""
        copy = self._make(())
        before = settings_in(copy)
        built = self._built(copy, tables, _normal(tables, sizes, 0))
        self._step(built, tables, sizes, 1)
        if late := built.late():
            raise CannotStepError(self._optimizer, "late", ", ".join(map(repr, late)))
        after = settings_in(copy)
        # What a class gives all its optimizers becomes an attribute of one with its first change.
        names = {*after, *settings_in(self._optimizer)}
        of_class = {name: getattr(type(copy), name) for name in names if hasattr(type(copy), name)}
        before, now = of_class | before, of_class | vars(copy)
        changed = {name for name in before if not _is_same(before[name], now.get(name))}
        numbers = [
            name
            for name in sorted(changed)
            if isinstance(before[name], (int, float)) and not isinstance(before[name], bool)
        ]
        replaced = [name for name in numbers if name not in after]
        for name in numbers:
            if name not in replaced:
                raise CannotStepError(self._optimizer, "count", repr(name))
        return frozenset(before.keys() - changed), replaced

    def _roles(
        self,
        built: Built,
        sizes: Sequence[int],
        tables: Sequence[Shape],
        more: Sequence[tuple[str, list[int]]],
    ) -> list[State | str]:
        """Returns the roles of a copy's own variables.

        Args:
          built: for tables of these sizes.
          more: (attribute, shape) of one for other numbers of rows, and mostly one table more.

        Raises:
          CannotStepError: a variable can have none.
        """
        roles: list[State | str] = []
        counts, more_counts = (Counter(name for name, _ in own) for own in (built.own, more))
        seen: Counter[str] = Counter()
        for attribute, variable in built.own:
            shape, number = _sizes(variable), seen[attribute]
            seen[attribute] += 1
            if shape and shape[0] in sizes:
                table = sizes.index(shape[0])
                taken = [r.name for r in roles if isinstance(r, State) and r.rows == table]
                name = _unused_name(built.name_of(variable, table) or attribute.strip("_"), taken)
                initial = self._initial_value(name, variable)
                roles.append(State(name, math.prod(shape[1:]), initial, table))
                continue
            if (attribute, shape) not in more:
                raise CannotStepError(self._optimizer, "size", repr(attribute))
            # One for each table, and so in their order; of several the order cannot be told.
            is_by_table = counts[attribute] == len(tables) == more_counts[attribute] - 1
            name = f"{attribute} of {tables[number].name}" if is_by_table else attribute
            roles.append(_unused_name(name, [role for role in roles if isinstance(role, str)]))
        return roles

    def _initial_value(self, name: str, variable: Any) -> float:
        """Returns what a state begins with, the same number for all rows."""
        values = value_of(variable)
        if values.dtype.kind == "f" and values.dtype.itemsize > 4:
            raise CannotStepError(self._optimizer, "dtype", repr(name), values.dtype)
        if (values != values.flat[0]).any():
            raise CannotStepError(self._optimizer, "initial", repr(name))
        return float(values.flat[0])


def _unlike_sizes(dims: Sequence[int]) -> list[int]:
    """Returns a size for each table: primes, which nothing else is likely to have."""
    primes = (n for n in itertools.count(101, 2) if all(n % d for d in range(3, 1 + n // 3, 2)))
    return list(itertools.islice((n for n in primes if n not in dims), len(dims)))


def _normal(tables: Sequence[Shape], sizes: Sequence[int], seed: int) -> list[tf.Tensor]:
    """Returns random rows."""
    rng = np.random.default_rng(seed)
    shapes = [(size, table.dim) for size, table in zip(sizes, tables, strict=True)]
    return [tf.constant(rng.normal(size=shape), tf.float32) for shape in shapes]


def _variables(built: Built) -> list[Any]:
    return [*built.rows, *(variable for _, variable in built.own)]


def _values(built: Built) -> list[np.ndarray]:
    return list(map(value_of, _variables(built)))


def _are_close(some: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> bool:
    return all(
        np.allclose(np.float64(a), np.float64(b), rtol=1e-5, atol=1e-6, equal_nan=True)
        for a, b in zip(some, others, strict=True)
    )


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    return one is other or (type(one) is type(other) and bool(one == other))


def _sizes(variable: Any) -> list[int]:
    return tf.TensorShape(variable.shape).as_list()


def _unused_name(name: str, taken: Collection[str]) -> str:
    names = itertools.chain([name], (f"{name}_{i}" for i in itertools.count(1)))
    return next(name for name in names if name not in taken)
