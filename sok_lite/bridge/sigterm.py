"""SIGTERM, which tells a job that its machine goes away, as a note of this rank for all ranks.

It is noted and no more, however often it comes: launchers and schedulers repeat it, and whoever
wants an end at once sends SIGKILL. What the program had for it before is called too.
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

# As a shell says of a program that SIGTERM has ended.
STATUS = 128 + signal.SIGTERM

# More than a `struct sigaction` has.
_ACTION_BYTES = 512

_libc = ctypes.CDLL(None)

_listeners = 0
_before: Any = None  # as Python knows it
_action = b""  # as the system knows it: a library may have set it, such as faulthandler
_process = 0
_has_come = False


@contextlib.contextmanager
def noted() -> Iterator[None]:
    """Has SIGTERM noted in a `with` block.

    In a thread other than the main one, where Python has no handlers, and where the program was
    started to ignore it, SIGTERM stays as it is. One that has come and that nobody has acted on
    when the last block is left without an error, is sent again.
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
    """Notes for the ranks that are connected now what was noted before."""
    communicator().connection.notes.ends = _has_come


def end() -> NoReturn:
    """Ends the program with the status of SIGTERM; from now on that ends nothing any more."""
    # A launcher sends it to all ranks as soon as the first has ended.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(STATUS)


def _leave() -> bool:
    """Goes back to what the program had; returns whether that ends it."""
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
    if os.getpid() != _process:  # a forked child, such as a worker that reads data
        _go_back()
        signal.raise_signal(number)
        return
    _has_come = True
    renew()
    if callable(_before):
        _before(number, frame)
