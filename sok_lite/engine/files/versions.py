"""Numbered folders of published models, of which servers load the largest number.

A version is renamed to its number when it is complete. The link `latest` leads to the newest. A
rolled-back version is named `N.withdrawn`, and its number is never used again: a server may have it
in memory.

At an address (store.py) there is no link, and a version exists while it has a `saved_model.pb`,
which is uploaded last and removed first.
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
from sok_lite.engine.files.store import Store, is_in_store, join_path
from sok_lite.engine.local_path import local_path

_LATEST = "latest"
_LOCK = ".publish.lock"
_log = logging.getLogger("sok_lite")
_NUMBER = re.compile(r"[1-9][0-9]{0,17}")
_WITHDRAWN = ".withdrawn"
# The marker file of a version at an address.
MARK = "saved_model.pb"
# The prefix of folders that are being removed; a killed process may leave some.
_REMOVED = ".removed-"


class Versions(NamedTuple):
    """The numbers of versions in a folder.

    Attributes:
      served: ascending.
      withdrawn: rolled back, ascending.
      unmarked: at an address: not yet or not completely uploaded.
    """

    served: list[int]
    withdrawn: list[int]
    unmarked: Sequence[int] = ()

    @property
    def next(self) -> int:
        """The number of the next version."""
        return max([0, *self.served, *self.withdrawn, *self.unmarked]) + 1


def versions_in(folder: str) -> Versions:
    """Returns the versions in a local folder."""
    return _versions_of(os.listdir(folder))


def versions_at(store: Store) -> Versions:
    """Returns the versions at an address. OSError: the store cannot be reached."""
    found = _versions_of(store.names())
    unmarked = [number for number in found.served if not store.has(f"{number}/{MARK}")]
    served = [number for number in found.served if number not in unmarked]
    return Versions(served, found.withdrawn, unmarked)


def _versions_of(names: list[str]) -> Versions:
    served = sorted(int(name) for name in names if _NUMBER.fullmatch(name))
    bare = [name.removesuffix(_WITHDRAWN) for name in names if name.endswith(_WITHDRAWN)]
    return Versions(served, sorted(int(name) for name in bare if _NUMBER.fullmatch(name)))


def lock_versions(folder: str, shown: str | None = None) -> Lock:
    """Locks a folder of versions for changes.

    Args:
      shown: the address of this staging folder, for errors.

    Raises:
      BlockingIOError: another process or thread has the lock. OSError: the folder is missing or
        cannot be written.
    """
    return Lock(os.path.join(folder, _LOCK), f"What is published at {shown or folder}")


def remove_all(folder: str) -> None:
    """Removes all of a folder of versions except its lock, which the caller holds."""
    for each in list(os.scandir(folder)):
        if each.is_dir(follow_symlinks=False):
            shutil.rmtree(each.path, ignore_errors=True)
        elif each.name != _LOCK:
            os.unlink(each.path)


def check_keep(keep: int | None) -> None:
    """Raises TypeError or ValueError unless `keep` is None or a positive integer."""
    if keep is not None:
        check_integer("keep", keep, 1)


def check_latest(folder: str) -> None:
    """Raises FileExistsError if `latest` exists and is not a link."""
    link = os.path.join(folder, _LATEST)
    if os.path.lexists(link) and not os.path.islink(link):
        raise FileExistsError(
            f"{link} must be a link to a version, which publish() makes. Received: another file. "
            "Rename it."
        )


def link_latest(folder: str, number: int) -> None:
    """Points the link `latest` to a version, atomically. Logs if the file system has no links."""
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
    """Removes old versions at an address, as `remove_old`, and incomplete uploads."""
    try:
        found = versions_at(store)
        for name in [*map(str, found.unmarked), *_expired(found, keep)]:
            store.remove(name, first=MARK)
    except OSError as error:
        _log.warning("What is too old stays there: %s", error)


def _expired(found: Versions, keep: int | None) -> list[str]:
    if keep is None or not found.served:
        return []
    oldest = found.served[-keep:][0]
    names = [str(number) for number in found.served if number < oldest]
    return names + [f"{number}{_WITHDRAWN}" for number in found.withdrawn if number < oldest]


def remove_old(folder: str, keep: int | None) -> None:
    """Removes all but the `keep` newest versions, and older withdrawn ones; None: removes none.

    Ignores errors.
    """
    for name in _expired(versions_in(folder), keep):
        # Renamed first: a server must not find half a version.
        with contextlib.suppress(OSError):
            os.rename(os.path.join(folder, name), os.path.join(folder, _REMOVED + name))
    for name in os.listdir(folder):
        if name.startswith(_REMOVED):
            shutil.rmtree(os.path.join(folder, name), ignore_errors=True)


def rollback(folder: str | os.PathLike[str], version: int | None = None) -> str:
    """Rolls a folder of `publish` back to an older version.

    Newer versions are renamed to `N.withdrawn`, so that this one has the largest number, and
    `latest` leads to it. Servers keep loading the newest version until the last of them is renamed:
    a process killed before that has changed nothing for them. The next version gets a new number.
    Call it in one process; it needs neither TensorFlow nor the ranks.

    Args:
      folder: as of `publish`.
      version: the number to roll back to; None: the one before the newest.

    Returns:
      The path of the version.

    Raises:
      ValueError: there is no such version, or none before the newest.
      BlockingIOError: another process publishes there. OSError: a folder cannot be renamed.
    """
    store = Store(folder, "folder") if is_in_store(folder) else None
    path = store.given if store else os.path.abspath(local_path(folder, "folder"))
    if version is not None:
        check_integer("version", version, 1)
    if store is not None:
        wanted, newer = _rollback_target(versions_at(store), version, store.address)
        for number in newer:
            store.move(str(number), f"{number}{_WITHDRAWN}", first=MARK)
        return join_path(path, str(wanted))
    with lock_versions(path):
        check_latest(path)
        wanted, newer = _rollback_target(versions_in(path), version, path)
        for number in newer:
            old = os.path.join(path, str(number))
            os.rename(old, old + _WITHDRAWN)
        sync_path(path)
        link_latest(path, wanted)
    return os.path.join(path, str(wanted))


def _rollback_target(found: Versions, version: int | None, path: str) -> tuple[int, list[int]]:
    """Returns (the version that `rollback` wants, the newer ones, ascending)."""
    served = found.served
    wanted = served[-2] if version is None and len(served) > 1 else version
    if wanted is None or wanted not in served:
        there = ", ".join(map(str, served)) or "none"
        what = "a version before the newest" if version is None else f"version {version}"
        raise ValueError(f"{path} must have {what}. It has: {there}. Nothing was changed.")
    return wanted, [number for number in served if number > wanted]
