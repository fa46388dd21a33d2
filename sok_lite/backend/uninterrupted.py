"""Holds signals back for the length of a change, so that Ctrl-C cuts none in two."""

import _thread
import signal
import threading
from collections import deque
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
        self._handlers: dict[int, Any] = {}
        self._caught: list[signal.Signals] = []

    def __enter__(self) -> None:
        if threading.get_ident() != threading.main_thread().ident:
            return
        if self._depth == 0:
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
            caught, self._caught = self._caught, []
            # They come again, all of them before the first handler runs.
            deque(map(_thread.interrupt_main, caught), maxlen=0)

    def _restore(self) -> None:
        for number, handler in self._handlers.items():
            if signal.getsignal(number) == self._hold:  # the change may have set another
                signal.signal(number, handler)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if number not in self._caught:  # as the system does with one that is pending
            self._caught.append(signal.Signals(number))


_uninterrupted = _Uninterrupted()


def uninterrupted() -> _Uninterrupted:
    """Returns a context manager in which signals wait for the end of the block.

    There the handlers run that they had; that of Ctrl-C mostly raises KeyboardInterrupt. Memory is
    found before such a block changes anything: whatever else is raised in it comes at once.
    """
    return _uninterrupted
