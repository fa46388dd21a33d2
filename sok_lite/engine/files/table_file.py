"""A table's part of a checkpoint on one rank: the tensors of its file, and how they are written.

n keys, in the order of the index, and m keys that were seen and have no row yet:

  keys             (n,)       the table's key type
  values           (n, dim)   rows
  stamps           (n,)       U32, number of the lookup that last saw each key
  scores           (n,)       U64, where they are not the stamps
  slots            (n,)       I64, positions in a "hybrid" index, if a restore can use them
  states.<i>.<s>   (n, dim)   F32, rows of the i-th optimizer state, which its optimizer calls s
  sighted_keys     (m,)       the table's key type
  sightings        (m,)       U32, pending counts: how often each was seen
  sighting_stamps  (m,)       U32, number of the lookup that last saw each

An increment has all of this but the rows of values and states that have not changed. The keys that
a lookup has seen, or a write changed, since the file before come first; so row i is that of key i.
Where the table logs removals it has one tensor more, with r keys that were there before:

  removed          (r,)       the table's key type
"""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from sok_lite.engine.files.increment import continuing
from sok_lite.engine.files.manifest import Shard, StateFacts, TableFacts, path_of
from sok_lite.engine.files.progress import Progress
from sok_lite.engine.files.shard import (
    CHUNK_BYTES,
    NOT_WRITTEN,
    ShardReader,
    ShardWriter,
    Tensor,
    dtype_of,
)
from sok_lite.engine.files.text_file import tensors_of_texts, write_texts
from sok_lite.engine.table import EmbeddingTable
from sok_lite.engine.table.content import PENDING, TablePart
from sok_lite.engine.texts import KeyTexts

REMOVED = "removed"


class ShardContent(NamedTuple):
    """A table's part of a checkpoint on one rank.

    Attributes:
      table: name of the table.
      shard: the manifest's entry of the file, without `written`.
      tensors: of the file.
      arrays: their elements, in pieces on the host. Each is read from the table when it is taken
        from the iterator: lock the table until the last one.
      texts: that this rank writes; None: the table keeps none.
    """

    table: str
    shard: Shard
    tensors: list[Tensor]
    arrays: Iterable[np.ndarray]
    texts: KeyTexts | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the file, and of that of its texts, without their headers."""
        tensors = list(self.tensors)
        if self.texts is not None:
            tensors += tensors_of_texts(self.texts.keys.size, self.texts.data.size)
        return sum(tensor.num_bytes for tensor in tensors)


def tensors_of(dim: int, dtype: str, key_type: str, shard: Shard) -> list[Tensor]:
    """Returns the tensors of a file, in their order.

    Args:
      dim, dtype, key_type: of the table.
      shard: has the numbers of keys and rows; `written` is not used.
    """
    n, m, k, key = shard.rows, shard.sighted, shard.num_rows, dtype_of(key_type)
    return [
        Tensor("keys", key, (n,)),
        Tensor("values", dtype_of(dtype), (k, dim)),
        Tensor("stamps", "U32", (n,)),
        *([Tensor("scores", "U64", (n,))] if shard.scores else []),
        *([Tensor("slots", "I64", (n,))] if shard.slots else []),
        *(Tensor(state.tensor, "F32", (k, state.dim)) for state in shard.states),
        Tensor("sighted_keys", key, (m,)),
        Tensor("sightings", "U32", (m,)),
        Tensor("sighting_stamps", "U32", (m,)),
        *([] if shard.removed is None else [Tensor(REMOVED, key, (shard.removed,))]),
    ]


def open_shard(
    facts: TableFacts, shard: Shard, folder: str, progress: Progress | None = None
) -> ShardReader:
    """Returns a reader of a file of a table, which has the tensors that the manifest implies.

    Args:
      facts: of the table.
      shard: one of its files.
      folder: of the checkpoint.
      progress: told of every chunk when it is read for the first time.

    Raises:
      OSError: the file cannot be read. ValueError: it is corrupt.
    """
    reader = ShardReader(path_of(folder, shard), shard.written, facts.name, progress)
    for tensor in tensors_of(facts.dim, facts.dtype, facts.key_type, shard):
        reader.expect(tensor)
    return reader


def part_of(
    table: EmbeddingTable, file: str, chunk_bytes: int = CHUNK_BYTES, before: Shard | None = None
) -> ShardContent:
    """Returns the part of a table to write. Lock it, as `holding` does, until the last array.

    Args:
      file: the new file, relative to the folder of the checkpoint, with "/".
      chunk_bytes: the most bytes of a piece.
      before: the file that this one continues as an increment; None: it has all rows.

    Raises:
      RuntimeError: the table does not know any more what has changed since `before`.
    """
    part, removed = TablePart(table, chunk_bytes), None
    states = tuple(
        StateFacts(f"states.{i}.{state.name}", state.name, state.dim, state.initial, state.group)
        for i, state in enumerate(part.states)
    )
    has = ("scores" in part.columns, "slots" in part.columns)
    sizes = (part.num_keys, part.num_pending, *has)
    shard = Shard(file, *sizes, states, part.facts, NOT_WRITTEN)
    if before is not None:
        shard, part.since = continuing(shard, before, part)
        if table.removals is not None and table.removals.since <= part.since:
            removed = table.backend.to_host(table.removed_since(part.since))
            shard = shard._replace(removed=removed.size)
    tensors = tensors_of(table.dim, table.row_dtype.name, table.key_dtype.name, shard)
    return ShardContent(table.name, shard, tensors, _arrays(part, removed))


def _arrays(part: TablePart, removed: np.ndarray | None) -> Iterator[np.ndarray]:
    """Yields all tensors in chunks, on the host.

    Args:
      removed: of an increment that names them, the keys that were removed.
    """
    names = ["keys", "value", *part.columns, *range(len(part.states)), *PENDING]
    for name in names:
        yield from map(part.table.backend.to_host, part.read(name))
    if removed is not None:
        yield removed


def copied(part: ShardContent) -> ShardContent:
    """Returns a copy of a part on the host, which does not need its table any more.

    Raises:
      MemoryError: there is no memory for it.
    """
    return part._replace(arrays=_drained(deque(part.arrays)))


def _drained(arrays: "deque[np.ndarray]") -> Iterator[np.ndarray]:
    while arrays:
        yield arrays.popleft()


def write_part(part: ShardContent, folder: str, chunk_bytes: int, progress: Progress) -> Shard:
    """Writes a part, chunk by chunk.

    Args:
      folder: of the checkpoint.
      chunk_bytes: bytes that have one checksum.
      progress: told of every byte of the tensors.

    Returns:
      The manifest's entry of the file, which is synced to disk.

    Raises:
      OSError: it cannot be written.
    """
    about = {"table": part.table}
    path = path_of(folder, part.shard)
    writer = ShardWriter(path, part.tensors, about, chunk_bytes, progress)
    try:
        for array in part.arrays:
            writer.write(array)
        shard = part.shard._replace(written=writer.finish())
    finally:
        writer.close()
    if part.texts is None:
        return shard
    where = (part.table, folder, shard.file, chunk_bytes, progress)
    return shard._replace(texts=write_texts(part.texts, *where))
