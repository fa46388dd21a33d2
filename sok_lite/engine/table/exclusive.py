"""Who may use a table when: one call at a time, no change within another, none torn by a fork."""

import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from sok_lite.backend import Backend
from sok_lite.backend.table_lock import TableLock, TableLocks
from sok_lite.engine.table.record import TableRecord, free_locks_in_child, new_record, retire

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T", bound="Exclusive")

# Every `with` of this file that takes a lock stands in one line with what it is for. Where it has
# several lines, Python comes back to the first one before it gives the lock up, and an exception
# that a trace function raises there would keep it.


# A lookup of native code goes on here.
_HANDED_OVER = 2

# A token that nobody locks.
_FREE = threading.Lock()


class Exclusive:
    """An object that one thread uses at a time: its methods are `exclusive`, or `changing`.

    Args:
      backend: whose kernels use it; None: none of one backend does.

    Attributes:
      record: what native code sees of it.
      lock: held during every exclusive method; hold it to do several as one.
      unfinished: what is left to do of a change that an exception has interrupted. It can be done
        again where an exception interrupts it too. None: nothing.
      has_to_begin: whether `begin` does more than to look at what is unfinished or unusable.
    """

    has_to_begin = False

    def __init__(self, backend: Backend | None = None) -> None:
        self.record = new_record()
        self.lock = threading.RLock() if backend is None else backend.new_lock(self.record)
        # Only who has `lock` looks at these: the tokens of the last call and of the last change. A
        # token is locked as long as its call goes on; one call of many items has one for all.
        self._call = self._change = _FREE
        self.unfinished: Callable[[], None] | None = None
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
        self.finish()

    def finish(self) -> None:
        """Does what is left to do of an interrupted change."""
        while self.unfinished is not None:
            self.unfinished()

    @property
    def is_changing(self) -> bool:
        """Whether this thread, which has `lock`, is in a change."""
        return self._change.locked()

    def why_unusable_after_fork(self) -> str | None:
        """Says why a forked child must not use its copy; None: it may."""
        return None


def exclusive(method: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R]:
    """Makes a method hold the lock, and finish first what an interrupted call has left.

    A signal handler or a finalizer may call it while this thread is in another call. Then it sees
    a change that is half made as it was before.
    """

    @functools.wraps(method)
    def call(self: T, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.lock: return _called(self, method, args, kwargs)  # fmt: skip # noqa: E701

    return call


def changing(method: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R]:
    """Makes a method exclusive that changes something, and so has no place within another.

    Raises:
      RuntimeError: this thread is in a change already. What that has prepared would be wrong.
    """

    @functools.wraps(method)
    def change(self: T, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._change.locked() or _is_handed_over(self):
            raise RuntimeError(
                f"{method.__name__} was called while this thread was changing the same table: from "
                "a signal handler, a finalizer or a predicate. Do it after that call."
            )
        token = threading.Lock()
        with token: return _changed(token, self, method, args, kwargs)  # fmt: skip # noqa: E701

    return exclusive(change)


@exclusive
def alone(item: Exclusive, function: Callable[[], R]) -> R:
    """Calls a function that does several things, while this thread has an item's lock."""
    return function()


@changing
def changing_alone(item: Exclusive, function: Callable[[], R]) -> R:
    """Calls a function that is one change of an item."""
    return function()


def unless_in_use(item: Exclusive, function: Callable[[], None]) -> None:
    """Calls a function under an item's lock; not if this thread is in a call of the item, which may
    be reading what the function changes."""
    with item.lock: return None if _is_in_call(item) else function()  # fmt: skip # noqa: E701


def holding(items: Iterable[Exclusive], function: Callable[[], R], goes_on: bool = False) -> R:
    """Calls a function that is one change of several items.

    Args:
      goes_on: whether it goes on with what native code has begun in this thread.

    Raises:
      RuntimeError: this thread is in a call of one of them.
    """
    distinct = [*dict.fromkeys(items)]
    return _holding(distinct, lambda: _held(distinct, function, goes_on))


def last_change(items: Iterable[Exclusive]) -> object:
    """Returns what stands for the last change of items, for `holding_since`. Hold the items."""
    return [(item._change, item.record.num_native) for item in items]


def holding_since(items: Sequence[Exclusive], change: object, function: Callable[[bool], R]) -> R:
    """Does what `holding` does with a function of whether items are as a call of theirs left them.

    Args:
      change: what `last_change` gave in a call of `holding`, of the same items in their order.
      function: takes whether none has changed since that call.
    """
    distinct = [*dict.fromkeys(items)]

    def since() -> R:
        return _held(distinct, functools.partial(function, last_change(items) == change))

    return _holding(distinct, since)


def _held(items: Sequence[Exclusive], function: Callable[[], R], goes_on: bool = False) -> R:
    # Mostly one token, that of the last such call.
    tokens = {token for item in items for token in (item._call, item._change)}
    is_within = not goes_on and True in map(_is_handed_over, items)
    if is_within or True in [token.locked() for token in tokens]:
        raise RuntimeError(
            "A lookup or an update was called while this thread was in another call of one of its "
            "tables: from a signal handler, a finalizer or a predicate. Do it after that call."
        )
    token = threading.Lock()
    with token: return _begun(token, items, function)  # fmt: skip # noqa: E701


def _begun(token: threading.Lock, items: Sequence[Exclusive], function: Callable[[], R]) -> R:
    for item in items:
        item._call = item._change = token
        item.record.is_settled = 0
    for item in [
        item
        for item in items
        if item.has_to_begin or item.unfinished is not None or item._unusable is not None
    ]:
        item.begin()
    try:
        result = function()
    except BaseException:
        # Now where it can be done, else by whoever comes next.
        for item in items:
            item.finish()
        _settle(items)
        raise
    _settle(items)
    return result


def _settle(items: Sequence[Exclusive]) -> None:
    """Lets native code use items at the end of a call."""
    for item in items:
        if item.unfinished is None and item._unusable is None:
            item.record.is_settled = 1


def _is_handed_over(item: Exclusive) -> bool:
    """Whether native code has begun a lookup that this thread, which has the lock, goes on with."""
    return bool(item.record.is_settled == _HANDED_OVER)


def _is_in_call(item: Exclusive) -> bool:
    """Whether this thread, which has the lock, is in a call of an item."""
    return item._call.locked() or item._change.locked() or _is_handed_over(item)


def _changed(
    token: threading.Lock, item: Any, method: Callable[..., R], args: Any, kwargs: Any
) -> R:
    item._change = token
    return method(item, *args, **kwargs)


def _called(item: Any, method: Callable[..., R], args: Any, kwargs: Any) -> R:
    if _is_in_call(item):
        return method(item, *args, **kwargs)
    token = threading.Lock()
    with token: return _outermost(token, item, method, args, kwargs)  # fmt: skip # noqa: E701


def _outermost(
    token: threading.Lock, item: Any, method: Callable[..., R], args: Any, kwargs: Any
) -> R:
    item._call = token
    item.record.is_settled = 0
    item.begin()
    try:
        result = method(item, *args, **kwargs)
    except BaseException:
        # Now where it can be done, else by whoever comes next.
        item.finish()
        _settle([item])
        raise
    _settle([item])
    return result


def _holding(items: Sequence[Exclusive], function: Callable[[], R]) -> R:
    # In one order for all threads, so that none waits for another that waits for it.
    native = [item.lock for item in items if type(item.lock) is TableLock]
    others = [item for item in items if type(item.lock) is not TableLock]
    locks = [item.lock for item in sorted(others, key=id)]
    if not native:
        return _nested(locks, function)
    with TableLocks(native): return _nested(locks, function)  # fmt: skip # noqa: E701


def _nested(locks: Sequence[Any], function: Callable[[], R]) -> R:
    # Some at a time, for a call may have a thousand tables, and Python nests 20 blocks at most.
    if not locks:
        return function()
    if len(locks) < 4:
        with locks[0]: return _nested(locks[1:], function)  # fmt: skip # noqa: E701
    if len(locks) < 15:
        a, b, c, d, *others = locks
        with a, b, c, d: return _nested(others, function)  # fmt: skip # noqa: E701
    a, b, c, d, e, f, g, h, i, j, k, m, n, o, p, *others = locks
    with a, b, c, d, e, f, g, h, i, j, k, m, n, o, p: return _nested(others, function)  # fmt: skip # noqa: E701


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
        is_free = is_free and not item._change.locked()
        item._call = item._change = _FREE
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
