"""Joins what the parts of several ranks say of one table: optimizer states and facts."""

import operator
from collections.abc import KeysView, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from sok_lite.engine.hashing import is_seed
from sok_lite.engine.table.clock import Spans
from sok_lite.engine.table.index import LAST_LOOKUP_NUMBER

_LAST_EPOCH = 0xFFFFFFFF


class NamedState(Protocol):
    """An optimizer state of a part.

    Attributes:
      name, dim, initial: the optimizer's name for it, elements of a row, of a new row.
      group: number of the optimizer that it belongs to; None: nobody knows, as in old checkpoints.
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


class JoinedState(NamedTuple):
    """A state of a table.

    Attributes:
      name, dim, initial: the optimizer's name for it, elements of a row, of a new row.
      group: number of the optimizer that it belongs to, among those of all parts; None: unknown.
      tensors: its tensor in each part, by the part's place; a part without it has no entry.
    """

    name: str
    dim: int
    initial: float
    group: int | None
    tensors: dict[int, Any]


# A state: name, elements, initial value. Those of an optimizer: of each its tensor in each part.
_Kind = tuple[str, int, float]
_Group = dict[_Kind, dict[int, Any]]


def joined_states(parts: Sequence[Sequence[NamedState]]) -> list[JoinedState]:
    """Returns the states that any part has.

    Groups have numbers of their own in every part. The first with some states is the first with
    these states in every part, and so on. Else groups are one of which one has all states of the
    other: an optimizer may have got one more between two saves. A state of which nobody knows what
    it belongs to is that of the first group which has it in other parts alone.

    Args:
      parts: what each has.
    """
    groups: list[_Group] = []
    free: _Group = {}
    for i, states in enumerate(parts):
        own: dict[int | None, dict[_Kind, Any]] = {}
        for state in states:
            kind = (state.name, state.dim, state.initial)
            own.setdefault(state.group, {})[kind] = state.tensor
        for kind, tensor in own.pop(None, {}).items():
            free.setdefault(kind, {})[i] = tensor
        for kinds, group in zip(own.values(), _matches(list(own.values()), groups), strict=True):
            for kind, tensor in kinds.items():
                group.setdefault(kind, {})[i] = tensor
    for kind, tensors in list(free.items()):
        for group in groups:
            if kind in group and not group[kind].keys() & tensors.keys():
                group[kind] |= free.pop(kind)
                break
    numbered = [(None, free), *enumerate(groups, start=1)]
    return [
        JoinedState(*kind, number, tensors)
        for number, group in numbered
        for kind, tensors in group.items()
    ]


def _matches(own: Sequence[Mapping[_Kind, Any]], groups: list[_Group]) -> list[_Group]:
    """Returns which group of all parts each of a part is; new ones are appended."""
    found: dict[int, _Group] = {}
    free = list(groups)
    for is_like in (operator.eq, _are_nested):
        for i, kinds in enumerate(own):
            like = (k for k, each in enumerate(free) if is_like(each.keys(), kinds.keys()))
            at = None if i in found else next(like, None)
            if at is not None:
                found[i] = free.pop(at)
    for i in range(len(own)):
        if i not in found:
            groups.append({})
            found[i] = groups[-1]
    return [found[i] for i in range(len(own))]


def _are_nested(one: KeysView[Any], other: KeysView[Any]) -> bool:
    return one <= other or one >= other


def checked_facts(facts: Any) -> Any:
    """Returns the facts of a part, as somebody has saved them.

    Raises:
      ValueError: one is missing, or is none that a table has: it would be in the way of its next
        lookup, epoch or dump.
    """
    if not isinstance(facts, Mapping):
        raise ValueError(f"{facts!r} are no facts")
    number_of(facts.get("num_lookups"), 0, LAST_LOOKUP_NUMBER)
    if "spans" in facts:
        Spans.of(facts["spans"], facts["num_lookups"])
    if "strategy" in facts:
        if type(facts["strategy"]) is not str:
            raise ValueError(f"{facts['strategy']!r} is no strategy")
        number_of(facts.get("epoch"), 0, _LAST_EPOCH)
    if "capacity" in facts:
        number_of(facts.get("bucket"), 1)
    for name in ("capacity", "bucket", "segment", "num_slots"):
        number_of(facts.get(name, 0))
    number_of(facts.get("epoch", 0), 0, _LAST_EPOCH)
    if not is_seed(facts.get("hash_seed", 0)):
        raise ValueError(f"{facts['hash_seed']!r} is no seed of a hash")
    return facts


def number_of(value: Any, least: int = 0, most: int = 1 << 62) -> int:
    """Returns an integer, or raises ValueError if it is none, or not in these bounds."""
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{value!r} is no number from {least} to {most}")
    return value


def joined_facts(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the facts of the rank with most lookups: no later one has seen any key."""
    newest = max(parts, key=lambda facts: facts["num_lookups"])
    epochs = [facts["epoch"] for facts in parts if "epoch" in facts]
    return newest | ({"epoch": max(epochs)} if epochs else {})


def without_slots(facts: dict[str, Any]) -> dict[str, Any]:
    """Returns facts that do not say where the slots of an index are."""
    of_slots = ("segment", "num_slots", "hash_seed")
    return {name: fact for name, fact in facts.items() if name not in of_slots}
