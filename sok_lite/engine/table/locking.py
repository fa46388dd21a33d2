"""Locks of tables: one call at a time, no change within another, none torn by a fork.

A change allocates all memory that it needs, and then changes the table under `uninterrupted`, where
Ctrl-C waits. So a call that raises has done all of its work or none of it.
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
T = TypeVar("T", bound="Lockable")


# `is_settled` of a record where native code has begun a lookup that Python continues.
_HANDED_OVER = 2


class _Call:
    """An outermost call, of one table or of several.

    Attributes:
      is_running: whether it has not ended yet.
      changes: whether it is in a change.
    """

    __slots__ = ("changes", "is_running")

    def __init__(self, is_running: bool, changes: bool) -> None:
        self.is_running, self.changes = is_running, changes


_NO_CALL = _Call(False, False)


class Lockable:
    """An object, mostly a table, that one thread uses at a time: its methods are `locked`, or
    `mutating`.

    Args:
      backend: whose kernels use it; None: it has no kernels.

    Attributes:
      record: what native code sees of it.
      lock: held during every method; hold it to do several as one.
      num_changes: calls so far that may have changed it.
      has_call_hook: whether `on_call` does more than check that it is usable.
    """

    has_call_hook = False

    def __init__(self, backend: Backend | None = None) -> None:
        self.record = new_record()
        self.lock = threading.RLock() if backend is None else backend.new_lock(self.record)
        # Only the thread that holds `lock` uses these.
        self._call = _NO_CALL  # the last one
        self.num_changes = 0
        self._unusable: str | None = None
        # The garbage collector clears references to what it frees before finalizers run, which may
        # still use a table. It does not track an array, which goes with the attributes.
        self._until_gone = np.empty(0)
        gone = weakref.ref(self._until_gone, functools.partial(_forget, id(self), self.record))
        references: list[weakref.ref[Any]] = [weakref.ref(self), gone]
        if isinstance(self.lock, TableLock):
            # C code, which no exception interrupts, and called while the table is still whole.
            references.append(weakref.ref(self, self.lock.retire))
        _all[id(self)] = references

    def on_call(self) -> None:
        """Called first in an outermost call."""
        if self._unusable is not None:
            raise RuntimeError(self._unusable)

    def on_failure(self) -> None:
        """Called when an outermost call raises."""

    @property
    def is_changing(self) -> bool:
        """Whether this thread, which holds `lock`, is in a change."""
        return self._call.changes

    def why_unusable_after_fork(self) -> str | None:
        """Returns why a forked child must not use its copy; None: it may."""
        return None


def locked(method: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R]:
    """Decorates a method that holds the lock."""

    @functools.wraps(method)
    def call(self: T, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.lock:
            if _is_in_call(self):
                return method(self, *args, **kwargs)
            return _outermost([self], lambda: method(self, *args, **kwargs), changes=False)

    return call


def mutating(method: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R]:
    """Decorates a method that holds the lock and changes the table, so not within another change.

    Raises:
      RuntimeError: this thread is in a change already, whose row numbers would become stale.
    """

    @functools.wraps(method)
    def change(self: T, *args: P.args, **kwargs: P.kwargs) -> R:
        def call() -> R:
            with uninterrupted():
                return method(self, *args, **kwargs)

        return _change(self, method.__name__, call)

    return change


def _change(table: Lockable, what: str, function: Callable[[], R]) -> R:
    with table.lock:
        if table.is_changing or _is_handed_over(table):
            raise RuntimeError(
                f"{what} was called while this thread was changing the same table: from a signal "
                "handler, a finalizer or a predicate. Do it after that call."
            )
        if not table._call.is_running:
            return _outermost([table], function, changes=True)
        table._call.changes = True
        table.num_changes += 1
        try:
            return function()
        finally:
            table._call.changes = False


@locked
def with_lock(table: Lockable, function: Callable[[], R]) -> R:
    """Calls a function under the lock of a table."""
    return function()


def mutate(table: Lockable, function: Callable[[], R]) -> R:
    """Calls a function as one change of a table, which may take long.

    The function makes its changes under `uninterrupted`.

    Raises:
      RuntimeError: as of `mutating`.
    """
    return _change(table, "A change", function)


def unless_in_use(table: Lockable, function: Callable[[], None]) -> None:
    """Calls a function under the lock of a table, unless this thread is in a call of the table,
    which may be reading what the function changes."""
    with table.lock, uninterrupted():
        if not _is_in_call(table):
            function()


def with_locks(
    tables: Iterable[Lockable], function: Callable[[], R], continues_native: bool = False
) -> R:
    """Calls a function under the locks of several tables, as one change of them.

    The function makes its changes under `uninterrupted`.

    Args:
      continues_native: whether it continues what native code has begun in this thread.

    Raises:
      RuntimeError: this thread is in a call of one of them.
    """
    distinct = [*dict.fromkeys(tables)]
    # All threads take native locks in one order, and then the others in one order: no deadlock.
    native = [table.lock for table in distinct if type(table.lock) is TableLock]
    others = [table for table in distinct if type(table.lock) is not TableLock]

    def held() -> R:
        if any(
            table._call.is_running or (_is_handed_over(table) and not continues_native)
            for table in distinct
        ):
            raise RuntimeError(
                "A lookup or an update was called while this thread was in another call of one of "
                "its tables: from a signal handler, a finalizer or a predicate. Do it after that "
                "call."
            )
        return _outermost(distinct, function, changes=True)

    locks = [table.lock for table in sorted(others, key=id)]
    if not native:
        return _nested(locks, held)
    with TableLocks(native):
        return _nested(locks, held)


def _nested(locks: Sequence[Any], function: Callable[[], R]) -> R:
    # By `with` alone: in an ExitStack Ctrl-C may come between acquiring a lock and noting it. Some
    # at a time: a call may have a thousand tables, and Python nests at most 20 blocks.
    if not locks:
        return function()
    if len(locks) < 15:
        with locks[0]:
            return _nested(locks[1:], function)
    a, b, c, d, e, f, g, h, i, j, k, m, n, o, p, *others = locks
    with a, b, c, d, e, f, g, h, i, j, k, m, n, o, p:
        return _nested(others, function)


def table_versions(tables: Iterable[Lockable]) -> object:
    """Returns a version of the content of tables, for `with_locks_since`. Hold their locks."""
    return [(table.num_changes, table.record.num_native) for table in tables]


def with_locks_since(
    tables: Sequence[Lockable], change: object, function: Callable[[bool], R]
) -> R:
    """`with_locks` for a function that takes whether no table has changed since an earlier call.

    Args:
      change: the result of `table_versions` in that call, for the same tables in the same order.
    """

    def since() -> R:
        # This call counts too.
        before = [(table.num_changes - 1, table.record.num_native) for table in tables]
        return function(before == change)

    return with_locks(tables, since)


def _outermost(tables: Sequence[Lockable], function: Callable[[], R], changes: bool) -> R:
    """Calls a function as an outermost call of tables, whose locks this thread holds."""
    call = _Call(True, changes)
    try:
        for table in tables:
            table._call = call
            table.num_changes += changes
            table.record.is_settled = 0
        for table in tables:
            if table.has_call_hook or table._unusable is not None:
                table.on_call()
        return function()
    except BaseException:
        for table in tables:
            table.on_failure()
        raise
    finally:
        # First, by one step that no exception can precede.
        call.is_running = call.changes = False
        for table in tables:
            table.record.is_settled = int(table._unusable is None)


def _is_handed_over(table: Lockable) -> bool:
    """Whether native code has begun a lookup that this thread, which holds the lock, continues."""
    return bool(table.record.is_settled == _HANDED_OVER)


def _is_in_call(table: Lockable) -> bool:
    """Whether this thread, which holds the lock, is in a call of a table."""
    return table._call.is_running or _is_handed_over(table)


# ---------------------------------------------------------------- fork
#
# A child has a copy of its parent's memory at that moment, and only the thread that forked. What
# another thread was using may be half changed, and its lock would never be released.

# By the id of each table: a reference to it, and others whose callbacks run at its end.
_all: dict[int, list[weakref.ref[Any]]] = {}


def _forget(number: int, record: TableRecord, _: object) -> None:
    if _all.pop(number, None) is not None:
        retire(record)


def _after_fork_in_child() -> None:
    free_locks_in_child()
    for reference, *_ in list(_all.values()):
        table = reference()
        if table is None:
            continue
        if isinstance(table.lock, TableLock):
            is_free = bool(table.lock.after_fork())
        else:
            is_free = table.lock.acquire(blocking=False)
            table.lock = threading.RLock()
        is_free = is_free and not table.is_changing
        table._call = _NO_CALL
        table._unusable = table._unusable or table.why_unusable_after_fork()
        if not is_free:
            table._unusable = (
                "This process was forked while a table was in use: its copy of the table may be "
                "half changed and cannot be used. Fork when no other thread uses the table, or "
                "start processes with the 'spawn' method of multiprocessing."
            )
        if table._unusable is not None:
            table.record.is_settled = 0


os.register_at_fork(after_in_child=_after_fork_in_child)
