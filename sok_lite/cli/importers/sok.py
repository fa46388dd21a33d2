"""SOK's dumps: a folder with a file of keys, one of rows and one of each optimizer state a table.

Each file is a header of 296 bytes and then numbers, little-endian, row by row:

  256 bytes   name of the table, with spaces before it; SOK leaves all of it blank
  uint32      0: keys, 1: rows, 2: an optimizer state; big-endian
  32 bytes    name of the state, with spaces before it; blank of keys and rows
  uint32      number of the dtype, the place of its name in `_DTYPES`; big-endian

How many keys there are, and the length of a row, follow from the sizes of the files. They are named
`<table>-key`, `<table>-weight` and `<table>-<optimizer>-<state>`, where `_` stands for each
character of ASCII punctuation in the name of TensorFlow's variable: `table0:0` is `table0_0`.

A load of SOK reads every file on every rank, and keeps the rows of the keys with key % ranks ==
rank: in the order of the files, whatever keys they are, where a table is static. So files whose
keys ascend are right for any number of ranks, and that is how they are written here.
"""

import os
import string
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from sok_lite.cli.errors import WrongUse
from sok_lite.cli.file_source import FileSource, Stored, cast_rows, raw_rows, recast
from sok_lite.cli.options import initial_values
from sok_lite.engine.dtypes import key_dtype
from sok_lite.engine.files.disk import open_file
from sok_lite.engine.files.manifest import StateFacts
from sok_lite.engine.files.source import Source

_HEADER = struct.Struct(">256sI32sI")
_KEYS, _ROWS, _STATE = range(3)
_WHAT = {_KEYS: "keys", _ROWS: "rows", _STATE: "an optimizer state"}
_DTYPES = ("int32", "int64", "uint32", "uint64", "float16", "float32", "float64")

_PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation, "_"))

# SOK's optimizer states by name, and our names if they differ. Adamax is an "Adam".
_STATES: Mapping[str, Mapping[str, str]] = {
    "Adadelta": {"accum_grad": "accumulator", "accum_var": "delta_accumulator"}
}
# The optimizer with exactly these states, by our names.
_OPTIMIZERS = {
    frozenset({"m", "v"}): "Adam",
    frozenset({"m", "v", "vhat"}): "Adam",
    frozenset({"momentum"}): "SGD",
    frozenset({"accumulator"}): "Adagrad",
    frozenset({"accumulator", "linear"}): "Ftrl",
    frozenset({"accumulator", "delta_accumulator"}): "Adadelta",
}
# Initial values other than 0: the defaults of the optimizers.
_INITIAL = {("Adagrad", "accumulator"): 0.1, ("Ftrl", "accumulator"): 0.1}


class _File(NamedTuple):
    """A file after reading its header: its name, dtype, and number of elements."""

    path: str
    name: str
    dtype: str
    size: int


def _read_file_header(path: str, kind: int, state: str) -> _File:
    """Reads the header of a file of a `kind`, and for an optimizer state of a name."""
    with open_file(path) as file:
        head = file.read(_HEADER.size)
        size = os.fstat(file.fileno()).st_size
    if len(head) < _HEADER.size:
        raise _corrupt(path, f"its header has {_HEADER.size} bytes, and there are {len(head)}")
    name, stated_kind, stated_state, number = _HEADER.unpack(head)
    if stated_kind != kind:
        raise _corrupt(
            path, f"byte 256 says kind {stated_kind}, and {_WHAT[kind]} are of kind {kind}"
        )
    if number >= len(_DTYPES):
        raise _corrupt(path, f"byte 292 says dtype {number}, and the last is {len(_DTYPES) - 1}")
    try:
        texts = name.decode().strip(), stated_state.decode().strip()
    except UnicodeDecodeError as error:
        raise _corrupt(path, f"a name in its header is no UTF-8 ({error})") from error
    if texts[1] != state:
        raise _corrupt(path, f"byte 260 names state {texts[1]!r}, and the file {state!r}")
    dtype = _DTYPES[number]
    width = np.dtype(dtype).itemsize
    if (size - _HEADER.size) % width:
        raise _corrupt(
            path, f"behind its header are {size - _HEADER.size:,} bytes, and a {dtype} has {width}"
        )
    return _File(path, texts[0], dtype, (size - _HEADER.size) // width)


def _corrupt(path: str, reason: str) -> ValueError:
    return ValueError(f"{path} is no whole file of a dump of SOK: {reason}.")


def _header(name: str, kind: int, state: str, dtype: str) -> bytes:
    """Returns the header of a file."""
    text = name.encode()
    # A longer name does not fit; SOK ignores it.
    title = text.rjust(256) if len(text) <= 256 else b" " * 256
    return _HEADER.pack(title, kind, state.encode().rjust(32), _DTYPES.index(dtype))


class Places(NamedTuple):
    """The order of a source's keys in the sorted file."""

    keys: np.ndarray  # (n,) ascending
    at: np.ndarray  # (n,) int64, the sorted position of the i-th key of the source

    @classmethod
    def of(cls, source: Source) -> "Places":
        """Sorts a source's distinct keys (else ValueError), with 32 bytes a key; keeps 16."""
        none = np.empty(0, key_dtype(source.key_type).dtype)
        keys = np.concatenate([none, *source.read("keys")])
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        repeated = np.flatnonzero(keys[1:] == keys[:-1])
        if repeated.size:
            raise ValueError(f"Table {source.name!r} has key {keys[repeated[0]]} more than once.")
        at = np.empty(keys.size, np.int64)
        at[order] = np.arange(keys.size)
        return cls(keys, at)

    @property
    def least(self) -> int | None:
        """The least key, or None."""
        return int(self.keys[0]) if self.keys.size else None

    def has(self, key: int) -> bool:
        """Whether it has a key, of any integer value."""
        limits = np.iinfo(self.keys.dtype)
        if not limits.min <= key <= limits.max:
            return False
        found = np.searchsorted(self.keys, self.keys.dtype.type(key))
        return bool(found < self.keys.size and self.keys[found] == key)


def write_sorted(
    path: str,
    head: bytes,
    pieces: Iterator[np.ndarray],
    dtype: np.dtype,
    shape: tuple[int, ...],
    places: Places,
) -> None:
    """Writes `head`, then a column of a source, each row at the position of its key.

    OSError: the file cannot be written. ValueError: the number of rows differs from that of keys.
    """
    n, first = int(places.at.size), 0
    with open(path, "xb+") as file:
        file.write(head)
        file.flush()
        target = None
        if n:
            num_bytes = n * int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            # Writing mapped memory without disk space would kill the process.
            os.posix_fallocate(file.fileno(), 0, len(head) + num_bytes)
            target = np.memmap(file, dtype.newbyteorder("<"), "r+", len(head), (n, *shape))
        for piece in pieces:
            at = places.at[first : first + len(piece)]
            if len(at) != len(piece):
                raise ValueError(f"{path} was to have {n:,} rows, and more came.")
            if target is not None:
                target[at] = piece
            first += len(piece)
        if first != n:
            raise ValueError(f"{path} was to have {n:,} rows, and {first:,} came.")
        if target is not None:
            target.flush()


def detect(path: str) -> bool:
    """Whether a folder has a file of keys with SOK's header."""
    try:
        names = [name for name in os.listdir(path) if name.endswith("-key")]
        return any(_read_file_header(os.path.join(path, name), _KEYS, "") for name in names)
    except (OSError, ValueError):
        return False


def others(path: str) -> list[str]:
    """Returns the names in a folder that are not SOK's files."""
    return [name for name in sorted(os.listdir(path)) if not _is_file(path, name)]


def _is_file(folder: str, name: str) -> bool:
    _, _, end = name.partition("-")  # such as key, or Adam-m
    _, _, state = end.partition("-")
    try:
        kind = {"key": _KEYS, "weight": _ROWS}.get(end, _STATE)
        _read_file_header(os.path.join(folder, name), kind, state)
    except (OSError, ValueError):
        return False
    return True


def sources(
    path: str,
    table: str | None = None,
    name: str | None = None,
    dim: int | None = None,
    dtype: str | None = None,
    key_type: str | None = None,
    states: bool = True,
    initial: str = "",
) -> list[Source]:
    """Returns the tables of a dump.

    Args:
      table: its files' name without `-key`; None: all tables.
      name: for a single table. By default the name in the files; for SOK's, which have none, the
        files' own without the `_0` of TensorFlow's ":0".
      dim: elements of a row; needed only for a table without keys.
      initial: initial values of states in new rows, such as "accumulator=0.1"; by default those of
        SOK's optimizers.

    Raises:
      OSError: a file cannot be read. ValueError: it is corrupt. WrongUse: there is no such table.
    """
    files = sorted(os.listdir(path))
    stems = [file.removesuffix("-key") for file in files if file.endswith("-key")]
    if not stems:
        raise ValueError(f"{path} is no dump of SOK: no file in it ends in -key.")
    if table is not None and table not in stems:
        raise WrongUse(f"{path} has no table {table!r}; it has: {', '.join(map(repr, stems))}")
    chosen = stems if table is None else [table]
    if name is not None and len(chosen) != 1:
        raise WrongUse(
            f"name={name!r} is of one table, and there are {len(chosen)}: give table=..."
        )
    names = _names(path, chosen) if name is None else {chosen[0]: name}
    return [
        _source(path, stem, names[stem], dim, dtype, key_type, files if states else [], initial)
        for stem in chosen
    ]


def _source(
    folder: str,
    stem: str,
    name: str,
    dim: int | None,
    dtype: str | None,
    key_type: str | None,
    files: Sequence[str],
    initial: str,
) -> Source:
    keys = _read_file_header(os.path.join(folder, f"{stem}-key"), _KEYS, "")
    rows = _read_file_header(os.path.join(folder, f"{stem}-weight"), _ROWS, "")
    stored = {
        "keys": raw_rows(keys.path, _HEADER.size, keys.dtype, (keys.size,)),
        "values": _rows(rows, keys, dim),
    }
    dim = stored["values"].shape[1]
    found: list[tuple[str, str]] = []  # the optimizer and our name of each state
    for file in files:
        if file.startswith(f"{stem}-") and file.count("-") >= 2:
            optimizer, state = file[len(stem) + 1 :].split("-", 1)
            found.append((optimizer, _STATES.get(optimizer, {}).get(state, state)))
            stored[_column(len(found) - 1, found[-1][1])] = _rows(
                _read_file_header(os.path.join(folder, file), _STATE, state),
                keys,
                dim,
                is_state=True,
            )
    initial_by_state = initial_values(initial, [state for _, state in found])
    groups = list(dict.fromkeys(optimizer for optimizer, _ in found))
    facts = tuple(
        StateFacts(
            _column(i, state),
            state,
            stored[_column(i, state)].shape[1],
            initial_by_state.get(state, _INITIAL.get((optimizer, state), 0.0)),
            groups.index(optimizer) + 1,
        )
        for i, (optimizer, state) in enumerate(found)
    )
    return FileSource(keys.path, stored, name, dtype, key_type, facts)


def _column(i: int, state: str) -> str:
    return f"states.{i}.{state}"


def _names(folder: str, stems: Sequence[str]) -> dict[str, str]:
    """Returns table names by the names of their files."""
    stated = {
        stem: _read_file_header(os.path.join(folder, f"{stem}-key"), _KEYS, "").name
        for stem in stems
    }
    names = {
        stem: name if name and _stem(name) == stem else stem.removesuffix("_0") or stem
        for stem, name in stated.items()
    }
    is_clear = len(set(names.values())) == len(names)
    return names if is_clear else {stem: stem for stem in stems}


def _rows(file: _File, keys: _File, dim: int | None, is_state: bool = False) -> Stored:
    """Returns the rows of a file, one for each key."""
    n = keys.size
    found = file.size // n if n else dim
    if found is None:
        raise WrongUse(
            f"{keys.path} has no key, so nothing says how long a row is: give dim=..., or leave "
            "the table out"
        )
    if found < 1 or file.size != n * found or found != (dim or found):
        expected = f"{dim} elements for" if dim else "the same number of elements for"
        reason = (
            f"it must have {expected} each of the {n:,} keys of {os.path.basename(keys.path)}, and "
            f"it has {file.size:,} elements in all"
        )
        if is_state:
            reason += (
                ". SOK leaves keys that were never trained out of these files, and does not say "
                "which: give states=no to read the table without them"
            )
        raise _corrupt(file.path, reason)
    return raw_rows(file.path, _HEADER.size, file.dtype, (n, found))


def write(
    path: str,
    sources: Sequence[Source],
    dtype: str | None = None,
    key_type: str | None = None,
    states: bool = True,
    ranks: int | None = None,
) -> None:
    """Writes tables as a dump, which SOK loads on any number of ranks.

    It takes 32 bytes of memory per key. float64 and float16 rows get states of the same dtype,
    because SOK rejects others.

    Args:
      sources: the tables. Table "x" is the variable "x:0".
      dtype, key_type: of SOK's variable, to cast rows and keys to.
      ranks: number of loading ranks; needed only for negative keys.

    Raises:
      OSError: a file cannot be written. ValueError: a source is corrupt. WrongUse: SOK cannot hold
        a table.
    """
    stems: dict[str, str] = {}
    for source in sources:
        stem = _stem(source.name)
        if stem in stems:
            raise WrongUse(
                f"the files of tables {stems[stem]!r} and {source.name!r} would have one name, "
                f"{stem}-key: write them into two folders"
            )
        stems[stem] = source.name
    tables = [recast(source, dtype, key_type) for source in sources]
    for source in tables:
        _check_writable(source, states)
    os.mkdir(path)
    for source in tables:
        _write(path, source, states, ranks)


def _stem(name: str) -> str:
    return (name if name.endswith(":0") else f"{name}:0").translate(_PUNCTUATION)


def _check_writable(source: Source, with_states: bool) -> None:
    if source.dtype not in _DTYPES:
        raise WrongUse(
            f"SOK has no rows of {source.dtype}, as table {source.name!r} has: give dtype=float32"
        )
    if not with_states or not source.states:
        return
    _state_files(source)
    if any(state.dim != source.dim for state in source.states):
        raise WrongUse(
            f"SOK's states are as long as rows, and table {source.name!r} has others: give "
            "states=no to leave them out"
        )
    if not source.dtype.startswith("float"):
        raise WrongUse(f"SOK has no states of rows of {source.dtype}: give states=no")


def _state_files(source: Source) -> dict[str, tuple[str, str]]:
    """Returns the optimizer and SOK's name of each state, by column."""
    groups: dict[int | None, list[str]] = {}
    for state in source.states:
        groups.setdefault(state.group, []).append(state.name)
    optimizers = {group: _OPTIMIZERS.get(frozenset(names)) for group, names in groups.items()}
    files = {}
    for state in source.states:
        optimizer = optimizers[state.group]
        if optimizer is None:
            raise WrongUse(
                f"SOK has no optimizer with the states {', '.join(groups[state.group])}, which "
                f"table {source.name!r} has: give states=no to leave them out"
            )
        theirs = {ours: name for name, ours in _STATES.get(optimizer, {}).items()}
        files[state.tensor] = (optimizer, theirs.get(state.name, state.name))
    if len(set(files.values())) != len(files):
        raise WrongUse(
            f"table {source.name!r} has states of two optimizers that SOK would write into the "
            "same files: give states=no to leave them out"
        )
    return files


def _write(folder: str, source: Source, with_states: bool, ranks: int | None) -> None:
    stem, places = os.path.join(folder, _stem(source.name)), Places.of(source)
    _check_keys(source, places, ranks)
    dtype = source.dtype

    def write_file(end: str, column: str, kind: int, state: str, stored: str, wanted: str) -> None:
        head = _header(source.name, kind, state, stored)
        path, shape = f"{stem}-{end}", (source.dim,) if kind != _KEYS else ()
        pieces = source.read(column)
        if wanted != stored:
            pieces = (cast_rows(piece, wanted, stored) for piece in pieces)
        write_sorted(path, head, pieces, np.dtype(stored), shape, places)

    write_file("weight", "values", _ROWS, "", dtype, dtype)
    for tensor, (optimizer, state) in _state_files(source).items() if with_states else ():
        write_file(f"{optimizer}-{state}", tensor, _STATE, state, dtype, "float32")
    write_file("key", "keys", _KEYS, "", source.key_type, source.key_type)


def _check_keys(source: Source, places: Places, ranks: int | None) -> None:
    """Raises WrongUse if SOK cannot hold a key, or would not find it after a load."""
    marks = _marks(source.key_type)
    if source.about.var_type == "hybrid":
        marks |= {-4, -3, -2, -1}
    reserved = sorted(mark for mark in marks if places.has(mark))
    if reserved:
        raise WrongUse(
            f"SOK's tables cannot hold key {reserved[0]}, which table {source.name!r} has: "
            "remove it"
        )
    least = places.least
    if least is not None and least < 0 and (ranks is None or ranks & (ranks - 1)):
        raise WrongUse(
            f"table {source.name!r} has key {least}. SOK's lookups and its load have different "
            "ranks for keys below 0, but where the number of ranks is a power of two: say how "
            f"many will load it by ranks=.... Received: ranks={ranks}"
        )


def _marks(key_type: str) -> set[int]:
    """Returns the keys that mark empty and removed slots in SOK's own table."""
    limits = np.iinfo(key_type)
    return {int(limits.max), int(limits.min) if limits.min else int(limits.max) - 1}
