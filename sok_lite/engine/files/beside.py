"""What is written beside a file or folder takes its place when it is whole.

It is written in a folder beside, which carries a lock: what a killed process has left is removed
by the next that writes there, what another one is writing and what is not ours stays.
"""

import ctypes
import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial

from sok_lite.engine.files.full_disk import naming_file
from sok_lite.engine.files.lock import Lock, is_lock, remove_unless_written
from sok_lite.engine.files.manifest import sync_path
from sok_lite.engine.local_path import local_path

# Behind the name of what is written, beside it: its lock, and what was there.
_LOCK, _OLD = ".lock", ".old"
_HERE, _EXCHANGE = -100, 2  # of the system: AT_FDCWD, RENAME_EXCHANGE


@contextmanager
def in_place_of(path: str) -> Iterator[str]:
    """Gives a path to write to, and puts what is there then in place of what is at another one.

    If the work inside fails, what was there stays and the new goes. A reader finds the old or the
    new; where the system cannot exchange two folders, for a moment none.

    Args:
      path: where the file or folder is to be; it ends in the name that is given.

    Raises:
      OSError: it cannot be put there.
    """
    path = os.path.abspath(path)
    folder, name = os.path.split(path)
    os.makedirs(folder, exist_ok=True)
    with scratch(folder, name, path) as inside:
        yield os.path.join(inside, name)
        put(os.path.join(inside, name), path)


def write_file(path: str | os.PathLike[str], data: bytes) -> None:
    """Writes a file of the caller's as a whole, or what is there stays.

    Raises:
      ValueError: the path is no local one. OSError: it cannot be written.
    """
    path = local_path(path)
    naming = naming_file(path, "the file", len(data))
    if os.path.exists(path) and not os.path.isfile(path):  # a pipe, a terminal
        with naming, open(path, "wb") as file:
            file.write(data)
        return
    path = os.path.realpath(path)
    if not os.path.isdir(os.path.dirname(path)):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    with naming, in_place_of(path) as new, open(new, "xb") as file:
        file.write(data)


@contextmanager
def scratch(folder: str, name: str, path: str) -> Iterator[str]:
    """Gives a new folder in a folder, which goes in the end with what is in it.

    Args:
      name: what is made in it, which its own name has.
      path: where that is to be.
    """
    start = f".{name[:50]}.part-"
    pattern = re.compile(re.escape(start) + "[0-9a-f]{16}")

    def put_back(made: str) -> bool:
        old = os.path.join(made, name + _OLD)
        if os.path.lexists(old) and not os.path.lexists(path):
            os.rename(old, path)
        return True

    for each in filter(pattern.fullmatch, os.listdir(folder)):
        left = os.path.join(folder, each)
        if is_lock(os.path.join(left, name + _LOCK)):
            remove_unless_written(left, name + _LOCK, partial(put_back, left))
    made = os.path.join(folder, start + secrets.token_hex(8))
    os.mkdir(made)
    try:
        with Lock(os.path.join(made, name + _LOCK), f"What is written at {path}"):
            yield made
    finally:
        # Here, since a signal may end the work between any two lines.
        put_back(made)
        shutil.rmtree(made, ignore_errors=True)


def put(new: str, path: str) -> None:
    """Puts a file or folder that is in a `scratch` in place of what is at a path."""
    _sync(new)
    if os.path.lexists(path):
        with suppress(OSError):
            shutil.copymode(path, new)
    if not os.path.isdir(path) or os.path.islink(path):
        os.replace(new, path)
    elif not _exchange(new, path):
        os.rename(path, new + _OLD)
        os.rename(new, path)
    sync_path(os.path.dirname(path))


def _exchange(one: str, other: str) -> bool:
    """Exchanges two names in one step; returns False where the system cannot."""
    exchange = getattr(ctypes.CDLL(None), "renameat2", None)
    names = os.fsencode(one), os.fsencode(other)
    return exchange is not None and exchange(_HERE, names[0], _HERE, names[1], _EXCHANGE) == 0


def _sync(path: str) -> None:
    """Waits until a file, or all of a folder, is on the disk."""
    for folder, _, names in os.walk(path):
        for name in names:
            sync_path(os.path.join(folder, name))
        sync_path(folder)
    if not os.path.isdir(path):
        sync_path(path)
