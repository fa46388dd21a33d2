"""What the variables of an optimizer are for: states of rows, or what goes on from step to step.

A trial shows it: a copy of the optimizer is built for tables of unlike sizes and takes a step. A
variable with as many rows as a table is a state of its rows.
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from sok_lite.bridge.optimizers.clones import CannotStepError, settings_in, variables_in
from sok_lite.bridge.optimizers.family import Cloning


class State(NamedTuple):
    """A state of rows.

    Attributes:
      table: which of the tables.
      name: of the state.
      size: elements of one row.
      initial: what a new row has.
    """

    table: int
    name: str
    size: int
    initial: float


class Shape(NamedTuple):
    """What an optimizer is told of a table.

    Attributes:
      name: of the table.
      dim: elements of a row.
    """

    name: str
    dim: int


class Trial(NamedTuple):
    """What a trial has shown.

    Attributes:
      roles: of each of a copy's own variables: a state, or the name of what goes on.
      followed: attributes that are settings, which a copy is to have as the optimizer has them.
    """

    roles: list[State | str]
    followed: frozenset[str]


def tried(
    optimizer: Any,
    cloning: Cloning,
    make: Callable[[Collection[str]], Any],
    tables: Sequence[Shape],
) -> Trial:
    """Returns what a step on tables like these shows.

    Args:
      make: takes the attributes that are followed; gives a copy of the optimizer.

    Raises:
      CannotStepError: the optimizer cannot take its steps so.
    """
    rng = np.random.default_rng(0)
    sizes = _unlike_sizes([table.dim for table in tables])
    rows = [
        tf.constant(rng.normal(size=(size, table.dim)), tf.float32)
        for size, table in zip(sizes, tables, strict=True)
    ]
    followed = _settings_that_stay(optimizer, cloning, make, tables, rows)
    copy, variables = _built(optimizer, cloning, make(followed), tables, rows)
    own = own_variables(cloning, copy, variables)
    more_tables = [*tables, Shape("one_more", 2)]
    more_rows = [tf.zeros((len(part) + 1, part.shape[1])) for part in rows] + [tf.zeros((3, 2))]
    try:
        more = _built(optimizer, cloning, make(followed), more_tables, more_rows)
    except CannotStepError:  # it may know its tables by name
        with_more = own
    else:
        with_more = own_variables(cloning, *more)
    roles = _roles(optimizer, cloning, copy, variables, own)
    names = _names_of_others(optimizer, [table.name for table in tables], own, with_more, roles)
    others = iter(names)
    roles = [role if isinstance(role, State) else next(others) for role in roles]
    _check_that_all_goes_on(optimizer, cloning, partial(make, followed), tables)
    return Trial(roles, followed)


def _built(
    optimizer: Any, cloning: Cloning, copy: Any, tables: Sequence[Shape], rows: Sequence[tf.Tensor]
) -> tuple[Any, list[Any]]:
    """Returns a copy that is built, and the variables that it is built for.

    Raises:
      CannotStepError: it cannot be built.
    """
    variables = row_variables(cloning, tables, rows)
    try:
        cloning.build(copy, variables, ())
    except Exception as error:
        raise CannotStepError(
            optimizer, f"it cannot be built on dense variables, which raises {error!r}."
        ) from error
    return copy, variables


def _check_that_all_goes_on(
    optimizer: Any, cloning: Cloning, make: Callable[[], Any], tables: Sequence[Shape]
) -> None:
    """Raises if two steps of one copy are not a step of one and, with its variables, of another.

    Raises:
      CannotStepError: they are not: the copy has something that is no variable of its own.
    """
    rng = np.random.default_rng(1)
    first, *grads = (
        [tf.constant(rng.normal(size=(5, table.dim)), tf.float32) for table in tables]
        for _ in range(3)
    )

    def after(copy: Any, variables: Sequence[Any], number: int) -> list[np.ndarray]:
        cloning.apply(copy, list(zip(grads[number - 1], variables, strict=True)), number)
        own = [variable for _, variable in own_variables(cloning, copy, variables)]
        return [_array(variable) for variable in (*variables, *own)]

    def two_steps(copies: int) -> list[np.ndarray]:
        copy, variables = _built(optimizer, cloning, make(), tables, first)
        values = after(copy, variables, 1)
        if copies == 2:
            rows = [tf.constant(part) for part in values[: len(tables)]]
            copy, variables = _built(optimizer, cloning, make(), tables, rows)
            own = own_variables(cloning, copy, variables)
            for (_, variable), value in zip(own, values[len(tables) :], strict=True):
                variable.assign(value)
        return after(copy, variables, 2)

    at_once = two_steps(1)
    # One that draws at random never does the same twice: nothing can be told then.
    if not _are_close(at_once, two_steps(2)) and _are_close(at_once, two_steps(1)):
        raise CannotStepError(
            optimizer,
            "some of what it keeps from one step for the next is in no variable among its "
            "attributes, and would be lost after each step. Keep it in variables.",
        )


def _array(variable: Any) -> np.ndarray:
    return tf.convert_to_tensor(variable).numpy()


def _are_close(some: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> bool:
    return all(
        np.allclose(np.float64(a), np.float64(b), rtol=1e-5, atol=1e-6, equal_nan=True)
        for a, b in zip(some, others, strict=True)
    )


def _names_of_others(
    optimizer: Any,
    tables: Sequence[str],
    own: Sequence[tuple[str, Any]],
    with_more: Sequence[tuple[str, Any]],
    roles: Sequence[State | str],
) -> list[str]:
    """Returns the names of what is no state: of the attribute, and of the table that it is of.

    Args:
      own: (attribute, variable) of a copy for the tables.
      with_more: the same of one for other numbers of rows, and one table more.
      roles: what `own` are.

    Raises:
      CannotStepError: one of them has a size that the number of rows decides.
    """
    found = [pair for pair, role in zip(own, roles, strict=True) if not isinstance(role, State)]
    counts = Counter(attribute for attribute, _ in found)
    all_counts = Counter(attribute for attribute, _ in own)
    more_counts = Counter(attribute for attribute, _ in with_more)
    names: list[str] = []
    seen: Counter[str] = Counter()
    for attribute, variable in found:
        others = [other for name, other in with_more if name == attribute]
        shapes = [_sizes(other) for other in others]
        if _sizes(variable) not in shapes:
            raise CannotStepError(
                optimizer,
                f"the size of its variable in {attribute!r} depends on the number of rows, but it "
                "has not one row for each. Give it the shape of the variable, or (rows, anything).",
            )
        number, seen[attribute] = seen[attribute], seen[attribute] + 1
        grows = more_counts[attribute] - all_counts[attribute]
        # One for each table, and so in their order; of several the order cannot be told.
        is_by_table = grows == 1 and counts[attribute] == all_counts[attribute] == len(tables)
        name = f"{attribute} of {tables[number]}" if is_by_table else attribute
        names.append(_unused(name, names))
    return names


def row_variables(
    cloning: Cloning, tables: Sequence[Shape], rows: Sequence[tf.Tensor]
) -> list[Any]:
    """Returns variables that a copy can update, one for each table and of its name."""
    return [
        cloning.variable(part, _variable_name(table.name))
        for table, part in zip(tables, rows, strict=True)
    ]


def _variable_name(table: str) -> str:
    """Returns the name of a table with what TensorFlow takes in the name of a variable."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", table).lstrip("_-") or "rows"


def own_variables(cloning: Cloning, copy: Any, variables: Sequence[Any]) -> list[tuple[str, Any]]:
    """Returns a copy's own (attribute, variable), which are neither rows nor settings."""
    rows = {id(variable) for variable in variables}
    found = variables_in(copy, cloning.not_states)
    return [(name, variable) for name, variable in found if id(variable) not in rows]


def _settings_that_stay(
    optimizer: Any,
    cloning: Cloning,
    make: Callable[[Collection[str]], Any],
    tables: Sequence[Shape],
    rows: Sequence[tf.Tensor],
) -> frozenset[str]:
    """Returns the settings in a copy that a step does not change."""
    copy = make(())
    before = dict(settings_in(copy))
    copy, variables = _built(optimizer, cloning, copy, tables, rows)
    made = own_variables(cloning, copy, variables)
    grads = [tf.fill(tf.shape(part), 0.5) for part in rows]
    try:
        cloning.apply(copy, list(zip(grads, variables, strict=True)), 1)
    except Exception as error:
        raise CannotStepError(optimizer, f"a step on dense variables raises {error!r}.") from error
    late = own_variables(cloning, copy, variables)[len(made) :]
    if late:
        names = ", ".join(repr(name) for name, _ in late)
        raise CannotStepError(
            optimizer,
            f"it makes variables ({names}) while it takes the step, so that they would be made "
            "anew in each step. Make them in build().",
        )
    after = dict(settings_in(copy))
    # What a class gives all its optimizers becomes an attribute of one with its first change.
    of_class = {name: getattr(type(copy), name) for name in after if hasattr(type(copy), name)}
    before = {**of_class, **before}
    changed = {name for name in before if not _is_same(before[name], after.get(name))}
    for name in sorted(changed):
        if isinstance(before[name], (int, float)) and not isinstance(before[name], bool):
            raise CannotStepError(
                optimizer,
                f"its attribute {name!r} changes in a step and is no variable, so that the change "
                "would be lost. Keep it in a variable.",
            )
    return frozenset(before.keys() - changed)


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    return one is other or (type(one) is type(other) and bool(one == other))


def _unlike_sizes(dims: Sequence[int]) -> list[int]:
    """Returns as many sizes as there are tables: primes that no table has for a dimension."""
    primes = (n for n in itertools.count(101, 2) if all(n % d for d in range(3, 1 + n // 3, 2)))
    return list(itertools.islice((n for n in primes if n not in dims), len(dims)))


def _roles(
    optimizer: Any,
    cloning: Cloning,
    copy: Any,
    variables: Sequence[Any],
    own: Sequence[tuple[str, Any]],
) -> list[State | str]:
    by_size = {_sizes(variable)[0]: i for i, variable in enumerate(variables)}
    roles: list[State | str] = []  # of what is no state, the attribute
    for attribute, variable in own:
        shape = _sizes(variable)
        table = by_size.get(shape[0]) if shape else None
        if table is None:
            roles.append(attribute)
            continue
        rows = variables[table]
        name = cloning.slot_name(copy, variable, rows) or _plain_name(variable, rows)
        taken = [role.name for role in roles if isinstance(role, State) and role.table == table]
        name = _unused(name or attribute.strip("_"), taken)
        initial = _initial_value(optimizer, name, variable)
        roles.append(State(table, name, math.prod(shape[1:]), initial))
    return roles


def _sizes(variable: Any) -> list[int]:
    return tf.TensorShape(variable.shape).as_list()


def _plain_name(variable: Any, rows: Any) -> str:
    """Returns the name of a state's variable without those of the optimizer and of the rows.

    Of rows "user" Keras 3 says "adam/user_momentum", tf_keras "m/user". A name that nobody chose,
    which counts all variables there are, is left out: "".
    """
    of_rows, name = (getattr(v, "path", v.name).split(":")[0] for v in (rows, variable))
    parts = [part for part in name.split("/") if part != of_rows]
    name = parts[-1].removeprefix(f"{of_rows}_") if parts else ""
    return "" if re.fullmatch(r"[Vv]ariable(_\d+)?", name) else name


def _unused(name: str, taken: Collection[Any]) -> str:
    names = itertools.chain([name], (f"{name}_{i}" for i in itertools.count(1)))
    return next(name for name in names if name not in taken)


def _initial_value(optimizer: Any, name: str, variable: Any) -> float:
    """Returns what a state begins with, the same number for all rows."""
    values = np.asarray(tf.convert_to_tensor(variable))
    if values.dtype.kind == "f" and values.dtype.itemsize > 4:
        raise CannotStepError(
            optimizer, f"its state {name!r} is {values.dtype}. Keep states of rows in float32."
        )
    first = values.reshape(-1)[0]
    if (values != first).any():
        raise CannotStepError(
            optimizer,
            f"its state {name!r} does not begin with the same number in all rows, and new rows "
            "come at any time. Let it begin with one number.",
        )
    return float(first)
