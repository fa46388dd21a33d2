"""Who may use a table when: one call at a time, never between the halves of a change, never torn by
a fork.
"""

import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T", bound="Exclusive")


class Exclusive:
    """What is used by one thread at a time. See `exclusive`.

    Attributes:
      lock: held during every exclusive method; hold it to do several as one.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        # What is left to do of a change that an exception has interrupted. It can be done again
        # where an exception interrupts it too.
        self._unfinished: Callable[[], None] | None = None
        self._unusable: str | None = None
        _all[id(self)] = weakref.ref(self, functools.partial(_forget, id(self)))

    def alone(self, function: Callable[[], R]) -> R:
        """Calls a function while this thread has the lock."""
        with self.lock: return _run(self, lambda _: function(), (), {})  # fmt: skip # noqa: E701

    def _begin(self) -> None:
        """Called before anything else is done, with the lock."""
        if self._unusable is not None:
            raise RuntimeError(self._unusable)
        self._finish()

    def _finish(self) -> None:
        while self._unfinished is not None:
            self._unfinished()

    def _unusable_after_fork(self) -> str | None:
        """Says why a forked child must not use its copy; None: it may."""
        return None


def exclusive(method: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R]:
    """Makes a method hold the lock, and finish what an interrupted one has left."""

    @functools.wraps(method)
    def call(self: T, *args: P.args, **kwargs: P.kwargs) -> R:
        # In one line. Where a `with` statement has several, Python comes back to its first line
        # before it gives the lock up, and an exception from a trace function there would keep it.
        with self.lock: return _run(self, method, args, kwargs)  # fmt: skip # noqa: E701

    return call


def holding(items: Iterable[Exclusive], function: Callable[[], R]) -> R:
    """Calls a function while this thread has the locks of some items."""
    # In one order for all threads, so that none waits for another that waits for it.
    ordered = sorted(set(items), key=id)
    return _holding([item.lock for item in ordered], lambda: _begun(ordered, function))


def _begun(items: Sequence[Exclusive], function: Callable[[], R]) -> R:
    for item in items:
        item._begin()
    return function()


def _run(item: Any, method: Callable[..., R], args: Any, kwargs: Any) -> R:
    item._begin()
    try:
        return method(item, *args, **kwargs)
    except BaseException:
        # Now where it can be done, else by whoever comes next.
        item._finish()
        raise


def _holding(locks: Sequence[Any], function: Callable[[], R]) -> R:
    if not locks:
        return function()
    # Eight at a time, for a call may have a thousand. An RLock may be taken again.
    a, b, c, d, e, f, g, h = (*locks[:8], *[locks[-1]] * 7)[:8]
    with a, b, c, d, e, f, g, h: return _holding(locks[8:], function)  # fmt: skip # noqa: E701


# ---------------------------------------------------------------- fork
#
# A child has a copy of its parent's memory as it is at that moment. So the forking thread takes all
# locks first: then no change is half made, and no lock belongs to a thread that the child lacks.

_FORK_WAIT_S = 10.0
_all: dict[int, "weakref.ref[Exclusive]"] = {}
_taken: dict[int, list[tuple[Exclusive, bool]]] = {}  # by forking thread: whether each was got


def _forget(number: int, _: object) -> None:
    _all.pop(number, None)


def _before_fork() -> None:
    taken = _taken[threading.get_ident()] = []
    deadline = time.monotonic() + _FORK_WAIT_S
    items = [item for item in (reference() for reference in list(_all.values())) if item]
    for item in sorted(items, key=id):
        left = max(0.0, deadline - time.monotonic())
        taken.append((item, item.lock.acquire(timeout=left)))


def _after_fork_in_parent() -> None:
    for item, is_taken in _taken.pop(threading.get_ident(), ()):
        if is_taken:
            item.lock.release()


def _after_fork_in_child() -> None:
    for item, is_taken in _taken.pop(threading.get_ident(), ()):
        item.lock = threading.RLock()
        item._unusable = item._unusable or item._unusable_after_fork()
        if not is_taken:
            item._unusable = (
                "This process was forked while another thread was changing a table: its copy of "
                "the table may be half changed and cannot be used. Fork when no other thread uses "
                "the table, or start processes with the 'spawn' method of multiprocessing."
            )
    _taken.clear()


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)
