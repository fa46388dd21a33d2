"""Atomic writes: a new file or folder replaces the old one once it is complete.

It is written in a temporary folder beside the old one, with a lock in it. What a killed process has
left is removed by the next write there; what another process is writing, or is not ours, stays.
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

from sok_lite.engine.files.disk import explain_full_disk, sync_path
from sok_lite.engine.files.lock import Lock, is_lock, remove_unless_locked
from sok_lite.engine.local_path import local_path

# Ends of the names, in the temporary folder, of its lock and of the old content.
_LOCK, _OLD = ".lock", ".old"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of Linux


@contextmanager
def replacing(path: str) -> Iterator[str]:
    """Yields a path to write to, of the same name, and then moves what is there to `path`.

    If the block fails, the old content stays. A reader finds the old or the new content; where the
    system cannot exchange two folders, for a moment none.

    Raises:
      OSError: it cannot be moved.
    """
    path = os.path.abspath(path)
    folder, name = os.path.split(path)
    os.makedirs(folder, exist_ok=True)
    with temporary_folder(folder, name, path) as inside:
        yield os.path.join(inside, name)
        replace(os.path.join(inside, name), path)


def write_file(path: str | os.PathLike[str], data: bytes) -> None:
    """Writes a file atomically; a pipe or a device is written to.

    Raises:
      ValueError: the path is no local one. OSError: it cannot be written.
    """
    path = local_path(path)
    explaining = explain_full_disk(path, "the file", len(data))
    if os.path.exists(path) and not os.path.isfile(path):  # a pipe, a terminal
        with explaining, open(path, "wb") as file:
            file.write(data)
        return
    path = os.path.realpath(path)
    if not os.path.isdir(os.path.dirname(path)):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    with explaining, replacing(path) as new, open(new, "xb") as file:
        file.write(data)


@contextmanager
def temporary_folder(folder: str, name: str, path: str) -> Iterator[str]:
    """Yields a new folder in a folder, which is removed at the end with what is left in it.

    Args:
      name: of what is written in it; a part of the new folder's own name.
      path: that will be replaced by what is written.
    """
    start = f".{name[:50]}.part-"
    pattern = re.compile(re.escape(start) + "[0-9a-f]{16}")

    def put_back(temporary: str) -> bool:
        old = os.path.join(temporary, name + _OLD)
        if os.path.lexists(old) and not os.path.lexists(path):
            os.rename(old, path)
        return True

    for each in filter(pattern.fullmatch, os.listdir(folder)):
        left = os.path.join(folder, each)
        if is_lock(os.path.join(left, name + _LOCK)):
            remove_unless_locked(left, name + _LOCK, partial(put_back, left))
    temporary = os.path.join(folder, start + secrets.token_hex(8))
    os.mkdir(temporary)
    try:
        with Lock(os.path.join(temporary, name + _LOCK), f"What is written at {path}"):
            yield temporary
    finally:
        # Not in `replace`: a signal may end that between any two lines.
        put_back(temporary)
        shutil.rmtree(temporary, ignore_errors=True)


def replace(new: str, path: str) -> None:
    """Replaces `path` by a file or folder in a `temporary_folder`, which is synced to disk."""
    _sync_all(new)
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
    """Exchanges two names atomically; returns False if the system cannot."""
    exchange = getattr(ctypes.CDLL(None), "renameat2", None)
    paths = _AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other)
    return exchange is not None and exchange(*paths, _RENAME_EXCHANGE) == 0


def _sync_all(path: str) -> None:
    """Syncs a file, or a folder with all that is in it, to disk."""
    for folder, _, names in os.walk(path):
        for name in names:
            sync_path(os.path.join(folder, name))
        sync_path(folder)
    if not os.path.isdir(path):
        sync_path(path)
