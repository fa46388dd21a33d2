"""Holds back Ctrl-C for the length of a change, so that no change is cut in two."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class _Uninterrupted:
    """The one context manager of this module; it may be entered within itself.

    Python runs signal handlers in the main thread alone, so in other threads it does nothing.
    """

    def __init__(self) -> None:
        # Only the main thread looks at these.
        self._depth = 0
        self._handler: Any = None
        self._caught: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> None:
        if threading.get_ident() != threading.main_thread().ident:
            return
        if self._depth == 0:
            self._caught = None
            self._handler = signal.getsignal(signal.SIGINT)
            if callable(self._handler):  # else no Python runs at Ctrl-C
                signal.signal(signal.SIGINT, self._hold)
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
        handler = self._handler
        if signal.getsignal(signal.SIGINT) == self._hold:  # the change may have set another
            signal.signal(signal.SIGINT, handler)
        if self._caught is not None:
            caught, self._caught = self._caught, None
            handler(*caught)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        self._caught = number, frame


_uninterrupted = _Uninterrupted()


def uninterrupted() -> _Uninterrupted:
    """Returns a context manager in which Ctrl-C waits for the end of the block.

    There the handler that SIGINT had is called, which mostly raises KeyboardInterrupt. Memory is
    found before such a block changes anything: whatever else is raised in it comes at once.
    """
    return _uninterrupted
