"""Kernel launches that are prepared first, and made as one for several tables.

A backend makes them, by `packed` in cpu.py and cuda.py. Native code has its own:
kernels/ops/launch.h.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

# Launches of one backend and one kernel can be one.
_Kind: TypeAlias = tuple[Any, str]


class Launch(NamedTuple):
    """A prepared launch of one kernel for one table; calling it makes it.

    Attributes:
      backend: the `Backend` that makes it.
      kernel: the kernel's name.
      args: its `LaunchArgs`; without items nothing is launched.
    """

    backend: Any
    kernel: str
    args: Any

    def __call__(self) -> None:
        launch_all([self])


def launch_all(*sequences: Iterable[Launch]) -> None:
    """Makes launches, those of each sequence in its order.

    Sequences must not depend on each other: launches of one kernel in several sequences become one,
    for which a sequence may wait. All arguments are packed before the first launch, so a TypeError
    or a MemoryError comes before any kernel runs.
    """
    for launch in packed_launches(*sequences):
        launch()


def packed_launches(*sequences: Iterable[Launch]) -> list[Callable[[], None]]:
    """Returns the launches that `launch_all` makes, to be called in order; see `Backend.packed`.

    TypeError, MemoryError: arguments cannot be packed; no kernel has run.
    """
    by_kinds: dict[tuple[_Kind, ...], list[list[Launch]]] = {}
    for launches in sequences:
        with_items = [each for each in launches if each.args.num_items > 0]
        if with_items:
            by_kinds.setdefault(tuple([each[:2] for each in with_items]), []).append(with_items)
    num_done, ready = dict.fromkeys(by_kinds, 0), []
    left = [*by_kinds]
    while left:
        kind = _next_kind([kinds[num_done[kinds] :] for kinds in left])
        tables = []
        for kinds in left:
            i = num_done[kinds]
            if kinds[i] == kind:
                tables += [launches[i].args for launches in by_kinds[kinds]]
                num_done[kinds] += 1
        backend, kernel = kind
        ready += backend.packed(kernel, tables)
        left = [kinds for kinds in left if num_done[kinds] < len(kinds)]
    return ready


def _next_kind(left: Sequence[Sequence[_Kind]]) -> _Kind:
    """Returns the kind of launch to make next: if possible one that no sequence has later."""
    for kinds in left:
        if all(kinds[0] not in others[1:] for others in left if others[0] != kinds[0]):
            return kinds[0]
    return left[0][0]
