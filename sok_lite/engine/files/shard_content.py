"""The content of one file of a checkpoint, before it is written."""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from sok_lite.engine.files.manifest_facts import Shard, path_of
from sok_lite.engine.files.progress import Progress
from sok_lite.engine.files.safetensors_header import Tensor
from sok_lite.engine.files.shard import ShardWriter
from sok_lite.engine.files.text_file import tensors_of_texts, write_texts
from sok_lite.engine.texts import KeyTexts


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
