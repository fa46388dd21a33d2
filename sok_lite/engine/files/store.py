"""Checkpoints at addresses such as s3://bucket/ck: in object stores, and on other machines.

An address has the same files as a folder. A dump first writes a complete checkpoint into a local
staging folder. Then it uploads the files, several at a time, and last the manifest, atomically:
the manifest is the marker. So a reader that takes the files of a manifest finds the old checkpoint
or the new one, whenever an upload breaks off. A reader downloads the files that it needs and does
not have yet to a local folder, and reads them there.

fsspec provides the file systems. Failed calls are retried with increasing pauses for half a minute,
except where a retry cannot help.
"""

import errno
import fcntl
import hashlib
import logging
import math
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

from sok_lite.backend.build import cache_folder
from sok_lite.engine.files import manifest
from sok_lite.engine.files.disk import explain_full_disk, sync_path
from sok_lite.engine.files.lock import try_flock, wait_for_lock
from sok_lite.engine.files.manifest import Manifest
from sok_lite.engine.local_path import plain_path

T = TypeVar("T")

_log = logging.getLogger("sok_lite")

# Seconds before each retry, and after which none begins: calls themselves take time, too.
PAUSES: Sequence[float] = (1, 2, 4, 8, 14)
_SECONDS_OF_TRIES = 30.0
# Files at a time, where a file system is thread-safe, and parts of each file at a time.
_NUM_THREADS, _NUM_PARTS = 4, 2
# Object stores: uploads are atomic, and there are no folders to make. Elsewhere a marker file is
# uploaded under a temporary name and renamed.
_FLAT = frozenset(("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "memory"))
# Packages of file systems that fsspec does not include.
_PACKAGES = {
    **dict.fromkeys(("s3", "s3a"), "s3fs"),
    **dict.fromkeys(("gs", "gcs"), "gcsfs"),
    **dict.fromkeys(("az", "abfs", "abfss"), "adlfs"),
    **dict.fromkeys(("sftp", "ssh"), "paramiko"),
    "hdfs": "pyarrow",
}
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://(.+)", re.DOTALL)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_FINAL = (FileNotFoundError, PermissionError, NotImplementedError, MemoryError)
# Errors of missing or rejected credentials, by name: their packages may not be installed.
_AUTH_ERRORS = {"NoCredentialsError", "PartialCredentialsError", "AuthenticationException"}
_PART = ".part"
# Readers of a copy hold a shared lock of this file; removing old copies needs an exclusive one.
_READERS = "readers"
_LONGEST_NAME = 200


def is_in_store(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path is an address such as s3://bucket/folder; file:// is not."""
    match = _ADDRESS.fullmatch(plain_path(path))
    return match is not None and match[1].lower() != "file"


def join_path(path: str, name: str) -> str:
    """Returns the path or address of `name` in a folder or a store."""
    return f"{path.rstrip('/')}/{name}" if is_in_store(path) else os.path.join(path, name)


def without_password(address: str) -> str:
    """Returns an address to show to people, without the password of user:password@host."""
    return re.sub(r"://([^/@:]*):[^/@]*@", r"://\1@", address)


def stores_folder() -> str:
    """Returns the local folder of staging folders and downloaded copies."""
    root = os.environ.get("SOK_LITE_STORES")
    return os.path.abspath(os.path.expanduser(root) if root else cache_folder() / "stores")


def make_folder(path: str) -> None:
    """Makes a folder in `stores_folder()` if it is missing; its OSError says what to do."""
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        text = (
            f"{error.strerror}: what goes to object stores or comes from them needs a folder of "
            "this machine. Have SOK_LITE_STORES name one that can be made and written to"
        )
        raise OSError(error.errno, text, path) from error


class _Newest(NamedTuple):
    """The newest checkpoint in a store: its path and the text of its manifest."""

    path: str
    text: bytes
    published: float | None  # seconds since 1970; None if the store does not tell


class Store:
    """The files at an address. Threads may share it. Methods raise OSError if it is unreachable.

    Args:
      address: of a checkpoint, of the saves of a `sok_lite.keras.Checkpoint`, or of versions.
      name: of the argument, for errors.
      level: logging level of failures that are retried.

    Attributes:
      given: the address, without a slash at its end. It may contain a password.
      address: the same without the password, to show to people.
      ends: while it is set, failed calls are not retried.

    Raises:
      ValueError: there is no package for it, or no such address.
    """

    def __init__(
        self, address: str | os.PathLike[str], name: str = "path", level: int = logging.WARNING
    ) -> None:
        self._level, self.ends = level, threading.Event()
        self.given = os.fsdecode(address).rstrip("/")
        match = _ADDRESS.fullmatch(self.given)
        if match is not None:
            self.given = f"{match[1].lower()}://{match[2]}"
        self.address = without_password(self.given)
        self._scheme = self.given.partition("://")[0]
        self._parts = self.address.partition("://")[2].split("/")
        if match is None or {".", ".."} & set(self._parts):
            raise ValueError(
                f"`{name}` must be an address such as s3://bucket/folder, without '.' and '..'. "
                f"Received: {self.address!r}."
            )
        if set("*?[") & set(self.given):  # fsspec expands them as patterns
            raise ValueError(
                f"`{name}` must be an address without '*', '?' and '['. Received: "
                f"{self.address!r}. Give a folder of another name; versions of objects and signed "
                "addresses are not for checkpoints."
            )
        self._class = self._checked_class(name)
        from fsspec.core import strip_protocol

        self._root = str(strip_protocol(self.given)).rstrip("/")
        self._opened: tuple[int, Any] | None = None
        self._has_failed = False
        self._opening = threading.Lock()

    def __repr__(self) -> str:
        return f"<Store {self.address}>"

    def _checked_class(self, name: str) -> Any:
        try:
            from fsspec import get_filesystem_class

            return get_filesystem_class(self._scheme)
        except ImportError as error:
            package = _PACKAGES.get(self._scheme)
            also = "" if package is None else f" {package}"
            raise ValueError(
                f"`{name}` is an address of {self._scheme}://, and a package for it is missing "
                f"({error}). Received: {self.address!r}. Run: pip install "
                f"'sok_lite[object-store]'{also}"
            ) from error
        except ValueError as error:
            raise ValueError(
                f"`{name}` must be a folder of this machine, or an address that fsspec knows, such "
                f"as s3://bucket/folder. Received: {self.address!r}. ({error})"
            ) from error

    # ---------------------------------------------------------------- folders of this machine

    def staging(self, rank: int, size: int) -> str:
        """Returns the local folder in which a rank writes files to upload.

        Folders of different addresses are never nested. Those of addresses in one folder are
        siblings.
        """
        *above, last = [part for part in self._parts if part]
        # No quoted name is "%" alone.
        parent = _file_name("/".join(above)) if above else "%"
        ranks = os.path.join(stores_folder(), "staging", f"{rank}-of-{size}")
        return os.path.join(ranks, self._scheme, parent, _file_name(last))

    def _copies(self) -> str:
        """Returns the local folder of downloads, which all processes share."""
        return os.path.join(stores_folder(), "copies", _file_name(self.address))

    def address_of_copy(self, folder: str) -> str:
        """Returns the address of a checkpoint that `download` put into a folder."""
        name = os.path.basename(folder)
        return self.address if name == self._parts[-1] else f"{self.address}/{name}"

    # ---------------------------------------------------------------- writing

    def check_is_ours(self) -> None:
        """Raises FileExistsError if another program's file has the path of the manifest."""
        text = self._manifest_of(self._path())
        if text is not None and manifest.FORMAT.encode() not in text:
            raise FileExistsError(
                f"{self.address}/{manifest.NAME} is no manifest of a checkpoint, and a dump would "
                "replace it. Dump to an address of its own."
            )

    def upload(self, folder: str, inside: Iterable[str], last: str = manifest.NAME) -> None:
        """Uploads files of a folder, without locks, temporary files and the marker `last`.

        Data files of dumps are skipped if the store has one of that name, which is unique, and
        size.

        Args:
          folder: local; the files directly in it are uploaded.
          inside: names of its subfolders to upload recursively.
          last: the marker file.

        Raises:
          OSError: a file cannot be read or uploaded.
        """
        there = self._sizes(self._path())
        names: list[str] = []
        for name in _files_in(folder, inside):
            if name == last or manifest.is_temporary(name):
                continue
            size = os.path.getsize(os.path.join(folder, name))
            is_data = manifest.DATA_FOLDER.fullmatch(name.split("/")[0])
            if not is_data or there.get(name) != size:
                names.append(name)
        # Files at the top tell who owns the folder, also if this process is killed half way.
        for some in ([n for n in names if "/" not in n], [n for n in names if "/" in n]):
            self._for_each(some, lambda name: self.put(folder, name))

    def put(self, folder: str, name: str) -> None:
        """Uploads one file of a local folder."""
        self._put(os.path.join(folder, name), name)

    def check_has(self, found: Manifest) -> None:
        """Raises OSError if a file is missing, or has another size than its manifest says."""
        there = self._sizes(self._path())
        for file, size in found.sizes.items():
            if there.get(file) != size:
                has = f"{there[file]:,} bytes" if file in there else "no such file"
                raise OSError(
                    f"{self.address}/{file} must have {size:,} bytes after its upload. Received: "
                    f"{has}. Another job may have written there meanwhile, or the ranks do not see "
                    "the same store: have one job write to an address, and all ranks to one "
                    "server. What was marked there before still is, unless by that job."
                )

    def mark(self, folder: str, last: str = manifest.NAME) -> None:
        """Uploads the marker file of a folder atomically. On an OSError the old one stays."""
        source = os.path.join(folder, last)
        if self._scheme in _FLAT:
            self._put(source, last)
            return
        self._put(source, f"{last}.tmp")
        path = self._path(last)
        self._retry("write", path, lambda system: system.mv(f"{path}.tmp", path))

    def sweep(self, found: Manifest) -> None:
        """Removes data files that a manifest does not name; logs those that it cannot remove."""
        used = {file.split("/")[0] for file in found.files}
        try:
            for name in filter(manifest.DATA_FOLDER.fullmatch, self.names()):
                if name not in used:
                    self.remove(name)
        except OSError as error:
            _log.warning("%s", error)

    def remove(self, name: str, first: str = "", last: str = "") -> None:
        """Removes a folder at the address, recursively.

        Args:
          first: its marker file, removed before all else.
          last: the file that tells who owns it, removed after all else.

        Raises:
          OSError: it cannot be removed, or not all of it.
        """
        path = self._path(name)
        inside = sorted(self._names(path), key=lambda each: (each == last, each != first))

        def remove(system: Any, each: str) -> None:
            with suppress(FileNotFoundError):
                system.rm(f"{path}/{each}", recursive=True)

        for each in inside:
            self._retry("remove", f"{path}/{each}", partial(remove, each=each))
        with suppress(FileNotFoundError):  # in a flat store it has gone with its files
            self._retry("remove", path, lambda system: system.rm(path, recursive=True))

    def move(self, name: str, to: str, first: str) -> None:
        """Renames a folder at the address, replacing `to`; in flat stores by copies.

        Args:
          first: its marker file, which is always there under one of the names.

        Raises:
          OSError: it cannot be renamed, or not all of it.
        """
        path, new = self._path(name), self._path(to)
        self.remove(to, first=first)
        if self._scheme not in _FLAT:
            self._retry("rename", path, lambda system: system.mv(path, new))
            return

        def copy(system: Any) -> None:
            with suppress(FileNotFoundError):  # of an earlier try: the copy would go inside it
                system.rm(new, recursive=True)
            system.copy(path, new, recursive=True)

        self._retry("copy", path, copy)
        self.remove(name, first=first)

    # ---------------------------------------------------------------- reading

    def names(self) -> list[str]:
        """Returns the names of files and folders at the address; [] if there is nothing."""
        return self._names(self._path())

    def has(self, name: str) -> bool:
        """Returns whether a file exists."""
        # Not by `exists`, which returns False for an unreachable store.
        folder, _, last = name.rpartition("/")
        return last in self._names(self._path(folder))

    def saves(self) -> dict[str, bool]:
        """Returns which saves of a `keras.Checkpoint` are marked, by name, oldest first."""
        saves = filter(manifest.SAVE.fullmatch, self.names())
        names = sorted(saves, key=lambda name: int(name.partition("-")[2]))
        return {name: self.has(f"{name}/{manifest.NAME}") for name in names}

    def download_newest(self) -> str:
        """Downloads all files as `download` does, and returns their local folder.

        They may be removed when any process downloads a newer checkpoint.
        """
        with self.download() as (folder, _):
            return folder

    @contextmanager
    def download(
        self,
        wanted: Callable[[Manifest], Iterable[str]] = lambda found: found.files,
        more: Callable[[Manifest], str] | None = None,
    ) -> Iterator[tuple[str, Manifest]]:
        """Downloads the checkpoint at the address, or the newest save of a `keras.Checkpoint`.

        Processes of this machine do so one after another, and share the files. Copies of other
        checkpoints are removed unless somebody reads.

        Args:
          wanted: returns the files to download, from the manifest.
          more: returns the name of a further folder to download.

        Yields:
          (a local folder with these files, its manifest). It is read-only, and stays until the
          `with` block ends.

        Raises:
          FileNotFoundError: there is no marked checkpoint. OSError: it cannot be downloaded.
        """
        copies = self._copies()
        make_folder(copies)
        with wait_for_lock(os.path.join(copies, "lock"), f"What is brought from {self.address}"):
            gone: bytes | None = None
            while True:
                newest = self._newest()
                at = f"{self.address}/{manifest.NAME}"
                found = manifest.from_text(newest.text, at)
                folder = os.path.join(copies, newest.path.rstrip("/").rpartition("/")[2])
                its = None if more is None else more(found)
                try:
                    is_new = self._download_missing(newest, found, folder, wanted(found), its)
                    break
                except FileNotFoundError:
                    if newest.text == gone:
                        raise
                    gone = newest.text  # a newer one may have replaced it in between
            readers = os.open(os.path.join(copies, _READERS), os.O_RDWR | os.O_CREAT, 0o666)
            try:
                if try_flock(readers, fcntl.LOCK_EX):
                    _remove_folders(copies, {os.path.basename(folder)})
                    if is_new:
                        kept = {file.split("/")[0] for file in found.files}
                        _remove_folders(folder, kept if its is None else kept | {its})
                try_flock(readers, fcntl.LOCK_SH)
            except BaseException:
                os.close(readers)
                raise
        try:
            yield folder, found
        finally:
            try_flock(readers, fcntl.LOCK_UN)  # closing is not enough if a fork has the file too
            os.close(readers)

    def _download_missing(
        self, newest: _Newest, found: Manifest, folder: str, wanted: Iterable[str], more: str | None
    ) -> bool:
        """Downloads missing files to a folder; returns whether it had another checkpoint."""
        os.makedirs(folder, exist_ok=True)
        try:
            is_same = manifest.text_of(folder)[0] == newest.text
        except (OSError, ValueError):
            is_same = False
        sizes = found.sizes
        missing = [file for file in dict.fromkeys(wanted) if _size(folder, file) != sizes[file]]
        if more is not None:
            for name, size in self._sizes(f"{newest.path}/{more}").items():
                if not is_same or _size(folder, f"{more}/{name}") != size:
                    missing.append(f"{more}/{name}")
        self._for_each(
            missing, lambda file: self._get(f"{newest.path}/{file}", os.path.join(folder, file))
        )
        if not is_same:
            manifest.publish(folder, newest.text.decode())
        if newest.published is not None:  # the time of the dump, not of the download
            os.utime(os.path.join(folder, manifest.NAME), (newest.published, newest.published))
        return not is_same

    def _newest(self) -> _Newest:
        path = self._path()
        text = self._manifest_of(path)
        if text is None:
            marked = [name for name, is_marked in self.saves().items() if is_marked]
            if not marked:
                raise FileNotFoundError(
                    f"{self.address} has no {manifest.NAME}: there is nothing, or no upload to it "
                    "was ever finished. Give the address that was given to `dump`."
                )
            path = self._path(marked[-1])
            text = self._manifest_of(path)
            if text is None:  # a newer save has replaced it in between
                return self._newest()
        at, published = f"{path}/{manifest.NAME}", None
        with suppress(NotImplementedError):
            published = self._retry("read", at, lambda system: system.modified(at).timestamp())
        return _Newest(path, text, published)

    def _manifest_of(self, path: str) -> bytes | None:
        """Returns the text of a folder's manifest; None if it has none."""
        at = f"{path}/{manifest.NAME}"
        try:
            return bytes(self._retry("read", at, lambda system: system.cat_file(at)))
        except FileNotFoundError:
            return None

    # ---------------------------------------------------------------- the file system

    def _path(self, name: str = "") -> str:
        """Returns the path in the file system of a name at the address."""
        return f"{self._root}/{name}" if name else self._root

    def _address_of(self, path: str) -> str:
        return self.address + path.removeprefix(self._root)

    def _system(self) -> Any:
        from fsspec.core import url_to_fs

        with self._opening:
            # A forked process cannot use its parent's connections.
            if self._opened is None or self._opened[0] != os.getpid():
                # fsspec's cached instance may have lost its connection, or not be thread-safe.
                is_own = self._has_failed or not self._class.async_impl
                system, _ = url_to_fs(self.given, skip_instance_cache=is_own)
                if hasattr(system, "max_concurrency"):  # S3: each part takes 50 MiB of memory
                    system.max_concurrency = _NUM_PARTS
                self._opened = os.getpid(), system
            self._opened[1].invalidate_cache()  # other processes write there too
            return self._opened[1]

    def _retry(self, verb: str, path: str, call: Callable[[Any], T]) -> T:
        """Calls `call(file_system)`, with retries; errors say "Cannot `verb` `path`"."""
        end = time.monotonic() + _SECONDS_OF_TRIES
        for number, pause in enumerate((*PAUSES, math.inf), 1):
            try:
                return call(self._system())
            except Exception as error:
                at = self._address_of(path)
                said = f"Cannot {verb} {at}: {type(error).__name__}: {error}"
                for kind in _FINAL:
                    if isinstance(error, kind):
                        raise kind(said) from error
                if _AUTH_ERRORS & {kind.__name__ for kind in type(error).__mro__}:
                    raise PermissionError(said) from error
                if getattr(error, "errno", None) in _NO_ROOM:
                    raise
                self._opened, self._has_failed = None, True
                is_last = time.monotonic() + pause > end
                if not is_last:
                    _log.log(self._level, "%s. Trying again in %g s.", said, pause)
                if is_last or self.ends.wait(pause):
                    tries = "once" if number == 1 else f"{number} times"
                    raise OSError(f"{said}. It was tried {tries}.") from error
        raise AssertionError

    def _names(self, path: str) -> list[str]:
        def listed(system: Any) -> list[str]:
            try:
                return list(system.ls(path, detail=False))
            except (FileNotFoundError, NotADirectoryError):
                return []

        names = [each.rstrip("/").rpartition("/")[2] for each in self._retry("list", path, listed)]
        return sorted({name for name in names if name})

    def _sizes(self, path: str) -> dict[str, int]:
        """Returns the sizes of all files below a path, by relative path."""

        def listed(system: Any) -> Mapping[str, Mapping[str, Any]]:
            try:
                return dict(system.find(path, detail=True))
            except FileNotFoundError:
                return {}

        start = path.lstrip("/") + "/"
        found = self._retry("list", path, listed)
        return {
            name.lstrip("/").removeprefix(start): int(about["size"])
            for name, about in found.items()
        }

    def _put(self, source: str, name: str) -> None:
        path = self._path(name)

        def put(system: Any) -> None:
            if self._scheme not in _FLAT:
                system.makedirs(path.rpartition("/")[0], exist_ok=True)
            system.put_file(source, path)

        self._retry("write", path, put)

    def _get(self, path: str, target: str) -> None:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        part = target + _PART
        what = (
            f"a copy of {self._address_of(path)}, in the folder that SOK_LITE_STORES names or else "
            "in the cache"
        )
        try:
            with explain_full_disk(part, what):
                self._retry("read", path, lambda system: system.get_file(path, part))
                sync_path(part)
            os.replace(part, target)
        except BaseException:
            with suppress(OSError):
                os.unlink(part)
            raise

    def _for_each(self, names: Collection[str], call: Callable[[str], None]) -> None:
        """Calls `call(name)` for each name, in several threads if the file system is thread-safe.

        Not by concurrent.futures, which takes no work while the interpreter exits: a background
        dump goes on then.
        """
        if not self._class.async_impl or len(names) < 2:
            for name in names:
                call(name)
            return
        left, failures, lock = iter(names), list[BaseException](), threading.Lock()

        def work() -> None:
            while not failures:
                with lock:
                    name = next(left, None)
                if name is None:
                    return
                try:
                    call(name)
                except BaseException as error:
                    failures.append(error)

        threads = [threading.Thread(target=work) for _ in range(min(_NUM_THREADS, len(names)))]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException as error:  # an interrupt: the threads take no more files
            failures.append(error)
            for thread in threads:  # the caller may change files as soon as this returns
                if thread.ident is not None:
                    thread.join()
        if failures:
            raise failures[0]


def _file_name(text: str) -> str:
    """Returns a file name for a text, unique for each."""
    name = quote(text, safe="@:")
    if len(name) > _LONGEST_NAME:
        name = f"{name[:_LONGEST_NAME]}~{hashlib.sha256(name.encode()).hexdigest()[:16]}"
    return name


def _files_in(folder: str, inside: Iterable[str]) -> list[str]:
    """Returns the files in a folder and below its subfolders `inside`, as relative paths."""
    found = [each.name for each in os.scandir(folder) if each.is_file()]
    for top in set(inside):
        for at, _, names in os.walk(os.path.join(folder, top)):
            found += [os.path.relpath(os.path.join(at, name), folder) for name in names]
    return sorted(found)


def _remove_folders(folder: str, keep: Collection[str]) -> None:
    for each in list(os.scandir(folder)):
        if each.is_dir() and each.name not in keep:
            shutil.rmtree(each.path, ignore_errors=True)


def _size(folder: str, file: str) -> int:
    try:
        return os.path.getsize(os.path.join(folder, file))
    except FileNotFoundError:
        return -1
