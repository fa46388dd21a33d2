"""Holds signals back for the length of a change, so that Ctrl-C cuts none in two."""

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

# Those whose handlers programs let raise.
_SIGNALS: list[signal.Signals] = [
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
]


class _Uninterrupted:
    """The one context manager of this module; it may be entered within itself.

    Python runs signal handlers in the main thread alone, so in other threads it does nothing.
    """

    def __init__(self) -> None:
        # Only the main thread looks at these.
        self._depth = 0
        self._thread = 0  # which was the main thread when the outermost block began
        self._handlers: dict[int, Any] = {}
        self._caught: dict[int, FrameType | None] = {}

    def __enter__(self) -> None:
        thread = threading.get_ident()
        if thread != threading.main_thread().ident:
            return
        if self._depth == 0:
            self._thread = thread
            try:
                for number in _SIGNALS:
                    handler = signal.getsignal(number)
                    if callable(handler) and handler != self._hold:  # else no Python runs
                        self._handlers[number] = handler
                        signal.signal(number, self._hold)
            except BaseException:  # of a handler that is not held back yet
                self._restore()
                raise
        self._depth += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
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
        """Gives handlers back where another thread has forked: the block ends in the parent."""
        if self._depth and threading.get_ident() != self._thread:
            self._depth, self._caught = 0, {}
            self._restore()

    def _restore(self) -> None:
        for number, handler in self._handlers.items():
            if signal.getsignal(number) == self._hold:  # the change may have set another
                signal.signal(number, handler)

    def _hold(self, number: int, frame: FrameType | None) -> None:
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
