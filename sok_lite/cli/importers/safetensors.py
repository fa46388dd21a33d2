"""safetensors files of named tensors, in which `keys` and `values` are a table.

The package of that name is not needed. Our checkpoints also consist of such files, but reading them
as a checkpoint adds checksums, and the files of all ranks together.
"""

import os
from collections.abc import Sequence
from typing import Any

from sok_lite.cli.file_source import Stored, raw_rows
from sok_lite.cli.named import ABOUT, about_text, named_columns, reader, shape_of
from sok_lite.cli.text_column import text_arrays
from sok_lite.cli.wrapped import only_one
from sok_lite.engine.files.disk import open_file
from sok_lite.engine.files.shard import (
    CHUNK_BYTES,
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    ShardWriter,
    Tensor,
    distinct,
    dtype_of,
)
from sok_lite.engine.files.source import Source
from sok_lite.engine.json_text import parsed

HOLDS_TEXTS = True

_DTYPES = {
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
}
_ERRORS = (AttributeError, KeyError, TypeError, ValueError)


def detect(path: str) -> bool:
    """Whether a file begins with a safetensors header."""
    try:
        _header(path)
    except (OSError, *_ERRORS):
        return False
    return True


def _header(path: str) -> tuple[dict[str, Any], int, int]:
    """Returns the header, the offset of the tensors, and their bytes."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size - LENGTH_BYTES
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if length > min(MAX_HEADER_BYTES, size):
            raise ValueError(f"a header of {length:,} bytes is longer than the file, or allowed")
        header = parsed(file.read(length), object_pairs_hook=distinct)
    if type(header) is not dict:
        raise ValueError("its header is no JSON object")
    return header, LENGTH_BYTES + length, size - length


def _open(path: str) -> tuple[dict[str, Stored], str | None]:
    header, begin, num_bytes = _header(path)
    about = header.pop("__metadata__", {}).get(ABOUT)
    found, placed = {}, []
    for name, facts in header.items():
        (first, last), shape = facts["data_offsets"], facts["shape"]
        if not all(type(number) is int and number >= 0 for number in (first, last, *shape)):
            raise ValueError(f"tensor {name!r} has numbers that are none")
        placed.append((first, last, name))
        dtype = _DTYPES.get(facts["dtype"])
        if dtype is None or not shape:
            # No table accepts it: using such a column raises.
            found[name] = Stored(str(facts["dtype"]), tuple(shape), lambda _: iter(()))
            continue
        found[name] = raw_rows(path, begin + first, dtype, tuple(shape))
        if found[name].row_bytes * shape[0] != last - first:
            raise ValueError(f"tensor {name!r} is not where its shape says")
    end = 0
    for first, last, name in sorted(placed):
        if first != end or last < first:
            raise ValueError(f"tensor {name!r} does not begin where the one before it ends")
        end = last
    if end != num_bytes:
        raise ValueError(f"its tensors have {end:,} bytes, and there are {num_bytes:,}")
    return found, about


sources = reader(_open, *_ERRORS)


def write(path: str, sources: Sequence[Source]) -> None:
    """Writes a table, tensor after tensor, in pieces.

    OSError: the file cannot be written. ValueError: the source is corrupt. WrongUse: several
    tables.
    """
    source = only_one(sources, "a file of safetensors")
    columns = named_columns(source)
    tensors = [
        Tensor(
            name,
            dtype_of(source.dtype if name == "values" else column.dtype.name),
            shape_of(source, column),
        )
        for name, column in columns
    ]
    texts = text_arrays(source)
    tensors += [Tensor(each.name, dtype_of(each.dtype.name), (each.size,)) for each in texts]
    about = {"table": source.name, ABOUT: about_text(source)}
    writer = ShardWriter(path, tensors, about, CHUNK_BYTES)
    try:
        for _, column in columns:
            for piece in source.read(column.name):
                writer.write(piece)
        for each in texts:
            for piece in each.pieces:
                writer.write(piece)
        writer.finish()
    finally:
        writer.close()
