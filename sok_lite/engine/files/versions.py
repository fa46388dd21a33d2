"""Numbered folders of published models, as servers look for them: the largest number is served.

A version is there or it is not: it is renamed to its number when all of it is written. The link
`latest` leads to the newest. A version that was rolled back is named `N.withdrawn`, and its number
is not used again: a server may have it in memory.

At an address (store.py) a version is there when its `saved_model.pb` is, which goes up last and
goes first. There is no link there.
"""

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Sequence
from typing import NamedTuple

from sok_lite.engine.dtypes import check_integer
from sok_lite.engine.files.disk import sync_path
from sok_lite.engine.files.lock import Lock
from sok_lite.engine.files.store import Store, is_in_store, joined
from sok_lite.engine.local_path import local_path

_LATEST = "latest"
_LOCK = ".publish.lock"
_log = logging.getLogger("sok_lite")
_NUMBER = re.compile(r"[1-9][0-9]{0,17}")
_WITHDRAWN = ".withdrawn"
# What marks a version at an address: servers need it.
MARK = "saved_model.pb"
# What is being removed; a killed process may leave it.
_GOING = ".removed-"


class Versions(NamedTuple):
    """The versions in a folder.

    Attributes:
      served: their numbers, ascending.
      withdrawn: those that were rolled back, ascending.
      unmarked: at an address, those whose upload is not over, or was ended.
    """

    served: list[int]
    withdrawn: list[int]
    unmarked: Sequence[int] = ()

    @property
    def next(self) -> int:
        """The number of the next one."""
        return max([0, *self.served, *self.withdrawn, *self.unmarked]) + 1


def versions_in(folder: str) -> Versions:
    """Returns the versions in a folder. Other names in it are none."""
    return _versions_of(os.listdir(folder))


def versions_at(store: Store) -> Versions:
    """Returns the versions at an address.

    Raises:
      OSError: the store cannot be reached.
    """
    found = _versions_of(store.names())
    unmarked = [number for number in found.served if not store.has(f"{number}/{MARK}")]
    served = [number for number in found.served if number not in unmarked]
    return Versions(served, found.withdrawn, unmarked)


def _versions_of(names: list[str]) -> Versions:
    served = sorted(int(name) for name in names if _NUMBER.fullmatch(name))
    bare = [name.removesuffix(_WITHDRAWN) for name in names if name.endswith(_WITHDRAWN)]
    return Versions(served, sorted(int(name) for name in bare if _NUMBER.fullmatch(name)))


def lock_versions(folder: str, shown: str | None = None) -> Lock:
    """Locks a folder of versions for the one who changes them.

    Args:
      folder: its path.
      shown: the address that they go to, for errors.

    Raises:
      BlockingIOError: somebody else does. OSError: there is no such folder, or it cannot be written
        to.
    """
    return Lock(os.path.join(folder, _LOCK), f"What is published at {shown or folder}")


def remove_all(folder: str) -> None:
    """Removes what is in a folder of versions but its lock, which the caller has."""
    for each in list(os.scandir(folder)):
        if each.is_dir(follow_symlinks=False):
            shutil.rmtree(each.path, ignore_errors=True)
        elif each.name != _LOCK:
            os.unlink(each.path)


def check_keep(keep: int | None) -> None:
    """Raises TypeError or ValueError for another `keep`."""
    if keep is not None:
        check_integer("keep", keep, 1)


def check_latest(folder: str) -> None:
    """Raises FileExistsError where something has the name of the link that is none."""
    link = os.path.join(folder, _LATEST)
    if os.path.lexists(link) and not os.path.islink(link):
        raise FileExistsError(
            f"{link} must be a link to a version, which publish() makes. Received: another file. "
            "Rename it."
        )


def link_latest(folder: str, number: int) -> None:
    """Has the link `latest` lead to a version, at every moment to one.

    Where the file system has no links there is none, and the log says so.
    """
    link = os.path.join(folder, _LATEST)
    try:
        with contextlib.suppress(FileNotFoundError):  # of a process that was killed
            os.unlink(f"{link}.tmp")
        os.symlink(str(number), f"{link}.tmp")
        os.replace(f"{link}.tmp", link)
        sync_path(folder)
    except OSError as error:
        _log.warning("%s does not lead to version %d: %s.", link, number, error)


def remove_old_at(store: Store, keep: int | None) -> None:
    """Removes versions at an address as `remove_old` does, and what ended uploads have left."""
    try:
        found = versions_at(store)
        for name in [*map(str, found.unmarked), *_too_old(found, keep)]:
            store.remove(name, first=MARK)
    except OSError as error:
        _log.warning("What is too old stays there: %s", error)


def _too_old(found: Versions, keep: int | None) -> list[str]:
    if keep is None or not found.served:
        return []
    oldest = found.served[-keep:][0]
    doomed = [str(number) for number in found.served if number < oldest]
    return doomed + [f"{number}{_WITHDRAWN}" for number in found.withdrawn if number < oldest]


def remove_old(folder: str, keep: int | None) -> None:
    """Removes versions but the newest, and what is older than these of those that were withdrawn.

    What cannot be removed stays.

    Args:
      keep: how many stay; None: all.
    """
    for name in _too_old(versions_in(folder), keep):
        # A server that looks for versions does not find half of one.
        with contextlib.suppress(OSError):
            os.rename(os.path.join(folder, name), os.path.join(folder, _GOING + name))
    for name in os.listdir(folder):
        if name.startswith(_GOING):
            shutil.rmtree(os.path.join(folder, name), ignore_errors=True)


def rollback(folder: str | os.PathLike[str], version: int | None = None) -> str:
    """Has servers of a folder of `publish` go back to an older version.

    The newer ones are renamed to `N.withdrawn`, so that this one has the largest number, and
    `latest` leads to it. What was served stays so until the last of them is renamed: a process that
    is killed before has changed nothing for servers that look for the largest number. The next
    version has a number of its own, above all of these. One process calls it, which needs neither
    TensorFlow nor the ranks.

    Args:
      folder: as of `publish`.
      version: the number to go back to; None: that before the newest.

    Returns:
      The path of the version.

    Raises:
      ValueError: there is no such version, or none before the newest.
      BlockingIOError: somebody publishes there. OSError: a folder cannot be renamed.
    """
    store = Store(folder, "folder") if is_in_store(folder) else None
    path = store.given if store else os.path.abspath(local_path(folder, "folder"))
    if version is not None:
        check_integer("version", version, 1)
    if store is not None:
        wanted, newer = _to_go_back_to(versions_at(store), version, store.address)
        for number in newer:
            store.move(str(number), f"{number}{_WITHDRAWN}", first=MARK)
        return joined(path, str(wanted))
    with lock_versions(path):
        check_latest(path)
        wanted, newer = _to_go_back_to(versions_in(path), version, path)
        for number in newer:
            old = os.path.join(path, str(number))
            os.rename(old, old + _WITHDRAWN)
        sync_path(path)
        link_latest(path, wanted)
    return os.path.join(path, str(wanted))


def _to_go_back_to(found: Versions, version: int | None, path: str) -> tuple[int, list[int]]:
    """Returns the version that `rollback` goes back to, and the newer ones, ascending."""
    served = found.served
    wanted = served[-2] if version is None and len(served) > 1 else version
    if wanted is None or wanted not in served:
        there = ", ".join(map(str, served)) or "none"
        what = "a version before the newest" if version is None else f"version {version}"
        raise ValueError(f"{path} must have {what}. It has: {there}. Nothing was changed.")
    return wanted, [number for number in served if number > wanted]
