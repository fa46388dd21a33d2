"""Files of HierarchicalKV: keys, values and scores, one file each.

They are little-endian numbers without headers, one key after the other, `dim` elements per row.
Keys are int64 or uint64; scores are uint64, or uint32 for a kCustomized table. Nothing else is
saved, not even the element type.

HierarchicalKV leaves the file names to the program. The defaults here are `keys`, `values` and
`scores` in a folder.
"""

import os
from collections.abc import Callable, Sequence

import numpy as np

from sok_lite.cli.errors import WrongUse
from sok_lite.cli.file_source import FileSource, Stored, raw_rows, recast
from sok_lite.engine.dtypes import row_dtype
from sok_lite.engine.files.source import Source, TableInfo
from sok_lite.engine.table.hkv_options import STRATEGIES

_KEY_BYTES = 8
_KEY_TYPES = ("int64", "uint64")
# HierarchicalKV reserves these, and silently drops them.
_RESERVED = range(-4, 0)


def detect(path: str) -> bool:
    """Whether a folder has exactly the files of the three names."""
    try:
        return sorted(os.listdir(path)) == ["keys", "scores", "values"]
    except OSError:
        return False


def sources(
    path: str,
    name: str | None = None,
    dim: int | None = None,
    dtype: str = "float32",
    key_type: str = "int64",
    strategy: str | None = None,
    keys: str = "keys",
    values: str = "values",
    scores: str = "scores",
    score_type: str = "uint64",
) -> list[Source]:
    """Returns the saved table.

    Args:
      name: of the table; None: the folder's.
      dim: elements of a row; None: from the file size.
      strategy: that made the scores, such as "kLfu". A table of the same strategy continues with
        them; without it a load gives each key a new score.
      keys, values, scores: file names, relative to the folder. Without scores: "".

    Raises:
      OSError: a file cannot be read. ValueError: the files do not match. WrongUse: an invalid
        option.
    """
    _check_key_type(key_type)
    if score_type not in ("uint64", "uint32"):
        raise WrongUse(f"score_type must be uint64 or uint32. Received: {score_type!r}")
    try:
        width = row_dtype(dtype).storage.itemsize
    except ValueError as error:
        raise WrongUse(str(error)) from error
    if strategy is not None and strategy not in STRATEGIES:
        raise WrongUse(f"strategy must be one of {', '.join(STRATEGIES)}. Received: {strategy!r}")
    files = [os.path.join(path, file) for file in (keys, values)]
    n = _length(files[0], _KEY_BYTES, f"keys of {key_type}")
    row_bytes = _row_bytes(files[1], n, width, dtype, dim)
    stored = {
        "keys": raw_rows(files[0], 0, key_type, (n,)),
        "values": raw_rows(files[1], 0, dtype, (n, row_bytes // width)),
    }
    if scores:
        file, width = os.path.join(path, scores), np.dtype(score_type).itemsize
        if os.path.getsize(file) != n * width:
            raise ValueError(
                f"{file} must have a score of {width} bytes for each of {n:,} keys. Received: "
                f"{os.path.getsize(file):,} bytes. Check score_type and the names of the files; if "
                "they are right, one of them was cut."
            )
        stored["scores"] = raw_rows(file, 0, score_type, (n,))
    about = TableInfo()
    if strategy is not None:
        about = _about_of(strategy, stored.get("scores"))
    name = name or os.path.basename(os.path.abspath(path))
    return [FileSource(files[0], stored, name, dtype, key_type, about=about)]


def _row_bytes(path: str, n: int, width: int, dtype: str, dim: int | None) -> int:
    size = os.path.getsize(path)
    if n == 0 and dim is None:
        raise WrongUse(f"{path} has no row, so nothing says how long one is: give dim=...")
    row_bytes = width * dim if dim is not None else size // n
    if row_bytes < 1 or row_bytes % width or size != n * row_bytes:
        expected = f"{dim} elements" if dim is not None else "whole elements"
        raise ValueError(
            f"{path} must have {expected} of {dtype} for each of {n:,} keys. Received: {size:,} "
            "bytes. Check dim, dtype and the names of the files; if they are right, a file was cut."
        )
    return row_bytes


def _length(path: str, width: int, what: str) -> int:
    size = os.path.getsize(path)
    if size % width:
        raise ValueError(
            f"{path} must have {what}, of {width} bytes each. Received: {size:,} bytes. If this is "
            "the right file, it was cut."
        )
    return size // width


def _about_of(strategy: str, scores: Stored | None) -> TableInfo:
    epoch = 0
    if strategy.startswith("kEpoch") and scores is not None:
        # The newest score has the table's epoch in its high bits.
        epoch = max((int(piece.max()) >> 32 for piece in scores.read(1 << 20)), default=0)
    facts = {"num_lookups": 0, "strategy": strategy, "epoch": epoch}
    return TableInfo(var_type="hybrid", facts=facts)


def write(
    path: str,
    sources: Sequence[Source],
    dtype: str | None = None,
    key_type: str | None = None,
    states: bool = True,
) -> None:
    """Writes a table in HierarchicalKV's format.

    A key without a score gets the number of the last lookup that saw it, at least 1, because 0
    marks free slots in HierarchicalKV.

    Args:
      states: False leaves out optimizer states, which the format cannot hold.

    Raises:
      OSError: a file cannot be written. ValueError: the source is corrupt. WrongUse: the format
        cannot hold the table.
    """
    if len(sources) != 1:
        raise WrongUse(f"files of HierarchicalKV have one table, and there are {len(sources)}")
    (source,) = sources
    if source.states and states:
        raise WrongUse(
            f"files of HierarchicalKV have no optimizer states, which table {source.name!r} has: "
            "give states=no to leave them out"
        )
    source = recast(source, dtype, key_type or ("int64" if source.key_type == "int32" else None))
    _check_key_type(source.key_type)
    os.mkdir(path)

    def write_file(name: str, column: str, convert: Callable[[np.ndarray], np.ndarray]) -> None:
        with open(os.path.join(path, name), "xb") as file:
            for piece in source.read(column):
                file.write(np.ascontiguousarray(convert(piece)).data)

    write_file("keys", "keys", lambda keys: _checked_keys(keys, source.name))
    write_file("values", "values", lambda rows: rows)
    if "scores" in source.columns:
        write_file("scores", "scores", lambda scores: scores)
    elif "stamps" in source.columns:
        write_file("scores", "stamps", lambda last_seen: np.maximum(last_seen, 1).astype(np.uint64))
    else:
        write_file("scores", "keys", lambda keys: np.ones(keys.size, np.uint64))


def _check_key_type(key_type: str) -> None:
    if key_type not in _KEY_TYPES:
        raise WrongUse(f"HierarchicalKV has keys of int64 or uint64. Received: {key_type!r}")


def _checked_keys(keys: np.ndarray, table: str) -> np.ndarray:
    """Returns keys that HierarchicalKV can hold."""
    bits = keys.view(np.int64)
    reserved = (bits >= _RESERVED.start) & (bits < _RESERVED.stop)
    if reserved.any():
        raise WrongUse(
            f"HierarchicalKV cannot hold key {keys[reserved][0]}, which table {table!r} has: it "
            "keeps the keys -4 to -1 for itself. Remove it"
        )
    return keys
