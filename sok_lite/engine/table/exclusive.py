"""Who may use a table when: one call at a time, no change within another, none torn by a fork.

A change finds all memory that it needs, and then changes the table under `uninterrupted`, which
Ctrl-C does not cut in two. So a call that raises has done all of its work or none of it.
"""

import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from sok_lite.backend import Backend
from sok_lite.backend.table_lock import TableLock, TableLocks
from sok_lite.backend.uninterrupted import uninterrupted
from sok_lite.engine.table.record import TableRecord, free_locks_in_child, new_record, retire

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T", bound="Exclusive")


# A lookup of native code goes on here.
_HANDED_OVER = 2


class _Call:
    """An outermost call, of one item or of several at once.

    Attributes:
      goes_on: whether it has not ended yet.
      changes: whether it is in a change.
    """

    __slots__ = ("changes", "goes_on")

    def __init__(self, goes_on: bool, changes: bool) -> None:
        self.goes_on, self.changes = goes_on, changes


_NO_CALL = _Call(False, False)


class Exclusive:
    """An object that one thread uses at a time: its methods are `exclusive`, or `changing`.

    Args:
      backend: whose kernels use it; None: none of one backend does.

    Attributes:
      record: what native code sees of it.
      lock: held during every exclusive method; hold it to do several as one.
      num_changes: calls so far that may have changed it.
      has_to_begin: whether `begin` does more than to look whether it is unusable.
    """

    has_to_begin = False

    def __init__(self, backend: Backend | None = None) -> None:
        self.record = new_record()
        self.lock = threading.RLock() if backend is None else backend.new_lock(self.record)
        # Only who has `lock` looks at these.
        self._call = _NO_CALL  # the last one
        self.num_changes = 0
        self._unusable: str | None = None
        # The garbage collector clears references to what it frees before finalizers run, which may
        # still use a table. It knows nothing of an array, which goes with the attributes.
        self._until_gone = np.empty(0)
        gone = weakref.ref(self._until_gone, functools.partial(_forget, id(self), self.record))
        references: list[weakref.ref[Any]] = [weakref.ref(self), gone]
        if isinstance(self.lock, TableLock):
            # C code, which no exception ends, and called while nothing of the table is gone.
            references.append(weakref.ref(self, self.lock.retire))
        _all[id(self)] = references

    def begin(self) -> None:
        """Called before anything else of an outermost call is done."""
        if self._unusable is not None:
            raise RuntimeError(self._unusable)

    def failed(self) -> None:
        """Called when an outermost call raises."""

    @property
    def is_changing(self) -> bool:
        """Whether this thread, which has `lock`, is in a change."""
        return self._call.changes

    def why_unusable_after_fork(self) -> str | None:
        """Says why a forked child must not use its copy; None: it may."""
        return None


def exclusive(method: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R]:
    """Makes a method hold the lock."""

    @functools.wraps(method)
    def call(self: T, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.lock:
            if _is_in_call(self):
                return method(self, *args, **kwargs)
            return _outermost([self], lambda: method(self, *args, **kwargs), changes=False)

    return call


def changing(method: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R]:
    """Makes a method exclusive that changes something, and so has no place within another.

    Raises:
      RuntimeError: this thread is in a change already. What that has looked up would be wrong.
    """

    @functools.wraps(method)
    def change(self: T, *args: P.args, **kwargs: P.kwargs) -> R:
        def call() -> R:
            with uninterrupted():
                return method(self, *args, **kwargs)

        return _change(self, method.__name__, call)

    return change


def _change(item: Exclusive, what: str, function: Callable[[], R]) -> R:
    with item.lock:
        if item.is_changing or _is_handed_over(item):
            raise RuntimeError(
                f"{what} was called while this thread was changing the same table: from a signal "
                "handler, a finalizer or a predicate. Do it after that call."
            )
        if not item._call.goes_on:
            return _outermost([item], function, changes=True)
        item._call.changes = True
        item.num_changes += 1
        try:
            return function()
        finally:
            item._call.changes = False


@exclusive
def alone(item: Exclusive, function: Callable[[], R]) -> R:
    """Calls a function that does several things, while this thread has an item's lock."""
    return function()


def changing_alone(item: Exclusive, function: Callable[[], R]) -> R:
    """Calls a function that is one change of an item, and may take long.

    What it changes it has to change under `uninterrupted`.

    Raises:
      RuntimeError: as of `changing`.
    """
    return _change(item, "A change", function)


def unless_in_use(item: Exclusive, function: Callable[[], None]) -> None:
    """Calls a function under an item's lock; not if this thread is in a call of the item, which may
    be reading what the function changes."""
    with item.lock, uninterrupted():
        if not _is_in_call(item):
            function()


def holding(items: Iterable[Exclusive], function: Callable[[], R], goes_on: bool = False) -> R:
    """Calls a function that is one change of several items, or does nothing but read them.

    What it changes it has to change under `uninterrupted`.

    Args:
      goes_on: whether it goes on with what native code has begun in this thread.

    Raises:
      RuntimeError: this thread is in a call of one of them.
    """
    distinct = [*dict.fromkeys(items)]
    # Native locks are taken in one order by all threads, and so are the others, so that none waits
    # for another that waits for it.
    native = [item.lock for item in distinct if type(item.lock) is TableLock]
    others = [item for item in distinct if type(item.lock) is not TableLock]

    def held() -> R:
        if any(item._call.goes_on or (_is_handed_over(item) and not goes_on) for item in distinct):
            raise RuntimeError(
                "A lookup or an update was called while this thread was in another call of one of "
                "its tables: from a signal handler, a finalizer or a predicate. Do it after that "
                "call."
            )
        return _outermost(distinct, function, changes=True)

    locks = [item.lock for item in sorted(others, key=id)]
    if not native:
        return _nested(locks, held)
    with TableLocks(native):
        return _nested(locks, held)


def _nested(locks: Sequence[Any], function: Callable[[], R]) -> R:
    # By `with` alone: in an ExitStack Ctrl-C may come between a lock and the note of it. Some at a
    # time, for a call may have a thousand tables, and Python nests 20 blocks at most.
    if not locks:
        return function()
    if len(locks) < 4:
        with locks[0]:
            return _nested(locks[1:], function)
    if len(locks) < 15:
        a, b, c, d, *others = locks
        with a, b, c, d:
            return _nested(others, function)
    a, b, c, d, e, f, g, h, i, j, k, m, n, o, p, *others = locks
    with a, b, c, d, e, f, g, h, i, j, k, m, n, o, p:
        return _nested(others, function)


def last_change(items: Iterable[Exclusive]) -> object:
    """Returns what stands for the last change of items, for `holding_since`. Hold the items."""
    return [(item.num_changes, item.record.num_native) for item in items]


def holding_since(items: Sequence[Exclusive], change: object, function: Callable[[bool], R]) -> R:
    """Does what `holding` does with a function of whether items are as a call of theirs left them.

    Args:
      change: what `last_change` gave in a call of `holding`, of the same items in their order.
      function: takes whether none has changed since that call.
    """

    def since() -> R:
        # One more: this call counts, too.
        before = [(item.num_changes - 1, item.record.num_native) for item in items]
        return function(before == change)

    return holding(items, since)


def _outermost(items: Sequence[Exclusive], function: Callable[[], R], changes: bool) -> R:
    """Calls a function as a call of items that this thread is in no other call of."""
    call = _Call(True, changes)
    try:
        for item in items:
            item._call = call
            item.num_changes += changes
            item.record.is_settled = 0
        for item in items:
            if item.has_to_begin or item._unusable is not None:
                item.begin()
        return function()
    except BaseException:
        for item in items:
            item.failed()
        raise
    finally:
        # First, by one step that nothing can come before.
        call.goes_on = call.changes = False
        for item in items:
            item.record.is_settled = int(item._unusable is None)


def _is_handed_over(item: Exclusive) -> bool:
    """Whether native code has begun a lookup that this thread, which has the lock, goes on with."""
    return bool(item.record.is_settled == _HANDED_OVER)


def _is_in_call(item: Exclusive) -> bool:
    """Whether this thread, which has the lock, is in a call of an item."""
    return item._call.goes_on or _is_handed_over(item)


# ---------------------------------------------------------------- fork
#
# A child has a copy of its parent's memory as it is at that moment, and of its threads only the one
# that forked. What another thread was using may be half changed, and its lock would never be free.

# Of each item that there is: a reference to it, and others that tell of its end.
_all: dict[int, list[weakref.ref[Any]]] = {}


def _forget(number: int, record: TableRecord, _: object) -> None:
    if _all.pop(number, None) is not None:
        retire(record)


def _after_fork_in_child() -> None:
    free_locks_in_child()
    for reference, *_ in list(_all.values()):
        item = reference()
        if item is None:
            continue
        if isinstance(item.lock, TableLock):
            is_free = bool(item.lock.after_fork())
        else:
            is_free = item.lock.acquire(blocking=False)
            item.lock = threading.RLock()
        is_free = is_free and not item.is_changing
        item._call = _NO_CALL
        item._unusable = item._unusable or item.why_unusable_after_fork()
        if not is_free:
            item._unusable = (
                "This process was forked while a table was in use: its copy of the table may be "
                "half changed and cannot be used. Fork when no other thread uses the table, or "
                "start processes with the 'spawn' method of multiprocessing."
            )
        if item._unusable is not None:
            item.record.is_settled = 0


os.register_at_fork(after_in_child=_after_fork_in_child)
