"""Launches of kernels that are yet to be made, and that several tables make as one."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

# What tells which launches can be one: the backend, and the kernel.
_Kind: TypeAlias = tuple[Any, str]


class Launch(NamedTuple):
    """A launch that is yet to be made.

    Attributes:
      backend: the `Backend` that makes it.
      kernel: the kernel's name.
      part: its `Work`; one of no items launches nothing.
    """

    backend: Any
    kernel: str
    part: Any

    def __call__(self) -> None:
        """Makes it by itself."""
        launch_all([self])


def launch_all(*lists: Iterable[Launch]) -> None:
    """Makes launches, those of each list one after the other.

    Lists must not depend on each other: launches of one kernel in several lists become one, for
    which a list may wait. All arguments are packed before the first launch is made, so a TypeError
    or a MemoryError comes before any kernel runs.
    """
    alike: dict[tuple[_Kind, ...], list[list[Launch]]] = {}
    for launches in lists:
        some = [each for each in launches if each.part.num_items > 0]
        if some:
            alike.setdefault(tuple([each[:2] for each in some]), []).append(some)
    done, ready = dict.fromkeys(alike, 0), []
    while left := [kinds for kinds in alike if done[kinds] < len(kinds)]:
        kind = _next_kind([kinds[done[kinds] :] for kinds in left])
        parts = []
        for kinds in left:
            number = done[kinds]
            if kinds[number] == kind:
                parts += [launches[number].part for launches in alike[kinds]]
                done[kinds] += 1
        backend, kernel = kind
        ready += backend.packed(kernel, parts)
    for launch in ready:
        launch()


def _next_kind(left: Sequence[Sequence[_Kind]]) -> _Kind:
    """Returns the kind of launch to make next: if possible one that no list has later."""
    for kinds in left:
        if all(kinds[0] not in others[1:] for others in left if others[0] != kinds[0]):
            return kinds[0]
    return left[0][0]
