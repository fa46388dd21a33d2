"""What the variables of an optimizer are for: states of rows, or what goes on from step to step.

A trial shows it: a copy of the optimizer is built for tables of unlike sizes and takes a step. A
variable with as many rows as a table is a state of its rows.
"""

import itertools
import math
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from sok_lite.bridge.optimizers.copies import CannotStepError, settings_in, variables_in
from sok_lite.bridge.optimizers.family import Copying


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


class Trial(NamedTuple):
    """What a trial has shown.

    Attributes:
      roles: of each of a copy's own variables: a state, or the name of what goes on.
      followed: attributes that are settings, which a copy is to have as the optimizer has them.
    """

    roles: list[State | str]
    followed: frozenset[str]


def tried(
    optimizer: Any, copying: Copying, make: Callable[[Collection[str]], Any], dims: Sequence[int]
) -> Trial:
    """Returns what a step on tables of these dimensions shows.

    Args:
      make: takes the attributes that are followed; gives a copy of the optimizer.

    Raises:
      CannotStepError: the optimizer cannot take its steps so.
    """
    rng = np.random.default_rng(0)
    sizes = _unlike_sizes(dims)
    rows = [
        tf.constant(rng.normal(size=shape), tf.float32) for shape in zip(sizes, dims, strict=True)
    ]
    followed = _settings_that_stay(optimizer, copying, make, rows)
    copy = make(followed)
    variables = row_variables(copying, rows)
    copying.build(copy, variables, ())
    own = own_variables(copying, copy, variables)
    return Trial(_roles(optimizer, copying, copy, variables, own), followed)


def row_variables(copying: Copying, rows: Sequence[tf.Tensor]) -> list[Any]:
    """Returns variables that a copy can update, one for each table."""
    return [copying.variable(part, f"{_ROWS}{i}_") for i, part in enumerate(rows)]


def own_variables(copying: Copying, copy: Any, variables: Sequence[Any]) -> list[tuple[str, Any]]:
    """Returns a copy's own (attribute, variable), which are neither rows nor settings."""
    rows = {id(variable) for variable in variables}
    found = variables_in(copy, copying.not_states)
    return [(name, variable) for name, variable in found if id(variable) not in rows]


# The names of row variables begin so and end with an underscore.
_ROWS = "rows_of_table_"


def _settings_that_stay(
    optimizer: Any,
    copying: Copying,
    make: Callable[[Collection[str]], Any],
    rows: Sequence[tf.Tensor],
) -> frozenset[str]:
    """Returns the settings in a copy that a step does not change."""
    copy = make(())
    before = dict(settings_in(copy))
    variables = row_variables(copying, rows)
    copying.build(copy, variables, ())
    made = own_variables(copying, copy, variables)
    grads = [tf.fill(tf.shape(part), 0.5) for part in rows]
    try:
        copying.apply(copy, list(zip(grads, variables, strict=True)), 1)
    except Exception as error:
        raise CannotStepError(optimizer, f"a step on dense variables raises {error!r}.") from error
    late = own_variables(copying, copy, variables)[len(made) :]
    if late:
        names = ", ".join(repr(name) for name, _ in late)
        raise CannotStepError(
            optimizer,
            f"it makes variables ({names}) while it takes the step, so that they would begin anew "
            "each time. Let it make them where it is built.",
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
                f"its attribute {name!r} changes with the step and is no variable, so that it "
                "would begin anew each time. Let the optimizer have a variable for it.",
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
    copying: Copying,
    copy: Any,
    variables: Sequence[Any],
    own: Sequence[tuple[str, Any]],
) -> list[State | str]:
    by_size = {variable.shape[0]: i for i, variable in enumerate(variables)}
    roles: list[State | str] = []
    for attribute, variable in own:
        shape = tuple(variable.shape)
        table = by_size.get(shape[0]) if shape else None
        if table is None:
            roles.append(_unused(attribute, roles))
            continue
        name = copying.slot_name(copy, variable, variables[table]) or _plain_name(variable)
        taken = [role.name for role in roles if isinstance(role, State) and role.table == table]
        name = _unused(name or attribute.strip("_"), taken)
        initial = _initial_value(optimizer, name, variable)
        roles.append(State(table, name, math.prod(shape[1:]), initial))
    return roles


def _plain_name(variable: Any) -> str:
    """Returns the name of a variable without that of the optimizer and of the rows.

    Keras 3 says "adam/rows_of_table_0__momentum", tf_keras "m/rows_of_table_0_:0". A name that
    nobody chose, which counts all variables there are, is left out: "".
    """
    name = getattr(variable, "path", variable.name).split(":")[0]
    name = re.sub(rf"{_ROWS}\d+_(_\d+)?", "", name)
    parts = [part.strip("_") for part in name.split("/")]
    name = next((part for part in reversed(parts) if part), "")
    return "" if re.fullmatch(r"[Vv]ariable(_\d+)?", name) else name


def _unused(name: str, taken: Collection[Any]) -> str:
    names = itertools.chain([name], (f"{name}_{i}" for i in itertools.count(1)))
    return next(name for name in names if name not in taken)


def _initial_value(optimizer: Any, name: str, variable: Any) -> float:
    """Returns what a state begins with, the same number for all rows."""
    values = np.asarray(tf.convert_to_tensor(variable))
    if values.dtype.kind == "f" and values.dtype.itemsize > 4:
        raise CannotStepError(
            optimizer, f"its state {name!r} is {values.dtype}, and states of rows are float32."
        )
    first = values.reshape(-1)[0]
    if (values != first).any():
        raise CannotStepError(
            optimizer,
            f"its state {name!r} does not begin with one number for all rows, and new rows come "
            "at any time.",
        )
    return float(first)
