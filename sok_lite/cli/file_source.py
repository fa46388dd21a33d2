"""A table in files of other systems: checks its columns and converts them to our types."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from sok_lite.engine.dtypes import bfloat16_to_float32, key_dtype, row_dtype
from sok_lite.engine.files.disk import open_file
from sok_lite.engine.files.manifest import StateFacts
from sok_lite.engine.files.shard import CHUNK_BYTES
from sok_lite.engine.files.source import Column, Source, TableInfo, column_of, columns_of

# Columns that a source may have besides rows.
NUMBERS = ("stamps", "scores")
_NOTHING = TableInfo()
_KEY_TYPES = ("int64", "int32", "uint64")
_INTEGERS = frozenset(np.dtype(code).name for code in np.typecodes["AllInteger"])
_NUMBERS = _INTEGERS | {np.dtype(code).name for code in np.typecodes["Float"]} | {"bfloat16"}


class Stored(NamedTuple):
    """A column as stored."""

    dtype: str  # "bfloat16" is uint16 bits; other text describes what no table accepts
    shape: tuple[int, ...]  # (n,) or (n, dim)
    read: Callable[[int], Iterator[np.ndarray]]  # in pieces of so many rows
    parts: tuple[str, ...] = ()  # the file's columns, if it combines several

    @property
    def is_of_integers(self) -> bool:
        return self.dtype in _INTEGERS

    @property
    def is_of_numbers(self) -> bool:
        return self.dtype in _NUMBERS

    @property
    def row_bytes(self) -> int:
        itemsize = np.dtype("uint16" if self.dtype == "bfloat16" else self.dtype).itemsize
        return itemsize * math.prod(self.shape[1:])


class FileSource(Source):
    """A table from a file's columns. Keys, rows and states are cast while reading.

    Args:
      stored: columns by their names in docs/checkpoint_format.md; at least keys and values.
      dtype: of its rows; None: as stored. For "bfloat16" uint16 is its bits.
      key_type: of its keys; None: as stored, or "int64" if that is no key type.

    Raises:
      ValueError: columns have other shapes than a table's, or cannot be cast.
    """

    def __init__(
        self,
        path: str,
        stored: Mapping[str, Stored],
        name: str,
        dtype: str | None = None,
        key_type: str | None = None,
        states: tuple[StateFacts, ...] = (),
        about: TableInfo = _NOTHING,
    ) -> None:
        self._path, self._stored = path, stored
        shape = stored["values"].shape
        if len(shape) != 2 or shape[1] < 1:
            raise ValueError(
                f"{path}: the values must have shape (n, dim). Received: {_text(shape)}. Give each "
                "key a row of at least one element."
            )
        self.num_keys, self.dim = shape
        self.states = states
        self.columns = tuple(column for column in NUMBERS if column in stored)
        self.name, self.about = name, about
        self.dtype = _dtype_of_rows(path, stored["values"].dtype, dtype)
        self.key_type = _key_type(path, stored["keys"].dtype, key_type)
        columns = columns_of(self)
        for each in columns:
            self._check(each)
        widths = [each.row_bytes for each in columns]
        widest = max(widths + [column.row_bytes for column in stored.values()])
        self._piece_rows = max(1, CHUNK_BYTES // widest)

    def _check(self, column: Column) -> None:
        stored = self._stored[column.name]
        expected = (self.num_keys,) if column.dim is None else (self.num_keys, column.dim)
        if stored.shape != expected:
            raise ValueError(
                f"{self._path}: column {column.name!r} must have shape {_text(expected)}, since "
                f"there are {self.num_keys:,} rows. Received: {_text(stored.shape)}."
            )
        is_right = stored.is_of_integers if column.dim is None else stored.is_of_numbers
        if not is_right:
            kind = "integers" if column.dim is None else "numbers"
            raise ValueError(
                f"{self._path}: column {column.name!r} must be of {kind}. Received: {stored.dtype}."
            )

    def read(self, column: str) -> Iterator[np.ndarray]:
        wanted = column_of(self, column)
        for piece in self._stored[column].read(self._piece_rows):
            try:
                yield self._cast(wanted, piece)
            except (TypeError, ValueError) as error:
                raise ValueError(f"{self._path}, column {column!r}: {error}") from error

    def _cast(self, column: Column, piece: np.ndarray) -> np.ndarray:
        """Converts a piece to the dtype that a source yields."""
        if column.name == "keys":
            kind = key_dtype(self.key_type)
            return kind.from_int64(np, kind.to_int64(np, piece))
        if column.dim is not None:
            stored = self._stored[column.name].dtype
            return cast_rows(piece, stored, self.dtype if column.name == "values" else "float32")
        most = np.iinfo(column.dtype).max
        is_wrong = (piece < 0) | (piece > most)
        if is_wrong.any():
            raise ValueError(f"Numbers must be from 0 to {most}. Received: {piece[is_wrong][0]}.")
        return piece.astype(column.dtype)


def cast_rows(rows: np.ndarray, stored: str, dtype: str) -> np.ndarray:
    """Casts rows between dtypes; bfloat16 is uint16, its bits. TypeError, ValueError: it cannot."""
    if stored == "bfloat16" and dtype != "bfloat16":
        rows = bfloat16_to_float32(np, rows)
    kind = row_dtype(dtype)
    with np.errstate(over="ignore"):
        cast = kind.to_storage(np, rows)
        if dtype not in (stored, "float64") and rows.dtype.kind == "f":
            is_lost = np.isinf(kind.to_float32(np, cast)) & np.isfinite(rows)
            if is_lost.any():
                raise ValueError(
                    f"values must fit {dtype}. Received: {rows[is_lost][0]}, which would be "
                    "infinite. Take a wider dtype."
                )
    return cast


def recast(source: Source, dtype: str | None, key_type: str | None) -> Source:
    """Casts a source's rows and keys, unless None. ValueError: unknown types, or keys that do not
    fit.
    """
    if dtype in (None, source.dtype) and key_type in (None, source.key_type):
        return source
    stored = {column.name: _as_stored(source, column) for column in columns_of(source)}
    about = source.about._replace(num_pending=0)
    return FileSource(
        f"table {source.name!r}", stored, source.name, dtype, key_type, source.states, about
    )


def _as_stored(source: Source, column: Column) -> Stored:
    dtype = source.dtype if column.name == "values" else column.dtype.name
    shape = (source.num_keys,) if column.dim is None else (source.num_keys, column.dim)
    return Stored(dtype, shape, lambda _: source.read(column.name))


def raw_rows(path: str, begin: int, dtype: str, shape: tuple[int, ...]) -> Stored:
    """Returns a little-endian column that starts at a byte of a file, whose size was checked."""
    storage = np.dtype(np.uint16 if dtype == "bfloat16" else dtype).newbyteorder("<")
    width = storage.itemsize * math.prod(shape[1:])

    def read(piece_rows: int) -> Iterator[np.ndarray]:
        with open_file(path) as file:
            file.seek(begin)
            for first in range(0, shape[0], piece_rows):
                count = min(piece_rows, shape[0] - first)
                data = file.read(count * width)
                if len(data) != count * width:
                    at = begin + first * width + len(data)
                    raise ValueError(f"{path} was cut at byte {at:,} while it was read.")
                yield np.frombuffer(data, storage).reshape(count, *shape[1:])

    return Stored(dtype, shape, read)


def _dtype_of_rows(path: str, stored: str, dtype: str | None) -> str:
    if dtype == "bfloat16" and stored == "uint16":
        return dtype
    try:
        return row_dtype(dtype or stored).name
    except ValueError as error:
        advice = ' Give dtype="bfloat16" if they are its bits.' if stored == "uint16" else ""
        raise ValueError(f"{path}: the values are {stored}. {error}{advice}") from error


def _key_type(path: str, stored: str, key_type: str | None) -> str:
    if key_type is None:
        return stored if stored in _KEY_TYPES else "int64"
    try:
        return key_dtype(key_type).name
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _text(shape: tuple[int, ...]) -> str:
    return f"({', '.join(f'{number:,}' for number in shape)}{',' if len(shape) == 1 else ''})"
