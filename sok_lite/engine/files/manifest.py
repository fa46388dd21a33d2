"""The manifest of a checkpoint: the tables, each of their files with its checksums, and their text.

The file is written last, and replaces the previous one atomically: so it decides which checkpoint a
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
from sok_lite.engine.files.disk import naming_file, open_file, read_rest, read_whole, sync_path
from sok_lite.engine.files.shard import MAX_CHUNK_BYTES, Written, distinct
from sok_lite.engine.json_text import parsed
from sok_lite.engine.table.content import checked_facts, number_of

NAME = "manifest.json"
FORMAT = "sok_lite checkpoint"
# Of a manifest without increments, which is as it was before there were any, and of one with some.
VERSION = 1
VERSION_OF_INCREMENTS = 2
# The folders of `sok_lite.keras.Checkpoint` in its own, by the number of steps.
SAVE = re.compile(r"step-(\d{10,})")
# The folders of files, one for each dump.
DATA_FOLDER = re.compile(r"data-[0-9a-f]{16}")

# More than ten times that of 1,000 tables with ten states on 64 ranks, or of one table of 300 TB.
_MOST_BYTES = 1 << 30
_TEMPORARY = NAME + ".tmp"
_LOCK = NAME + ".lock"
_NO_SUM = "0" * 64
_LONGEST_NAME = 100
_SUFFIX = ".safetensors"
_FILE = re.compile(rf"{DATA_FOLDER.pattern}/[^/\0]+{re.escape(_SUFFIX)}")


class StateFacts(NamedTuple):
    """An optimizer state in a file: a `content.State` with its tensors.

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
    """The texts that one rank wrote of a table: safetensors with `keys`, `ends` and `data`.

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
    """The part of a table that was on one rank.

    Attributes:
      file: path relative to the folder of the manifest, with "/".
      rows: number of keys with a row.
      sighted: number of pending keys: seen, but without a row yet.
      scores, slots: whether the file has those tensors.
      states: the optimizer states.
      facts: num_lookups; where it is known spans, the times of lookups; of a "hybrid" table also
        what a restore of its index needs, such as strategy, epoch and capacity.
      written: the file's size and checksums.
      changed: number of keys, the first ones, whose rows and states an increment has; those of the
        others are in the previous files. None: it is no increment, all rows are in the file.
      before: the files that an increment continues, oldest first; the first is no increment. Their
        own `before` is not used.
      texts: of keys of any rank, those that this rank wrote; None: the table keeps none.
      removed: number of keys that an increment names as removed; None: it names none, and the keys
        that it has tell.
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
        """The number of rows in the file."""
        return self.rows if self.changed is None else self.changed

    @property
    def chain(self) -> "tuple[Shard, ...]":
        """All files with rows of the part, oldest first."""
        return (*self.before, self)

    @property
    def written_files(self) -> list[Written]:
        """All files that the part is made of, that of texts too."""
        texts = [] if self.texts is None else [self.texts.written]
        return [part.written for part in self.chain] + texts


class TableFacts(NamedTuple):
    """A table.

    Attributes:
      name, var_type, dim, dtype, key_type: of the table.
      owner: name of the rule for the owner ranks of keys.
      options: other arguments of the table on rank 0, for people: a load does not use them, but to
        warn where `ids` are "texts" and the table that is loaded is one of integers.
      shards: of each rank.
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
    """The content of a checkpoint.

    Attributes:
      ranks: number of ranks that wrote it.
      tables: by name.
      extra: the `extra` of `dump`.
    """

    ranks: int
    tables: dict[str, TableFacts]
    extra: dict[str, Any]

    @property
    def files(self) -> list[str]:
        """All files that it names."""
        shards = [shard for table in self.tables.values() for shard in table.shards]
        texts = [shard.texts.file for shard in shards if shard.texts is not None]
        return [part.file for shard in shards for part in shard.chain] + texts

    @property
    def sizes(self) -> dict[str, int]:
        """The bytes of each of `files`, by its name."""
        shards = [shard for table in self.tables.values() for shard in table.shards]
        found = {part.file: part.written.num_bytes for shard in shards for part in shard.chain}
        texts = [shard.texts for shard in shards if shard.texts is not None]
        return found | {file.file: file.written.num_bytes for file in texts}


def path_of(folder: str, shard: Shard | TextFile) -> str:
    """Returns the path of a file."""
    return os.path.join(folder, *shard.file.split("/"))


def file_name(table: str, rank: int, ranks: int) -> str:
    """Returns the name of the file of a rank's part of a table.

    What is no letter, digit, "_", "-", "." or "~" of ASCII stands as "%" and its bytes in UTF-8, as
    in addresses of the web: so no two names give one. One that becomes too long for a file is cut,
    and ends with "~" and a part of its SHA-256.
    """
    name = quote(table, safe="")
    if len(name) > _LONGEST_NAME:
        name = f"{name[:_LONGEST_NAME]}~{hashlib.sha256(name.encode()).hexdigest()[:16]}"
    return f"{name}-{rank:05d}-of-{ranks:05d}{_SUFFIX}"


def text_file_name(file: str) -> str:
    """Returns the name of the file of texts beside a file of a table."""
    return f"{file.removesuffix(_SUFFIX)}.texts{_SUFFIX}"


def as_text(manifest: Manifest) -> str:
    """Returns the text of a manifest."""
    tables = [
        table._asdict() | {"shards": [_shard_to_json(shard) for shard in table.shards]}
        for table in manifest.tables.values()
    ]
    shards = (shard for table in manifest.tables.values() for shard in table.shards)
    has_increments = any(shard.before for shard in shards)
    described = {
        "format": FORMAT,
        "version": VERSION_OF_INCREMENTS if has_increments else VERSION,
        "library": __version__,
        "ranks": manifest.ranks,
        "extra": manifest.extra,
        "tables": tables,
        "sha256": _NO_SUM,
    }
    text = json.dumps(described, indent=1) + "\n"
    before, _, after = text.rpartition(_NO_SUM)  # a name may look like it: the last one counts
    return before + hashlib.sha256(text.encode()).hexdigest() + after


def read(folder: str | os.PathLike[str]) -> Manifest:
    """Returns the manifest of a folder.

    Raises:
      FileNotFoundError: it has none, so no complete checkpoint.
      ValueError: it is not a manifest, or of a newer version, or corrupt.
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
            return read_rest(file, path, _MOST_BYTES), os.fstat(file.fileno()).st_mtime
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(what_is_missing(folder)) from error


def is_whole(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder has a checkpoint."""
    return os.path.exists(os.path.join(folder, NAME))


def is_unfinished(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder has what a dump writes, and no checkpoint: it writes still, or was ended."""
    return not is_whole(folder) and any(map(is_name_in_checkpoint, _names_in(folder)))


def all_saves_in(folder: str | os.PathLike[str]) -> dict[str, bool]:
    """Returns the folders of the saves of a `sok_lite.keras.Checkpoint`, the newest last.

    Args:
      folder: what it was given; another one has none.

    Returns:
      Whether each is whole, by path. One that is not is being written, or was ended.
    """
    matches = filter(None, map(SAVE.fullmatch, _names_in(folder)))
    found = sorted((int(match[1]), match[0]) for match in matches)
    paths = [os.path.join(folder, name) for _, name in found]
    return {path: is_whole(path) for path in paths if is_whole(path) or is_unfinished(path)}


def saves_in(folder: str | os.PathLike[str]) -> list[str]:
    """Returns those of `all_saves_in` that are whole, the newest last."""
    return [path for path, whole in all_saves_in(folder).items() if whole]


def saves_beside(path: str) -> dict[str, str]:
    """Returns what the saves are of the `Checkpoint` whose save a folder is; {}: it is of none.

    Returns:
      "whole" or "unfinished" of each by its name, the newest last.
    """
    folder, name = os.path.split(os.path.realpath(path))
    found = {
        os.path.basename(save): "whole" if whole else "unfinished"
        for save, whole in all_saves_in(folder).items()
    }
    return found if name in found else {}


def newest_at(path: str) -> str:
    """Returns the folder of the checkpoint at a path: of a `sok_lite.keras.Checkpoint` the newest.

    Of a link to one it is what that leads to now. Any other path comes as it is.
    """
    if not is_whole(path):
        return next(reversed(saves_in(path)), path)
    return os.path.join(os.path.dirname(path), os.readlink(path)) if os.path.islink(path) else path


def newest_in(folder: str) -> str | None:
    """Returns the newest of the folders in a folder that have a checkpoint; None: none has."""
    whole = [path for name in _names_in(folder) if is_whole(path := os.path.join(folder, name))]
    whole.sort(key=lambda path: os.path.getmtime(os.path.join(path, NAME)))
    return next(reversed(saves_in(folder) or whole), None)


def what_is_missing(folder: str | os.PathLike[str]) -> str:
    """Says of a path without a checkpoint what is there, and what to give instead."""
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
    inside = newest_in(path)
    if inside is not None:
        return f"{path} has checkpoints in it: give one of them, such as {inside}."
    if is_unfinished(path):
        beside = saves_in(os.path.normpath(os.path.join(path, os.pardir)))
        newest = f"The newest whole one is {beside[-1]}." if beside else "Dump into it once more."
        return f"{path} has no {NAME}: it is unfinished, was ended or is being written. {newest}"
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


def from_text(data: bytes, path: str) -> Manifest:
    """Parses the text of a manifest.

    Args:
      data: of the file.
      path: of the file, for errors.

    Raises:
      ValueError: it is not a manifest, or of a newer version, or corrupt.
    """
    try:
        described = parsed(data, object_pairs_hook=distinct)
        is_other = described["format"] != FORMAT
        version, stated = described["version"], described["sha256"]
        before, _, after = data.rpartition(stated.encode())
        summed = hashlib.sha256(before + _NO_SUM.encode() + after)
        is_whole = summed.hexdigest() == stated
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _corrupt(path, f"it cannot be read ({error})") from error
    if not is_whole:
        raise _corrupt(path, "its SHA-256 is not the one that it names")
    if is_other or version not in (VERSION, VERSION_OF_INCREMENTS):
        raise ValueError(
            f"{path} must be a {FORMAT!r} of version {VERSION} or {VERSION_OF_INCREMENTS}. "
            f"Received: {described['format']!r} of version {version!r}, written by version "
            f"{described.get('library')!r} of the library. Load it with that version."
        )
    try:
        return _from_json(described)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise _corrupt(path, f"a part of it is missing or no such thing ({error})") from error


def lock(folder: str, shown: str | None = None) -> locks.Lock:
    """Locks a folder for what writes a checkpoint, by rank 0 alone; makes it if it is missing.

    Args:
      folder: its path.
      shown: the address that it goes to, for errors.

    Raises:
      BlockingIOError: another dump writes there. FileExistsError: a file of another program has
        the path of the manifest. OSError: the folder cannot be made. It is as it was.
    """
    os.makedirs(folder, exist_ok=True)
    _check_is_ours(os.path.join(folder, NAME))
    return locks.Lock(os.path.join(folder, _LOCK), f"The checkpoint at {shown or folder}")


def remove_unless_written(folder: str, may_go: Callable[[], bool]) -> None:
    """Removes a folder of ours where no dump writes; what cannot be removed stays.

    Args:
      may_go: called while no dump can begin; False: it stays.
    """
    locks.remove_unless_written(folder, _LOCK, may_go)


def is_name_in_checkpoint(name: str) -> bool:
    """Whether a dump makes a file or folder of this name."""
    return name == NAME or is_private(name) or bool(DATA_FOLDER.fullmatch(name))


def is_private(name: str) -> bool:
    """Whether a file is for those who write a checkpoint alone, and no part of it."""
    return name in (_TEMPORARY, _LOCK)


def _check_is_ours(path: str) -> None:
    try:
        is_ours = FORMAT.encode() in read_whole(path, _MOST_BYTES)
    except FileNotFoundError:
        return
    except ValueError:  # too large for one
        is_ours = False
    if not is_ours:
        raise FileExistsError(
            f"{path} is no manifest of a checkpoint, and a dump would replace it. Dump into a "
            "folder of its own."
        )


def publish(folder: str, text: str) -> None:
    """Replaces the manifest of a folder atomically by this text.

    Raises:
      OSError: the old manifest is still there; or the new one is, and may not survive a loss of
        power.
    """
    temporary = os.path.join(folder, _TEMPORARY)
    # A file of its own: what has the name, of a dump that was killed or a link that somebody has
    # put there, is removed and not written to.
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    data = memoryview(text.encode())
    with naming_file(temporary, "the manifest", len(data)):
        number = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
        try:
            while data:
                data = data[os.write(number, data) :]
            os.fsync(number)
        finally:
            os.close(number)
    os.replace(temporary, os.path.join(folder, NAME))
    sync_path(folder)


def _corrupt(path: str, reason: str) -> ValueError:
    return ValueError(
        f"{path}, a manifest, is corrupt: {reason}. Nothing was loaded. Take another checkpoint."
    )


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
    """Returns shards as a text, for another rank."""
    return json.dumps([_shard_to_json(shard) for shard in shards])


def shards_from_text(text: str | bytes) -> list[Shard]:
    """Returns the argument of `shards_to_text`."""
    return [_shard(shard) for shard in json.loads(text)]


def _from_json(described: dict[str, Any]) -> Manifest:
    ranks = number_of(described["ranks"], 1)
    tables = {}
    for each in described["tables"]:
        shards = tuple(_shard(shard) for shard in each["shards"])
        if len(shards) != ranks:
            raise ValueError(f"{len(shards)} files of {ranks} ranks")
        name, var_type, dtype, key_type, owner = (
            _of(str, each[field]) for field in ("name", "var_type", "dtype", "key_type", "owner")
        )
        row_dtype(dtype)  # raises for one that there is not
        key_dtype(key_type)
        dim, options = number_of(each["dim"], 1), _of(dict, each["options"])
        if name in tables:
            raise ValueError(f"table {name!r} is there twice")
        tables[name] = TableFacts(name, var_type, dim, dtype, key_type, owner, options, shards)
    return Manifest(ranks, tables, _of(dict, described["extra"]))


def _shard(each: dict[str, Any]) -> Shard:
    *before, last = (_one_file(part) for part in (*each.get("before", ()), each))
    if [part.changed is None for part in (*before, last)] != [True, *[False] * len(before)]:
        raise ValueError(f"{last.file!r} does not continue what is before it")
    for older, newer in itertools.pairwise((*before, last)):
        # Not their names: a state may have been renamed in between.
        there = {(state.tensor, state.dim, state.initial) for state in older.states}
        for state in newer.states:
            its = (state.before, state.dim, state.initial)
            if state.before is not None and its not in there:
                raise ValueError(f"{older.file!r} has no {state.before!r} to continue")
    return last._replace(before=tuple(before))


def _one_file(each: dict[str, Any]) -> Shard:
    states = tuple(
        StateFacts(
            _of(str, state["tensor"]),
            _of(str, state["name"]),
            number_of(state["dim"], 1),
            float(state["initial"]),
            None if state["group"] is None else number_of(state["group"], 1),
            None if state.get("before") is None else _of(str, state["before"]),
        )
        for state in each["states"]
    )
    return Shard(
        _file(each["file"]),
        number_of(each["rows"]),
        number_of(each["sighted"]),
        _of(bool, each["scores"]),
        _of(bool, each["slots"]),
        states,
        checked_facts(each["facts"]),
        _written(each["written"]),
        number_of(each["changed"], 0, each["rows"]) if "changed" in each else None,
        texts=_texts(each["texts"]) if "texts" in each else None,
        removed=number_of(each["removed"]) if "removed" in each else None,
    )


def _texts(each: dict[str, Any]) -> TextFile:
    numbers = number_of(each["keys"]), number_of(each["num_bytes"])
    return TextFile(_file(each["file"]), *numbers, _written(each["written"]))


def _file(file: Any) -> str:
    if not _FILE.fullmatch(_of(str, file)):
        raise ValueError(f"file {file!r}")
    return str(file)


def _written(written: dict[str, Any]) -> Written:
    return Written(
        number_of(written["num_bytes"]),
        number_of(written["chunk_bytes"], 1, MAX_CHUNK_BYTES),
        tuple(number_of(crc) for crc in written["crcs"]),
    )


def _of(kind: Callable[..., Any], value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r} is no {kind}")
    return value
