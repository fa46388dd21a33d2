"""One writer at a time, of all processes and threads that see a folder.

A lock is a file that exists while the work lasts. Its process holds it by flock, so it ends with
the process: what a killed one has left is taken over. Where a file system has no flock, or not for
several machines, there is no lock there either.
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

from sok_lite.engine.files.full_disk import naming_file

_WORD = b"sok_lite"
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


class Lock:
    """A lock of this process, until `release` or until nobody has it any more.

    Args:
      path: of the file, in a folder that is there.
      what: is written, for the error.

    Attributes:
      excludes: whether it keeps others out: where a file system has no locks it does not.

    Raises:
      BlockingIOError: somebody else has it, another thread of this process included.
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
        # What a later one is told.
        text = b"%s %d %s" % (_WORD, os.getpid(), socket.gethostname().encode())
        try:
            with naming_file(path, "a lock", len(text)):
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

    def leave_to_parent(self) -> None:
        """Forgets it, in a forked process."""
        self.release.detach()
        os.close(self._file)


def waited_for(path: str, what: str) -> Lock:
    """Returns a lock once nobody else has it. Arguments and errors are those of `Lock`."""
    while True:
        try:
            return Lock(path, what)
        except BlockingIOError:
            time.sleep(0.05)


def try_flock(file: int, operation: int) -> bool:
    """Locks an open file where that can be done at once, or unlocks it.

    Args:
      file: its number.
      operation: of `fcntl.flock`.

    Returns:
      False: somebody else has a lock that keeps this one out. Where there are no locks True.
    """
    try:
        fcntl.flock(file, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


# A forked process has the files of its parent too, whose locks would last as long as it does.
_held: "weakref.WeakSet[Lock]" = weakref.WeakSet()


def _leave_to_parent() -> None:
    for lock in list(_held):
        if lock.release.alive:
            lock.leave_to_parent()
    _held.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


def _lock(file: int, path: str, what: str) -> bool:
    excludes = True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        said = os.pread(file, 1000, 0).decode(errors="replace")
        _, pid, host = [*said.split(" ", 2), "?", "?"][:3]
        is_own = (pid, host) == (str(os.getpid()), socket.gethostname())
        whose = "this process" if is_own else "another process"
        raise BlockingIOError(
            f"{what} must have one writer at a time. Received: a second one, while {whose} writes "
            f"(pid {pid} on host {host}). Wait until that is over, or give another path. Nothing "
            "has changed."
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        excludes = False
    if os.pread(file, len(_WORD), 0) not in (b"", _WORD):
        raise FileExistsError(
            f"{path} is no lock of sok_lite, and would be replaced. Give a folder without it."
        )
    return excludes


def is_lock(path: str) -> bool:
    """Whether a file is a lock of a process that lives or was killed."""
    try:
        with open(path, "rb") as file:
            return file.read(len(_WORD)) == _WORD
    except OSError:
        return False


def remove_unless_written(folder: str, lock: str, may_go: Callable[[], bool]) -> None:
    """Removes a folder of ours where nobody has its lock; what cannot be removed stays.

    Args:
      lock: name of the file in the folder.
      may_go: called while nobody can write there; False: it stays.
    """
    with suppress(OSError), Lock(os.path.join(folder, lock), folder) as taken:
        if taken.excludes and may_go():
            shutil.rmtree(folder)


def _is_at(file: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def _release(file: int, path: str) -> None:
    try:
        if _is_at(file, path):
            os.unlink(path)
    except OSError:
        pass  # it stays as an empty promise: nobody holds it
    finally:
        os.close(file)
