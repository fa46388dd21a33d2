"""File locks: one writer of a folder at a time, among all processes and threads that see it.

A lock is a file that exists while the work lasts. Its process holds it by flock, so it ends with
the process: what a killed one has left is taken over. Where a file system has no flock, or none
across machines, the lock excludes nobody there.
"""

import errno
import fcntl
import os
import shutil
import socket
import time
import weakref
from collections.abc import Callable
from contextlib import suppress

from sok_lite.engine.files.disk import explain_full_disk

_FIRST_WORD = b"sok_lite"
_UNSUPPORTED = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


class Lock:
    """A lock of this process, until `release` or until it is garbage.

    Args:
      path: of the file, in a folder that exists.
      what: is written, for the error.

    Attributes:
      excludes: whether it keeps others out: False where the file system has no locks.

    Raises:
      BlockingIOError: another process has it, or another thread of this one.
      FileExistsError: a file that is no lock has this name.
      OSError: the file cannot be made.
    """

    def __init__(self, path: str, what: str) -> None:
        while True:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            try:
                self.excludes = _lock(file, path, what)
                if _is_at(file, path):  # else its last holder has removed it meanwhile
                    break
            except BaseException:
                os.close(file)
                raise
            os.close(file)
        self._file = file
        self.release = weakref.finalize(self, _release, file, path)
        # For the error of a second writer.
        text = b"%s %d %s" % (_FIRST_WORD, os.getpid(), socket.gethostname().encode())
        try:
            with explain_full_disk(path, "a lock", len(text)):
                os.ftruncate(file, 0)
                os.pwrite(file, text, 0)
        except BaseException:
            self.release()
            raise
        _held.add(self)

    def __enter__(self) -> "Lock":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def wait_for_lock(path: str, what: str) -> Lock:
    """Returns a lock as soon as it is free. Arguments and errors are those of `Lock`."""
    while True:
        try:
            return Lock(path, what)
        except BlockingIOError:
            time.sleep(0.05)


def try_flock(file: int, operation: int) -> bool:
    """Locks or unlocks an open file without waiting; returns False if another lock excludes it.

    True where the file system has no locks.

    Args:
      file: descriptor.
      operation: of `fcntl.flock`.
    """
    try:
        _flock(file, operation)
    except BlockingIOError:
        return False
    return True


def _flock(file: int, operation: int) -> bool:
    """Locks or unlocks a file; returns False where the file system has no locks.

    Raises:
      BlockingIOError: another lock excludes it.
    """
    try:
        fcntl.flock(file, operation | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        return False
    return True


# A forked process has the files of its parent too, whose locks would last as long as it does.
_held: "weakref.WeakSet[Lock]" = weakref.WeakSet()


def _leave_to_parent() -> None:
    for lock in list(_held):
        if lock.release.alive:
            lock.release.detach()
            os.close(lock._file)
    _held.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


def _lock(file: int, path: str, what: str) -> bool:
    """Does what `_flock` does for a `Lock`, with its errors."""
    try:
        excludes = _flock(file, fcntl.LOCK_EX)
    except BlockingIOError:
        text = os.pread(file, 1000, 0).decode(errors="replace")
        _, pid, host = [*text.split(" ", 2), "?", "?"][:3]
        is_own = (pid, host) == (str(os.getpid()), socket.gethostname())
        whose = "this process" if is_own else "another process"
        raise BlockingIOError(
            f"{what} must have one writer at a time. Received: a second one, while {whose} writes "
            f"(pid {pid} on host {host}). Wait until that is over, or give another path. Nothing "
            "has changed."
        ) from None
    if os.pread(file, len(_FIRST_WORD), 0) not in (b"", _FIRST_WORD):
        raise FileExistsError(
            f"{path} is no lock of sok_lite, and would be replaced. Give a folder without it."
        )
    return excludes


def is_lock(path: str) -> bool:
    """Whether a file is a lock, of a living process or a killed one."""
    try:
        with open(path, "rb") as file:
            return file.read(len(_FIRST_WORD)) == _FIRST_WORD
    except OSError:
        return False


def remove_unless_locked(folder: str, lock: str, may_remove: Callable[[], bool]) -> None:
    """Removes a folder unless its lock is held; what cannot be removed stays.

    Args:
      lock: name of the file in the folder.
      may_remove: called while the lock excludes writers; False: the folder stays.
    """
    with suppress(OSError), Lock(os.path.join(folder, lock), folder) as taken:
        if taken.excludes and may_remove():
            shutil.rmtree(folder)


def _is_at(file: int, path: str) -> bool:
    """Whether a path still leads to an open file."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def _release(file: int, path: str) -> None:
    try:
        if _is_at(file, path):
            os.unlink(path)
    except OSError:
        pass  # the file stays, unlocked
    finally:
        os.close(file)
