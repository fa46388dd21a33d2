"""SIGTERM, sent before a machine goes away, as a note of this rank for all ranks.

It is only noted, however often it comes: launchers and schedulers repeat it, and SIGKILL ends a
program at once. The program's previous handler is called too.
"""

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn

from sok_lite.bridge.job import communicator

# A shell's status for a program that SIGTERM ended.
STATUS = 128 + signal.SIGTERM

# Larger than a `struct sigaction`.
_ACTION_BYTES = 512

_libc = ctypes.CDLL(None)

_listeners = 0
_before: Any = None  # Python's view
_action = b""  # the system's view: a library such as faulthandler may have set it
_process = 0
_has_come = False


@contextlib.contextmanager
def noted() -> Iterator[None]:
    """Notes SIGTERM within a `with` block.

    Outside of the main thread, where Python has no handlers, and in a program started to ignore
    SIGTERM, it does nothing. A SIGTERM that came but was not acted on is sent again when the last
    block ends without an error.
    """
    global _listeners, _before, _action, _process
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or (not _listeners and signal.getsignal(signal.SIGTERM) is signal.SIG_IGN):
        yield
        return
    if not _listeners:
        _process, _action = os.getpid(), _action_now()
        _before = signal.signal(signal.SIGTERM, _note)
    _listeners += 1
    try:
        renew()
        yield
    except BaseException:
        _leave()
        raise
    if _leave() and _has_come:
        signal.raise_signal(signal.SIGTERM)


def renew() -> None:
    """Copies the note to the ranks that are connected now."""
    communicator().connection.notes.ends = _has_come


def end() -> NoReturn:
    """Exits with the status of SIGTERM, and ignores SIGTERM from now on."""
    # A launcher sends it to all ranks as soon as the first has exited.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(STATUS)


def _leave() -> bool:
    """Restores the program's handler; returns whether SIGTERM then ends the program."""
    global _listeners
    _listeners -= 1
    if _listeners or signal.getsignal(signal.SIGTERM) is not _note:
        return False
    _go_back()
    return not callable(_before)


def _go_back() -> None:
    signal.signal(signal.SIGTERM, _before or signal.SIG_DFL)
    _libc.sigaction(int(signal.SIGTERM), _action, None)


def _action_now() -> bytes:
    action = ctypes.create_string_buffer(_ACTION_BYTES)
    _libc.sigaction(int(signal.SIGTERM), None, action)
    return action.raw


def _note(number: int, frame: FrameType | None) -> None:
    global _has_come
    if os.getpid() != _process:  # a forked child, such as a data worker
        _go_back()
        signal.raise_signal(number)
        return
    _has_come = True
    renew()
    if callable(_before):
        _before(number, frame)
