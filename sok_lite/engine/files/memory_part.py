"""A table's part of a checkpoint that stays in memory, and travels between ranks.

A message is the length of a JSON text, the text, which describes each part as a manifest would, and
then the tensors of all parts, each from a multiple of 8 bytes on.
"""

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from sok_lite.engine.files.manifest import Shard, shards_from_text, shards_to_text
from sok_lite.engine.files.shard import Tensor
from sok_lite.engine.files.table_file import part_of, tensors_of
from sok_lite.engine.optimizer_states import drop_orphaned_states
from sok_lite.engine.table import EmbeddingTable
from sok_lite.engine.table.exclusive import alone, holding

# Rows of a message have as many bytes, so that their number fits into 31 bits.
WORD = np.dtype((np.int64, (8,)))
_ALIGNED = 8
_SIGHTED = ("sighted_keys", "sightings", "sighting_stamps")


class MemoryPart(NamedTuple):
    """What a rank holds of a table, on the host.

    Attributes:
      shard: what a manifest would say of a file of it. There is none; by its name parts of one
        commit are in the order of the ranks that they were of.
      tensors: by name, what there is.
      arrays: by name, their elements.
    """

    shard: Shard
    tensors: dict[str, Tensor]
    arrays: dict[str, np.ndarray]

    def rows(self, name: str, ranges: Iterator[tuple[int, int]]) -> Iterator[np.ndarray]:
        """Yields rows of a tensor, as `Reader.rows`."""
        for first, last in ranges:
            yield self.arrays[name][first:last]

    def corrupt(self, reason: str) -> ValueError:
        """Returns the error that says that it is."""
        return ValueError(f"What was kept in memory of a table is corrupt: {reason}.")


def parts_of(tables: Sequence[EmbeddingTable], rank: int) -> list[MemoryPart]:
    """Returns a copy of all that tables hold on this rank.

    Raises:
      MemoryError: there is no memory for it.
    """
    for table in tables:
        alone(table, partial(drop_orphaned_states, table))
    return holding(tables, lambda: [_copied(table, rank) for table in tables])


def _copied(table: EmbeddingTable, rank: int) -> MemoryPart:
    # A manifest takes no name that is not like one of its own.
    part = part_of(table, f"data-{rank:016x}/memory.safetensors")
    arrays = {tensor.name: np.empty(tensor.shape, tensor.storage) for tensor in part.tensors}
    # The pieces come tensor after tensor, and none comes of an empty one.
    filling = (array for array in arrays.values() if array.size)
    whole, end = np.empty(0), 0
    for piece in part.arrays:
        if not piece.size:
            continue
        if end == len(whole):
            whole, end = next(filling), 0
        whole[end : end + len(piece)] = piece
        end += len(piece)
    return MemoryPart(part.shard, {tensor.name: tensor for tensor in part.tensors}, arrays)


def divided(table: EmbeddingTable, part: MemoryPart, num_ranks: int) -> list[MemoryPart]:
    """Returns what each of some ranks owns of a part. Places in the index are left out.

    Raises:
      ValueError: the rule that says who owns a key has no owner among so many ranks.
    """

    def places(name: str) -> list[np.ndarray]:
        keys = table.key_dtype.to_int64(np, part.arrays[name])
        owners = table.owner.owners(keys, num_ranks, table.key_dtype, np)
        ends = np.cumsum(np.bincount(owners, minlength=num_ranks))[:-1]
        return np.split(np.argsort(owners, kind="stable"), ends)

    def chosen(at: np.ndarray, sighted_at: np.ndarray) -> MemoryPart:
        shard = part.shard._replace(rows=at.size, sighted=sighted_at.size, slots=False)
        arrays = {
            name: array[sighted_at if name in _SIGHTED else at]
            for name, array in part.arrays.items()
            if name != "slots"
        }
        return MemoryPart(shard, _tensors(table, shard), arrays)

    both = zip(places("keys"), places("sighted_keys"), strict=True)
    return [chosen(*at) for at in both]


def as_message(parts: Sequence[MemoryPart]) -> np.ndarray:
    """Returns parts as (n,) of `WORD`."""
    text = shards_to_text([part.shard for part in parts]).encode()
    head = np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8)
    arrays = [head, *(array for part in parts for array in part.arrays.values())]
    begins = list(itertools.accumulate((_padded(array.nbytes) for array in arrays), initial=0))
    message = np.zeros(-(-begins[-1] // WORD.itemsize), WORD)
    flat = message.reshape(-1).view(np.uint8)
    for begin, array in zip(begins, arrays, strict=False):
        flat[begin : begin + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return message


def from_message(message: np.ndarray, tables: Sequence[EmbeddingTable]) -> list[MemoryPart]:
    """Returns the parts of a message, whose memory they use.

    Args:
      tables: whose parts they are, one after the other and then from the first one on again.
    """
    flat = message.reshape(-1).view(np.uint8)
    begin = 8 + int(flat[:8].view("<i8")[0])
    shards = shards_from_text(flat[8:begin].tobytes())
    begin = _padded(begin)
    parts = []
    for table, shard in zip(itertools.cycle(tables), shards, strict=False):
        tensors, arrays = _tensors(table, shard), {}
        for name, tensor in tensors.items():
            end = begin + tensor.num_bytes
            arrays[name] = flat[begin:end].view(tensor.storage).reshape(tensor.shape)
            begin += _padded(tensor.num_bytes)
        parts.append(MemoryPart(shard, tensors, arrays))
    return parts


def _tensors(table: EmbeddingTable, shard: Shard) -> dict[str, Tensor]:
    tensors = tensors_of(table.dim, table.row_dtype.name, table.key_dtype.name, shard)
    return {tensor.name: tensor for tensor in tensors}


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED) * _ALIGNED
