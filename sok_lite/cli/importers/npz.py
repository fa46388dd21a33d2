"""NumPy's .npz archives of arrays, in which `keys` and `values` are a table.

NumPy has no bfloat16: such rows are written as float32 and read back as bfloat16, as the file
notes.
"""

import math
import os
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from typing import IO, Any

import numpy as np

from sok_lite.cli.file_source import Stored
from sok_lite.cli.named import ABOUT, about_text, named_columns, naming, reader, shape_of
from sok_lite.cli.text_column import text_arrays
from sok_lite.cli.wrapped import only_one, read_plain
from sok_lite.engine.files.disk import open_file
from sok_lite.engine.files.source import Source

HOLDS_TEXTS = True

_END = ".npy"
_ERRORS = (
    *(zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError),
    # An offset before the file is an OSError.
    *(ValueError, OSError),
)
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
# Ours takes a few hundred bytes per state.
_MOST_ABOUT = 1 << 20


def detect(path: str) -> bool:
    """Whether a file is an archive of arrays."""
    try:
        with open_file(path) as file, zipfile.ZipFile(file) as archive:
            return any(name.endswith(_END) for name in archive.namelist())
    except _ERRORS:
        return False


def _open(path: str) -> tuple[dict[str, Stored], str | None]:
    found: dict[str, Stored] = {}
    about = None
    with open_file(path) as whole, zipfile.ZipFile(whole) as archive:
        _check_has_all(path, archive)
        for info in archive.infolist():
            if info is not archive.getinfo(info.filename):
                raise ValueError(f"{info.filename!r} is in it twice")
            if not info.filename.endswith(_END):
                raise ValueError(f"{info.filename!r} in it is no array")
            name = info.filename.removesuffix(_END)
            with archive.open(info) as file:
                shape, dtype = _header(file, info)
                if name == ABOUT and shape == () and dtype.kind == "U":
                    about = _text(file, dtype)
                else:
                    found[name] = _stored(path, info.filename, shape, dtype)
    return found, about


def _check_has_all(path: str, archive: zipfile.ZipFile) -> None:
    """Raises ValueError if a wrong length in the archive's list hides later members."""
    with open_file(path) as file:
        file.seek(-22 - len(archive.comment), os.SEEK_END)
        stated = int.from_bytes(file.read(22)[10:12], "little")
    if stated not in (len(archive.infolist()), 0xFFFF):  # 0xFFFF: too many for the field
        raise ValueError(f"it has {stated} members, and lists {len(archive.infolist())}")


def _header(file: IO[bytes], info: zipfile.ZipInfo) -> tuple[tuple[int, ...], np.dtype]:
    """Returns the shape and dtype of an array, and reads up to its bytes."""
    version = np.lib.format.read_magic(file)
    if version not in _HEADERS:
        raise ValueError(f"array {info.filename!r} is of version {version}")
    try:
        shape, is_turned, dtype = _HEADERS[version](file)
    except Exception as error:  # NumPy passes on whatever its parsers raise
        raise ValueError(f"the header of {info.filename!r} is none ({error})") from error
    num_bytes = math.prod(shape) * dtype.itemsize
    if not dtype.hasobject and info.file_size != file.tell() + num_bytes:
        raise ValueError(
            f"array {info.filename!r} of shape {shape} has {num_bytes:,} bytes, and there are "
            f"{info.file_size - file.tell():,}"
        )
    if is_turned and sum(size > 1 for size in shape) > 1:
        raise ValueError(
            f"array {info.filename!r} is stored column by column. Save np.ascontiguousarray of it"
        )
    return shape, dtype


def _text(file: IO[bytes], dtype: np.dtype) -> str:
    if dtype.itemsize > _MOST_ABOUT:
        raise ValueError(f"its text about the table has {dtype.itemsize:,} bytes")
    return str(np.frombuffer(file.read(dtype.itemsize), dtype)[0])


def _stored(path: str, member: str, shape: tuple[int, ...], dtype: np.dtype) -> Stored:
    # The dtype that bfloat16 packages leave behind.
    dtype = np.dtype(np.uint16) if dtype == np.dtype("V2") else dtype
    row_bytes = dtype.itemsize * math.prod(shape[1:])

    def read(piece_rows: int) -> Iterator[np.ndarray]:
        with (
            naming(path, *_ERRORS),
            open_file(path) as whole,
            zipfile.ZipFile(whole) as archive,
            archive.open(member) as file,
        ):
            _header(file, archive.getinfo(member))
            for first in range(0, shape[0], piece_rows):
                count = min(piece_rows, shape[0] - first)
                data = file.read(count * row_bytes)
                if len(data) != count * row_bytes:
                    raise ValueError(f"array {member!r} ends in row {first:,} or soon behind")
                rows = np.frombuffer(data, dtype).reshape(count, *shape[1:])
                yield rows.astype(dtype.newbyteorder("="), copy=False)

    name = dtype.newbyteorder("=").name if dtype.kind in "iuf" else str(dtype)
    return Stored(name, shape, read)


sources = reader(_open, *_ERRORS)


def write(path: str, sources: Sequence[Source], compress: bool = False) -> None:
    """Writes a table, column after column, in pieces; `compress` deflates them.

    OSError: the file cannot be written. ValueError: the source is corrupt. WrongUse: several
    tables.
    """
    source = only_one(sources, "an .npz file")
    with zipfile.ZipFile(path, "x") as archive:
        for name, column in named_columns(source):
            facts = _array_facts(column.dtype, shape_of(source, column))
            _write_array(archive, _info(name, compress), facts, read_plain(source, column.name))
        for name, dtype, size, pieces in text_arrays(source):
            _write_array(archive, _info(name, compress), _array_facts(dtype, (size,)), pieces)
        about = np.array(about_text(source))
        with archive.open(_info(ABOUT, compress), "w") as file:
            np.lib.format.write_array_header_1_0(file, _array_facts(about.dtype, ()))
            file.write(about.tobytes())


def _write_array(
    archive: zipfile.ZipFile,
    info: zipfile.ZipInfo,
    facts: dict[str, Any],
    pieces: Iterator[np.ndarray],
) -> None:
    with archive.open(info, "w", force_zip64=True) as file:
        np.lib.format.write_array_header_1_0(file, facts)
        for piece in pieces:
            file.write(np.ascontiguousarray(piece).data)


def _info(name: str, compress: bool) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name + _END)
    info.compress_type = zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED
    return info


def _array_facts(dtype: np.dtype, shape: tuple[int, ...]) -> dict[str, Any]:
    return {"descr": dtype.str, "fortran_order": False, "shape": shape}
