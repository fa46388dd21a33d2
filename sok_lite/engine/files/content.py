"""What the files of a checkpoint have for a table of this rank: a snapshot whose rows stay there.

Keys and what goes with each are in memory, as in the table's index; rows come in pieces as they are
asked for. Where as many ranks wrote the checkpoint as read it, and the keys have the same owners,
each rank reads the file of its own number alone; else the keys of all files and the rows of its own
keys.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from sok_lite.backend import Array
from sok_lite.comm.protocol import Communicator
from sok_lite.engine.dtypes import row_dtype
from sok_lite.engine.files.chain import rows_of, tensors_of_chain
from sok_lite.engine.files.manifest import Shard, TableFacts
from sok_lite.engine.files.progress import Progress
from sok_lite.engine.files.shard import ShardReader
from sok_lite.engine.files.table_file import open_shard
from sok_lite.engine.static_table import AnyTable
from sok_lite.engine.table.content import one_of_each, owns
from sok_lite.engine.table.joined import joined_facts, joined_states, without_slots
from sok_lite.engine.table.snapshot import Held, LazyRows, Snapshot, State


class _Part(NamedTuple):
    """Keys of one file that belong to this rank.

    Attributes:
      reader: of the file.
      at: (k,) int64, ascending, where they are in the file.
      places: (k,) int64, where they are among all keys of this rank.
      num_rows: how many there are in the file.
    """

    reader: ShardReader
    at: np.ndarray
    places: np.ndarray
    num_rows: int

    def rows(self, name: str, num_bytes: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields (places, rows) of a tensor, of which at most `num_bytes` are read at a time."""
        step = max(1, num_bytes // max(1, self.reader.tensors[name].row_bytes))
        cuts = np.searchsorted(self.at, np.arange(0, self.num_rows + step, step))
        spans = [(i, j) for i, j in itertools.pairwise(cuts.tolist()) if i < j]
        ranges = ((int(self.at[i]), int(self.at[j - 1]) + 1) for i, j in spans)
        for (i, j), rows in zip(spans, self.reader.rows(name, ranges), strict=True):
            yield self.places[i:j], rows[self.at[i:j] - self.at[i]]


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
) -> Snapshot:
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
    shards = shards_of(table, facts, comm)
    has_all = _is_own(table, facts, comm) or comm.size == 1

    def opened(shard: Shard) -> ShardReader:
        return open_shard(facts, shard, folder, progress)

    readers = [opened(shard) for shard in shards]
    chosen = [_keys(table, reader, comm, has_all, num_bytes) for reader in readers]
    key_type = table.key_dtype.dtype
    keys = np.concatenate([np.empty(0, key_type), *(keys for _, keys in chosen)])
    # That of the lowest rank, where several had the key.
    kept, _ = one_of_each(keys, "first")
    places = np.full(keys.size, -1)
    places[kept] = np.arange(kept.size)
    keys = keys[kept]
    parts, start = [], 0
    for reader, shard, (at, _) in zip(readers, shards, chosen, strict=True):
        its = places[start : start + at.size]
        start += at.size
        parts.append(_Part(reader, at[its >= 0], its[its >= 0], shard.rows))
    sighted = _sighted(table, readers, comm, has_all, num_bytes)
    held = _held(table, shards, parts, keys, sighted, num_bytes)
    n, to_storage = int(held.keys.size), _conversion(table, facts.dtype)
    rows = [
        _with_rows(opened, shard, part, keys) for shard, part in zip(shards, parts, strict=True)
    ]
    with_values = [(part, "values") for its_rows in rows for _, part in its_rows]
    values = _pieces(table, with_values, (n, table.dim), num_bytes)
    values = values._replace(read=_converted(values.read, to_storage))
    return Snapshot(held, values, _states(table, shards, rows, n, num_bytes))


def _with_rows(
    opened: Callable[[Shard], ShardReader], shard: Shard, part: _Part, keys: np.ndarray
) -> list[tuple[Shard, _Part]]:
    """Returns the files that have the rows of a part, newest first, and where."""
    readers = [*map(opened, shard.before), part.reader]
    return [
        (rows.shard, _Part(rows.reader, rows.at, part.places[rows.places], rows.shard.num_rows))
        for rows in rows_of(shard, readers, keys[part.places], part.at)
    ]


def _steps(reader: ShardReader, name: str, num_bytes: int) -> Iterator[tuple[int, int]]:
    tensor = reader.tensors[name]
    num_rows, step = tensor.shape[0], max(1, num_bytes // max(1, tensor.row_bytes))
    for first in range(0, num_rows, step):
        yield first, min(first + step, num_rows)


def _keys(
    table: AnyTable,
    reader: ShardReader,
    comm: Communicator,
    has_all: bool,
    num_bytes: int,
    name: str = "keys",
) -> tuple[np.ndarray, np.ndarray]:
    """Returns where the keys of this rank are in a file, and those keys."""
    found, chosen = [np.empty(0, np.int64)], [np.empty(0, table.key_dtype.dtype)]
    steps, are_own = list(_steps(reader, name, num_bytes)), owns(table, comm.rank, comm.size)
    for (first, _), keys in zip(steps, reader.rows(name, iter(steps)), strict=True):
        if has_all:
            at = np.arange(keys.size)
        else:
            at = np.flatnonzero(are_own(keys))
        found.append(at + first)
        chosen.append(keys[at])
    return np.concatenate(found), np.concatenate(chosen)


def _held(
    table: AnyTable,
    shards: Sequence[Shard],
    parts: Sequence[_Part],
    keys: np.ndarray,
    sighted: tuple[np.ndarray, np.ndarray, np.ndarray],
    num_bytes: int,
) -> Held:
    from_host = table.backend.from_host

    def gathered(name: str, dtype: Any) -> np.ndarray:
        whole = np.zeros(keys.size, dtype)
        for part in parts:
            for places, numbers in part.rows(name, num_bytes):
                whole[places] = numbers
        return whole

    facts = joined_facts([shard.facts for shard in shards])
    none = np.empty(0, np.int64)
    is_whole = len(shards) == 1 and keys.size == shards[0].rows
    has_scores = all(shard.scores for shard in shards)
    slots = gathered("slots", np.int64) if is_whole and shards[0].slots else none
    if not is_whole:
        facts = without_slots(facts)
    scores = gathered("scores", np.uint64) if has_scores else none.astype(np.uint64)
    return Held(
        from_host(keys),
        from_host(np.empty(0, np.uint32)),
        from_host(gathered("stamps", np.uint32)),
        from_host(scores),
        from_host(slots),
        from_host(sighted[0]),
        from_host(sighted[1]),
        from_host(sighted[2]),
        facts,
    )


def _sighted(
    table: AnyTable,
    readers: Sequence[ShardReader],
    comm: Communicator,
    has_all: bool,
    num_bytes: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the keys that were seen and have no row, as int64, how often, and when last."""
    keys = [np.empty(0, np.int64)]
    counts, stamps = [np.empty(0, np.uint32)], [np.empty(0, np.uint32)]
    for reader in readers:
        at, found = _keys(table, reader, comm, has_all, num_bytes, "sighted_keys")
        num_rows = reader.tensors["sighted_keys"].shape[0]
        part = _Part(reader, at, np.arange(at.size), num_rows)
        keys.append(table.key_dtype.to_int64(np, found))
        counts.extend(rows for _, rows in part.rows("sightings", num_bytes))
        stamps.extend(rows for _, rows in part.rows("sighting_stamps", num_bytes))
    all_keys = np.concatenate(keys)
    first, _ = one_of_each(all_keys, "first")
    return all_keys[first], np.concatenate(counts)[first], np.concatenate(stamps)[first]


def _states(
    table: AnyTable,
    shards: Sequence[Shard],
    rows: Sequence[Sequence[tuple[Shard, _Part]]],
    n: int,
    num_bytes: int,
) -> list[State]:
    states = []
    for name, dim, initial, group, in_files in joined_states([shard.states for shard in shards]):
        its: list[tuple[_Part, str]] = []
        for i, newest in in_files.items():
            tensors = reversed(tensors_of_chain(shards[i], newest))
            parts = zip(rows[i], tensors, strict=True)
            its += [(part, tensor) for (_, part), tensor in parts if tensor is not None]
        pieces = _pieces(table, its, (n, dim), num_bytes)
        states.append(State(name, dim, initial, pieces, group))
    return states


def _pieces(
    table: AnyTable,
    tensors: Sequence[tuple[_Part, str]],
    shape: tuple[int, int],
    num_bytes: int,
) -> LazyRows:
    from_host = table.backend.from_host

    def read() -> Iterator[tuple[Array, Array]]:
        for part, name in tensors:
            for places, rows in part.rows(name, num_bytes):
                yield from_host(places), from_host(rows)

    return LazyRows(shape, read)


def _conversion(table: AnyTable, dtype: str) -> Callable[[Array], Array]:
    """Returns what makes rows of a dtype those of the table."""
    if dtype == table.row_dtype.name:
        return lambda rows: rows
    xp, source = table.backend.xp, row_dtype(dtype)
    if source.name == "bfloat16":
        return lambda rows: table.row_dtype.to_storage(xp, source.to_float32(xp, rows))
    return partial(table.row_dtype.to_storage, xp)


def _converted(
    read: Callable[[], Iterator[tuple[Array, Array]]], convert: Callable[[Array], Array]
) -> Callable[[], Iterator[tuple[Array, Array]]]:
    return lambda: ((places, convert(rows)) for places, rows in read())
