"""Atomic writes of a SavedModel or a folder with a checkpoint: it takes its place when complete."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Any

import tensorflow as tf

from sok_lite.engine.files import atomic_write
from sok_lite.engine.local_path import is_address, local_path

# Files that readers look for, moved last.
_LAST = (".index", "saved_model.pb")
# The entries of a SavedModel, replaced together.
_OF_ONE = ("assets", "saved_model.pb", "fingerprint.pb", "variables")


def checked_folder(path: Any) -> str:
    """Returns a folder of this machine, or an address of one; raises ValueError if damaged."""
    path = os.fspath(path)
    return path if is_address(path) and not path.startswith("file:///") else local_path(path)


@contextmanager
def as_a_whole(path: Any) -> Iterator[str]:
    """Yields a folder to write to, which then replaces the folder or address `path`.

    If the block fails, the old content stays. On this machine a reader finds the old folder or the
    new one. In a folder with other files, one that cannot be moved, and TensorFlow's file systems,
    files are replaced one by one, `saved_model.pb` last. Raises OSError and tf.errors.OpError.
    """
    path = checked_folder(path)
    if is_address(path):
        part = f"{path.rstrip('/')}.part-{secrets.token_hex(8)}"
        try:
            yield part
            _move(part, path)
        finally:
            if tf.io.gfile.exists(part):
                tf.io.gfile.rmtree(part)
        return
    path = os.path.realpath(path)
    folder, name = os.path.split(path)
    os.makedirs(folder, exist_ok=True)
    # A mounted folder cannot be moved, nor one in a folder without write access.
    is_stuck = os.path.ismount(path) or not os.access(folder, os.W_OK)
    is_movable = not os.path.isdir(path) or not is_stuck
    with atomic_write.temporary_folder(folder if is_movable else path, name, path) as inside:
        part = os.path.join(inside, name)
        yield part
        if is_movable and _is_all_replaced(path, part):
            atomic_write.replace(part, path)
        else:
            _move(part, path)


def _files_in(folder: str) -> list[PurePosixPath]:
    found = []
    for inside, _, names in tf.io.gfile.walk(folder):
        at = PurePosixPath(inside[len(folder) :].strip("/"))
        found += [at / name for name in names]
    return found


def _is_all_replaced(path: str, part: str) -> bool:
    """Whether a folder has no other files, which would be lost."""
    new = set(_files_in(part))
    return all(each in new or each.parts[0] in _OF_ONE for each in _files_in(path))


def _move(part: str, path: str) -> None:
    """Moves the files of a folder into another one."""

    def rank(file: PurePosixPath) -> int:
        return next((i for i, end in enumerate(_LAST) if file.name.endswith(end)), -1)

    for each in sorted(_files_in(part), key=rank):
        tf.io.gfile.makedirs(os.path.dirname(f"{path}/{each}"))
        tf.io.gfile.rename(f"{part}/{each}", f"{path}/{each}", overwrite=True)
