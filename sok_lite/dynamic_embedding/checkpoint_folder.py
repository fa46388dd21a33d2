"""The folder for variable files beside the checkpoint that is being saved or restored.

It is `TFRADynamicEmbedding-<step>` beside the checkpoint `<prefix>-<step>`, and
`TFRADynamicEmbedding` beside one without a step.
"""

import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from sok_lite.engine.files.key_value_files import has_only_shards
from sok_lite.engine.local_path import local_path, plain_path

# The open folders, newest last. TensorFlow runs host calls on its own threads, so this cannot be
# thread-local. It is replaced as a whole: readers need no lock.
_open: tuple[tuple[object, str], ...] = ()
_changing = threading.Lock()


@contextmanager
def use_folder(folder: str) -> Iterator[None]:
    """A context that sets the folder of variable files for all threads of the process."""
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
    """Returns the folder opened last, or None."""
    folders = _open
    return folders[-1][1] if folders else None


def directory(dirpath: str | os.PathLike[str], dirpath_env: str | None = "TFRA_SAVED_KV") -> str:
    """Returns the local folder of the environment variable, else `dirpath`, or ValueError."""
    named = os.environ.get(dirpath_env) if dirpath_env else None
    return local_path(named or dirpath, dirpath_env if named and dirpath_env else "dirpath")


def folder_beside(prefix: str | os.PathLike[str]) -> str:
    """Returns the folder of the checkpoint whose files start with `prefix`."""
    parent, name = os.path.split(plain_path(prefix))
    step = re.search(r"-\d+$", name)
    return os.path.join(parent, f"TFRADynamicEmbedding{step.group() if step else ''}")


class WrittenFolders:
    """The folders that a program wrote; they are removed once their checkpoints are gone."""

    def __init__(self) -> None:
        self._of_prefix: dict[str, str] = {}

    def note(self, prefix: str) -> None:
        """Records a written checkpoint, and removes the folders of removed ones."""
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
            if has_only_shards(folder) and not _is_of_another(folder):
                shutil.rmtree(folder, ignore_errors=True)  # another process may remove it too


def _is_of_another(folder: str) -> bool:
    """Whether a checkpoint exists that the folder belongs to, whoever wrote it."""
    parent, name = os.path.split(folder)
    names = os.listdir(parent or ".") if os.path.isdir(parent or ".") else []
    return any(
        each.endswith(".index") and folder_beside(each.removesuffix(".index")) == name
        for each in names
    )
