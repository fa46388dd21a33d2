"""Static tables in a checkpoint, with the numbers of rows as keys.

So readers of dynamic tables read them too, and a table of either kind loads those of the other, if
it has these keys. The rows themselves are stored outside the engine.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from sok_lite.backend import Array
from sok_lite.comm.protocol import Communicator
from sok_lite.engine.files.item import Item
from sok_lite.engine.files.manifest import Shard, StateFacts, TableFacts
from sok_lite.engine.files.progress import Progress
from sok_lite.engine.files.saved_file import saved_in
from sok_lite.engine.files.shard import NOT_WRITTEN
from sok_lite.engine.files.table_file import ShardContent, tensors_of
from sok_lite.engine.rows.store import NO_ROW
from sok_lite.engine.static_table import StaticTable
from sok_lite.engine.table.content import warn_of_repeated
from sok_lite.engine.table.restore import KeySelection, Swap

# Returns rows [first, last) of this rank: (name of a column, "value" or a state; first; last).
ReadRows: TypeAlias = Callable[[str, int, int], np.ndarray]


class StaticPart(Item):
    """This rank's rows of a static table, and their optimizer states.

    Args:
      states: names of those of one optimizer, each as long as a row; None: they are left out.
    """

    def __init__(self, table: StaticTable, states: tuple[str, ...] | None = None) -> None:
        self.table: StaticTable = table
        self.states, self.equal_on_all_ranks = states, (table.num_rows,)

    @abstractmethod
    def row_reader(self) -> ReadRows:
        """Returns a function that reads the present rows, even if they change before its calls.

        It returns (last - first, dim) on the host, of the storage dtype; of a state float32.
        """

    @abstractmethod
    def assignment(self, columns: Mapping[str, np.ndarray]) -> Swap:
        """Returns a function that assigns all rows, read by `row_reader`; it needs no memory."""

    def part(
        self, folder: str, file: str, comm: Communicator, chunk_bytes: int, before: Shard | None
    ) -> ShardContent:
        table, numbers = self.table, self.table.row_numbers(comm.rank, comm.size)
        names = self.states or ()
        states = tuple(
            StateFacts(f"states.{i}.{name}", name, table.dim, 0.0, 1)
            for i, name in enumerate(names)
        )
        sizes = (len(numbers), 0, False, False)
        shard = Shard(file, *sizes, states, {"num_lookups": 0}, NOT_WRITTEN)
        tensors = tensors_of(table.dim, table.row_dtype.name, table.key_dtype.name, shard)
        step = max(1, chunk_bytes // max(8, 4 * table.dim))
        arrays = _arrays(self.row_reader(), names, numbers, step)
        return ShardContent(table.name, shard, tensors, arrays)

    def prepare_load(
        self,
        facts: TableFacts,
        folder: str,
        comm: Communicator,
        mode: str,
        on_full: str,
        progress: Progress,
    ) -> Swap:
        table, num_rows = self.table, sum(shard.rows for shard in facts.shards)
        if num_rows != table.num_rows:
            raise ValueError(
                f"Static table {table.name!r} must be as in the checkpoint at {folder}: shape "
                f"{(num_rows, facts.dim)}. Received: shape {(table.num_rows, table.dim)}. Nothing "
                "was loaded. Make the table as it was."
            )
        numbers = table.row_numbers(comm.rank, comm.size)
        saved = saved_in(table, facts, folder, comm, progress)
        rows = _RowNumbers(table, numbers)
        selection = KeySelection(table, rows.find)
        for part in saved.parts:
            for keys, first, _ in selection.select(part):
                rows.insert(keys, first)
        if rows.has_others or selection.num_rows < len(numbers):
            raise ValueError(
                f"Static table {table.name!r} takes the keys 0 to {table.num_rows - 1}. The "
                f"checkpoint at {folder} has others. Nothing was loaded. Load it into a dynamic "
                "table."
            )
        warn_of_repeated(f"table {table.name!r}", selection.num_repeated)
        selection.select_older_rows()
        states = {state.name: state for state in saved.states if state.dim == table.dim}
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
        whole = np.empty((len(numbers), table.dim), table.row_dtype.storage)
        rows.write(whole, [selection.read(i, "value") for i in range(len(saved.parts))])
        columns = {"value": whole}
        for name in self.states or ():
            columns[name] = np.full(whole.shape, states[name].initial, np.float32)
            its_places = states[name].places.items()
            rows.write(columns[name], [selection.read(i, place) for i, place in its_places])
        return self.assignment(columns)


class _RowNumbers:
    """The rows of a rank that were read so far, in the order in which they were read.

    Attributes:
      has_others: whether keys were read that are no rows of this rank.
    """

    def __init__(self, table: StaticTable, numbers: range) -> None:
        self._backend, self._numbers, self.has_others = table.backend, numbers, False
        self._order = table.backend.xp.full(len(numbers), NO_ROW, np.uint32)

    def _places(self, keys: Array) -> tuple[Array, Array]:
        """Returns the positions of keys among the rows of this rank, and which keys are theirs."""
        start, stop, step = self._numbers.start, self._numbers.stop, self._numbers.step
        is_there = (keys >= start) & (keys < stop) & ((keys - start) % step == 0)
        return (keys - start) // step, is_there

    def find(self, keys: Array) -> Array:
        """Returns the number of each key in reading order, (k,) uint32; NO_ROW for another key."""
        xp = self._backend.xp
        at, is_there = self._places(keys)
        found = xp.full(keys.size, NO_ROW, np.uint32)
        found[is_there] = self._order[at[is_there]]
        return found

    def insert(self, keys: Array, first: int) -> None:
        """Notes keys that were read, numbered from `first` on."""
        at, is_there = self._places(keys)
        self.has_others |= not bool(is_there.all())
        order = self._backend.xp.arange(first, first + keys.size, dtype=np.uint32)
        self._order[at[is_there]] = order[is_there]

    def write(self, whole: np.ndarray, parts: Iterable[Iterator[tuple[Array, Array]]]) -> None:
        """Writes a column of parts, each as `KeySelection.read` yields it."""
        host = self._backend.to_host
        places = np.empty(len(whole), np.int64)
        places[host(self._order)] = np.arange(len(whole))
        for part in parts:
            for rows, values in part:
                order = host(rows)
                counts = order != np.uint32(NO_ROW)
                whole[places[order[counts]]] = values[counts]


def _arrays(
    read: ReadRows, states: Sequence[str], numbers: range, step: int
) -> Iterator[np.ndarray]:
    """Yields the tensors of the file in pieces of `step` rows."""
    spans = [(first, min(first + step, len(numbers))) for first in range(0, len(numbers), step)]
    for first, last in spans:
        yield np.array(numbers[first:last], np.int64)
    for first, last in spans:
        yield read("value", first, last)
    for first, last in spans:
        yield np.zeros(last - first, np.uint32)  # stamps
    for name in states:
        for first, last in spans:
            yield read(name, first, last)
