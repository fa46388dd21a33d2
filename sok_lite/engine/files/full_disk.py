"""What is said of a file that a full disk has no room for: whose it is, bytes needed and free."""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator

# The disk is full, or what this user may have of it.
_FULL = (errno.ENOSPC, errno.EDQUOT)


class DiskFullError(OSError):
    """What `naming_file` has told of; one around it adds nothing."""


@contextlib.contextmanager
def naming_file(path: str, what: str, num_bytes: int = 0, of_all: int = 0) -> Iterator[None]:
    """A `with` block in which a write that a full disk ends is told with what there is to know.

    Args:
      path: of the file or folder that is written.
      what: it is, such as "a file of table 't'".
      num_bytes: that it is to have; 0: nobody knows.
      of_all: bytes of all files of which it is one; 0: it is the only one, or nobody knows.

    Raises:
      DiskFullError: of the same number. Any other error goes as it came.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL or isinstance(error, DiskFullError):
            raise
        text = f"{os.strerror(error.errno)}: {_told(path, what, num_bytes, of_all)}"
        raise DiskFullError(error.errno, text, path) from error


def _told(path: str, what: str, num_bytes: int, of_all: int) -> str:
    facts = [f"{what} needs {num_bytes:,} bytes" if num_bytes else what]
    with contextlib.suppress(OSError):
        if os.path.isfile(path):
            facts.append(f"{os.path.getsize(path):,} are written")
    if of_all > num_bytes:
        facts.append(f"all files of this rank need {of_all:,}")
    with contextlib.suppress(OSError):
        facts.append(f"{shutil.disk_usage(_folder_of(path)).free:,} bytes are free")
    return "; ".join(facts)


def _folder_of(path: str) -> str:
    """Returns the innermost folder of a path that is there."""
    while path and not os.path.isdir(path):
        path = os.path.dirname(path)
    return path or os.curdir
