"""The items of a checkpoint: tables of keys, and parts of static tables, behind one interface."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import partial
from typing import Any, TypeAlias

from sok_lite.comm.protocol import Communicator
from sok_lite.engine.files.increment import remember_file
from sok_lite.engine.files.manifest import Shard, TableFacts
from sok_lite.engine.files.progress import Progress
from sok_lite.engine.files.saved_file import saved_in
from sok_lite.engine.files.shard import CHUNK_BYTES
from sok_lite.engine.files.table_file import ShardContent, part_of
from sok_lite.engine.files.text_file import texts_in
from sok_lite.engine.optimizer_states import drop_orphaned_states
from sok_lite.engine.static_table import AnyTable
from sok_lite.engine.table import EmbeddingTable
from sok_lite.engine.table.exclusive import alone
from sok_lite.engine.table.restore import Swap, merge, prepare_restore
from sok_lite.engine.texts import TextStore


class Item(ABC):
    """A table, or this rank's part of one, in a checkpoint.

    Attributes:
      table: the table.
      tables_to_lock: while the item is read or changed.
      of_all_ranks: values that must be equal on all ranks, beside kinds and names.
      texts: of keys, that go with the table; None: it keeps none.
    """

    table: AnyTable
    tables_to_lock: tuple[EmbeddingTable, ...] = ()
    of_all_ranks: tuple[Any, ...] = ()
    texts: TextStore | None = None

    @abstractmethod
    def part(
        self, folder: str, file: str, comm: Communicator, chunk_bytes: int, before: Shard | None
    ) -> ShardContent:
        """Returns the part that this rank writes. Lock the tables until its last array is read.

        Args:
          folder: of the checkpoint.
          file: the new one, relative to the folder, with "/".
          chunk_bytes: the most bytes of a piece.
          before: the file of this rank that is continued; None: all is written.
        """

    @abstractmethod
    def loaded(
        self,
        facts: TableFacts,
        folder: str,
        comm: Communicator,
        mode: str,
        on_full: str,
        progress: Progress,
    ) -> Swap:
        """Loads this rank's part from a checkpoint of any number of ranks, beside what there is.

        Args:
          facts: the manifest's entry of the table.
          mode: "replace" or "merge".
          on_full: "error" or "evict".

        Raises:
          OSError: a file cannot be read. ValueError: a file is corrupt, or does not fit.

        Returns:
          What puts it in the place of what there is; it cannot fail.
        """


class _TableItem(Item):
    """A table of keys."""

    def __init__(self, table: EmbeddingTable) -> None:
        self.table, self.tables_to_lock, self.texts = table, (table,), table.texts
        if self.texts is not None:
            self.of_all_ranks = ("with texts",)

    def part(
        self, folder: str, file: str, comm: Communicator, chunk_bytes: int, before: Shard | None
    ) -> ShardContent:
        (table,) = self.tables_to_lock
        made = part_of(table, file, chunk_bytes, before)
        remember_file(table, folder, made.shard)
        return made

    def loaded(
        self,
        facts: TableFacts,
        folder: str,
        comm: Communicator,
        mode: str,
        on_full: str,
        progress: Progress,
    ) -> Swap:
        (table,) = self.tables_to_lock
        saved = saved_in(table, facts, folder, comm, progress)
        if mode == "merge":
            saved = merge(table, saved, CHUNK_BYTES)
        swap_table = prepare_restore(table, saved, evicts=on_full == "evict")
        kept = self.texts
        if kept is None:
            return swap_table
        texts = texts_in(facts, folder, comm.rank, comm.size)
        if mode == "merge":
            texts |= kept.all()

        def swap() -> None:
            swap_table()
            kept.replace(texts)

        return swap


# What programs name: a table, or a part of a static one.
Named: TypeAlias = EmbeddingTable | Item


def items_of(tables: Iterable[Any], what: str) -> list[Item]:
    """Returns tables as items.

    Args:
      what: "dump" or "load".

    Raises:
      TypeError: one is no table whose rows are in this process.
    """
    for table in tables:
        if not isinstance(table, (EmbeddingTable, Item)):
            raise TypeError(
                f"{what} takes tables whose rows are in this process. Received: {table!r}."
            )
    return [table if isinstance(table, Item) else _TableItem(table) for table in tables]


def tables_of(items: Iterable[Item]) -> list[EmbeddingTable]:
    """Returns the tables to lock while items are read or changed."""
    return [table for item in items for table in item.tables_to_lock]


def keyed_tables_of(items: Iterable[Item]) -> list[EmbeddingTable]:
    """Returns the tables of keys among items."""
    return [item.table for item in items if isinstance(item.table, EmbeddingTable)]


def forget_gone_optimizers(items: Iterable[Item]) -> None:
    """Drops the states of optimizers that are gone: they are not written."""
    for table in tables_of(items):
        alone(table, partial(drop_orphaned_states, table))
