"""Static tables in a checkpoint: a file has the numbers of rows as keys, and says no more of them.

So any reader of the files of dynamic tables reads these, and a table of either kind takes what the
other had, if the keys are those that it has. The rows themselves are kept by somebody else.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

import numpy as np

from sok_lite.backend.publish import Action
from sok_lite.comm.protocol import Communicator
from sok_lite.engine.files.content import content
from sok_lite.engine.files.manifest import Shard, StateFacts, TableFacts
from sok_lite.engine.files.part import Part
from sok_lite.engine.files.progress import Progress
from sok_lite.engine.files.table_file import NOT_WRITTEN, tensors_of
from sok_lite.engine.static_table import StaticTable
from sok_lite.engine.table import EmbeddingTable
from sok_lite.engine.table.lazy_rows import whole

# Takes the name of a column, "value" or that of a state, and [first, last) of this rank's rows.
ReadRows: TypeAlias = Callable[[str, int, int], np.ndarray]


class StaticPart(ABC):
    """This rank's rows of a static table, and their optimizer states.

    Args:
      table: whose rows they are.
      states: of one optimizer, which have as many elements as a row; None: they are left out.

    Attributes:
      table, states: the same.
    """

    def __init__(self, table: StaticTable, states: tuple[str, ...] | None = None) -> None:
        self.table, self.states = table, states

    @abstractmethod
    def reading(self) -> ReadRows:
        """Returns what reads rows as they are now, whatever becomes of them until it is called.

        It returns (last - first, dim) on the host, of the storage dtype; of a state float32.
        """

    @abstractmethod
    def assigning(self, columns: Mapping[str, np.ndarray]) -> list[Action]:
        """Prepares to set all rows of columns, of the shapes and dtypes that `reading` gives."""


# What a checkpoint is of.
Item: TypeAlias = EmbeddingTable | StaticPart


def table_of(item: Item) -> EmbeddingTable | StaticTable:
    """Returns the table that an item of a checkpoint is, or is a part of."""
    return item.table if isinstance(item, StaticPart) else item


def static_part_of(part: StaticPart, comm: Communicator, file: str, chunk_bytes: int) -> Part:
    """Returns what is written of this rank's rows, as they are now.

    Args:
      file, chunk_bytes: as of `table_file.part_of`.
    """
    table, numbers = part.table, part.table.row_numbers(comm.rank, comm.size)
    states = tuple(
        StateFacts(f"states.{i}.{name}", name, table.dim, 0.0, 1)
        for i, name in enumerate(part.states or ())
    )
    sizes = (len(numbers), 0, False, False)
    shard = Shard(file, *sizes, states, {"num_lookups": 0}, NOT_WRITTEN)
    tensors = tensors_of(table.dim, table.row_dtype.name, table.key_dtype.name, shard)
    return Part(table.name, shard, tensors, _arrays(part, part.reading(), numbers, chunk_bytes))


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


def check_fits(part: StaticPart, facts: TableFacts, folder: str) -> None:
    """Raises ValueError where a checkpoint has another number of rows than a table."""
    table, num_rows = part.table, sum(shard.rows for shard in facts.shards)
    if num_rows != table.num_rows:
        raise ValueError(
            f"Static table {table.name!r} must be as in the checkpoint at {folder}: shape "
            f"{(num_rows, facts.dim)}. Received: shape {(table.num_rows, table.dim)}. Nothing was "
            "loaded. Make the table as it was."
        )


def static_actions(
    part: StaticPart,
    facts: TableFacts,
    folder: str,
    comm: Communicator,
    num_bytes: int,
    progress: Progress,
) -> list[Action]:
    """Prepares to give a part what a checkpoint has for it, however it was spread over ranks.

    Args:
      As of `content.content`.

    Raises:
      OSError: a file cannot be read. ValueError: a file is corrupt, there are keys that are no
        rows of the table, or other states.
    """
    table = part.table
    numbers = table.row_numbers(comm.rank, comm.size)
    found = content(table, facts, folder, comm, num_bytes, progress)
    if not np.array_equal(found.keys, np.array(numbers, np.int64)):
        raise ValueError(
            f"Static table {table.name!r} takes the keys 0 to {table.num_rows - 1}. The checkpoint "
            f"at {folder} has others. Nothing was loaded. Load it into a dynamic table."
        )
    states = {state.name: state for state in found.states if state.dim == table.dim}
    if part.states is not None and states.keys() != set(part.states):
        theirs, mine = (", ".join(map(repr, names)) or "none" for names in (states, part.states))
        raise ValueError(
            f"The optimizer states of static table {table.name!r} must be as in the checkpoint at "
            f"{folder}: {theirs}. Received: an optimizer with {mine}. Nothing was loaded. One of "
            "Keras has its states once it is built: call its build() with all dense and static "
            "variables that it trains. Or leave the optimizer out."
        )
    columns = {"value": whole(found.values, table.row_dtype.storage, 0.0)}
    for name in part.states or ():
        columns[name] = whole(states[name].rows, np.dtype(np.float32), states[name].initial)
    return part.assigning(columns)
