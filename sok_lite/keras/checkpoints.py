"""The folders of a `Checkpoint`: which are whole, and which go."""

import contextlib
import os
import re
import shutil
from functools import partial
from typing import Any

from sok_lite.bridge.job import communicator
from sok_lite.engine.files import manifest

_FOLDER = re.compile(r"step-(\d{10,})")
_DENSE = re.compile(r"dense-[\d-]+")
# The first file of each folder, and the last to go: of nothing else anything is removed.
_MARK = "of_sok_lite_keras_checkpoint"
# Its place in training, in the `extra` of a dump.
EXTRA = "sok_lite.keras"


def sweep(path: str, rank: int) -> None:
    """Removes what saves have left that were broken off, and that no process writes."""
    if rank != 0:
        return
    os.makedirs(path, exist_ok=True)
    for name in filter(_FOLDER.fullmatch, os.listdir(path)):
        folder = os.path.join(path, name)
        if os.path.exists(os.path.join(folder, _MARK)) and not _is_whole(folder):
            # Another process may have made it whole meanwhile.
            manifest.remove_unless_written(folder, partial(_empty_if_broken_off, folder))


def _empty_if_broken_off(folder: str) -> bool:
    return not _is_whole(folder) and _empty(folder)


def mark(folder: str, rank: int) -> None:
    """Marks a folder, which is locked, as one of a `Checkpoint`.

    Raises:
      FileExistsError: it has files of others, or their checkpoint.
    """
    if rank != 0:
        return
    names = os.listdir(folder)
    others = sorted(name for name in names if not _is_name_of_ours(name))
    others = [] if _MARK in names else others
    if others or (_is_whole(folder) and not _is_ours(folder)):
        what = repr(others[0]) if others else "a checkpoint of another program"
        raise FileExistsError(
            f"{folder} must be of sok_lite.keras.Checkpoint alone. Received: {what} in it. Give "
            "Checkpoint a path of its own."
        )
    if _MARK not in names:
        with open(os.path.join(folder, _MARK), "xb") as file:
            os.fsync(file.fileno())
        manifest.sync_path(folder)


def _is_name_of_ours(name: str) -> bool:
    return bool(_DENSE.fullmatch(name)) or manifest.is_name_in_checkpoint(name)


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
        ours = [number for number in numbers(path) if _is_ours(os.path.join(path, name_of(number)))]
        for number in ours[:-keep]:
            old = os.path.join(path, name_of(number))
            manifest.remove_unless_written(old, partial(_empty, old))


def _empty(folder: str) -> bool:
    """Removes what is in a folder but its mark."""
    with contextlib.suppress(FileNotFoundError):
        # First what makes it a checkpoint: it is never one that lacks something.
        os.unlink(os.path.join(folder, manifest.NAME))
    for name in os.listdir(folder):
        if os.path.isdir(os.path.join(folder, name)):
            shutil.rmtree(os.path.join(folder, name), ignore_errors=True)
    return True


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


def _is_ours(folder: str) -> bool:
    """Whether what a folder has was written by a `Checkpoint`, of any version."""
    try:
        return EXTRA in manifest.read(folder).extra
    except (OSError, ValueError):
        return os.path.exists(os.path.join(folder, _MARK))


def place_in_training(folder: str) -> dict[str, Any]:
    """Returns where a checkpoint was made, and the name of its dense weights."""
    extra = manifest.read(folder).extra
    if EXTRA not in extra:
        raise ValueError(
            f"{folder} was not written by sok_lite.keras.Checkpoint. Give it a path of its own."
        )
    found: dict[str, Any] = extra[EXTRA]
    return found
