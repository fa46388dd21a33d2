"""TFRA's files of keys and values, with metadata and optimizer states beside them.

A shard is three files. `key_value_names` makes `<base>`:

    <base>-keys        the keys, one after the other
    <base>-values      the row of each key, in the same order, `dim` elements each
    <base>-meta.json   {"format": "sok_lite keys and values", "version": 1, "name": the variable's,
                       "key_dtype", "value_dtype", "dim", "count", "index", "num_shards", "rank",
                       "size", "keys_crc32", "values_crc32"}

Numbers are little-endian, bfloat16 has its two bytes. The first two files are TFRA's own format,
without a header. The metadata is ours: its types, sizes and checksums are checked if it is there;
files of TFRA come without it, and have the types that the reader expects.

New files are renamed to their names when they are complete, the metadata last. If a process is
killed in between, or while it appends, the files do not match the metadata and are refused.

Optimizer states, `last_seen` and scores of all shards of a process are in one NumPy .npz file:

    <variable>_rank<r>_size<s>-states.npz

It has the tensors of bridge/checkpoint.py except keys and values, in ascending order of the keys,
texts as UTF-8 bytes, and `checksums`: the CRC-32 of the keys and of the values of each shard, which
tie it to one save.
"""

import contextlib
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from sok_lite.engine.files.disk import (
    explain_full_disk,
    open_file,
    read_arrays,
    read_whole,
    sync_path,
)
from sok_lite.engine.files.key_value_names import ShardPlace
from sok_lite.engine.files.lock import Lock
from sok_lite.engine.json_text import parsed

_KEY_DTYPES = {"int64": "<i8", "int32": "<i4"}
_VALUE_DTYPES = {
    "float32": "<f4",
    "float16": "<f2",
    "bfloat16": "<u2",
    "float64": "<f8",
    "int8": "<i1",
    "int32": "<i4",
    "int64": "<i8",
}

BUFFER_SIZE = 4194304  # keys, TFRA's default

STATES = "-states.npz"

_MAX_META_BYTES = 1 << 20
_FORMAT = {"format": "sok_lite keys and values", "version": 1}
_FIELDS = ("name", "key_dtype", "value_dtype", "dim")


class Layout(NamedTuple):
    """Types and sizes of a variable's files. `make_layout` makes a valid one."""

    name: str
    key_dtype: str
    value_dtype: str
    dim: int

    @property
    def key_storage(self) -> np.dtype:
        """NumPy dtype of the keys in the file."""
        return np.dtype(_KEY_DTYPES[self.key_dtype])

    @property
    def value_storage(self) -> np.dtype:
        """NumPy dtype of the values in the file: uint16 for bfloat16."""
        return np.dtype(_VALUE_DTYPES[self.value_dtype])


def make_layout(name: str, key_dtype: str, value_dtype: str, dim: int) -> Layout:
    """Returns the layout of a variable's files. ValueError: they cannot hold such keys or rows."""
    for what, dtype, known in (
        ("keys", key_dtype, _KEY_DTYPES),
        ("values", value_dtype, _VALUE_DTYPES),
    ):
        if dtype not in known:
            raise ValueError(
                f"Files of keys and values hold {what} of {', '.join(known)}, of variable "
                f"{name!r} too. Received: {dtype!r}. Save it in TensorFlow's checkpoint instead."
            )
    if dim < 1:
        raise ValueError(f"A row of variable {name!r} has at least one element. Received: {dim}.")
    return Layout(name, key_dtype, value_dtype, int(dim))


@dataclass(frozen=True)
class StoredShard:
    """A shard whose files `open_shards` has checked.

    Attributes:
      base: path of its files, without their endings.
      count: number of keys.
      meta: its metadata; None for files of TFRA.
    """

    base: str
    layout: Layout
    count: int
    meta: dict[str, Any] | None

    def pieces(self, buffer_size: int = BUFFER_SIZE) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields keys (m,) and rows (m, dim), m <= buffer_size.

        Raises:
          ValueError: the files were cut while they were read.
        """
        _check_buffer_size(buffer_size)
        layout = self.layout
        key_path, value_path = f"{self.base}-keys", f"{self.base}-values"
        with open_file(key_path) as key_file, open_file(value_path) as value_file:
            for start in range(0, self.count, buffer_size):
                count = min(buffer_size, self.count - start)
                keys = np.fromfile(key_file, layout.key_storage, count)
                values = np.fromfile(value_file, layout.value_storage, count * layout.dim)
                if len(keys) < count or len(values) < count * layout.dim:
                    raise ValueError(f"{self.base!r}: its files were cut while they were read.")
                yield keys, values.reshape(count, layout.dim)


def write_shard(
    folder: str,
    layout: Layout,
    place: ShardPlace,
    pieces: Iterable[tuple[Any, Any]],
    *,
    file_name: str | None = None,
    append_to_file: bool = False,
    buffer_size: int = BUFFER_SIZE,
) -> int:
    """Writes a shard of a variable, and makes the folder. If it raises, old files are unchanged.

    Args:
      pieces: pairs of keys (m,) and rows (m, dim), of the layout's types; bfloat16 rows may be
        uint16 bits. Repeated keys are written as they come: for readers the last counts.
      file_name: of the files, without their endings; None: that of the place.
      append_to_file: whether to append to existing files instead of replacing them.
      buffer_size: keys per write.

    Returns:
      The number of keys in the files.

    Raises:
      ValueError: a piece does not fit the layout, or the files are another variable's.
      BlockingIOError: another process or thread writes them.
    """
    _check_buffer_size(buffer_size)
    base = os.path.join(folder, file_name or place.base(layout.name))
    meta = _read_meta(base)
    if meta is not None and meta["name"] != layout.name:
        raise ValueError(
            f"{base!r} holds variable {meta['name']!r}, and variable {layout.name!r} would be "
            "written over it: the files of both have one name. Rename one, or use two folders."
        )
    os.makedirs(folder, exist_ok=True)
    with contextlib.ExitStack() as opened:
        opened.enter_context(explain_full_disk(base, f"the files of {layout.name!r}"))
        opened.enter_context(Lock(f"{base}.lock", repr(base)))
        old = None
        if append_to_file and os.path.exists(f"{base}-keys"):
            old = _open_shard(base, layout)
        key_file = opened.enter_context(AtomicFile(f"{base}-keys", _old_crc(old, "keys")))
        value_file = opened.enter_context(AtomicFile(f"{base}-values", _old_crc(old, "values")))
        count = old.count if old else 0
        for keys, values in pieces:
            keys, values = _checked_piece(layout, keys, values)
            for start in range(0, len(keys), buffer_size):
                key_file.write(keys[start : start + buffer_size])
                value_file.write(values[start : start + buffer_size])
            count += len(keys)
        # Both are on the disk before the first is renamed.
        key_file.sync()
        value_file.sync()
        written = {
            **_FORMAT,
            **layout._asdict(),
            "count": count,
            **asdict(place),
            "keys_crc32": key_file.crc,
            "values_crc32": value_file.crc,
        }
        meta_file = opened.enter_context(AtomicFile(f"{base}-meta.json", None))
        meta_file.write(np.frombuffer(json.dumps(written, indent=1).encode(), np.uint8))
        meta_file.sync()
        for each in (key_file, value_file, meta_file):
            each.commit()
    sync_path(folder)
    return count


def open_shards(
    folder: str, layout: Layout, *, file_name_list: Iterable[str], is_own: bool = True
) -> list[StoredShard]:
    """Checks files of a variable, and returns the shards in the order of the list.

    Args:
      layout: that they must have.
      file_name_list: names of the files, without their endings.
      is_own: whether they must be of the variable `layout.name`.

    Raises:
      FileNotFoundError: files are missing.
      ValueError: files have other content, or are corrupt.
    """
    paths = [os.path.join(folder, base) for base in file_name_list]
    shards = [_open_shard(path, layout, is_own) for path in paths]
    for shard in shards:
        if shard.meta is None:
            continue
        for what in ("keys", "values"):
            path = f"{shard.base}-{what}"
            if _crc_of(path) != shard.meta[f"{what}_crc32"]:
                raise ValueError(
                    f"{path!r} is corrupt: it does not have the checksum of its -meta.json. "
                    "Take another copy of the shard; if another program has written this one, "
                    "remove the -meta.json."
                )
    return shards


def checksums(folder: str, base: str) -> tuple[int, int] | None:
    """Returns the CRC-32 of a shard's keys and of its values; None if it has no metadata."""
    meta = _read_meta(os.path.join(folder, base))
    return None if meta is None else (meta["keys_crc32"], meta["values_crc32"])


def read_layout(folder: str, base: str) -> Layout | None:
    """Returns the layout of a shard; None if it has no metadata."""
    meta = _read_meta(os.path.join(folder, base))
    return None if meta is None else make_layout(*(meta[field] for field in _FIELDS))


def has_only_shards(folder: str) -> bool:
    """Returns whether all files of a folder are of shards with metadata."""
    names = set(os.listdir(folder)) if os.path.isdir(folder) else set[str]()
    ends = ("-keys", "-values", "-meta.json")
    bases = (name.removesuffix(ends[2]) for name in names if name.endswith(ends[2]))
    ours = {f"{base}{end}" for base in bases for end in ends}
    return all(name in ours or name.endswith(STATES) for name in names)


def _check_buffer_size(buffer_size: int) -> None:
    if buffer_size < 1:
        raise ValueError(f"buffer_size must be at least 1 key. Received: {buffer_size}.")


def _checked_piece(layout: Layout, keys: Any, values: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns a piece in the storage types of the layout; raises ValueError if it cannot."""
    keys, values = np.asarray(keys), np.asarray(values)
    if values.dtype.name == "bfloat16" and layout.value_dtype == "bfloat16":
        values = np.ascontiguousarray(values).view(np.uint16)
    fits = keys.ndim == 1 and values.shape == (len(keys), layout.dim)
    if not fits or keys.dtype != layout.key_storage or values.dtype != layout.value_storage:
        raise ValueError(
            f"A piece of variable {layout.name!r} must be keys (m,) of {layout.key_dtype} and "
            f"rows (m, {layout.dim}) of {layout.value_dtype}. Received: keys {keys.shape} of "
            f"{keys.dtype} and rows {values.shape} of {values.dtype}."
        )
    return keys, values


def _open_shard(base: str, layout: Layout, is_own: bool = True) -> StoredShard:
    """Returns a shard, after all checks except the checksums."""
    for path in (f"{base}-keys", f"{base}-values"):
        if not os.path.isfile(path):
            raise FileNotFoundError(
                f"There is no file {path!r}. A shard of variable {layout.name!r} has one that ends "
                "in -keys and one that ends in -values."
            )
    meta = _read_meta(base)
    if meta is not None:
        fields = _FIELDS if is_own else _FIELDS[1:]
        wrong = [field for field in fields if meta[field] != getattr(layout, field)]
        if wrong:
            raise ValueError(
                f"{base!r} holds another variable, or one of another form: its "
                f"{', '.join(f'{field} is {meta[field]!r}' for field in wrong)}. Expected "
                f"{', '.join(f'{field}={getattr(layout, field)!r}' for field in wrong)}."
            )
    count = _count(f"{base}-keys", layout.key_storage.itemsize, f"keys of {layout.key_dtype}")
    row = f"rows of {layout.dim} elements of {layout.value_dtype}"
    rows = _count(f"{base}-values", layout.value_storage.itemsize * layout.dim, row)
    if rows != count:
        raise ValueError(
            f"{base!r} has {count} keys of {layout.key_dtype} but {rows} {row}. Check the types "
            "and the length of a row; if they are right the files are cut or from two saves."
        )
    if meta is not None and meta["count"] != count:
        raise ValueError(
            f"{base!r} is corrupt: it has {count} keys where its -meta.json says "
            f"{meta['count']}. Take another copy of the shard."
        )
    return StoredShard(base, layout, count, meta)


def _count(path: str, width: int, what: str) -> int:
    """Returns the number of elements of `width` bytes in a file."""
    length = os.path.getsize(path)
    if length % width:
        raise ValueError(
            f"{path!r} does not hold whole {what}: it has {length} bytes, and each takes {width}. "
            "Check the types and the length of a row; if they are right the file was cut."
        )
    return length // width


def _read_meta(base: str) -> dict[str, Any] | None:
    """Returns the metadata of a shard; None if it has none."""
    path = f"{base}-meta.json"
    try:
        meta = parsed(read_whole(path, _MAX_META_BYTES))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{path!r} is corrupt: {error}") from error
    fields = {*_FORMAT, *_FIELDS, "count", "keys_crc32", "values_crc32"}
    known = isinstance(meta, dict) and fields <= meta.keys()
    if not known or any(meta[field] != _FORMAT[field] for field in _FORMAT):
        raise ValueError(
            f"{path!r} is of another format. Expected {_FORMAT} and the fields "
            f"{', '.join(sorted(fields - set(_FORMAT)))}."
        )
    return meta


def _crc_of(path: str) -> int:
    crc = 0
    with open_file(path) as file:
        while data := file.read(1 << 20):
            crc = zlib.crc32(data, crc)
    return crc


def _old_crc(shard: StoredShard | None, what: str) -> int | None:
    """Returns the checksum of a file to append to; None if there is no such file."""
    if shard is None:
        return None
    return _crc_of(f"{shard.base}-{what}") if shard.meta is None else shard.meta[f"{what}_crc32"]


def states_path(folder: str, name: str, rank: int, size: int) -> str:
    """Returns the path of a rank's states of a variable."""
    return os.path.join(folder, f"{name.replace('/', '_')}_rank{rank}_size{size}{STATES}")


def write_states(
    path: str, arrays: Mapping[str, np.ndarray], checksums: Sequence[tuple[int, int]]
) -> None:
    """Writes a file of states. If it raises, the old file is unchanged.

    Args:
      checksums: of the keys and values of each shard, which are on the disk already.
    """
    pairs = np.array(checksums, np.int64).reshape(-1, 2)
    num_bytes = sum(array.nbytes for array in arrays.values())
    naming = explain_full_disk(path, "the states", num_bytes)
    with naming, Lock(f"{path}.lock", repr(path)), AtomicFile(path, None) as made:
        np.savez(made.file, checksums=pairs, **arrays)  # type: ignore[arg-type]
        made.sync()
        made.commit()
    sync_path(os.path.dirname(path))


def read_states(
    path: str, checksums: Sequence[tuple[int, int] | None]
) -> dict[str, np.ndarray] | None:
    """Returns the arrays of a file of states; None if there is none.

    Args:
      checksums: of the keys and values of each shard; None for a shard without metadata.

    Raises:
      ValueError: it is corrupt, or of another save than the shards.
    """
    if not os.path.exists(path):
        return None
    arrays = read_arrays(path)
    try:
        expected = [tuple(pair) for pair in arrays.pop("checksums").tolist()]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path!r} is corrupt: {error}. Take another copy of it.") from error
    if expected != list(checksums):
        raise ValueError(
            f"{path!r} is not of the keys and values beside it: they are from two saves. Take the "
            "files of one save, or remove this one: rows are then restored without their states."
        )
    return arrays


class AtomicFile:
    """A file that is replaced or appended to; without `commit` it stays unchanged.

    Args:
      old_crc: CRC-32 of the bytes to append to; None: replace the file.

    Attributes:
      crc: CRC-32 of the whole file, if `write` alone has written it.
      file: the open file.
    """

    def __init__(self, path: str, old_crc: int | None) -> None:
        self.crc = old_crc or 0
        self._path = path
        self._written = f"{path}.tmp" if old_crc is None else path
        self._is_committed = False
        self.file: BinaryIO = open(self._written, "wb" if old_crc is None else "ab")  # noqa: SIM115
        self._old_length = self.file.tell()

    def __enter__(self) -> "AtomicFile":
        return self

    def write(self, array: np.ndarray) -> None:
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        self.file.write(data)
        self.crc = zlib.crc32(data, self.crc)

    def sync(self) -> None:
        """Flushes the file to the disk."""
        self.file.flush()
        os.fsync(self.file.fileno())

    def commit(self) -> None:
        """Renames a new file to its name, and keeps appended bytes."""
        if self._written != self._path:
            os.replace(self._written, self._path)
        self._is_committed = True

    def __exit__(self, *_: object) -> None:
        try:
            self.file.close()
        finally:
            if not self._is_committed and self._written == self._path:
                os.truncate(self._path, self._old_length)
            elif not self._is_committed:
                with contextlib.suppress(FileNotFoundError):  # interrupted after the rename
                    os.unlink(self._written)
