"""What the parts of several ranks say together of one table."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol


class NamedState(Protocol):
    """An optimizer state of a part.

    Attributes:
      name, dim, initial, group: as of `snapshot.State`.
      tensor: says where its rows are.
    """

    @property
    def name(self) -> str: ...
    @property
    def dim(self) -> int: ...
    @property
    def initial(self) -> float: ...
    @property
    def group(self) -> int | None: ...
    @property
    def tensor(self) -> Any: ...


# What identifies a state in parts of several ranks: see `kinds_of`.
Kind = tuple[Any, ...]


class JoinedState(NamedTuple):
    """A state of a table.

    Attributes:
      name, dim, initial, group: as of `NamedState`; the groups are those of all parts.
      tensors: its tensor in each part, by the part's place; a part without it has no entry.
    """

    name: str
    dim: int
    initial: float
    group: int | None
    tensors: dict[int, Any]


def kinds_of(states: Sequence[NamedState]) -> dict[Kind, Any]:
    """Returns the tensor of each state of a part, by what tells it from others in every part.

    Groups have numbers of their own on every rank: the first with some kinds of states is the first
    with these kinds in every part, and so on.
    """
    groups: dict[int | None, list[tuple[str, int, float]]] = {}
    for state in states:
        groups.setdefault(state.group, []).append((state.name, state.dim, state.initial))
    seen: list[tuple[Any, ...]] = []
    numbers: dict[int | None, Kind] = {}
    for group, kinds in groups.items():
        alike = (group is None, *(sorted(kinds) if group is not None else ()))
        numbers[group] = (alike, seen.count(alike))
        seen.append(alike)
    return {
        (*numbers[state.group], state.name, state.dim, state.initial): state.tensor
        for state in states
    }


def joined_states(parts: Sequence[Sequence[NamedState]]) -> list[JoinedState]:
    """Returns the states that any part has.

    Args:
      parts: what each has.
    """
    by_kind: dict[Kind, dict[int, Any]] = {}
    for i, states in enumerate(parts):
        for kind, tensor in kinds_of(states).items():
            by_kind.setdefault(kind, {})[i] = tensor
    groups: dict[Kind, int] = {}
    joined = []
    for kind, tensors in by_kind.items():
        (is_free, *_), *_, name, dim, initial = kind
        group = None if is_free else groups.setdefault(kind[:2], len(groups) + 1)
        joined.append(JoinedState(name, dim, initial, group, tensors))
    return joined


def joined_facts(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the facts of that rank which had most lookups: no stamp of a key is above."""
    newest = max(parts, key=lambda facts: facts["num_lookups"])
    epochs = [facts["epoch"] for facts in parts if "epoch" in facts]
    return newest | ({"epoch": max(epochs)} if epochs else {})


def without_slots(facts: dict[str, Any]) -> dict[str, Any]:
    """Returns facts that do not say where the slots of an index are."""
    of_slots = ("segment", "num_slots", "hash_seed")
    return {name: fact for name, fact in facts.items() if name not in of_slots}
