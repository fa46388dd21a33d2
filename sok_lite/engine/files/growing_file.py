"""A file that is unchanged if a write fails."""

import contextlib
import os
import zlib
from typing import BinaryIO

import numpy as np


class GrowingFile:
    """A file that is appended to, or written under another name until `publish`.

    Without `publish` it stays as before.

    Args:
      path: of the file.
      old_crc: CRC-32 of the bytes to append to; None: a new file.

    Attributes:
      crc: CRC-32 of the whole file, where `write` alone has written it.
      file: what is written to.
    """

    def __init__(self, path: str, old_crc: int | None) -> None:
        self.crc = old_crc or 0
        self._path = path
        self._written = f"{path}.tmp" if old_crc is None else path
        self._is_published = False
        self.file: BinaryIO = open(self._written, "wb" if old_crc is None else "ab")  # noqa: SIM115
        self._old_length = self.file.tell()

    def __enter__(self) -> "GrowingFile":
        return self

    def write(self, array: np.ndarray) -> None:
        """Writes the bytes of an array."""
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        self.file.write(data)
        self.crc = zlib.crc32(data, self.crc)

    def sync(self) -> None:
        """Waits until what was written is on the disk."""
        self.file.flush()
        os.fsync(self.file.fileno())

    def publish(self) -> None:
        """Makes what was written the file of that name."""
        if self._written != self._path:
            os.replace(self._written, self._path)
        self._is_published = True

    def __exit__(self, *_: object) -> None:
        try:
            self.file.close()
        finally:
            if not self._is_published and self._written == self._path:
                os.truncate(self._path, self._old_length)
            elif not self._is_published:
                with contextlib.suppress(FileNotFoundError):  # it has its name already
                    os.unlink(self._written)
