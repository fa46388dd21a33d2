"""The owners of the optimizer states of a row store: one owner for all states of an optimizer.

Columns with the same owner are the states of one optimizer. States of an optimizer that is gone are
orphaned: they will be dropped. Free states, from a checkpoint for example, have had no optimizer
yet. States that a restore gave to a living optimizer are its own; until it has used them, another
optimizer of the same kinds may get a copy: a program may have made the optimizer again, and still
refer to the old one.
"""

import warnings
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from sok_lite.engine.rows.column import Column


@dataclass(frozen=True, eq=False)
class StateOwner:
    """The owner of the states of one optimizer, compared by identity.

    Attributes:
      reference: a weak reference to the optimizer; None: the states are free.
      is_restored: whether a restore gave it the states, and it has not used them since.
    """

    reference: "weakref.ref[Any] | None" = None
    is_restored: bool = False

    @classmethod
    def of(cls, optimizer: Any) -> "StateOwner":
        """Returns a new owner; if the optimizer is None, its states are free."""
        return cls(None if optimizer is None else weakref.ref(optimizer))

    @property
    def optimizer(self) -> Any:
        """The optimizer; None: the states are free, or it is gone."""
        return None if self.reference is None else self.reference()

    @property
    def is_gone(self) -> bool:
        """Whether the optimizer has used the states and is gone."""
        return self.reference is not None and not self.is_restored and self.optimizer is None

    @property
    def is_free(self) -> bool:
        """Whether the next optimizer that needs the same states may take them over."""
        return self.optimizer is None and not self.is_gone


# By name as the optimizer has them.
States: TypeAlias = Mapping[str, Column]
# By name, elements of a row and what a new row has in them.
Kinds: TypeAlias = Mapping[str, tuple[int, float]]
# Of None those that no owner keeps together.
StateGroups: TypeAlias = Mapping[StateOwner | None, States]


class SoleStates(NamedTuple):
    """All states of a store, where they have one owner.

    Attributes:
      owner: of all states; None: there are no states.
      states, kinds: of the store.
    """

    owner: StateOwner | None
    states: States
    kinds: Kinds

    @staticmethod
    def of(groups: StateGroups) -> "SoleStates | None":
        """Returns all states of a store; None: they have several owners, or none."""
        if not groups:
            return SoleStates(None, {}, {})
        owner, *others = groups
        if others or owner is None:
            return None
        return SoleStates(owner, groups[owner], kinds_of(groups[owner]))


def owned(groups: StateGroups, optimizer: Any) -> States | None:
    """Returns the states that an optimizer owns; None: it owns none."""
    if optimizer is not None:
        for owner, states in groups.items():
            if owner is not None and owner.optimizer is optimizer:
                return states
    return None


def orphaned(groups: StateGroups) -> list[Column]:
    """Returns the states whose optimizer is gone: they cannot be used any more."""
    return [
        column
        for owner, states in groups.items()
        if owner is not None and owner.is_gone
        for column in states.values()
    ]


def fitting(groups: StateGroups, kinds: Kinds) -> States | None:
    """Returns the first free states that an optimizer can take over; None: there are none."""
    return next(_all_fitting(groups, kinds), None)


def warn_if_several_fit(table_name: str, groups: StateGroups, kinds: Kinds) -> None:
    """Warns if free states of several optimizers fit, and names those that are taken over."""
    found = list(_all_fitting(groups, kinds))
    if len(found) > 1:
        names = "; ".join(
            ", ".join(repr(column.name) for column in states.values()) for states in found
        )
        warnings.warn(
            f"The checkpoint of table {table_name!r} has the states of {len(found)} optimizers "
            f"that fit the one which trains it now: {names}. It takes the first, those of the "
            "optimizer that trained the table first. If it should have others, drop or rename "
            "these first: see optimizer_states().",
            RuntimeWarning,
            stacklevel=2,
        )


def _all_fitting(groups: StateGroups, kinds: Kinds) -> Iterator[States]:
    """Yields free states that an optimizer can take over.

    States of one owner must be all the states of the optimizer: Ftrl has an `accumulator` as
    Adagrad does, with another meaning. Of free states without an owner, as from old checkpoints,
    some are enough.
    """
    for owner, states in groups.items():
        if owner is not None and not owner.is_free:
            continue
        found = kinds_of(states)
        if owner is None:
            found = {name: kind for name, kind in found.items() if name in kinds}
        if found == kinds:
            yield {name: states[name] for name in kinds}


def restored(groups: StateGroups, kinds: Kinds) -> list[States]:
    """Returns states of these kinds that a restore gave to an optimizer which has not used them."""
    return [
        states
        for owner, states in groups.items()
        if owner is not None and owner.is_restored and kinds_of(states) == kinds
    ]


def kinds_of(states: States) -> dict[str, tuple[int, float]]:
    """Returns the kinds of some states."""
    return {name: (column.dim, column.initial) for name, column in states.items()}
