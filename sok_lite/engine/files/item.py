"""The items of a checkpoint: dynamic tables, and parts of static tables, behind one interface."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, TypeAlias

from sok_lite.comm.protocol import Communicator
from sok_lite.engine.files.increment import remember_file
from sok_lite.engine.files.manifest import Shard, TableFacts
from sok_lite.engine.files.progress import Progress
from sok_lite.engine.files.saved_file import saved_in
from sok_lite.engine.files.shard import CHUNK_BYTES
from sok_lite.engine.files.table_file import ShardContent, shard_content
from sok_lite.engine.files.text_file import texts_in
from sok_lite.engine.static_table import AnyTable
from sok_lite.engine.table import EmbeddingTable
from sok_lite.engine.table.restore import Swap, merge, prepare_restore
from sok_lite.engine.texts import TextStore


class Item(ABC):
    """A table, or this rank's part of one, in a checkpoint.

    Attributes:
      equal_on_all_ranks: values that must be, beside kinds and names.
      texts: of keys, saved with the table; None: it keeps none.
    """

    table: AnyTable
    equal_on_all_ranks: tuple[Any, ...] = ()
    texts: TextStore | None = None

    @abstractmethod
    def part(
        self, folder: str, file: str, comm: Communicator, chunk_bytes: int, before: Shard | None
    ) -> ShardContent:
        """Returns the part that this rank writes. Lock the table until its last array is read.

        Args:
          folder: of the checkpoint.
          file: the new one, relative to the folder, with "/".
          chunk_bytes: of a piece at most.
          before: the file of this rank that an increment continues; None: all is written.
        """

    @abstractmethod
    def prepare_load(
        self,
        facts: TableFacts,
        folder: str,
        comm: Communicator,
        mode: str,
        on_full: str,
        progress: Progress,
    ) -> Swap:
        """Loads this rank's part from a checkpoint of any number of ranks, beside the old content.

        Args:
          facts: the manifest's entry of the table.
          mode: "replace" or "merge".
          on_full: "error" or "evict".

        Raises:
          OSError: a file cannot be read. ValueError: a file is corrupt, or does not fit.

        Returns:
          A function that replaces the old content; it cannot fail.
        """


class _DynamicTable(Item):
    def __init__(self, table: EmbeddingTable) -> None:
        self.table: EmbeddingTable = table
        self.texts = table.texts
        if self.texts is not None:
            self.equal_on_all_ranks = ("with texts",)

    def part(
        self, folder: str, file: str, comm: Communicator, chunk_bytes: int, before: Shard | None
    ) -> ShardContent:
        made = shard_content(self.table, file, chunk_bytes, before)
        remember_file(self.table, folder, made.shard)
        return made

    def prepare_load(
        self,
        facts: TableFacts,
        folder: str,
        comm: Communicator,
        mode: str,
        on_full: str,
        progress: Progress,
    ) -> Swap:
        table, texts = self.table, self.texts
        saved = saved_in(table, facts, folder, comm, progress)
        if mode == "merge":
            saved = merge(table, saved, CHUNK_BYTES)
        swap_table = prepare_restore(table, saved, evicts=on_full == "evict")
        if texts is None:
            return swap_table
        new_texts = texts_in(facts, folder, comm.rank, comm.size)
        if mode == "merge":
            new_texts |= texts.all()

        def swap() -> None:
            swap_table()
            texts.replace(new_texts)

        return swap


ItemOrTable: TypeAlias = EmbeddingTable | Item


def items_of(tables: Iterable[Any], what: str) -> list[Item]:
    """Returns tables as items of a "dump" or "load".

    Raises:
      TypeError: one is no table whose rows are in this process.
    """
    for table in tables:
        if not isinstance(table, (EmbeddingTable, Item)):
            raise TypeError(
                f"{what} takes tables whose rows are in this process. Received: {table!r}."
            )
    return [table if isinstance(table, Item) else _DynamicTable(table) for table in tables]


def tables_of(items: Iterable[Item]) -> list[EmbeddingTable]:
    """Returns the dynamic tables among items: they are locked while they are read or changed."""
    return [item.table for item in items if isinstance(item.table, EmbeddingTable)]
