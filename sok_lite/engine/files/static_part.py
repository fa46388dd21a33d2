"""Static tables in a checkpoint: a file has the numbers of rows as keys, and says no more of them.

So any reader of the files of dynamic tables reads these, and a table of either kind takes what the
other had, if the keys are those that it has. The rows themselves are kept by somebody else.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

import numpy as np

from sok_lite.backend.publish import Action
from sok_lite.comm.protocol import Communicator
from sok_lite.engine.files.content import content
from sok_lite.engine.files.item import Item
from sok_lite.engine.files.manifest import Shard, StateFacts, TableFacts
from sok_lite.engine.files.part import Part
from sok_lite.engine.files.progress import Progress
from sok_lite.engine.files.shard import CHUNK_BYTES
from sok_lite.engine.files.table_file import NOT_WRITTEN, tensors_of
from sok_lite.engine.static_table import StaticTable
from sok_lite.engine.table.lazy_rows import whole

# Takes the name of a column, "value" or that of a state, and [first, last) of this rank's rows.
ReadRows: TypeAlias = Callable[[str, int, int], np.ndarray]


class StaticPart(Item):
    """This rank's rows of a static table, and their optimizer states.

    Args:
      table: whose rows they are.
      states: of one optimizer, which have as many elements as a row; None: they are left out.

    Attributes:
      table, states: the same.
    """

    def __init__(self, table: StaticTable, states: tuple[str, ...] | None = None) -> None:
        self.table: StaticTable = table
        self.states, self.of_all_ranks = states, (table.num_rows,)

    @abstractmethod
    def reading(self) -> ReadRows:
        """Returns what reads rows as they are now, whatever becomes of them until it is called.

        It returns (last - first, dim) on the host, of the storage dtype; of a state float32.
        """

    @abstractmethod
    def assigning(self, columns: Mapping[str, np.ndarray]) -> list[Action]:
        """Prepares to set all rows of columns, of the shapes and dtypes that `reading` gives."""

    # ---------------------------------------------------------------- as an item of a checkpoint

    def part(
        self, folder: str, file: str, comm: Communicator, chunk_bytes: int, before: Shard | None
    ) -> Part:
        table, numbers = self.table, self.table.row_numbers(comm.rank, comm.size)
        states = tuple(
            StateFacts(f"states.{i}.{name}", name, table.dim, 0.0, 1)
            for i, name in enumerate(self.states or ())
        )
        sizes = (len(numbers), 0, False, False)
        shard = Shard(file, *sizes, states, {"num_lookups": 0}, NOT_WRITTEN)
        tensors = tensors_of(table.dim, table.row_dtype.name, table.key_dtype.name, shard)
        arrays = _arrays(self, self.reading(), numbers, chunk_bytes)
        return Part(table.name, shard, tensors, arrays)

    def actions(
        self, facts: TableFacts, folder: str, comm: Communicator, mode: str, progress: Progress
    ) -> list[Action]:
        table, num_rows = self.table, sum(shard.rows for shard in facts.shards)
        if num_rows != table.num_rows:
            raise ValueError(
                f"Static table {table.name!r} must be as in the checkpoint at {folder}: shape "
                f"{(num_rows, facts.dim)}. Received: shape {(table.num_rows, table.dim)}. Nothing "
                "was loaded. Make the table as it was."
            )
        numbers = table.row_numbers(comm.rank, comm.size)
        found = content(table, facts, folder, comm, CHUNK_BYTES, progress)
        if not np.array_equal(found.keys, np.array(numbers, np.int64)):
            raise ValueError(
                f"Static table {table.name!r} takes the keys 0 to {table.num_rows - 1}. The "
                f"checkpoint at {folder} has others. Nothing was loaded. Load it into a dynamic "
                "table."
            )
        states = {state.name: state for state in found.states if state.dim == table.dim}
        if self.states is not None and states.keys() != set(self.states):
            theirs, mine = (
                ", ".join(map(repr, names)) or "none" for names in (states, self.states)
            )
            raise ValueError(
                f"The optimizer states of static table {table.name!r} must be as in the checkpoint "
                f"at {folder}: {theirs}. Received: an optimizer with {mine}. Nothing was loaded. "
                "One of Keras has its states once it is built: call its build() with all dense and "
                "static variables that it trains. Or leave the optimizer out."
            )
        columns = {"value": whole(found.values, table.row_dtype.storage, 0.0)}
        for name in self.states or ():
            columns[name] = whole(states[name].rows, np.dtype(np.float32), states[name].initial)
        return self.assigning(columns)


def _arrays(
    part: StaticPart, read: ReadRows, numbers: range, chunk_bytes: int
) -> Iterator[np.ndarray]:
    step = max(1, chunk_bytes // max(8, 4 * part.table.dim))
    spans = [(first, min(first + step, len(numbers))) for first in range(0, len(numbers), step)]
    for first, last in spans:
        yield np.array(numbers[first:last], np.int64)
    for first, last in spans:
        yield read("value", first, last)
    for first, last in spans:
        yield np.zeros(last - first, np.uint32)  # stamps
    for name in part.states or ():
        for first, last in spans:
            yield read(name, first, last)
