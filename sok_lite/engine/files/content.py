"""What the files of a checkpoint have for a table of this rank: a content whose rows stay there.

Keys and what goes with each are in memory, as in the table's index; rows come in pieces as they are
asked for. Where as many ranks wrote the checkpoint as read it, and the keys have the same owners,
each rank reads the file of its own number alone; else the keys of all files and the rows of its own
keys.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from sok_lite.comm.protocol import Communicator
from sok_lite.engine.dtypes import row_dtype
from sok_lite.engine.files.chain import Rows, rows_of, tensors_of_chain
from sok_lite.engine.files.manifest import Shard, TableFacts
from sok_lite.engine.files.progress import Progress
from sok_lite.engine.files.shard import ShardReader
from sok_lite.engine.files.table_file import open_shard
from sok_lite.engine.static_table import AnyTable
from sok_lite.engine.table.content import (
    Content,
    Owns,
    concatenate,
    in_order,
    one_of_each,
    owns,
)
from sok_lite.engine.table.joined import without_slots
from sok_lite.engine.table.lazy_rows import LazyRows
from sok_lite.engine.table.snapshot import State

_SIGHTED = ("sightings", "sighting_stamps")


def shards_of(table: AnyTable, facts: TableFacts, comm: Communicator) -> Sequence[Shard]:
    """Returns the files that have keys of this rank: its own alone, or all."""
    return [facts.shards[comm.rank]] if _is_own(table, facts, comm) else facts.shards


def _is_own(table: AnyTable, facts: TableFacts, comm: Communicator) -> bool:
    """Whether each rank has a file with its keys and no others."""
    return len(facts.shards) == comm.size and facts.owner == table.owner.name


def content(
    table: AnyTable,
    facts: TableFacts,
    folder: str,
    comm: Communicator,
    num_bytes: int,
    progress: Progress | None = None,
) -> Content:
    """Returns what a checkpoint has for the part of a table that is on this rank.

    Args:
      facts: what the manifest says of the table; dim, key type and dtype fit it.
      folder: of the checkpoint.
      num_bytes: of rows that are read together.
      progress: told of every chunk when it is read for the first time.

    Raises:
      OSError: a file cannot be read. ValueError: a file is corrupt. Reading the LazyRows may raise
        the same.
    """

    def opened(shard: Shard) -> ShardReader:
        return open_shard(facts, shard, folder, progress)

    # A file of its own is to a rank as that of one rank alone.
    ranks = (0, 1) if _is_own(table, facts, comm) else (comm.rank, comm.size)
    files = _Files(opened, owns(table, *ranks), _conversion(table, facts.dtype), num_bytes)
    parts = [_part(table, files, shard) for shard in shards_of(table, facts, comm)]
    # A key that several have is that of the lowest rank.
    return concatenate(parts, f"table {table.name!r}", counts="first")


class _Files(NamedTuple):
    """How files are read.

    Attributes:
      opened: opens one.
      are_own: says which keys are of this rank.
      to_storage: makes rows those of the table.
      num_bytes: of rows that are read together.
    """

    opened: Callable[[Shard], ShardReader]
    are_own: Owns
    to_storage: Callable[[np.ndarray], np.ndarray]
    num_bytes: int


def _part(table: AnyTable, files: _Files, shard: Shard) -> Content:
    """Returns what one file, and those that it continues, have for this rank."""
    reader, kind = files.opened(shard), table.key_dtype
    at, keys = _own_keys(files, reader, "keys", kind.dtype)
    # Files of others may have a key twice.
    at, keys = _firsts(at, keys, f"table {table.name!r}")
    sighted_at, sighted_keys = _own_keys(files, reader, "sighted_keys", kind.dtype)
    sighted_at, sighted_keys = _firsts(sighted_at, sighted_keys, f"sightings of {table.name!r}")
    chain = rows_of(shard, [*map(files.opened, shard.before), reader], keys, at)
    shape = keys.size, table.dim
    values = _lazy(files, chain, ["values"] * len(chain), shape, files.to_storage)
    states = [
        State(
            *(state.name, state.dim, state.initial),
            _lazy(
                *(files, chain, tensors_of_chain(shard, state.tensor)[::-1]),
                (keys.size, state.dim),
            ),
            state.group,
        )
        for state in shard.states
    ]
    # Where slots are says something of all keys together.
    is_whole = at.size == shard.rows
    names = [name for name in ("scores", "slots") if getattr(shard, name)]
    columns = {name: _gathered(files, reader, name, at) for name in ["stamps", *names]}
    if not is_whole:
        columns.pop("slots", None)
    sighted = {name: _gathered(files, reader, name, sighted_at) for name in _SIGHTED}
    facts = shard.facts if is_whole else without_slots(shard.facts)
    sighted_keys = kind.to_int64(np, sighted_keys)
    # In an increment keys that have changed come first.
    return in_order(Content(keys, values, states, columns, sighted_keys, sighted, facts))


def _firsts(at: np.ndarray, keys: np.ndarray, whose: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns keys without those that came before, and where they are, as they come."""
    kept = one_of_each(keys, "first", whose)
    if kept.size == keys.size:
        return at, keys
    kept.sort()
    return at[kept], keys[kept]


def _steps(reader: ShardReader, name: str, num_bytes: int) -> Iterator[tuple[int, int]]:
    tensor = reader.tensors[name]
    num_rows, step = tensor.shape[0], max(1, num_bytes // max(1, tensor.row_bytes))
    for first in range(0, num_rows, step):
        yield first, min(first + step, num_rows)


def _own_keys(
    files: _Files, reader: ShardReader, name: str, dtype: np.dtype
) -> tuple[np.ndarray, np.ndarray]:
    """Returns where the keys of this rank are in a file, ascending, and those keys."""
    found, own = [np.empty(0, np.int64)], [np.empty(0, dtype)]
    steps = list(_steps(reader, name, files.num_bytes))
    for (first, _), keys in zip(steps, reader.rows(name, iter(steps)), strict=True):
        at = np.flatnonzero(files.are_own(keys))
        found.append(at + first)
        own.append(keys[at])
    return np.concatenate(found), np.concatenate(own)


def _gathered(files: _Files, reader: ShardReader, name: str, at: np.ndarray) -> np.ndarray:
    """Returns what a tensor has of some keys."""
    whole = np.empty(at.size, reader.tensors[name].storage.newbyteorder("="))
    for part, numbers in _pieces(reader, name, at, files.num_bytes):
        whole[part] = numbers
    return whole


def _lazy(
    files: _Files,
    chain: Sequence[Rows],
    tensors: Sequence[str | None],
    shape: tuple[int, int],
    convert: Callable[[np.ndarray], np.ndarray] = lambda rows: rows,
) -> LazyRows:
    """Returns the rows of a tensor.

    Args:
      chain: the files that have them, newest first.
      tensors: its name in each; None: rows there are older than the state.
      shape: of all of them, as many as there are keys: a file of others may have a key twice.
      convert: makes of them what is read.
    """

    def read() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for (_, reader, at, places), name in zip(chain, tensors, strict=True):
            if name is not None:
                for part, rows in _pieces(reader, name, at, files.num_bytes):
                    yield places[part], convert(rows)

    return LazyRows(shape, read)


def _pieces(
    reader: ShardReader, name: str, at: np.ndarray, num_bytes: int
) -> Iterator[tuple[slice, np.ndarray]]:
    """Yields rows of a tensor, at ascending places, of which `num_bytes` are read at a time."""
    firsts = [first for first, _ in _steps(reader, name, num_bytes)]
    cuts = [*np.searchsorted(at, firsts).tolist(), at.size]
    spans = [(i, j) for i, j in itertools.pairwise(cuts) if i < j]
    ranges = ((int(at[i]), int(at[j - 1]) + 1) for i, j in spans)
    for (i, j), rows in zip(spans, reader.rows(name, ranges), strict=True):
        yield slice(i, j), rows if len(rows) == j - i else rows[at[i:j] - at[i]]


def _conversion(table: AnyTable, dtype: str) -> Callable[[np.ndarray], np.ndarray]:
    """Returns what makes rows of a dtype those of the table."""
    if dtype == table.row_dtype.name:
        return lambda rows: rows
    source, target = row_dtype(dtype), table.row_dtype
    if source.name == "bfloat16":
        return lambda rows: target.to_storage(np, source.to_float32(np, rows))
    return partial(target.to_storage, np)
