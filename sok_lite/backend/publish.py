"""Changes that no exception can cut in two, and launches that several tables share.

A KeyboardInterrupt can be raised between any two bytecodes of Python, and memory can run out at any
allocation. So whoever changes something in several places prepares all of it first, which may fail,
as a list of actions; `publish` then takes all of them in one go. An action is a call of C code with
its arguments ready: no line of Python runs between two of them. On a CPU they allocate nothing; a
launch on a GPU takes a few bytes of the host's memory.

Tables that change at the same time publish together: launches of one kernel become one.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import starmap
from typing import Any, NamedTuple, TypeAlias


class Launch(NamedTuple):
    """A launch that is yet to be made, and that those of other tables can join.

    Attributes:
      backend: the `Backend` that makes it.
      kernel: the kernel's name.
      part: its `Work`.
    """

    backend: Any
    kernel: str
    part: Any

    def __call__(self) -> None:
        """Makes it by itself."""
        for launch in self.backend.joined(self.kernel, [self.part]):
            launch()


Action: TypeAlias = partial[Any] | Launch

NOTHING: Action = partial(bool)

# Not a lambda: this one refuses what is no partial, and so most functions of Python's.
_take: Callable[[partial[Any]], object] = partial.__call__


def publish(*lists: Sequence[Action]) -> None:
    """Takes actions, those of each list one after the other.

    Actions of different lists must not depend on each other: a launch of one list is delayed to be
    joined with launches of the same kernel in others.
    """
    lists = tuple(filter(None, lists))
    ready = lists[0] if len(lists) == 1 and Launch not in map(type, lists[0]) else _ready(lists)
    # Not `map`, which makes a tuple of arguments for each.
    deque(starmap(_take, list(zip(ready))), maxlen=0)


def plan_set(target: object, **attributes: Any) -> list[Action]:
    """Returns the actions that set attributes."""
    return [partial(setattr, target, name, value) for name, value in attributes.items()]


# What tells which launches can be one: the number of the backend, and the kernel.
_Kind: TypeAlias = tuple[int, str]


class _Alike(NamedTuple):
    """Lists with the same kinds of launches in the same order.

    Attributes:
      kinds: of the launches.
      lists: each cut before its launches: the actions before the first launch; the first launch and
        the actions after it; and so on.
    """

    kinds: tuple[_Kind, ...]
    lists: list[list[list[Action]]]


def _ready(lists: Sequence[Sequence[Action]]) -> list[Any]:
    """Returns the actions of all lists in an order to take them in, launches packed and joined."""
    by_kinds: dict[tuple[_Kind, ...], _Alike] = {}
    for actions in lists:
        cut: list[list[Action]] = [[]]
        kinds: list[_Kind] = []
        for action in actions:
            if isinstance(action, Launch):
                kinds.append((id(action.backend), action.kernel))
                cut.append([])
            cut[-1].append(action)
        by_kinds.setdefault(tuple(kinds), _Alike(tuple(kinds), [])).lists.append(cut)
    alike = list(by_kinds.values())
    ready = [action for each in alike for cut in each.lists for action in cut[0]]
    done = [0] * len(alike)  # launches of each
    while True:
        left = {
            i: each.kinds[done[i] :] for i, each in enumerate(alike) if done[i] < len(each.kinds)
        }
        if not left:
            return ready
        chosen = _next_kind(list(left.values()))
        pieces: list[list[Action]] = []
        for i, coming in left.items():
            if coming[0] == chosen:
                done[i] += 1
                pieces += [cut[done[i]] for cut in alike[i].lists]
        launches: list[Any] = [piece[0] for piece in pieces]
        first = launches[0]
        ready += first.backend.joined(first.kernel, [launch.part for launch in launches])
        ready += [action for piece in pieces for action in piece[1:]]


def _next_kind(left: list[tuple[_Kind, ...]]) -> _Kind:
    """Returns the kind of launch to make next: if possible one that no list has later."""
    for kinds in left:
        if all(kinds[0] not in others[1:] for others in left if others[0] != kinds[0]):
            return kinds[0]
    return left[0][0]
