"""A table's part of a checkpoint on one rank: the tensors of its file, and how they are written.

n keys, in the order of the index, and m keys that were seen and have no row yet:

  keys             (n,)       the table's key type
  values           (n, dim)   rows
  stamps           (n,)       U32, number of the lookup that last saw each key
  scores           (n,)       U64, where they are not the stamps
  slots            (n,)       I64, places in a "hybrid" index, where they say anything
  states.<i>.<s>   (n, dim)   F32, rows of the i-th optimizer state, which its optimizer calls s
  sighted_keys     (m,)       the table's key type
  sightings        (m,)       U32, how often each was seen
  sighting_stamps  (m,)       U32, number of the lookup that last saw each
"""

from collections.abc import Iterator

import numpy as np

from sok_lite.engine.files.manifest import Shard, StateFacts
from sok_lite.engine.files.part import Part
from sok_lite.engine.files.shard import CHUNK_BYTES, Tensor, Written, dtype_of
from sok_lite.engine.table import EmbeddingTable
from sok_lite.engine.table.pieces import Outline, outline, pieces, sighted_pieces

# What goes with each key beside its rows; of the index alone, so never more than this a key.
_ENTRY_BYTES = 32
# Of a file that is not there yet.
NOTHING_WRITTEN = Written(0, 1, ())


def tensors_of(dim: int, dtype: str, key_type: str, shard: Shard) -> list[Tensor]:
    """Returns the tensors of a file, in their order.

    Args:
      dim, dtype, key_type: of the table.
      shard: says how much there is; `written` is not looked at.
    """
    n, m, key = shard.rows, shard.sighted, dtype_of(key_type)
    return [
        Tensor("keys", key, (n,)),
        Tensor("values", dtype_of(dtype), (n, dim)),
        Tensor("stamps", "U32", (n,)),
        *([Tensor("scores", "U64", (n,))] if shard.scores else []),
        *([Tensor("slots", "I64", (n,))] if shard.slots else []),
        *(Tensor(state.tensor, "F32", (n, state.dim)) for state in shard.states),
        Tensor("sighted_keys", key, (m,)),
        Tensor("sightings", "U32", (m,)),
        Tensor("sighting_stamps", "U32", (m,)),
    ]


def part_of(table: EmbeddingTable, file: str, chunk_bytes: int = CHUNK_BYTES) -> Part:
    """Returns what is written of a table. Hold it, as `holding` does, to the last array.

    Args:
      file: the new file, relative to the folder of the checkpoint, with "/".
      chunk_bytes: of a piece at most.
    """
    held = outline(table)
    states = tuple(
        StateFacts(f"states.{i}.{name}", name, column.dim, float(column.initial), group)
        for i, (group, name, column) in enumerate(held.states)
    )
    sizes = (held.num_keys, held.num_sighted, held.has_scores, held.has_slots)
    shard = Shard(file, *sizes, states, held.facts, NOTHING_WRITTEN)
    tensors = tensors_of(table.dim, table.row_dtype.name, table.key_dtype.name, shard)
    return Part(table.name, shard, tensors, _arrays(table, held, chunk_bytes))


def _arrays(table: EmbeddingTable, held: Outline, chunk_bytes: int) -> Iterator[np.ndarray]:
    """Yields all tensors in pieces of a chunk at most, on the host."""
    to_host, store = table.backend.to_host, table.store
    columns = [column for *_, column in held.states]
    widest = max(column.row_bytes for column in (store.column(), *columns))
    num_slots = max(1, chunk_bytes // max(widest, _ENTRY_BYTES))
    names = ["keys", "value", "stamps"]
    names += ["scores"] * held.has_scores + ["slots"] * held.has_slots
    for name in names:
        for piece in pieces(table, num_slots):
            yield to_host(store.read(piece.rows) if name == "value" else getattr(piece, name))
    for column in columns:
        for piece in pieces(table, num_slots):
            yield to_host(store.read(piece.rows, column.name))
    for name in ("keys", "rows", "stamps"):
        for piece in sighted_pieces(table, num_slots):
            yield to_host(getattr(piece, name))
