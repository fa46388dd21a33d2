"""Checkpoints at addresses such as s3://bucket/ck: in object stores, and on other machines.

At an address is what a folder has, under the same names. A dump writes into a folder of this
machine first, its staging folder, with all that makes it whole there. Then the files go up, several
at a time, and last the manifest, in one step: it marks what there is. So a reader that takes what a
manifest names finds the checkpoint of before or the new one, whenever an upload ends. A reader
brings a marked checkpoint to a folder of this machine, only what that does not have yet, and reads
it there.

fsspec knows the file systems. A call that fails is made again, with longer and longer pauses for
half a minute, but where another try cannot help.
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
from sok_lite.engine.files.disk import naming_file, sync_path
from sok_lite.engine.files.lock import try_flock, waited_for
from sok_lite.engine.files.manifest import Manifest
from sok_lite.engine.local_path import plain_path

T = TypeVar("T")

_log = logging.getLogger("sok_lite")

# Seconds before each further try, and those after which none begins: calls take long, too.
PAUSES: Sequence[float] = (1, 2, 4, 8, 14)
_SECONDS_OF_TRIES = 30.0
# Files that go at a time, where a file system takes calls of several threads; and of each pieces.
_AT_A_TIME, _PIECES = 4, 2
# Where an object appears under its name when all of it is there, and folders are not made. Anywhere
# else what marks others is renamed to its place.
_FLAT = frozenset(("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "memory"))
# What installs a file system that fsspec does not bring along.
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
# Of packages that need not be here: nothing says who one is, or it is not believed.
_NOT_LET_IN = {"NoCredentialsError", "PartialCredentialsError", "AuthenticationException"}
_PART = ".part"
# Whoever reads a copy has a shared lock of this file; what is too old goes under the other one.
_READERS = "readers"
_LONGEST_NAME = 200


def is_in_store(path: str | os.PathLike[str]) -> bool:
    """Whether a path is an address of a file system that is not this machine's."""
    match = _ADDRESS.fullmatch(plain_path(path))
    return match is not None and match[1].lower() != "file"


def joined(path: str, name: str) -> str:
    """Returns the path of a name in a folder of this machine or of a store."""
    return f"{path.rstrip('/')}/{name}" if is_in_store(path) else os.path.join(path, name)


def without_password(address: str) -> str:
    """Returns an address to be shown: of user:password@host the password is nobody else's."""
    return re.sub(r"://([^/@:]*):[^/@]*@", r"://\1@", address)


def stores_folder() -> str:
    """Returns the folder that has what this machine keeps of stores."""
    root = os.environ.get("SOK_LITE_STORES")
    return os.path.abspath(os.path.expanduser(root) if root else cache_folder() / "stores")


def make_folder(path: str) -> None:
    """Makes a folder in `stores_folder()`, if it is missing.

    Raises:
      OSError: it cannot be made.
    """
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        text = (
            f"{error.strerror}: what goes to object stores or comes from them needs a folder of "
            "this machine. Have SOK_LITE_STORES name one that can be made and written to"
        )
        raise OSError(error.errno, text, path) from error


class _Newest(NamedTuple):
    """A checkpoint in a store: its path there, the text of its manifest and when that was put, in
    seconds since 1970; None: the store does not say."""

    path: str
    text: bytes
    published: float | None


class Store:
    """What is at an address. Threads may share it.

    Args:
      address: of a checkpoint, of the folder of a `sok_lite.keras.Checkpoint`, or of versions.
      name: of the argument, for errors.
      level: at which a failure is logged after which another try comes.

    Attributes:
      given: the address, without a slash at its end. It may have a password in it.
      address: without that, to be shown.
      ends: while it is set a call that fails is not made again.

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
        if set("*?[") & set(self.given):  # with fsspec they stand for other names
            raise ValueError(
                f"`{name}` must be an address without '*', '?' and '['. Received: "
                f"{self.address!r}. Give a folder of another name; versions of objects and signed "
                "addresses are not for checkpoints."
            )
        self._class = self._checked_class(name)
        from fsspec.core import strip_protocol

        # As the file system knows it.
        self._at = str(strip_protocol(self.given)).rstrip("/")
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
        """Returns the folder in which a rank of several writes what goes up.

        That of one address is never in that of another, and addresses in one folder have theirs
        beside each other.
        """
        *above, last = [part for part in self._parts if part]
        # "%" alone is none that is quoted.
        parent = _file_name("/".join(above)) if above else "%"
        ranks = os.path.join(stores_folder(), "staging", f"{rank}-of-{size}")
        return os.path.join(ranks, self._scheme, parent, _file_name(last))

    def _copies(self) -> str:
        """Returns the folder of what was brought here, which all processes share."""
        return os.path.join(stores_folder(), "copies", _file_name(self.address))

    def address_of_copy(self, folder: str) -> str:
        """Returns the address of what `reading` has brought to a folder."""
        name = os.path.basename(folder)
        return self.address if name == self._parts[-1] else f"{self.address}/{name}"

    # ---------------------------------------------------------------- writing

    def check_is_ours(self) -> None:
        """Raises FileExistsError where a file of another program has the path of the manifest.

        Raises:
          OSError: the store cannot be reached.
        """
        text = self._text_of(self._path())
        if text is not None and manifest.FORMAT.encode() not in text:
            raise FileExistsError(
                f"{self.address}/{manifest.NAME} is no manifest of a checkpoint, and a dump would "
                "replace it. Dump to an address of its own."
            )

    def upload(self, folder: str, inside: Iterable[str], last: str = manifest.NAME) -> None:
        """Brings files of a folder to the store, those that it does not have yet.

        Files of dumps have names of their own, so one of the same size is the same. All others go
        each time.

        Args:
          folder: of this machine. The files that are in it at once go.
          inside: which folders in it go too, with what is below them.
          last: what marks them; it does not go, and neither do locks and what is half written.

        Raises:
          OSError: a file cannot be read, or not be written there.
        """
        there = self._sizes(self._path())
        going: list[str] = []
        for name in _files_in(folder, inside):
            if name == last or manifest.is_private(name):
                continue
            size = os.path.getsize(os.path.join(folder, name))
            is_data = manifest.DATA_FOLDER.fullmatch(name.split("/")[0])
            if not is_data or there.get(name) != size:
                going.append(name)
        # First what says whose the folder is: so what a killed process has left is known.
        for some in ([n for n in going if "/" not in n], [n for n in going if "/" in n]):
            self._each(some, lambda name: self._put(os.path.join(folder, name), name))

    def put(self, folder: str, name: str) -> None:
        """Brings one file of a folder to the store.

        Raises:
          OSError: it cannot be read or written.
        """
        self._put(os.path.join(folder, name), name)

    def check_has(self, found: Manifest) -> None:
        """Raises OSError where a file is missing or of another size than its manifest says.

        Raises:
          OSError: so it is, or the store cannot be reached.
        """
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
        """Brings what marks the files of a folder, in one step.

        Raises:
          OSError: it cannot be read or written. What was marked before still is.
        """
        source = os.path.join(folder, last)
        if self._scheme in _FLAT:
            self._put(source, last)
            return
        self._put(source, f"{last}.tmp")
        path = self._path(last)
        self._tried("write", path, lambda system: system.mv(f"{path}.tmp", path))

    def sweep(self, found: Manifest) -> None:
        """Removes files of dumps that the manifest there does not name; what cannot be stays."""
        used = {file.split("/")[0] for file in found.files}
        try:
            for name in filter(manifest.DATA_FOLDER.fullmatch, self.names()):
                if name not in used:
                    self.remove(name)
        except OSError as error:
            _log.warning("%s", error)

    def remove(self, name: str, first: str = "", last: str = "") -> None:
        """Removes a folder with what is in it.

        Args:
          name: of it, at the address.
          first: what marks the files in it, and goes before them.
          last: what says whose it is, and goes after them.

        Raises:
          OSError: it cannot be removed, or not all of it.
        """
        path = self._path(name)
        inside = sorted(self._names(path), key=lambda each: (each == last, each != first))

        def remove(system: Any, each: str) -> None:
            with suppress(FileNotFoundError):
                system.rm(f"{path}/{each}", recursive=True)

        for each in inside:
            self._tried("remove", f"{path}/{each}", partial(remove, each=each))
        with suppress(FileNotFoundError):  # where folders are none, it has gone with what it had
            self._tried("remove", path, lambda system: system.rm(path, recursive=True))

    def move(self, name: str, to: str, first: str) -> None:
        """Gives a folder another name: where folders have none, by copies.

        Args:
          name, to: at the address. What has the other name goes.
          first: what marks its files: they are marked under one name or the other.

        Raises:
          OSError: it cannot be done, or not all of it.
        """
        path, new = self._path(name), self._path(to)
        self.remove(to, first=first)
        if self._scheme not in _FLAT:
            self._tried("rename", path, lambda system: system.mv(path, new))
            return

        def copy(system: Any) -> None:
            with suppress(FileNotFoundError):  # what there is of another try: it would go into that
                system.rm(new, recursive=True)
            system.copy(path, new, recursive=True)

        self._tried("copy", path, copy)
        self.remove(name, first=first)

    # ---------------------------------------------------------------- reading

    def names(self) -> list[str]:
        """Returns the names of files and folders at the address; [] where there is nothing.

        Raises:
          OSError: the store cannot be reached.
        """
        return self._names(self._path())

    def has(self, name: str) -> bool:
        """Whether there is such a file.

        Raises:
          OSError: the store cannot be reached.
        """
        # Not by `exists`, which takes a store that cannot be reached for one without the file.
        folder, _, last = name.rpartition("/")
        return last in self._names(self._path(folder))

    def saves(self) -> dict[str, bool]:
        """Returns whether the saves of a `sok_lite.keras.Checkpoint` are marked, by name, the
        newest last.

        Raises:
          OSError: the store cannot be reached.
        """
        saves = filter(manifest.SAVE.fullmatch, self.names())
        names = sorted(saves, key=lambda name: int(name.partition("-")[2]))
        return {name: self.has(f"{name}/{manifest.NAME}") for name in names}

    def brought(
        self,
        wanted: Callable[[Manifest], Iterable[str]] = lambda found: found.files,
        more: Callable[[Manifest], str] | None = None,
    ) -> str:
        """Brings the checkpoint at the address here, and returns its folder.

        Its files may go as soon as another call, of any process, brings a newer one. Arguments and
        errors are those of `reading`.
        """
        with self.reading(wanted, more) as (folder, _):
            return folder

    @contextmanager
    def reading(
        self,
        wanted: Callable[[Manifest], Iterable[str]] = lambda found: found.files,
        more: Callable[[Manifest], str] | None = None,
    ) -> Iterator[tuple[str, Manifest]]:
        """Brings the checkpoint at the address here, of a `sok_lite.keras.Checkpoint` the newest.

        Processes of this machine do so one after another, and the next one finds what the last has
        brought. Files of a checkpoint that is not there any more go, where nobody reads.

        Args:
          wanted: returns which of its files are to be here; others need not be.
          more: returns the name of a folder beside them that is to be here too.

        Yields:
          A folder with these files, which nobody may write to, and its manifest: they stay until
          the `with` block ends.

        Raises:
          FileNotFoundError: there is no marked checkpoint. OSError: it cannot be brought here.
        """
        copies = self._copies()
        make_folder(copies)
        with waited_for(os.path.join(copies, "lock"), f"What is brought from {self.address}"):
            gone: bytes | None = None
            while True:
                newest = self._newest()
                at = f"{self.address}/{manifest.NAME}"
                found = manifest.from_text(newest.text, at)
                folder = os.path.join(copies, newest.path.rstrip("/").rpartition("/")[2])
                its = None if more is None else more(found)
                try:
                    is_new = self._bring(newest, found, folder, wanted(found), its)
                except FileNotFoundError:
                    if newest.text == gone:
                        raise
                    gone = newest.text  # another one may have taken its place in between
                else:
                    break
            readers = os.open(os.path.join(copies, _READERS), os.O_RDWR | os.O_CREAT, 0o666)
            try:
                if try_flock(readers, fcntl.LOCK_EX):
                    _remove_folders(copies, {os.path.basename(folder)})
                    if is_new:
                        of_it = {file.split("/")[0] for file in found.files}
                        _remove_folders(folder, of_it if its is None else of_it | {its})
                try_flock(readers, fcntl.LOCK_SH)
            except BaseException:
                os.close(readers)
                raise
        try:
            yield folder, found
        finally:
            try_flock(readers, fcntl.LOCK_UN)  # also where a forked process has the file too
            os.close(readers)

    def _bring(
        self, newest: _Newest, found: Manifest, folder: str, wanted: Iterable[str], more: str | None
    ) -> bool:
        """Brings files of a checkpoint to a folder; returns whether another one was there."""
        os.makedirs(folder, exist_ok=True)
        is_same = _text_in(folder) == newest.text
        written = found.sizes
        lacking = [file for file in dict.fromkeys(wanted) if _size(folder, file) != written[file]]
        if more is not None:
            for name, size in self._sizes(f"{newest.path}/{more}").items():
                if not is_same or _size(folder, f"{more}/{name}") != size:
                    lacking.append(f"{more}/{name}")
        self._each(
            lacking, lambda file: self._get(f"{newest.path}/{file}", os.path.join(folder, file))
        )
        if not is_same:
            manifest.publish(folder, newest.text.decode())
        if newest.published is not None:  # that counts, and not when it came here
            os.utime(os.path.join(folder, manifest.NAME), (newest.published, newest.published))
        return not is_same

    def _newest(self) -> _Newest:
        path = self._path()
        text = self._text_of(path)
        if text is None:
            marked = [name for name, is_marked in self.saves().items() if is_marked]
            if not marked:
                raise FileNotFoundError(
                    f"{self.address} has no {manifest.NAME}: there is nothing, or no upload to it "
                    "was ever finished. Give the address that was given to `dump`."
                )
            path = self._path(marked[-1])
            text = self._text_of(path)
            if text is None:  # it has gone, since a newer one is there
                return self._newest()
        return _Newest(path, text, self._time_of(f"{path}/{manifest.NAME}"))

    def _time_of(self, path: str) -> float | None:
        """Returns when a file was last changed, seconds since 1970; None: it is not said."""
        try:
            return float(
                self._tried("read", path, lambda system: system.modified(path).timestamp())
            )
        except NotImplementedError:
            return None

    def _text_of(self, path: str) -> bytes | None:
        """Returns the text of a manifest; None: there is none."""
        at = f"{path}/{manifest.NAME}"
        try:
            return bytes(self._tried("read", at, lambda system: system.cat_file(at)))
        except FileNotFoundError:
            return None

    # ---------------------------------------------------------------- the file system

    def _path(self, name: str = "") -> str:
        """Returns the path, as the file system knows it, of a name at the address."""
        return f"{self._at}/{name}" if name else self._at

    def _shown(self, path: str) -> str:
        """Returns the address of such a path."""
        return self.address + path.removeprefix(self._at)

    def _system(self) -> Any:
        from fsspec.core import url_to_fs

        with self._opening:
            # What a forked process has of its parent cannot be used.
            if self._opened is None or self._opened[0] != os.getpid():
                # One that has failed may have lost its connection. Those that make no calls of
                # several threads are of one store alone.
                is_own = self._has_failed or not self._class.async_impl
                system, _ = url_to_fs(self.given, skip_instance_cache=is_own)
                if hasattr(system, "max_concurrency"):  # of S3; each piece has 50 MiB in memory
                    system.max_concurrency = _PIECES
                self._opened = os.getpid(), system
            self._opened[1].invalidate_cache()  # others write there too
            return self._opened[1]

    def _tried(self, verb: str, path: str, call: Callable[[Any], T]) -> T:
        """Makes a call, again and again where another try may help.

        Args:
          verb: what it does, for errors.
          path: to what.
          call: is given the file system.
        """
        end = time.monotonic() + _SECONDS_OF_TRIES
        for number, pause in enumerate((*PAUSES, math.inf), 1):
            try:
                return call(self._system())
            except Exception as error:
                said = f"Cannot {verb} {self._shown(path)}: {type(error).__name__}: {error}"
                for kind in _FINAL:
                    if isinstance(error, kind):
                        raise kind(said) from error
                if _NOT_LET_IN & {kind.__name__ for kind in type(error).__mro__}:
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

        names = [each.rstrip("/").rpartition("/")[2] for each in self._tried("list", path, listed)]
        return sorted({name for name in names if name})

    def _sizes(self, path: str) -> dict[str, int]:
        """Returns the sizes of all files below a path, by what comes after it."""

        def listed(system: Any) -> Mapping[str, Mapping[str, Any]]:
            try:
                return dict(system.find(path, detail=True))
            except FileNotFoundError:
                return {}

        start = path.lstrip("/") + "/"
        found = self._tried("list", path, listed)
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

        self._tried("write", path, put)

    def _get(self, path: str, target: str) -> None:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        part = target + _PART
        what = (
            f"a copy of {self._shown(path)}, in the folder that SOK_LITE_STORES names or else in "
            "the cache"
        )
        try:
            with naming_file(part, what):
                self._tried("read", path, lambda system: system.get_file(path, part))
                sync_path(part)
            os.replace(part, target)
        except BaseException:
            with suppress(OSError):
                os.unlink(part)
            raise

    def _each(self, names: Collection[str], call: Callable[[str], None]) -> None:
        """Calls a function with each of some names, in several threads where that is safe.

        Not by concurrent.futures, which takes no more work once the interpreter ends: a dump in
        the background goes on then.
        """
        if not self._class.async_impl or len(names) < 2:
            for name in names:
                call(name)
            return
        left, failures, taking = iter(names), list[BaseException](), threading.Lock()

        def work() -> None:
            while not failures:
                with taking:
                    name = next(left, None)
                if name is None:
                    return
                try:
                    call(name)
                except BaseException as error:
                    failures.append(error)

        threads = [threading.Thread(target=work) for _ in range(min(_AT_A_TIME, len(names)))]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException as error:  # an interrupt: they take no more files
            failures.append(error)
            for thread in threads:  # and nobody changes the files of the one that they are at
                if thread.ident is not None:
                    thread.join()
        if failures:
            raise failures[0]


def _file_name(text: str) -> str:
    """Returns the name of a file for a text; no two have the same one."""
    name = quote(text, safe="@:")
    if len(name) > _LONGEST_NAME:
        name = f"{name[:_LONGEST_NAME]}~{hashlib.sha256(name.encode()).hexdigest()[:16]}"
    return name


def _files_in(folder: str, inside: Iterable[str]) -> list[str]:
    """Returns the files in a folder and below some folders in it, relative to it, with "/"."""
    found = [each.name for each in os.scandir(folder) if each.is_file()]
    for top in set(inside):
        for at, _, names in os.walk(os.path.join(folder, top)):
            found += [os.path.relpath(os.path.join(at, name), folder) for name in names]
    return sorted(found)


def _remove_folders(folder: str, but: Collection[str]) -> None:
    for each in list(os.scandir(folder)):
        if each.is_dir() and each.name not in but:
            shutil.rmtree(each.path, ignore_errors=True)


def _size(folder: str, file: str) -> int:
    try:
        return os.path.getsize(os.path.join(folder, file))
    except FileNotFoundError:
        return -1


def _text_in(folder: str) -> bytes | None:
    try:
        return manifest.text_of(folder)[0]
    except (OSError, ValueError):
        return None
