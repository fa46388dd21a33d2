"""What a rank writes into one file of a checkpoint."""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from sok_lite.engine.files.manifest import Shard, path_of
from sok_lite.engine.files.progress import Progress
from sok_lite.engine.files.shard import ShardWriter, Tensor


class ShardContent(NamedTuple):
    """A table's part of a checkpoint on one rank.

    Attributes:
      table: name of the table.
      shard: what the manifest says of the file, but for `written`.
      tensors: of the file.
      arrays: their elements, in pieces on the host. They are taken from the table as they are asked
        for: hold it until the last one came.
    """

    table: str
    shard: Shard
    tensors: list[Tensor]
    arrays: Iterable[np.ndarray]

    @property
    def num_bytes(self) -> int:
        """Bytes of the file without its header."""
        return sum(tensor.num_bytes for tensor in self.tensors)


def copied(part: ShardContent) -> ShardContent:
    """Returns a part that needs its table no more: all of it is on the host, until it is written.

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
      chunk_bytes: see `Written`.
      progress: told of every byte of the tensors.

    Returns:
      What the manifest says of the file, which is on the disk.

    Raises:
      OSError: it cannot be written.
    """
    about = {"table": part.table}
    path = path_of(folder, part.shard)
    writer = ShardWriter(path, part.tensors, about, chunk_bytes, progress)
    try:
        for array in part.arrays:
            writer.write(array)
        return part.shard._replace(written=writer.finish())
    finally:
        writer.close()
