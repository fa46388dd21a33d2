"""Keras files: `.keras` of `model.save`, `.weights.h5` of `model.save_weights`. Read only.

A `.keras` file is an archive with an uncompressed `model.weights.h5`; a `.weights.h5` file is that
HDF5 file itself. Each layer has a group `.../vars`, which Keras 3 gives the attribute `name`, and a
`sok_lite.keras.Table` has the arrays of bridge/checkpoint.py there, strings as in bridge/stored.py.
Names from several ranks start with `rank<i>of<n>_`.

h5py finds each array; its rows are then read from the file. External or chunked arrays are not
Keras' and are rejected.
"""

import io
import os
import re
import struct
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from sok_lite.cli.errors import WrongUse
from sok_lite.cli.file_source import FileSource, Stored, raw_rows
from sok_lite.cli.named import check_opens, naming, package
from sok_lite.engine.files.disk import open_file
from sok_lite.engine.files.manifest import StateFacts
from sok_lite.engine.files.source import PENDING_COLUMNS, JoinedSource, Source, TableInfo
from sok_lite.engine.json_text import parsed
from sok_lite.engine.table.content import without_slots
from sok_lite.engine.table.named_arrays import states_of
from sok_lite.engine.texts import KeyTexts

_MEMBER = "model.weights.h5"
_HDF5 = b"\x89HDF\r\n\x1a\n"
_LOCAL_HEADER = struct.Struct("<26xHH")  # an archive member: lengths of its name and extra
_OF_RANK = re.compile(r"(?:rank(\d{1,9})of(\d{1,9})_)?(\w+)")
# Little-endian dtypes of h5py and ours; uint16 holds the bits of bfloat16.
_DTYPES = {dtype: np.dtype(dtype).name for dtype in ("<i8", "<i4", "<u8", "<f4", "<f2", "|u1")} | {
    "<u2": "bfloat16"
}
_NAMES = {"keys", "values", "states", "stamps", "scores", "sighted_keys", "sightings"}
_TEXTS = ("facts_bytes", "state_columns_bytes")
_KEPT = ("text_keys", "texts_lengths", "texts_bytes")
_MOST_TEXT = 1 << 20  # a state takes a few hundred bytes
_ERRORS = (
    *(zipfile.BadZipFile, NotImplementedError, RuntimeError, OSError),
    *(AttributeError, LookupError, TypeError, ValueError),
)


def detect(path: str) -> bool:
    """Whether a file is a Keras archive, or an HDF5 file."""
    try:
        with open_file(path) as file:
            if file.read(len(_HDF5)) == _HDF5:
                return True
            with zipfile.ZipFile(file) as archive:
                return _MEMBER in archive.namelist()
    except (zipfile.BadZipFile, NotImplementedError, OSError, ValueError):
        return False


def sources(path: str) -> list[Source]:
    """Returns the tables of a model, each with the keys of all ranks that saved it.

    A table has the name of its layer. If two layers share a name, and for tf_keras, which stores
    none, it is the place in the file, such as "layers/table_1". ImportError: h5py is missing.
    OSError: the file cannot be read. ValueError: it is corrupt. WrongUse: it has no table.
    """
    check_opens(path)
    h5py = package("h5py", "files of Keras", "h5py")
    with naming(path, *_ERRORS):
        begin, size = _place_of_weights(path)
        with h5py.File(_Stretch(path, begin, size), "r") as file:
            groups = _groups_of(h5py, file)
            names = [_name_of(*each) for each in groups.items()]
            found = [
                _source(path, begin, size, group, name if names.count(name) == 1 else place)
                for (place, group), name in zip(groups.items(), names, strict=True)
            ]
    if not found:
        raise WrongUse(
            f"{path} has no table of sok_lite.keras, which are what is read of a file of Keras"
        )
    return found


def _place_of_weights(path: str) -> tuple[int, int]:
    """Returns the first byte of the weights in a file, and their length."""
    with open_file(path) as file:
        if file.read(len(_HDF5)) == _HDF5:
            return 0, os.fstat(file.fileno()).st_size
        with zipfile.ZipFile(file) as archive:
            info = archive.getinfo(_MEMBER)
            if info.compress_type != zipfile.ZIP_STORED:
                raise ValueError(
                    f"{_MEMBER!r} in it is compressed, which Keras does not do. Unpack the file, "
                    f"and give {_MEMBER}"
                )
            archive.open(info).close()  # raises for a bad header
        file.seek(info.header_offset)
        head = file.read(_LOCAL_HEADER.size)
        return info.header_offset + len(head) + sum(_LOCAL_HEADER.unpack(head)), info.file_size


class _Stretch(io.RawIOBase):
    """A part of a file as a file."""

    def __init__(self, path: str, begin: int, size: int) -> None:
        self._file: Any = open_file(path)
        self._begin, self._size, self._at = begin, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_CUR: self._at, os.SEEK_END: self._size}.get(whence, 0)
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._size - self._at)]
        self._file.seek(self._begin + self._at)
        count = self._file.readinto(view)
        self._at += count
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def _groups_of(h5py: Any, file: Any) -> dict[str, Any]:
    """Returns the groups of tables, by the path of their layer."""
    found: dict[str, Any] = {}

    def visit(place: str, item: Any) -> None:
        is_of_layer = isinstance(item, h5py.Group) and place.endswith("/vars")
        names = map(_OF_RANK.fullmatch, item) if is_of_layer else ()
        if any(name is not None and name[3] == "facts_bytes" for name in names):
            found[place.removesuffix("/vars")] = item

    file.visititems(visit)
    return found


def _name_of(place: str, group: Any) -> str:
    """Returns the name of a layer, or its place in the file."""
    name = group.attrs.get("name")
    return name if isinstance(name, str) and name else place


def _source(path: str, begin: int, size: int, group: Any, name: str) -> Source:
    """Returns a table; the weights lie at `begin`, `size` bytes."""
    ranks: dict[tuple[int, int], dict[str, Any]] = {}
    for match in filter(None, map(_OF_RANK.fullmatch, group)):
        rank, of, array = match.groups()
        ranks.setdefault((int(of or 1), int(rank or 0)), {})[array] = group[match[0]]
    num_ranks = next(iter(ranks))[0]
    expected = {(num_ranks, rank) for rank in range(min(num_ranks, len(ranks) + 1))}
    if ranks.keys() != expected:
        raise ValueError(f"table {name!r} does not have the parts of all of {num_ranks:,} ranks")
    parts = [_part(path, begin, size, ranks[rank], name) for rank in sorted(ranks)]
    kinds = {(part.dim, part.dtype, part.key_type) for part in parts}
    if len(kinds) != 1:
        raise ValueError(f"the parts of table {name!r} differ: {sorted(kinds)}")
    return JoinedSource(parts)


def _part(path: str, begin: int, size: int, arrays: Mapping[str, Any], name: str) -> "_Part":
    """Returns what one rank saved of a table."""
    missing = sorted({*_NAMES, *_TEXTS} - arrays.keys())
    if missing:
        raise ValueError(f"table {name!r} has no {missing[0]!r}")
    found = {each: _stored(path, begin, size, arrays[each]) for each in sorted(_NAMES)}
    n = found["keys"].shape[:1]
    for each in ("keys", "values", "states", "stamps"):
        shape, num_dims = found[each].shape, 2 if each in ("values", "states") else 1
        if len(shape) != num_dims or shape[:1] != n:
            raise ValueError(f"{each!r} of table {name!r} have shape {shape}, and keys {n}")
    if found["scores"].shape != found["keys"].shape:  # an empty tensor: "stamps" are the scores
        del found["scores"]
    facts, columns = (parsed(_text(arrays[each])) for each in _TEXTS)
    if type(facts["num_lookups"]) is not int:
        raise TypeError(f"table {name!r} has no number of lookups")
    rows = found.pop("states")
    states = states_of(np.empty((0, rows.shape[1]), np.float32), columns, f"table {name!r}")
    ends = list(accumulate(state.dim for state in states))
    for i, (state, end) in enumerate(zip(states, ends, strict=True)):
        found[f"states.{i}.{state.name}"] = _columns_of(rows, end - state.dim, end)
    about = TableInfo(
        "hybrid" if "strategy" in facts else "hbm",
        facts=without_slots(facts),
        num_pending=found["sighted_keys"].shape[0],
    )
    described = [
        StateFacts(f"states.{i}.{s.name}", s.name, s.dim, float(s.initial), s.group)
        for i, s in enumerate(states)
    ]
    part = _Part(path, found, name, states=tuple(described), about=about)
    if "text_keys" in arrays:
        part.kept = [_stored(path, begin, size, arrays[each]) for each in _KEPT]
    return part


class _Part(FileSource):
    """The part of a table that one rank saved: its keys, also those without a row yet.

    Attributes:
      kept: the arrays of `_KEPT`, for a table that keeps strings.
    """

    kept: Sequence[Stored] = ()

    def texts(self) -> dict[int, bytes]:
        if not self.kept:
            return {}
        keys, lengths, data = (
            np.concatenate([np.empty(0, each.dtype), *each.read(self._piece_rows)])
            for each in self.kept
        )
        found = KeyTexts(keys, np.cumsum(lengths), data)
        if keys.shape != lengths.shape or found.fault() is not None:
            raise ValueError(f"the texts of table {self.name!r} contradict themselves")
        return found.as_dict()

    def read(self, column: str) -> Iterator[np.ndarray]:
        if column not in PENDING_COLUMNS:
            yield from super().read(column)
            return
        stored = self._stored["sighted_keys" if column == "sighted_keys" else "sightings"]
        for piece in stored.read(self._piece_rows):
            if column == "sighted_keys":
                yield piece.astype(self.key_type)
            else:  # 2**32 times the number of the lookup, plus the pending count
                yield (piece >> 32 if column == "sighting_stamps" else piece).astype(np.uint32)


def _stored(path: str, begin: int, size: int, dataset: Any) -> Stored:
    """Returns an array as a contiguous part of the file."""
    dtype = _DTYPES.get(dataset.dtype.str)
    if dtype is None:
        raise TypeError(f"{dataset.name} is of {dataset.dtype}, which no array of a table is")
    is_elsewhere = bool(dataset.external) or dataset.is_virtual or dataset.chunks is not None
    at, num_bytes = dataset.id.get_offset(), dataset.nbytes
    if is_elsewhere or (num_bytes and (at is None or not 0 <= at <= size - num_bytes)):
        raise ValueError(f"{dataset.name} does not lie in one piece in it, as Keras writes it")
    return raw_rows(path, begin + (at or 0), dtype, dataset.shape)


def _columns_of(rows: Stored, begin: int, end: int) -> Stored:
    """Slices columns of an array."""

    def read(piece_rows: int) -> Iterator[np.ndarray]:
        return (piece[:, begin:end] for piece in rows.read(piece_rows))

    return Stored(rows.dtype, (rows.shape[0], end - begin), read)


def _text(dataset: Any) -> bytes:
    if dataset.nbytes > _MOST_TEXT:
        raise ValueError(f"{dataset.name} has {dataset.nbytes:,} bytes, which is no such text")
    return bytes(np.asarray(dataset, np.uint8))
