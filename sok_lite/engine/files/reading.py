"""Reads from the files of a checkpoint, piece by piece, the content of a table on this rank.

If as many ranks wrote the checkpoint as read it, and keys have the same owners, each rank reads
only the file of its own number; otherwise the keys of all files and the rows of its own keys.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np

from sok_lite.comm.protocol import Communicator
from sok_lite.engine.dtypes import row_dtype
from sok_lite.engine.files.manifest_facts import Shard, TableFacts
from sok_lite.engine.files.progress import Progress
from sok_lite.engine.files.saved_file import Convert, SavedFile
from sok_lite.engine.files.shard import ShardReader
from sok_lite.engine.files.table_file import open_shard
from sok_lite.engine.static_table import AnyTable
from sok_lite.engine.table.content_parts import owns
from sok_lite.engine.table.saved import Saved


def shards_of(table: AnyTable, facts: TableFacts, comm: Communicator) -> Sequence[Shard]:
    """Returns the files that have keys of this rank: its own alone, or all."""
    return [facts.shards[comm.rank]] if _is_own(table, facts, comm) else facts.shards


def _is_own(table: AnyTable, facts: TableFacts, comm: Communicator) -> bool:
    """Returns whether each rank has a file with exactly its own keys."""
    return len(facts.shards) == comm.size and facts.owner == table.owner.name


def saved_in(
    table: AnyTable, facts: TableFacts, folder: str, comm: Communicator, progress: Progress | None
) -> Saved:
    """Returns the content of a checkpoint for this rank's part of a table.

    Args:
      facts: the manifest's entry of the table; dim, key type and dtype fit it.
      folder: of the checkpoint.
      progress: told of every chunk when it is read for the first time.

    Raises:
      OSError: a file cannot be read. ValueError: a file is corrupt. Reading may raise the same.
    """

    def opened(shard: Shard) -> ShardReader:
        return open_shard(facts, shard, folder, progress)

    # A file of its own is to a rank as that of one rank alone.
    is_alone = comm.size == 1 or _is_own(table, facts, comm)
    are_own = None if is_alone else owns(table, comm.rank, comm.size)
    convert = _conversion(table, facts.dtype)
    # A key that several have is that of the lowest rank.
    return Saved.of(
        [SavedFile(shard, opened, are_own, convert) for shard in shards_of(table, facts, comm)]
    )


def _conversion(table: AnyTable, dtype: str) -> Convert:
    """Returns the function that converts rows of a dtype to that of the table."""
    if dtype == table.row_dtype.name:
        return lambda rows: rows
    source, target = row_dtype(dtype), table.row_dtype
    if source.name == "bfloat16":
        return lambda rows: target.to_storage(np, source.to_float32(np, rows))
    return partial(target.to_storage, np)
