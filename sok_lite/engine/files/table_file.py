"""A rank's file of a table in a checkpoint: its tensors, and how they are written.

n keys in the order of the index, and m pending keys, which were seen but have no row yet:

  keys             (n,)       the table's key type
  values           (n, dim)   rows
  stamps           (n,)       U32, number of the lookup that last saw each key
  scores           (n,)       U64, unless they are the stamps
  slots            (n,)       I64, positions in a "hybrid" index, if a restore can use them
  states.<i>.<s>   (n, dim)   F32, the i-th optimizer state, named s by its optimizer
  sighted_keys     (m,)       the table's key type
  sightings        (m,)       U32, how often each pending key was seen
  sighting_stamps  (m,)       U32, number of the lookup that last saw each

An increment lacks the rows of values and states that have not changed since the file before. Keys
that a lookup saw or a write changed come first, so row i belongs to key i. If the table logs
removals, it has one tensor more, with the r keys that were removed since the file before:

  removed          (r,)       the table's key type
"""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from sok_lite.engine.files.increment import increment_of
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
    """What a rank writes of a table.

    Attributes:
      table: name of the table.
      shard: the manifest's entry of the file, without `written`.
      arrays: the content of `tensors`, in pieces on the host. Iteration reads from the table: lock
        it until the last one.
      texts: that this rank writes; None if the table keeps none.
    """

    table: str
    shard: Shard
    tensors: list[Tensor]
    arrays: Iterable[np.ndarray]
    texts: KeyTexts | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors, and of those of the texts."""
        tensors = list(self.tensors)
        if self.texts is not None:
            tensors += tensors_of_texts(self.texts.keys.size, self.texts.data.size)
        return sum(tensor.num_bytes for tensor in tensors)


def tensors_of(dim: int, dtype: str, key_type: str, shard: Shard) -> list[Tensor]:
    """Returns the tensors of a file of a table, in order."""
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
    """Returns a reader of a table's file, after checking its header against the manifest.

    Args:
      progress: counts every chunk when it is first read.

    Raises:
      OSError: the file cannot be read. ValueError: it is corrupt.
    """
    reader = ShardReader(path_of(folder, shard), shard.written, facts.name, progress)
    for tensor in tensors_of(facts.dim, facts.dtype, facts.key_type, shard):
        reader.expect(tensor)
    return reader


def shard_content(
    table: EmbeddingTable, file: str, chunk_bytes: int = CHUNK_BYTES, before: Shard | None = None
) -> ShardContent:
    """Returns what this rank writes of a table. Lock the table until the last array.

    Args:
      file: the new file, relative to the folder of the checkpoint, with "/".
      chunk_bytes: the most bytes of a piece.
      before: the file that this increment continues; None: a complete file.

    Raises:
      RuntimeError: the table no longer knows what has changed since `before`.
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
        shard, part.since = increment_of(shard, before, part)
        if table.removals is not None and table.removals.since <= part.since:
            removed = table.backend.to_host(table.removed_since(part.since))
            shard = shard._replace(removed=removed.size)
    tensors = tensors_of(table.dim, table.row_dtype.name, table.key_dtype.name, shard)
    return ShardContent(table.name, shard, tensors, _arrays(part, removed))


def _arrays(part: TablePart, removed: np.ndarray | None) -> Iterator[np.ndarray]:
    """Yields all tensors in pieces on the host; `removed` last, if it is a tensor of the file."""
    names = ["keys", "value", *part.columns, *range(len(part.states)), *PENDING]
    for name in names:
        yield from map(part.table.backend.to_host, part.read(name))
    if removed is not None:
        yield removed


def copy_to_host(part: ShardContent) -> ShardContent:
    """Returns a copy on the host, which needs no lock of the table. MemoryError: no room for it."""
    arrays = deque(part.arrays)
    # Each array is freed when it has been written.
    return part._replace(arrays=(arrays.popleft() for _ in range(len(arrays))))


def write_content(part: ShardContent, folder: str, chunk_bytes: int, progress: Progress) -> Shard:
    """Writes a file and that of its texts, and syncs them to disk.

    Args:
      folder: of the checkpoint.
      chunk_bytes: bytes per checksum.
      progress: counts every byte of the tensors.

    Returns:
      The manifest's entry of the file.
    """
    path = path_of(folder, part.shard)
    writer = ShardWriter(path, part.tensors, {"table": part.table}, chunk_bytes, progress)
    try:
        for array in part.arrays:
            writer.write(array)
        shard = part.shard._replace(written=writer.finish())
    finally:
        writer.close()
    if part.texts is None:
        return shard
    texts = write_texts(part.texts, part.table, folder, shard.file, chunk_bytes, progress)
    return shard._replace(texts=texts)
