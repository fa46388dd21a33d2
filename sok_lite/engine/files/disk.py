"""Files of this machine: opened safely, synced to disk, and errors with what there is to know."""

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterator
from typing import IO, TypeAlias

import numpy as np

Path: TypeAlias = str | os.PathLike[str]

# The disk is full, or what this user may have of it.
_FULL = (errno.ENOSPC, errno.EDQUOT)


class DiskFullError(OSError):
    """A full disk, explained by `explain_full_disk`."""


@contextlib.contextmanager
def explain_full_disk(
    path: str, what: str, num_bytes: int = 0, total_bytes: int = 0
) -> Iterator[None]:
    """A `with` block in which the error of a full disk says what was written, and what is free.

    Args:
      path: of the file or folder that is written.
      what: it is, such as "a file of table 't'".
      num_bytes: that it needs; 0: unknown.
      total_bytes: that it and the files written with it need; 0: it is the only one, or unknown.

    Raises:
      DiskFullError: with the same errno. Any other error passes unchanged.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL or isinstance(error, DiskFullError):
            raise
        facts = [f"{what} needs {num_bytes:,} bytes" if num_bytes else what]
        with contextlib.suppress(OSError):
            if os.path.isfile(path):
                facts.append(f"{os.path.getsize(path):,} are written")
        if total_bytes > num_bytes:
            facts.append(f"all files of this rank need {total_bytes:,}")
        with contextlib.suppress(OSError):
            facts.append(f"{shutil.disk_usage(_existing_folder(path)).free:,} bytes are free")
        text = f"{os.strerror(error.errno)}: {'; '.join(facts)}"
        raise DiskFullError(error.errno, text, path) from error


def _existing_folder(path: str) -> str:
    """Returns the innermost folder of a path that exists."""
    while path and not os.path.isdir(path):
        path = os.path.dirname(path)
    return path or os.curdir


def sync_path(path: str) -> None:
    """Syncs a file, or the names of a folder's files, to disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def open_file(path: Path) -> IO[bytes]:
    """Opens a file for reading: never a pipe, which may block its reader forever, or a device.

    Raises:
      OSError: it cannot be opened, or is no regular file.
    """
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        mode = os.fstat(number).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "Not a regular file", os.fspath(path))
        return os.fdopen(number, "rb")
    except BaseException:
        os.close(number)
        raise


def read_whole(path: Path, max_bytes: int) -> bytes:
    """Returns the bytes of an untrusted file.

    Raises:
      OSError: it cannot be opened, or is no regular file. ValueError: it has more than `max_bytes`.
    """
    with open_file(path) as file:
        return read_rest(file, path, max_bytes)


def read_rest(file: IO[bytes], path: Path, max_bytes: int) -> bytes:
    """Does what `read_whole` does with an open file."""
    size = os.fstat(file.fileno()).st_size
    if size > max_bytes:
        raise ValueError(
            f"{os.fspath(path)} must have at most {max_bytes:,} bytes. Received: {size:,}. It is "
            "another file, or corrupt: take another copy."
        )
    try:
        return file.read()
    except MemoryError as error:  # Python's own has no text
        raise MemoryError(f"No memory for {size:,} bytes of {os.fspath(path)}.") from error


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Returns the arrays of an .npz file by name, all in memory.

    Raises:
      OSError: it cannot be opened, or is no regular file. ValueError: it is corrupt. MemoryError:
        there is no memory for them.
    """
    with open_file(path) as opened:
        try:
            with np.load(opened, allow_pickle=False) as file:
                return {name: file[name] for name in file.files}
        except MemoryError:
            raise
        except Exception as error:  # zipfile, zlib and NumPy have errors of many kinds
            raise ValueError(
                f"{os.fspath(path)!r} is corrupt: {error}. Take another copy of it."
            ) from error
