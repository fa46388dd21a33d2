"""The manifest of a checkpoint: its tables, and the files of each with their checksums.

It is written last, and replaces the previous manifest atomically: so it decides which checkpoint a
folder has. The files of each dump are in a folder of their own beside it.
"""

import contextlib
import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

from sok_lite._version import __version__
from sok_lite.engine.dtypes import key_dtype, row_dtype
from sok_lite.engine.files import lock as locks
from sok_lite.engine.files.disk import (
    explain_full_disk,
    open_file,
    read_rest,
    read_whole,
    sync_path,
)
from sok_lite.engine.files.shard import MAX_CHUNK_BYTES, Written, distinct
from sok_lite.engine.json_text import parsed
from sok_lite.engine.table.content import checked_facts, number_of

NAME = "manifest.json"
FORMAT = "sok_lite checkpoint"
# Of a manifest without increments and of one with some: older releases read the first.
VERSION = 1
VERSION_OF_INCREMENTS = 2
# The folders of saves of a `sok_lite.keras.Checkpoint`, by the number of steps.
SAVE = re.compile(r"step-(\d{10,})")
# The folder of a dump's files.
DATA_FOLDER = re.compile(r"data-[0-9a-f]{16}")

# More than ten times that of 1,000 tables with ten states on 64 ranks, or of one table of 300 TB.
_MAX_BYTES = 1 << 30
_TEMPORARY = NAME + ".tmp"
_LOCK = NAME + ".lock"
_ZERO_SHA256 = "0" * 64
_MAX_NAME = 100
_SUFFIX = ".safetensors"
_FILE = re.compile(rf"{DATA_FOLDER.pattern}/[^/\0]+{re.escape(_SUFFIX)}")


class StateFacts(NamedTuple):
    """An optimizer state in a file: a `content.State` with the names of its tensors.

    Attributes:
      before: of an increment, its tensor in the previous file; None: the state is new.
    """

    tensor: str
    name: str
    dim: int
    initial: float
    group: int | None
    before: str | None = None


class TextFile(NamedTuple):
    """The texts of keys that one rank wrote of a table (text_file.py).

    Attributes:
      file: path relative to the folder of the manifest, with "/".
      keys: number of keys.
      num_bytes: bytes of their texts together.
      written: the file's size and checksums.
    """

    file: str
    keys: int
    num_bytes: int
    written: Written


class Shard(NamedTuple):
    """The file of a table's part on one rank, and the files that it continues as an increment.

    Attributes:
      file: path relative to the folder of the manifest, with "/".
      rows: number of keys with a row.
      sighted: number of pending keys: seen, but without a row yet.
      scores, slots: whether the file has those tensors.
      states: the optimizer states.
      facts: num_lookups; if known spans, the times of lookups; of a "hybrid" table also what
        restores its index, such as strategy, epoch and capacity.
      written: the file's size and checksums.
      changed: number of keys, the first ones, whose rows and states an increment has; the previous
        files have those of the others. None: it is no increment, and has all rows.
      before: the files that an increment continues, oldest first; the first is no increment. Their
        own `before` is not used.
      texts: of keys of any rank, those that this rank wrote; None: the table keeps none.
      removed: number of keys that an increment lists as removed; None: it lists none, and a removed
        key is one that its `keys` lack.
    """

    file: str
    rows: int
    sighted: int
    scores: bool
    slots: bool
    states: tuple[StateFacts, ...]
    facts: dict[str, Any]
    written: Written
    changed: int | None = None
    before: "tuple[Shard, ...]" = ()
    texts: TextFile | None = None
    removed: int | None = None

    @property
    def num_rows(self) -> int:
        """The number of rows in the file itself."""
        return self.rows if self.changed is None else self.changed

    @property
    def chain(self) -> "tuple[Shard, ...]":
        """All files with rows of the part, oldest first."""
        return (*self.before, self)

    @property
    def written_files(self) -> list[Written]:
        """Sizes and checksums of all files of the part, that of texts included."""
        texts = [] if self.texts is None else [self.texts.written]
        return [part.written for part in self.chain] + texts


class TableFacts(NamedTuple):
    """The manifest's entry of a table.

    Attributes:
      owner: name of the rule for the owner ranks of keys.
      options: other arguments of the table on rank 0, for people. A load only warns if `ids` are
        "texts" and its own table is one of integers.
      shards: one for each rank.
    """

    name: str
    var_type: str
    dim: int
    dtype: str
    key_type: str
    owner: str
    options: dict[str, Any]
    shards: tuple[Shard, ...]


class Manifest(NamedTuple):
    """A checkpoint: number of ranks that wrote it, tables by name, and the `extra` of `dump`."""

    ranks: int
    tables: dict[str, TableFacts]
    extra: dict[str, Any]

    @property
    def files(self) -> list[str]:
        """The names of all its files."""
        return list(self.sizes)

    @property
    def sizes(self) -> dict[str, int]:
        """The bytes of each file by its name."""
        shards = [shard for table in self.tables.values() for shard in table.shards]
        parts: list[Shard | TextFile] = [part for shard in shards for part in shard.chain]
        parts += [shard.texts for shard in shards if shard.texts is not None]
        return {part.file: part.written.num_bytes for part in parts}


def path_of(folder: str, shard: Shard | TextFile) -> str:
    """Returns the path of a file."""
    return os.path.join(folder, *shard.file.split("/"))


def file_name(table: str, rank: int, ranks: int) -> str:
    """Returns the name of the file of a rank's part of a table.

    The table's name is percent-encoded, so no two names give one file. If it is too long for a file
    it is cut, and ends with "~" and a part of its SHA-256.
    """
    name = quote(table, safe="")
    if len(name) > _MAX_NAME:
        name = f"{name[:_MAX_NAME]}~{hashlib.sha256(name.encode()).hexdigest()[:16]}"
    return f"{name}-{rank:05d}-of-{ranks:05d}{_SUFFIX}"


def text_file_name(file: str) -> str:
    """Returns the name of the file of texts beside a file of a table."""
    return f"{file.removesuffix(_SUFFIX)}.texts{_SUFFIX}"


# ---- reading -------------------------------------------------------------------------------------


def read(folder: str | os.PathLike[str]) -> Manifest:
    """Returns the manifest of a folder.

    Raises:
      FileNotFoundError: it has none, so no complete checkpoint.
      ValueError: it is no manifest, or of a newer version, or corrupt.
    """
    return from_text(text_of(folder)[0], os.path.join(folder, NAME))


def text_of(folder: str | os.PathLike[str]) -> tuple[bytes, float]:
    """Returns the text of the manifest of a folder, and when it was written, seconds since 1970.

    Raises:
      FileNotFoundError: it has none, so no complete checkpoint. ValueError: it is too large.
    """
    path = os.path.join(folder, NAME)
    try:
        with open_file(path) as file:
            return read_rest(file, path, _MAX_BYTES), os.fstat(file.fileno()).st_mtime
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(explain_missing(folder)) from error


def from_text(data: bytes, path: str) -> Manifest:
    """Parses the text of a manifest; the path is for errors.

    Raises:
      ValueError: it is no manifest, or of a newer version, or corrupt.
    """
    try:
        described = parsed(data, object_pairs_hook=distinct)
        is_other = described["format"] != FORMAT
        version, stated = described["version"], described["sha256"]
        before, _, after = data.rpartition(stated.encode())
        digest = hashlib.sha256(before + _ZERO_SHA256.encode() + after).hexdigest()
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _corrupt(path, f"it cannot be read ({error})") from error
    if digest != stated:
        raise _corrupt(path, "its SHA-256 is not the one that it names")
    if is_other or version not in (VERSION, VERSION_OF_INCREMENTS):
        raise ValueError(
            f"{path} must be a {FORMAT!r} of version {VERSION} or {VERSION_OF_INCREMENTS}. "
            f"Received: {described['format']!r} of version {version!r}, written by version "
            f"{described.get('library')!r} of the library. Load it with that version."
        )
    try:
        return _parse_manifest(described)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise _corrupt(path, f"a part of it is missing or no such thing ({error})") from error


def _corrupt(path: str, reason: str) -> ValueError:
    return ValueError(
        f"{path}, a manifest, is corrupt: {reason}. Nothing was loaded. Take another checkpoint."
    )


def shards_from_text(text: str) -> list[Shard]:
    """Returns the argument of `shards_to_text`."""
    return [_parse_shard(shard) for shard in json.loads(text)]


def _parse_manifest(described: dict[str, Any]) -> Manifest:
    ranks = number_of(described["ranks"], 1)
    tables = {}
    for each in described["tables"]:
        shards = tuple(_parse_shard(shard) for shard in each["shards"])
        if len(shards) != ranks:
            raise ValueError(f"{len(shards)} files of {ranks} ranks")
        name, var_type, dtype, key_type, owner = (
            _typed(str, each[field]) for field in ("name", "var_type", "dtype", "key_type", "owner")
        )
        row_dtype(dtype)  # raises if unknown
        key_dtype(key_type)
        dim, options = number_of(each["dim"], 1), _typed(dict, each["options"])
        if name in tables:
            raise ValueError(f"table {name!r} is there twice")
        tables[name] = TableFacts(name, var_type, dim, dtype, key_type, owner, options, shards)
    return Manifest(ranks, tables, _typed(dict, described["extra"]))


def _parse_shard(each: dict[str, Any]) -> Shard:
    *before, last = chain = [_parse_file(part) for part in (*each.get("before", ()), each)]
    if [part.changed is None for part in chain] != [True, *[False] * len(before)]:
        raise ValueError(f"{last.file!r} does not continue what is before it")
    for older, newer in itertools.pairwise(chain):
        # Names do not count: a state may have been renamed in between.
        known = {(state.tensor, state.dim, state.initial) for state in older.states}
        for state in newer.states:
            continued = (state.before, state.dim, state.initial)
            if state.before is not None and continued not in known:
                raise ValueError(f"{older.file!r} has no {state.before!r} to continue")
    return last._replace(before=tuple(before))


def _parse_file(each: dict[str, Any]) -> Shard:
    states = tuple(
        StateFacts(
            _typed(str, state["tensor"]),
            _typed(str, state["name"]),
            number_of(state["dim"], 1),
            float(state["initial"]),
            None if state["group"] is None else number_of(state["group"], 1),
            None if state.get("before") is None else _typed(str, state["before"]),
        )
        for state in each["states"]
    )
    return Shard(
        _parse_name(each["file"]),
        number_of(each["rows"]),
        number_of(each["sighted"]),
        _typed(bool, each["scores"]),
        _typed(bool, each["slots"]),
        states,
        checked_facts(each["facts"]),
        _parse_written(each["written"]),
        number_of(each["changed"], 0, each["rows"]) if "changed" in each else None,
        texts=_parse_texts(each["texts"]) if "texts" in each else None,
        removed=number_of(each["removed"]) if "removed" in each else None,
    )


def _parse_texts(each: dict[str, Any]) -> TextFile:
    numbers = number_of(each["keys"]), number_of(each["num_bytes"])
    return TextFile(_parse_name(each["file"]), *numbers, _parse_written(each["written"]))


def _parse_name(file: Any) -> str:
    if not _FILE.fullmatch(_typed(str, file)):
        raise ValueError(f"file {file!r}")
    return str(file)


def _parse_written(written: dict[str, Any]) -> Written:
    return Written(
        number_of(written["num_bytes"]),
        number_of(written["chunk_bytes"], 1, MAX_CHUNK_BYTES),
        tuple(number_of(crc) for crc in written["crcs"]),
    )


def _typed(kind: Callable[..., Any], value: Any) -> Any:
    """Returns a value of exactly this type, no subclass; raises TypeError for another one."""
    if type(value) is not kind:
        raise TypeError(f"{value!r} is no {kind}")
    return value


# ---- writing -------------------------------------------------------------------------------------


def as_text(manifest: Manifest) -> str:
    """Returns the text of a manifest."""
    tables = [
        table._asdict() | {"shards": [_shard_to_json(shard) for shard in table.shards]}
        for table in manifest.tables.values()
    ]
    has_increments = any(
        shard.before for table in manifest.tables.values() for shard in table.shards
    )
    described = {
        "format": FORMAT,
        "version": VERSION_OF_INCREMENTS if has_increments else VERSION,
        "library": __version__,
        "ranks": manifest.ranks,
        "extra": manifest.extra,
        "tables": tables,
        "sha256": _ZERO_SHA256,
    }
    text = json.dumps(described, indent=1) + "\n"
    before, _, after = text.rpartition(_ZERO_SHA256)  # a name may look like it: the last one counts
    return before + hashlib.sha256(text.encode()).hexdigest() + after


def _shard_to_json(shard: Shard) -> dict[str, Any]:
    described = shard._asdict() | {
        "states": [state._asdict() for state in shard.states],
        "written": shard.written._asdict(),
        "before": [_shard_to_json(part) for part in shard.before],
    }
    if shard.texts is None:
        del described["texts"]
    else:
        described["texts"] = shard.texts._asdict() | {"written": shard.texts.written._asdict()}
    if not shard.before:
        del described["before"]
    if shard.removed is None:
        del described["removed"]
    if shard.changed is None:
        del described["changed"]
        for state in described["states"]:
            del state["before"]
    return described


def shards_to_text(shards: Sequence[Shard]) -> str:
    """Returns shards as JSON, for other ranks."""
    return json.dumps([_shard_to_json(shard) for shard in shards])


def lock(folder: str, address: str | None = None) -> locks.Lock:
    """Makes a folder if it is missing, and locks it for a dump; only one rank may call it.

    Args:
      folder: its path.
      address: that the checkpoint is uploaded to, for errors.

    Raises:
      BlockingIOError: another dump writes there. FileExistsError: a file of another program has
        the path of the manifest. OSError: the folder cannot be made. It is as it was.
    """
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, NAME)
    try:
        is_ours = FORMAT.encode() in read_whole(path, _MAX_BYTES)
    except FileNotFoundError:
        is_ours = True
    except ValueError:  # too large for a manifest
        is_ours = False
    if not is_ours:
        raise FileExistsError(
            f"{path} is no manifest of a checkpoint, and a dump would replace it. Dump into a "
            "folder of its own."
        )
    return locks.Lock(os.path.join(folder, _LOCK), f"The checkpoint at {address or folder}")


def remove_unless_locked(folder: str, may_remove: Callable[[], bool]) -> None:
    """Removes a folder unless a dump writes into it; what cannot be removed stays.

    Args:
      may_remove: called while no dump can begin; False: the folder stays.
    """
    locks.remove_unless_locked(folder, _LOCK, may_remove)


def publish(folder: str, text: str) -> None:
    """Replaces the manifest of a folder atomically.

    Raises:
      OSError: the old manifest is still there; or the new one is, and may not survive a loss of
        power.
    """
    temporary = os.path.join(folder, _TEMPORARY)
    # What has the name, of a killed dump or a link that somebody has made, is not written to.
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    data = memoryview(text.encode())
    with explain_full_disk(temporary, "the manifest", len(data)):
        number = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
        try:
            while data:
                data = data[os.write(number, data) :]
            os.fsync(number)
        finally:
            os.close(number)
    os.replace(temporary, os.path.join(folder, NAME))
    sync_path(folder)


# ---- checkpoints in folders ----------------------------------------------------------------------


def is_checkpoint_name(name: str) -> bool:
    """Whether a dump makes a file or folder of this name."""
    return name == NAME or is_temporary(name) or bool(DATA_FOLDER.fullmatch(name))


def is_temporary(name: str) -> bool:
    """Whether a file is the lock or the temporary file of a dump, and no part of the checkpoint."""
    return name in (_TEMPORARY, _LOCK)


def is_whole(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder has a complete checkpoint."""
    return os.path.exists(os.path.join(folder, NAME))


def is_unfinished(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder has files of a running or interrupted dump, and no checkpoint."""
    return not is_whole(folder) and any(map(is_checkpoint_name, _names_in(folder)))


def all_saves_in(folder: str | os.PathLike[str]) -> dict[str, bool]:
    """Returns the saves of a `sok_lite.keras.Checkpoint` in its folder, the newest last.

    Returns:
      Whether each is complete, by path. One that is not is being written, or was interrupted.
    """
    matches = filter(None, map(SAVE.fullmatch, _names_in(folder)))
    found = sorted((int(match[1]), match[0]) for match in matches)
    paths = [os.path.join(folder, name) for _, name in found]
    return {path: is_whole(path) for path in paths if is_whole(path) or is_unfinished(path)}


def saves_in(folder: str | os.PathLike[str]) -> list[str]:
    """Returns the complete saves of `all_saves_in`, the newest last."""
    return [path for path, whole in all_saves_in(folder).items() if whole]


def saves_beside(path: str) -> dict[str, str]:
    """Returns "whole" or "unfinished" for all saves of a `sok_lite.keras.Checkpoint`, by name.

    Args:
      path: one of them; {} is returned for any other folder.
    """
    folder, name = os.path.split(os.path.realpath(path))
    found = {
        os.path.basename(save): "whole" if whole else "unfinished"
        for save, whole in all_saves_in(folder).items()
    }
    return found if name in found else {}


def newest_at(path: str) -> str:
    """Returns the newest save in the folder of a `sok_lite.keras.Checkpoint`; else `path` itself.

    A link to a checkpoint is resolved, since it may lead to another one later.
    """
    if not is_whole(path):
        return next(reversed(saves_in(path)), path)
    return os.path.join(os.path.dirname(path), os.readlink(path)) if os.path.islink(path) else path


def newest_in(folder: str) -> str | None:
    """Returns the newest checkpoint among the folders in a folder; None: there is none."""
    found = [path for name in _names_in(folder) if is_whole(path := os.path.join(folder, name))]
    found.sort(key=lambda path: os.path.getmtime(os.path.join(path, NAME)))
    return next(reversed(saves_in(folder) or found), None)


def explain_missing(folder: str | os.PathLike[str]) -> str:
    """Returns what a path without a checkpoint is instead, and what to give, for an error."""
    path = os.fspath(folder)
    if os.path.isfile(path):
        instead = (
            "keras.models.load_model and model.load_weights read files of Keras; of their tables "
            if path.endswith((".keras", ".h5"))
            else "Of the tables of other formats "
        )
        return (
            f"{path} is a file, and a checkpoint of `dump` is a folder with a {NAME}. {instead}"
            f"`sok-lite convert {path} FOLDER` makes such a folder."
        )
    if os.path.exists(f"{path}.index"):
        return (
            f"{path} has no {NAME}: it was written by tf.train.Checkpoint. Read it with that, and "
            "the same variables."
        )
    if not os.path.isdir(path):
        return f"There is no folder {path}. Give the one that `dump` was given."
    newest = newest_in(path)
    if newest is not None:
        return f"{path} has checkpoints in it: give one of them, such as {newest}."
    if is_unfinished(path):
        beside = saves_in(os.path.normpath(os.path.join(path, os.pardir)))
        advice = f"The newest whole one is {beside[-1]}." if beside else "Dump into it once more."
        return f"{path} has no {NAME}: it is unfinished, was ended or is being written. {advice}"
    unfinished = list(all_saves_in(path))
    if unfinished:
        return (
            f"{path} has no whole save: {os.path.basename(unfinished[-1])} is unfinished, was "
            "ended or is being written. Train on: the next save replaces it."
        )
    return (
        f"{path} has no {NAME}: no dump into it was ever finished. Give the folder that was given "
        "to `dump`."
    )


def _names_in(folder: str | os.PathLike[str]) -> list[str]:
    """Returns the names in a folder; [] of what is none."""
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
