"""Defers signals for the length of a change, so that Ctrl-C cuts none in two."""

# The functions of `signal` without its enums, whose conversions take most of the time there.
import _signal  # type: ignore[import-not-found]
import ctypes
import os
import signal
import threading
from types import FrameType
from typing import Any

# Those whose handlers programs let raise.
_SIGNALS: list[int] = [
    int(getattr(signal, name))
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
]

# Python's handler in C, or another that a library such as faulthandler has put before it, and flags
# as `signal.siginterrupt` sets them: `signal.signal` resets all of it.
_Action = ctypes.c_char * 512  # larger than a `struct sigaction`
_sigaction = ctypes.PyDLL(None).sigaction


class _Uninterrupted:
    """The one context manager of this module; it may be entered within itself.

    Python runs signal handlers in the main thread alone, so in other threads it does nothing.
    """

    def __init__(self) -> None:
        # Only the main thread looks at these.
        self._depth = 0
        self._thread = 0  # which was the main thread when the outermost block began
        self._deferred: dict[int, tuple[Any, Any]] = {}  # handlers in Python and in C
        self._caught: dict[int, FrameType | None] = {}

    def __enter__(self) -> None:
        thread = threading.get_ident()
        if thread != threading.main_thread().ident:
            return
        if self._depth == 0:
            self._thread = thread
            try:
                for number in _SIGNALS:
                    handler = _signal.getsignal(number)
                    if callable(handler) and handler != self._catch:  # else no Python runs
                        self._defer(number, handler)
            except BaseException:  # of a handler that is not deferred yet
                self._restore()
                raise
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        if threading.get_ident() != threading.main_thread().ident:
            return
        self._depth -= 1
        if self._depth:
            return
        try:
            self._restore()
        finally:
            self._restore()  # where a handler has raised in between
            self._deliver()

    def after_fork_in_child(self) -> None:
        """Restores the handlers where another thread has forked: the block ends in the parent."""
        if self._depth and threading.get_ident() != self._thread:
            self._depth, self._caught = 0, {}
            self._restore()

    def _defer(self, number: int, handler: Any) -> None:
        action = _Action()
        _sigaction(number, None, action)
        self._deferred[number] = handler, action
        _signal.signal(number, self._catch)
        _sigaction(number, action, None)

    def _restore(self) -> None:
        for number, (handler, action) in self._deferred.items():
            if _signal.getsignal(number) == self._catch:  # the change may have set another
                _signal.signal(number, handler)
            if _signal.getsignal(number) == handler:
                _sigaction(number, action, None)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        self._caught.setdefault(number, frame)  # once, as the system does with one that is pending

    def _deliver(self) -> None:
        """Calls the handlers of what was caught, all of them though one raises."""
        if self._caught:
            number = next(iter(self._caught))
            frame, handler = self._caught.pop(number), signal.getsignal(number)
            try:
                if callable(handler):
                    handler(number, frame)
            finally:
                self._deliver()


_uninterrupted = _Uninterrupted()
os.register_at_fork(after_in_child=_uninterrupted.after_fork_in_child)


def uninterrupted() -> _Uninterrupted:
    """Returns a context manager in which signals wait for the end of the block.

    There the handlers run that they had; that of Ctrl-C mostly raises KeyboardInterrupt. Memory is
    found before such a block changes anything: whatever else is raised in it comes at once.
    """
    return _uninterrupted
