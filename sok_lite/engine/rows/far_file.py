"""A scratch file for rows that do not fit in memory, mapped piece by piece as a table grows.

It is no checkpoint: only the table can read it, and it is removed with the table. Disk space is
allocated when a piece is mapped, because a disk that is full at the first write to mapped memory
would kill the process.
"""

import contextlib
import mmap
import os
import tempfile
import weakref

import numpy as np

from sok_lite.engine.local_path import local_path


class FarFile:
    """Zeroed memory that is backed by a file. A forked child must not use it: it shares the rows.

    Args:
      path: an existing folder, for an unnamed file in it, which the system removes even if the
        process is killed; or the name of a file, which must not exist yet.
      whose: owner of the rows, for errors, such as "table 'item'".

    Raises:
      ValueError: the path is not local.
      FileExistsError: the file exists: it is another table's, or a killed process left it.
      OSError: the file cannot be made.
    """

    def __init__(self, path: str | os.PathLike[str], whose: str = "a table") -> None:
        self.path, self._whose = local_path(path, "far_path"), whose
        if os.path.isdir(self.path):
            self._fd, unnamed = tempfile.mkstemp(prefix="sok_lite_rows_", dir=self.path)
            os.unlink(unnamed)
            name = None
        else:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            try:
                self._fd = os.open(self.path, flags, 0o600)
            except FileExistsError as error:
                raise FileExistsError(
                    f"far_path {self.path!r} exists. It must be a folder, or a new file that no "
                    "other table uses. If a killed process left it, remove it."
                ) from error
            except FileNotFoundError as error:
                raise FileNotFoundError(
                    f"far_path {self.path!r} is in no folder. Make "
                    f"{os.path.dirname(self.path) or '.'!r} first, or name another place."
                ) from error
            name = os.path.abspath(self.path)
        self.close = weakref.finalize(self, _close, self._fd, name, os.getpid())
        # Bytes of the file that each of them reads.
        self._readers: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()

    @property
    def num_bytes(self) -> int:
        """Length of the file."""
        # From the system: right whatever was interrupted, and whoever cut the file.
        return os.fstat(self._fd).st_size

    def sibling(self) -> "FarFile":
        """Returns a new unnamed file in the same folder."""
        is_folder = os.path.isdir(self.path)
        folder = self.path if is_folder else os.path.dirname(os.path.abspath(self.path))
        return FarFile(folder, self._whose)

    def zeros(self, num_bytes: int) -> np.ndarray:
        """Returns new zeroed memory at the end of the file, (num_bytes,) uint8.

        Raises:
          MemoryError: the disk is full or the file too long; the file is as it was.
        """
        length = -(-num_bytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        start = self.num_bytes
        try:
            os.posix_fallocate(self._fd, start, length)
            memory = mmap.mmap(self._fd, length, mmap.MAP_SHARED, offset=start)
        except (OSError, OverflowError) as error:
            os.ftruncate(self._fd, start)
            disk = os.fstatvfs(self._fd)
            free = disk.f_bavail * disk.f_frsize
            raise MemoryError(
                f"No {num_bytes:,} bytes for rows of {self._whose} in far_path {self.path!r}, "
                f"which holds {start:,} bytes: {error}. {free:,} bytes are free."
            ) from error
        # Rows are read in random order: no read-ahead.
        memory.madvise(mmap.MADV_RANDOM)
        return np.frombuffer(memory, np.uint8, num_bytes)

    def keep(self, num_bytes: int, reader: object) -> None:
        """Makes `trim` keep the first `num_bytes` as long as the reader lives."""
        self._readers[reader] = num_bytes

    def discard(self, memory: np.ndarray) -> None:
        """Frees the disk space of memory from `zeros`, which must not be used any more.

        The file keeps its length. A file system that cannot make holes frees the space when the
        file is cut or removed. Memory from elsewhere is left alone.
        """
        # Some versions of NumPy have a memoryview as the base.
        owner = getattr(memory.base, "obj", memory.base)
        if isinstance(owner, mmap.mmap):
            with contextlib.suppress(OSError):
                owner.madvise(mmap.MADV_REMOVE)

    def trim(self, num_bytes: int) -> None:
        """Cuts the file behind `num_bytes`, unless a reader still uses that part.

        Raises:
          OSError: another program has cut the file shorter: a read behind its end would kill the
            process.
        """
        length = self.num_bytes
        if length > num_bytes:
            needed = max([num_bytes, *self._readers.values()])
            if length > needed:
                os.ftruncate(self._fd, needed)
        elif length < num_bytes:
            raise OSError(
                f"far_path {self.path!r} was cut short by another program: {length:,} bytes are "
                f"left of {num_bytes:,}, so rows of the table are lost. Restore a checkpoint into "
                "a new table, and keep other programs away from the file."
            )


def _close(fd: int, name: str | None, pid: int) -> None:
    # A forked child has the descriptor too, but the file is its parent's.
    if name is not None and os.getpid() == pid:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
    os.close(fd)
