"""TFRA's files of keys and values, and two more of ours: what they hold, and optimizer states.

A shard is three files; `key_value_names` has the bases of their names:

    <base>-keys        the keys, one after the other
    <base>-values      the row of each key, in the same order, `dim` elements each
    <base>-meta.json   {"format": "sok_lite keys and values", "version": 1, "name": the variable's,
                       "key_dtype", "value_dtype", "dim", "count", "index", "num_shards", "rank",
                       "size", "keys_crc32", "values_crc32"}

Numbers are little-endian, a bfloat16 is its two bytes. The first two are as TFRA writes and reads
them, without a header; the third is ours. Where it is there all that it says is checked, the
checksums included; files without it, as TFRA leaves them, are what their reader says they are.

New files take their names when they are complete, the third one last. A process that is killed
in between, or while it appends, leaves files that do not agree with the third, which are refused.

What these lack, optimizer states, `last_seen` and scores, a process writes into one file beside its
shards, an .npz of NumPy arrays that is named

    <variable>_rank<r>_size<s>-states.npz

It has the tensors of bridge/checkpoint.py but for keys and values, in ascending order of the keys,
its texts as bytes of UTF-8, and `checksums`: the CRC-32 of the keys and of the values of each
shard, which tell it from that of another save.
"""

import contextlib
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from sok_lite.engine.files.disk import naming_file, open_file, read_arrays, read_whole, sync_path
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

BUFFER_SIZE = 4194304  # keys at a time, as TFRA

STATES = "-states.npz"  # the file of optimizer states

_MOST_META_BYTES = 1 << 20  # of a third file, which has a few hundred and the variable's name
_FORMAT = {"format": "sok_lite keys and values", "version": 1}
_FIELDS = ("name", "key_dtype", "value_dtype", "dim")


class Layout(NamedTuple):
    """The content of a variable's files: types and sizes. `make_layout` checks one.

    Attributes:
      name: of the variable.
      key_dtype, value_dtype: names of types.
      dim: elements of a row.
    """

    name: str
    key_dtype: str
    value_dtype: str
    dim: int

    @property
    def key_storage(self) -> np.dtype:
        """NumPy's dtype of the keys in the file."""
        return np.dtype(_KEY_DTYPES[self.key_dtype])

    @property
    def value_storage(self) -> np.dtype:
        """NumPy's dtype of the rows' elements in the file: uint16 for bfloat16."""
        return np.dtype(_VALUE_DTYPES[self.value_dtype])


def make_layout(name: str, key_dtype: str, value_dtype: str, dim: int) -> Layout:
    """Returns the layout of a variable's files.

    Raises:
      ValueError: files of this kind cannot hold such keys or rows.
    """
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
    """A shard whose files were found and checked by `open_shards`.

    Attributes:
      base: path of its files, without their endings.
      layout: types and sizes of their content.
      count: number of keys.
      meta: the content of its third file; None: there is none.
    """

    base: str
    layout: Layout
    count: int
    meta: dict[str, Any] | None

    def pieces(self, buffer_size: int = BUFFER_SIZE) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields keys (m,) and their rows (m, dim), of at most `buffer_size` keys at a time.

        Raises:
          ValueError: the files were cut while they were read.
        """
        _check_buffer_size(buffer_size)
        layout = self.layout
        with open_file(_keys(self.base)) as key_file, open_file(_values(self.base)) as value_file:
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
    """Writes a shard of a variable; makes the folder if need be.

    If it raises, the files that were there are as before.

    Args:
      folder: for the files.
      layout: what they hold.
      place: which shard it is.
      pieces: pairs of keys (m,) and rows (m, dim), of the layout's types; bfloat16 rows may be the
        uint16 of their bits. Keys that repeat are written as they come: readers let the last count.
      file_name: of the files, without their endings; None: the place's.
      append_to_file: behind what the files hold, if they are there, instead of over it.
      buffer_size: how many keys are written at a time.

    Returns:
      How many keys the files hold.

    Raises:
      ValueError: a piece does not suit the layout, or the files are another variable's.
      BlockingIOError: somebody else writes them.
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
        opened.enter_context(naming_file(base, f"the files of {layout.name!r}"))
        opened.enter_context(Lock(f"{base}.lock", repr(base)))
        old = None
        if append_to_file and os.path.exists(_keys(base)):
            old = _open_shard(base, layout)
        key_file = opened.enter_context(GrowingFile(_keys(base), _old_crc(old, "keys")))
        value_file = opened.enter_context(GrowingFile(_values(base), _old_crc(old, "values")))
        count = old.count if old else 0
        for keys, values in pieces:
            keys, values = _checked_piece(layout, keys, values)
            for start in range(0, len(keys), buffer_size):
                key_file.write(keys[start : start + buffer_size])
                value_file.write(values[start : start + buffer_size])
            count += len(keys)
        # Both are on the disk before the first of them takes its name.
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
        meta_file = opened.enter_context(GrowingFile(_meta(base), None))
        meta_file.write(np.frombuffer(json.dumps(written, indent=1).encode(), np.uint8))
        meta_file.sync()
        for each in (key_file, value_file, meta_file):
            each.publish()
    sync_path(folder)
    return count


def open_shards(
    folder: str, layout: Layout, *, file_name_list: Iterable[str], is_own: bool = True
) -> list[StoredShard]:
    """Checks files of a variable, all of them before anybody reads one.

    Args:
      folder: where they are.
      layout: what they must hold.
      file_name_list: names of the files, without their endings.
      is_own: whether they are to be of the variable that `layout` names.

    Returns:
      The shards, in the order of the list.

    Raises:
      FileNotFoundError: files are missing.
      ValueError: files hold something else, or are corrupt.
    """
    paths = [os.path.join(folder, base) for base in file_name_list]
    shards = [_open_shard(path, layout, is_own) for path in paths]
    for shard in shards:
        if shard.meta is not None:
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
    """Returns the CRC-32 of a shard's keys and of its values, from its third file.

    Args:
      base: of its files.

    Returns:
      None where there is no such file.
    """
    meta = _read_meta(os.path.join(folder, base))
    return None if meta is None else (meta["keys_crc32"], meta["values_crc32"])


def described(folder: str, base: str) -> Layout | None:
    """Returns the layout of a shard, from its third file.

    Args:
      base: of its files.

    Returns:
      None where there is no such file.
    """
    meta = _read_meta(os.path.join(folder, base))
    return None if meta is None else make_layout(*(meta[field] for field in _FIELDS))


def has_nothing_else(folder: str) -> bool:
    """Whether all that is in a folder is of shards that this package has written."""
    names = set(os.listdir(folder)) if os.path.isdir(folder) else set[str]()
    ends = ("-keys", "-values", "-meta.json")
    bases = (name.removesuffix(ends[2]) for name in names if name.endswith(ends[2]))
    ours = {f"{base}{end}" for base in bases for end in ends}
    return all(name in ours or name.endswith(STATES) for name in names)


def _keys(base: str) -> str:
    return f"{base}-keys"


def _values(base: str) -> str:
    return f"{base}-values"


def _meta(base: str) -> str:
    return f"{base}-meta.json"


def _check_buffer_size(buffer_size: int) -> None:
    if buffer_size < 1:
        raise ValueError(f"buffer_size must be at least 1 key. Received: {buffer_size}.")


def _checked_piece(layout: Layout, keys: Any, values: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns a piece in the types of the files."""
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
    """Returns a shard whose files agree in all but the checksums, which are not read here.

    Args:
      is_own: whether they are to be of the variable that `layout` names.
    """
    for path in (_keys(base), _values(base)):
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
    count = _count(_keys(base), layout.key_storage.itemsize, f"keys of {layout.key_dtype}")
    row = f"rows of {layout.dim} elements of {layout.value_dtype}"
    rows = _count(_values(base), layout.value_storage.itemsize * layout.dim, row)
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
    """Returns the content of a shard's third file; None: there is none."""
    try:
        meta = parsed(read_whole(_meta(base), _MOST_META_BYTES))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{_meta(base)!r} is corrupt: {error}") from error
    fields = {*_FORMAT, *_FIELDS, "count", "keys_crc32", "values_crc32"}
    known = isinstance(meta, dict) and fields <= meta.keys()
    if not known or any(meta[field] != _FORMAT[field] for field in _FORMAT):
        raise ValueError(
            f"{_meta(base)!r} is of another format. Expected {_FORMAT} and the fields "
            f"{', '.join(sorted(fields - set(_FORMAT)))}."
        )
    return meta


def _crc_of(path: str) -> int:
    """Returns the checksum of a file."""
    crc = 0
    with open_file(path) as file:
        while data := file.read(1 << 20):
            crc = zlib.crc32(data, crc)
    return crc


def _old_crc(shard: StoredShard | None, what: str) -> int | None:
    """Returns the checksum of a file that is to be appended to; None: there is no such file."""
    if shard is None:
        return None
    return _crc_of(f"{shard.base}-{what}") if shard.meta is None else shard.meta[f"{what}_crc32"]


def states_path(folder: str, name: str, rank: int, size: int) -> str:
    """Returns the path of the file of a process."""
    return os.path.join(folder, f"{name.replace('/', '_')}_rank{rank}_size{size}{STATES}")


def write_states(
    path: str, arrays: Mapping[str, np.ndarray], checksums: Sequence[tuple[int, int]]
) -> None:
    """Writes the file; if it raises, the one that was there is as before.

    Args:
      arrays: by name, numbers or a text's bytes.
      checksums: of the keys and values of each shard, as they are on the disk already.
    """
    pairs = np.array(checksums, np.int64).reshape(-1, 2)
    num_bytes = sum(array.nbytes for array in arrays.values())
    naming = naming_file(path, "the states", num_bytes)
    with naming, Lock(f"{path}.lock", repr(path)), GrowingFile(path, None) as made:
        np.savez(made.file, checksums=pairs, **arrays)  # type: ignore[arg-type]
        made.sync()
        made.publish()
    sync_path(os.path.dirname(path))


def read_states(
    path: str, checksums: Sequence[tuple[int, int] | None]
) -> dict[str, np.ndarray] | None:
    """Returns the arrays of a file; None: there is none.

    Args:
      checksums: of keys and values of each shard that it belongs to; None: those are not known.

    Raises:
      ValueError: it is corrupt, or of other shards.
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


class GrowingFile:
    """A file that is appended to, or written under another name until `publish`.

    Without `publish` it stays as before.

    Args:
      path: of the file.
      old_crc: CRC-32 of the bytes to append to; None: a new file.

    Attributes:
      crc: CRC-32 of the whole file, where `write` alone has written it.
      file: what is written to.
    """

    def __init__(self, path: str, old_crc: int | None) -> None:
        self.crc = old_crc or 0
        self._path = path
        self._written = f"{path}.tmp" if old_crc is None else path
        self._is_published = False
        self.file: BinaryIO = open(self._written, "wb" if old_crc is None else "ab")  # noqa: SIM115
        self._old_length = self.file.tell()

    def __enter__(self) -> "GrowingFile":
        return self

    def write(self, array: np.ndarray) -> None:
        """Writes the bytes of an array."""
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        self.file.write(data)
        self.crc = zlib.crc32(data, self.crc)

    def sync(self) -> None:
        """Waits until what was written is on the disk."""
        self.file.flush()
        os.fsync(self.file.fileno())

    def publish(self) -> None:
        """Makes what was written the file of that name."""
        if self._written != self._path:
            os.replace(self._written, self._path)
        self._is_published = True

    def __exit__(self, *_: object) -> None:
        try:
            self.file.close()
        finally:
            if not self._is_published and self._written == self._path:
                os.truncate(self._path, self._old_length)
            elif not self._is_published:
                with contextlib.suppress(FileNotFoundError):  # it has its name already
                    os.unlink(self._written)
