"""The folder of the variables' files that belongs to a checkpoint which is saved or restored now.

It is `TFRADynamicEmbedding-<step>` beside the checkpoint `<prefix>-<step>`, `TFRADynamicEmbedding`
beside one without a step.
"""

import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from sok_lite.engine.files.key_value_files import has_nothing_else
from sok_lite.engine.local_path import local_path, plain_path

# The folders that are open, the latest last. TensorFlow runs host calls on threads of its own, so
# this cannot belong to a thread. It is replaced as a whole: who reads it needs no lock.
_open: tuple[tuple[object, str], ...] = ()
_changing = threading.Lock()


@contextmanager
def opened(folder: str) -> Iterator[None]:
    """A `with` block in which variables' files are in a folder, for all threads of the process."""
    global _open
    entry = (object(), folder)
    with _changing:
        _open = (*_open, entry)
    try:
        yield
    finally:
        with _changing:
            _open = tuple(other for other in _open if other is not entry)


def current() -> str | None:
    """Returns the folder that was opened last; None: none is open."""
    folders = _open
    return folders[-1][1] if folders else None


def directory(dirpath: str | os.PathLike[str], dirpath_env: str | None = "TFRA_SAVED_KV") -> str:
    """Returns the folder of the files: the environment's where it names one, else `dirpath`.

    Raises:
      ValueError: it is empty, or an address and not a folder of this machine.
    """
    named = os.environ.get(dirpath_env) if dirpath_env else None
    return local_path(named or dirpath, dirpath_env if named and dirpath_env else "dirpath")


def folder_beside(prefix: str | os.PathLike[str]) -> str:
    """Returns the folder of a checkpoint.

    Args:
      prefix: what the names of the checkpoint's files start with.
    """
    parent, name = os.path.split(plain_path(prefix))
    step = re.search(r"-\d+$", name)
    return os.path.join(parent, f"TFRADynamicEmbedding{step.group() if step else ''}")


class WrittenFolders:
    """The folders that checkpoints of one program have; they go when their checkpoints are gone."""

    def __init__(self) -> None:
        self._of_prefix: dict[str, str] = {}

    def note(self, prefix: str) -> None:
        """Notes that a checkpoint was written, and removes the folders of those that are gone."""
        prefix = plain_path(prefix)
        self._of_prefix[prefix] = folder_beside(prefix)
        gone = {
            prefix: folder
            for prefix, folder in self._of_prefix.items()
            if not any(os.path.exists(path) for path in (prefix, f"{prefix}.index"))
        }
        for prefix in gone:
            del self._of_prefix[prefix]
        for folder in set(gone.values()).difference(self._of_prefix.values()):
            if has_nothing_else(folder) and not _is_of_another(folder):
                shutil.rmtree(folder, ignore_errors=True)  # one that another process removes, too


def _is_of_another(folder: str) -> bool:
    """Whether a checkpoint is there that the folder belongs to, whoever has written it."""
    parent, name = os.path.split(folder)
    names = os.listdir(parent or ".") if os.path.isdir(parent or ".") else []
    return any(
        each.endswith(".index") and folder_beside(each.removesuffix(".index")) == name
        for each in names
    )
