"""The folders of a `Checkpoint`: which are whole, and which go."""

import contextlib
import os
import re
import shutil
from typing import Any

from sok_lite.bridge.job import communicator
from sok_lite.engine.files import manifest

_FOLDER = re.compile(r"step-(\d+)")
_DENSE = re.compile(r"dense-[\d-]+")
# Its place in training, in the `extra` of a dump.
EXTRA = "sok_lite.keras"


def sweep(path: str, rank: int) -> None:
    """Removes what saves have left that were broken off."""
    if rank != 0:
        return
    os.makedirs(path, exist_ok=True)
    for name in os.listdir(path):
        if _FOLDER.fullmatch(name) and not _is_whole(os.path.join(path, name)):
            shutil.rmtree(os.path.join(path, name), ignore_errors=True)


def tidy(path: str, keep: int, folder: str, dense: str) -> None:
    """Removes checkpoints that are too old, and dense weights that no manifest names.

    What cannot be removed stays: the new checkpoint is whole, and other ranks train on.
    """
    if communicator().rank != 0:
        return
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if _DENSE.fullmatch(name) and name != dense:
                shutil.rmtree(os.path.join(folder, name), ignore_errors=True)
        for number in numbers(path)[:-keep]:
            old = os.path.join(path, name_of(number))
            # First what makes it a checkpoint: it is never one that lacks something.
            os.unlink(os.path.join(old, manifest.NAME))
            shutil.rmtree(old)


def numbers(path: str) -> list[int]:
    """Returns the numbers of the whole checkpoints, ascending."""
    names = os.listdir(path) if os.path.isdir(path) else []
    found = [(int(match[1]), name) for name in names if (match := _FOLDER.fullmatch(name))]
    return sorted(n for n, name in found if _is_whole(os.path.join(path, name)))


def name_of(number: int) -> str:
    """Returns the name of the folder of a checkpoint."""
    return f"step-{number:010d}"


def _is_whole(folder: str) -> bool:
    return os.path.exists(os.path.join(folder, manifest.NAME))


def place_in_training(folder: str) -> dict[str, Any]:
    """Returns where a checkpoint was made, and the name of its dense weights."""
    extra = manifest.read(folder).extra
    if EXTRA not in extra:
        raise ValueError(
            f"{folder} was not written by sok_lite.keras.Checkpoint. Give it a path of its own."
        )
    found: dict[str, Any] = extra[EXTRA]
    return found
