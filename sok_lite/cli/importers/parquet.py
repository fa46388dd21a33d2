"""Parquet files: a column of keys, and rows as a column of lists or one column per element.

`value` has lists of one length, or `value_0`, `value_1` and so on (or `value0`, `value1`) are
numbers; likewise for states. Parquet has no bfloat16: such rows are written as float32 and read
back as bfloat16, as the file notes. Needs pyarrow.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from sok_lite.cli.file_source import Stored
from sok_lite.cli.named import (
    about_text,
    check_opens,
    named_columns,
    named_source,
    naming,
    package,
    regroup,
)
from sok_lite.cli.text_column import texts_beside
from sok_lite.cli.wrapped import only_one, read_plain
from sok_lite.engine.files.disk import open_file
from sok_lite.engine.files.source import Column, Source
from sok_lite.reports.text import readable

HOLDS_TEXTS = True

_MARK = b"PAR1"
_METADATA = b"sok_lite"
# Columns by their names in tables and in files.
_NAMES = {"keys": "key", "values": "value"}
_ELEMENT = re.compile(r"(.+?)(_?)(0|[1-9]\d{0,8})", re.DOTALL)
_ROWS = (
    "a column of lists of numbers (in a file without lines with dim=), or numbered columns of one "
    "dtype, such as value_0, value_1, ... or e0, e1, ..., which `values=e` names"
)


def detect(path: str) -> bool:
    """Whether a file begins like Parquet."""
    try:
        with open_file(path) as file:
            return file.read(len(_MARK)) == _MARK
    except OSError:
        return False


def sources(
    path: str,
    name: str | None = None,
    dtype: str | None = None,
    key_type: str | None = None,
    columns: str = "",
    initial: str = "",
    dim: int | None = None,
) -> list[Source]:
    """Returns the table of a file. Other options and errors as for `named_source`.

    Args:
      dim: elements of a row; needed only for variable-length lists in a file without rows.
    """
    check_opens(path)
    with naming(path, *_errors()):
        found, about = _open(path, dim)
    options = (name, dtype, key_type, columns, initial)
    return [named_source(path, found, about, *options, names=_NAMES, rows_are=_ROWS)]


def _package(module: str) -> Any:
    return package(module, "Parquet files", "sok_lite[parquet]")


def _errors() -> tuple[type[Exception], ...]:
    arrow = _package("pyarrow")
    return (arrow.ArrowException, OSError, OverflowError, UnicodeDecodeError, ValueError)


def _open(path: str, dim: int | None) -> tuple[dict[str, Stored], str | None]:
    types = _package("pyarrow").types
    found: dict[str, Stored] = {}
    with _file(path) as file:
        n, schema = file.metadata.num_rows, file.schema_arrow
        for field in schema:
            kind = field.type
            if types.is_integer(kind) or types.is_floating(kind):
                found[field.name] = _stored(path, [field.name], _dtype(kind), (n,))
            elif types.is_fixed_size_list(kind) and _is_number(types, kind.value_type):
                shape = (n, kind.list_size)
                found[field.name] = _stored(path, [field.name], _dtype(kind.value_type), shape)
            elif types.is_list(kind) or types.is_large_list(kind):
                width = _first_length(file, field.name) if n else dim
                if width and _is_number(types, kind.value_type):
                    dtype = _dtype(kind.value_type)
                    found[field.name] = _stored(path, [field.name], dtype, (n, width))
            else:
                # No table accepts it: using such a column raises.
                found[field.name] = Stored(str(kind), (n,), lambda _: iter(()))
        about = (schema.metadata or {}).get(_METADATA)
    for base, names in _group_numbered(found).items():
        row = _stored(path, names, found[names[0]].dtype, (n, len(names)))
        found.setdefault(base, row._replace(parts=tuple(names)))
        if base.startswith("states."):
            for name in names:
                del found[name]  # or each would be a state
    return found, about


def _file(path: str) -> Any:
    parquet = _package("pyarrow.parquet")
    # Our files have checksums; others may.
    return parquet.ParquetFile(path, page_checksum_verification=True)


def _is_number(types: Any, kind: Any) -> bool:
    return bool(types.is_integer(kind) or types.is_floating(kind))


def _dtype(kind: Any) -> str:
    return np.dtype(kind.to_pandas_dtype()).name


def _first_length(file: Any, name: str) -> int | None:
    batch = next(file.iter_batches(batch_size=1, columns=[name]))
    (first,) = batch.column(batch.schema.get_field_index(name)).to_pylist()
    return None if first is None else len(first)


def _group_numbered(found: dict[str, Stored]) -> dict[str, list[str]]:
    """Returns the columns x_0, x_1, ..., or x0, x1, ..., all numbers of one dtype, by x."""
    numbers: dict[tuple[str, str], dict[int, str]] = {}
    for name, column in found.items():
        match = _ELEMENT.fullmatch(name)
        if match and len(column.shape) == 1 and column.is_of_numbers:
            numbers.setdefault((match[1], match[2]), {})[int(match[3])] = name
    return {
        base: [names[i] for i in range(len(names))]
        for (base, _), names in sorted(numbers.items())
        if sorted(names) == list(range(len(names)))
        and len({found[name].dtype for name in names.values()}) == 1
    }


def _stored(path: str, names: list[str], dtype: str, shape: tuple[int, ...]) -> Stored:
    def arrays(piece_rows: int) -> Iterator[np.ndarray]:
        with naming(path, *_errors()), _file(path) as file:
            for batch in file.iter_batches(batch_size=piece_rows, columns=names):
                yield _array(batch, names, shape[1:])

    def read(piece_rows: int) -> Iterator[np.ndarray]:
        count = 0
        for piece in regroup(arrays(piece_rows), piece_rows):
            count += len(piece)
            yield piece
        if count != shape[0]:
            raise ValueError(
                f"{path}: column {names[0]!r} was to have {shape[0]:,} rows, and has {count:,}."
            )

    return Stored(dtype, shape, read)


def _array(batch: Any, names: list[str], row_shape: tuple[int, ...]) -> np.ndarray:
    """Converts columns of a batch to an array (k,) or (k, dim)."""
    columns = [batch.column(batch.schema.get_field_index(name)) for name in names]
    for name, column in zip(names, columns, strict=True):
        is_list = row_shape and len(names) == 1
        if column.null_count or (is_list and column.flatten().null_count):
            raise ValueError(f"column {name!r} has values that are missing")
    if not row_shape or len(names) > 1:
        arrays = [column.to_numpy(zero_copy_only=False) for column in columns]
        return np.stack(arrays, axis=1) if row_shape else arrays[0]
    (column,) = columns
    (dim,) = row_shape
    lengths = column.value_lengths().to_numpy(zero_copy_only=False)
    if (lengths != dim).any():
        raise ValueError(
            f"column {names[0]!r} has lists of {dim} and of {lengths[lengths != dim][0]} elements"
        )
    return column.flatten().to_numpy(zero_copy_only=False).reshape(-1, dim)


def write(path: str, sources: Sequence[Source], wide: bool = False) -> None:
    """Writes a table in pieces; `wide`: one column per element, `value_0` and so on, for lists.

    OSError: the file cannot be written. ValueError: the source is corrupt. WrongUse: several
    tables, or pyarrow is not installed.
    """
    source = only_one(sources, "a Parquet file")
    parquet, arrow = (_package(m) for m in ("pyarrow.parquet", "pyarrow"))
    columns, texts = named_columns(source), texts_beside(source)
    fields = [field for each in columns for field in _fields(arrow, *each, wide)]
    if texts is not None:
        fields.insert(1, arrow.field("text", arrow.string()))
    schema = arrow.schema(fields, metadata={_METADATA: about_text(source).encode()})
    with (
        open(path, "xb") as file,
        parquet.ParquetWriter(file, schema, write_page_checksum=True) as writer,
    ):
        for pieces in zip(*(read_plain(source, column.name) for _, column in columns), strict=True):
            arrays = [
                array
                for (_, column), piece in zip(columns, pieces, strict=True)
                for array in _arrays(arrow, column, piece, wide)
            ]
            if texts is not None:
                its = [None if text is None else readable(text) for text in next(texts)]
                arrays.insert(1, arrow.array(its, arrow.string()))
            writer.write_batch(arrow.record_batch(arrays, schema=schema))


def _fields(arrow: Any, name: str, column: Column, wide: bool) -> list[Any]:
    name, kind = _NAMES.get(name, name), arrow.from_numpy_dtype(column.dtype)
    if column.dim is not None and wide:
        return [arrow.field(f"{name}_{i}", kind, nullable=False) for i in range(column.dim)]
    kind = kind if column.dim is None else _rows_of(arrow, column)
    return [arrow.field(name, kind, nullable=False)]


def _rows_of(arrow: Any, column: Column) -> Any:
    kind = arrow.from_numpy_dtype(column.dtype)
    return arrow.list_(arrow.field("element", kind, nullable=False), column.dim)


def _arrays(arrow: Any, column: Column, piece: np.ndarray, wide: bool) -> list[Any]:
    if column.dim is None:
        return [arrow.array(piece)]
    if wide:
        return [arrow.array(np.ascontiguousarray(piece[:, i])) for i in range(column.dim)]
    flat = arrow.array(np.ascontiguousarray(piece).reshape(-1))
    return [arrow.FixedSizeListArray.from_arrays(flat, type=_rows_of(arrow, column))]
