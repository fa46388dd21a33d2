"""A table whose rows are somewhere else, where other processes change them too.

It gives what a program asks of a table. What it computes with rows it computes in a table of this
process that has just the keys of the call, so that both kinds give the same, to the last bit.
"""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

from sok_lite.backend import Array
from sok_lite.engine.remote_update import RemoteStep
from sok_lite.engine.rows.column import Kinds, kinds_of
from sok_lite.engine.rows.store import NO_ROW
from sok_lite.engine.table.arguments import check_rows, checked_deltas, checked_keys
from sok_lite.engine.table.exclusive import Exclusive
from sok_lite.engine.table.results import Lookup
from sok_lite.engine.table.table import EmbeddingTable

# Takes (m,) which of the keys they are, (m,) bool whether each is there, and values (m, bytes)
# uint8; gives (m,) bool which to write, and values.
Change = Callable[[np.ndarray, np.ndarray, np.ndarray], tuple[Any, Any]]


class RemoteStore(Protocol):
    """A store of values of bytes by int64 key: a row, then its optimizer states."""

    def get(self, keys: Any) -> tuple[np.ndarray, np.ndarray]:
        """Returns ((n,) bool which keys there are, values; new ones where there is none)."""

    def put(self, keys: Any, rows: Any) -> None:
        """Writes rows, and leaves states as they are. Of a repeated key the last counts."""

    def update(self, keys: Any, function: Change) -> None:
        """Changes values depending on what they are, each as a whole, whoever else does.

        The function is called again for values that somebody else has changed meanwhile.
        """

    def delete(self, keys: Any) -> int:
        """Removes keys. Returns how many there were."""

    def size(self) -> int:
        """Returns how many keys there are."""

    def clear(self) -> None:
        """Removes all keys."""

    def export(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields all keys and values, in pieces."""

    def place_of_state(self, name: str, dim: int, initial: float) -> slice:
        """Returns where in a value a state is, `dim` float32 that begin with a number."""


class RemoteTable(Exclusive):
    """Rows by key, somewhere else. Several threads may use it at once.

    It has what the bridge asks of an `EmbeddingTable`, where that has the same name. Lookups insert
    nothing; see engine/remote_update.py for training.

    Args:
      make: makes an empty table of this process, as this one would be if it were here.
      rows: where they are.
    """

    var_type = "remote"
    is_static = False
    keeps_every_key = True
    lists_states = False
    step_type = RemoteStep

    def __init__(self, make: Callable[[], EmbeddingTable], rows: RemoteStore) -> None:
        super().__init__()
        self.make = make
        self.rows = rows
        # Never has a key. It knows the formats, draws initial values, and has columns for the
        # states of each optimizer that has trained the table in this process.
        self.like = make()
        self.backend, self.dim, self.name = self.like.backend, self.like.dim, self.like.name
        self.key_dtype, self.row_dtype = self.like.key_dtype, self.like.row_dtype
        self.owner = self.like.owner
        self.store, self.initializer = self.like.store, self.like.initializer
        self.row_bytes = self.dim * self.row_dtype.storage.itemsize

    @property
    def size(self) -> int:
        """Number of keys with a row."""
        return self.rows.size()

    @property
    def all_ranks_refusal(self) -> str:
        """Why a lookup of all ranks does not reach its rows."""
        return (
            f"Table {self.name!r} cannot be looked up over all ranks: its rows are in a store "
            "outside of their processes, which all of them share. Each rank looks up its own keys, "
            "by tf.nn.embedding_lookup or de.embedding_lookup."
        )

    def summary(self) -> str:
        """Returns one line about the table."""
        return f"keys={self.size:,} not in this process"

    def facts(self, dtype: str) -> dict[str, str]:
        """Returns what a notebook shows of the table, by name."""
        return {"keys": f"{self.size:,}", "row": f"{self.dim} x {dtype}"}

    # ---------------------------------------------------------------- what programs call

    def lookup(
        self,
        keys: Any,
        *,
        unique_keys: bool = False,
        out: Array | None = None,
        insert: bool = True,
        missing: str = "initial",
    ) -> Lookup:
        """Returns the row of every key, or what `missing` says: "initial" values or "zeros".

        Its row numbers only say which keys have a row.

        Raises:
          NotImplementedError: `insert`.
        """
        if insert:
            raise NotImplementedError(
                f"A lookup does not insert into table {self.name!r}, whose rows are not in this "
                "process. Train it, or write rows."
            )
        keys = checked_keys(self.like, keys)
        distinct, inverse = np.unique(self.backend.to_host(keys), return_inverse=True)
        found, values = self.rows.get(distinct)
        result = self.like.lookup(keys, out=out, insert=False, missing=missing).values
        found = found[inverse]
        at = np.flatnonzero(found)
        if at.size:
            rows = self.as_rows(values)[inverse[at]]
            result[self.backend.from_host(at)] = self.backend.from_host(rows)
        numbers = np.where(found, np.uint32(0), np.uint32(NO_ROW))
        return Lookup(result, self.backend.from_host(numbers), len(found) - len(at))

    def insert_or_assign(self, keys: Any, values: Any, scores: Any = None) -> None:
        """Sets the rows of keys, inserting those that have none. A repeated key: the last wins."""
        keys, values = checked_keys(self.like, keys), self.store.to_storage(values)
        check_rows(self.like, keys, values)
        self.rows.put(self.backend.to_host(keys), self.as_bytes(values))

    def accum_or_assign(self, keys: Any, values: Any, is_found: Any) -> None:
        """Does what `EmbeddingTable.accum_or_assign` does, of several workers one by one."""
        xp, keys = self.backend.xp, checked_keys(self.like, keys)
        values, flags = xp.asarray(values), xp.asarray(is_found)
        checked_deltas(self.like, keys, values)
        distinct = np.unique(self.backend.to_host(keys))

        def change(which: np.ndarray, found: np.ndarray, old: np.ndarray) -> tuple[Any, Any]:
            table, its_keys = self.holding(distinct[which], found, old)
            table.accum_or_assign(keys, values, flags)  # the others' rows go with the table
            new = self.changed(table, its_keys, old)
            is_present = self.backend.to_host(table.contains(its_keys))
            return is_present & (~found | (new != old).any(axis=1)), new

        self.rows.update(distinct, change)

    def erase(self, keys: Any) -> int:
        """Removes keys; missing ones are skipped. Returns how many there were."""
        return self.rows.delete(np.unique(self.backend.to_host(checked_keys(self.like, keys))))

    def clear(self) -> None:
        """Removes all keys."""
        self.rows.clear()

    def contains(self, keys: Any) -> Array:
        """Returns whether each key has a row, (n,) bool."""
        found, _ = self.rows.get(self.backend.to_host(checked_keys(self.like, keys)))
        return self.backend.from_host(found)

    def export(
        self,
        column: str = "value",
        out: Callable[[int], Array] | None = None,
        cutoff: float | None = None,
    ) -> tuple[Array, Array]:
        """Returns all keys (n,), ascending, and their rows (n, dim).

        Raises:
          NotImplementedError: a cutoff.
        """
        if cutoff is not None:
            raise NotImplementedError(f"The export of table {self.name!r} has no `cutoff`.")
        decode = self.as_rows if column == "value" else self._decoding(column)
        pieces = [(keys, decode(values)) for keys, values in self.rows.export()]
        nothing = (np.empty(0, np.int64), decode(self.rows.get(np.empty(0, np.int64))[1]))
        keys, rows = map(np.concatenate, zip(nothing, *pieces, strict=True))
        order = np.argsort(keys)
        keys, rows = (self.backend.from_host(array[order]) for array in (keys, rows))
        if out is not None:
            memory = out(len(keys))
            memory[...] = rows
            rows = memory
        return self.key_dtype.from_int64(self.backend.xp, keys), rows

    # ---------------------------------------------------------------- optimizer states

    def read_state(self, name: str, keys: Any) -> Array:
        """Returns a state of keys, (n, dim) float32; its initial value for a key without a row."""
        keys = self.backend.to_host(checked_keys(self.like, keys))
        distinct, inverse = np.unique(keys, return_inverse=True)
        return self.backend.from_host(self._decoding(name)(self.rows.get(distinct)[1])[inverse])

    def assign_state(self, name: str, keys: Any, values: Any) -> None:
        """Sets a state of keys that have a row. The last of a repeated key wins.

        Raises:
          ValueError: a key has no row, or shapes do not fit.
        """
        place = self._place_of(name)
        keys = self.backend.to_host(checked_keys(self.like, keys))
        states = np.asarray(self.backend.to_host(values), np.float32)
        if states.shape != (len(keys), self.store.column(name).dim):
            raise ValueError(
                f"State {name!r} of table {self.name!r} takes values of shape "
                f"({len(keys)}, {self.store.column(name).dim}), a row for each key. "
                f"Received: shape {states.shape}."
            )
        # The last of a repeated key.
        distinct, last = np.unique(keys[::-1], return_index=True)
        states = states[::-1][last]

        def change(which: np.ndarray, found: np.ndarray, old: np.ndarray) -> tuple[Any, Any]:
            if not found.all():
                raise ValueError(
                    f"State {name!r} of table {self.name!r} cannot be set for "
                    f"{int((~found).sum())} of {len(distinct)} keys, which have no row. Assign "
                    "their rows first."
                )
            new = old.copy()
            new[:, place] = _bytes_of(states[which])
            return found, new

        self.rows.update(distinct, change)

    def places_of(self, kinds: Kinds) -> dict[str, slice]:
        """Returns where in a value the states of an optimizer are.

        Those are the same states that begin with the same numbers and belong to the same others:
        `accumulator` of Adagrad is not that of Ftrl.
        """
        others = ",".join(sorted(kinds))
        return {
            name: self.rows.place_of_state(f"{name} of {others}", dim, initial)
            for name, (dim, initial) in kinds.items()
        }

    def _place_of(self, column: str) -> slice:
        """Returns where in a value the state of a column of `like` is."""
        states = self.store.state_groups[self.store.column(column).owner]
        return self.places_of(kinds_of(states))[self.store.column(column).state]

    def _decoding(self, column: str) -> Callable[[np.ndarray], np.ndarray]:
        """Returns what takes values and gives the state that they have of a column of `like`."""
        place = self._place_of(column)
        return lambda values: _view(values[:, place], np.dtype(np.float32))

    # ---------------------------------------------------------------- bytes and tables

    def as_rows(self, values: np.ndarray) -> np.ndarray:
        """Returns the rows of values, (n, dim) of the storage dtype."""
        return _view(values[:, : self.row_bytes], self.row_dtype.storage)

    def as_bytes(self, rows: Array) -> np.ndarray:
        """Returns rows as they are in values, (n, row_bytes) uint8."""
        return _bytes_of(self.backend.to_host(rows))

    def holding(
        self, keys: np.ndarray, found: np.ndarray, values: np.ndarray
    ) -> tuple[EmbeddingTable, Array]:
        """Returns a table of this process that has the rows of keys, and the keys on its device.

        Args:
          keys: (n,) int64, distinct.
          found: (n,) bool, which have a row.
          values: theirs.
        """
        table = self.make()
        rows = self.backend.from_host(self.as_rows(values[found]))
        table.insert_or_assign(self.backend.from_host(keys[found]), rows)
        return table, self.backend.from_host(keys)

    def changed(self, table: EmbeddingTable, keys: Array, old: np.ndarray) -> np.ndarray:
        """Returns values with the rows that a table has of their keys (n,)."""
        new = old.copy()
        new[:, : self.row_bytes] = self.as_bytes(table.lookup(keys, insert=False).values)
        return new


def _view(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return np.ascontiguousarray(values).view(dtype)


def _bytes_of(rows: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(rows).view(np.uint8)
