"""Files of safetensors: named tensors, of which `keys` and `values` are a table.

The package of that name is not needed. The files of our checkpoints are such files too; read as
one of those, a checkpoint has more: its checksums, and the files of all ranks together.
"""

import json
import os
from collections.abc import Sequence
from typing import Any

from sok_lite.cli.file_source import Stored, raw_rows
from sok_lite.cli.named import (
    ABOUT,
    about_text,
    named_columns,
    named_source,
    naming,
    shape_of,
)
from sok_lite.cli.wrapped import only_one
from sok_lite.engine.files.shard import (
    CHUNK_BYTES,
    DTYPES,
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    ShardWriter,
    Tensor,
    dtype_of,
    placed_tensor,
)
from sok_lite.engine.files.source import Source

_ERRORS = (AttributeError, KeyError, TypeError, ValueError, RecursionError)


def detect(path: str) -> bool:
    """Returns whether a file begins with a header of safetensors."""
    try:
        _header(path)
    except (OSError, *_ERRORS):
        return False
    return True


def sources(
    path: str,
    name: str | None = None,
    dtype: str | None = None,
    key_type: str | None = None,
    columns: str = "",
    initial: str = "",
) -> list[Source]:
    """Returns the table of a file; see `named_source` for the options and errors.

    Raises:
      OSError: the file cannot be read.
    """
    with naming(path, *_ERRORS):
        found, about = _opened(path)
    return [named_source(path, found, about, name, dtype, key_type, columns, initial)]


def _header(path: str) -> tuple[dict[str, Any], int, int]:
    """Returns the header, where the tensors begin, and the bytes that they have."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if size < LENGTH_BYTES or length > min(MAX_HEADER_BYTES, size - LENGTH_BYTES):
            raise ValueError(f"a header of {length:,} bytes is longer than the file, or allowed")
        header = json.loads(file.read(length))
    if type(header) is not dict:
        raise ValueError("its header is no JSON object")
    return header, LENGTH_BYTES + length, size - LENGTH_BYTES - length


def _opened(path: str) -> tuple[dict[str, Stored], str | None]:
    header, begin, num_bytes = _header(path)
    about = header.pop("__metadata__", {}).get(ABOUT)
    found, end = {}, 0
    for name, facts in header.items():
        end = max(end, facts["data_offsets"][1])
        if facts["dtype"] not in DTYPES:
            continue  # nor has any column such
        first, last, tensor = placed_tensor(name, facts)
        if last - first != tensor.num_bytes or last > num_bytes:
            raise ValueError(f"tensor {name!r} is not where its shape says")
        dtype = "bfloat16" if tensor.dtype == "BF16" else tensor.storage.name
        if len(tensor.shape) in (1, 2):
            found[name] = raw_rows(path, begin + first, dtype, tensor.shape)
    if end != num_bytes:
        raise ValueError(f"its tensors have {end:,} bytes, and there are {num_bytes:,}")
    return found, about


def write(path: str, sources: Sequence[Source]) -> None:
    """Writes a table, tensor after tensor, in pieces.

    Raises:
      OSError: the file cannot be written. ValueError: the source is corrupt. WrongUse: there are
        several.
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
    about = {"table": source.name, ABOUT: about_text(source)}
    writer = ShardWriter(path, tensors, about, CHUNK_BYTES)
    try:
        for _, column in columns:
            for piece in source.read(column.name):
                writer.write(piece)
        writer.finish()
    finally:
        writer.close()
