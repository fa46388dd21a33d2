"""A cache of compiled files on disk, keyed by everything that decides the result.

A file is written under another name and then renamed, so no reader sees half of one, and begins
with the checksum of the rest: a file that a full disk or a crash has cut short is made again. There
is no lock: of several ranks that miss the same file each makes it, on a core of its own in the time
that it would have waited, and the last one stays. A lock would save only work, and not every shared
disk has locks that a killed process releases.
"""

import hashlib
import os
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path


class DiskCache:
    """Files in a folder. If the folder cannot be used there is a warning, and nothing is cached.

    Args:
      folder: where the files are; made when the first one is written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._has_warned = False

    def get(self, facts: Sequence[str], make: Callable[[], bytes]) -> bytes:
        """Returns the cached result for some facts, or that of `make`, which is then cached.

        Args:
          facts: everything that decides the result.
          make: called if there is no valid file; its errors are passed on.
        """
        digest = hashlib.sha256()
        for fact in facts:
            part = fact.encode()
            digest.update(len(part).to_bytes(8, "little") + part)
        path = self._folder / digest.hexdigest()[:40]
        data = self._read(path)
        if data is None:
            data = make()
            self._write(path, data)
        return data

    def _read(self, path: Path) -> bytes | None:
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn(error)
            return None
        checksum, data = content[:32], content[32:]
        return data if hashlib.sha256(data).digest() == checksum else None

    def _write(self, path: Path, data: bytes) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self._folder) as scratch:
                written = Path(scratch) / path.name
                written.write_bytes(hashlib.sha256(data).digest() + data)
                os.replace(written, path)
        except OSError as error:
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        warnings.warn(
            f"Compiled kernels cannot be kept in {str(self._folder)!r} ({error}): each process "
            "compiles them anew, which takes seconds. Set SOK_LITE_CACHE to a folder that can be "
            "written to.",
            RuntimeWarning,
            stacklevel=2,
        )
