"""A table whose rows are in a store outside of this process, shared with other processes.

It computes in a table of this process that has just the keys of a call, so that both kinds of table
give the same bits.

A training step fetches rows and their states into such a table, updates them there, and writes each
key's row and states back together. If another worker has changed a row meanwhile, it is fetched and
updated again: no step is lost when several workers train the same keys.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, Protocol, cast

import numpy as np

from sok_lite.backend import Array
from sok_lite.engine.optimizers.rule import rule_step
from sok_lite.engine.rows.column import Kinds, kinds_of
from sok_lite.engine.rows.store import NO_ROW
from sok_lite.engine.table.arguments import check_rows, checked_deltas, checked_keys
from sok_lite.engine.table.locking import Lockable
from sok_lite.engine.table.results import Lookup
from sok_lite.engine.table.table import EmbeddingTable
from sok_lite.engine.update import Step, StepOptions, UpdateStep, make_states, merge_updates
from sok_lite.engine.update_rows import Update, sum_duplicates

# Takes positions (m,) among the keys of a call, whether each key exists, (m,) bool, and the values
# (m, bytes) uint8. Returns which values to write, (m,) bool, and the new values.
Change = Callable[[np.ndarray, np.ndarray, np.ndarray], tuple[Any, Any]]


class RemoteStore(Protocol):
    """A store of values by int64 key. A value is bytes: a row, then its optimizer states."""

    def get(self, keys: Any) -> tuple[np.ndarray, np.ndarray]:
        """Returns whether each key exists, (n,) bool, and the values, initial ones if not."""

    def put(self, keys: Any, rows: Any) -> None:
        """Writes rows, without their states. The last of a repeated key wins."""

    def update(self, keys: Any, function: Change) -> None:
        """Changes each value atomically, by a function of the old one.

        The function is called again for values that somebody else has changed meanwhile.
        """

    def delete(self, keys: Any) -> int:
        """Removes keys. Returns the number of those that existed."""

    def size(self) -> int:
        """Returns the number of keys."""

    def clear(self) -> None:
        """Removes all keys."""

    def export(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields all keys and values, in chunks."""

    def place_of_state(self, name: str, dim: int, initial: float) -> slice:
        """Returns the bytes of a state in a value: `dim` float32, each at first `initial`."""


class RemoteStep(Step):
    """One optimizer step of remote tables, with an `Update` per gradient.

    If the connection to the store fails, some rows may have changed.

    Raises:
      ForeignKeysError, NonFiniteGradientError, ValueError, TypeError, MemoryError: as `UpdateStep`.
      Exception: whatever the remote store raises.
    """

    def __init__(self, updates: Sequence[Update], options: StepOptions) -> None:
        self._updates = sum_duplicates(merge_updates(updates))
        stand_ins = [each._replace(table=cast(Any, each.table).make()) for each in self._updates]
        self._stand_ins, self._options = UpdateStep(stand_ins, options), options

    @staticmethod
    def refuse(table: str, why: str) -> NoReturn:
        """Raises NotImplementedError for a step that remote tables cannot take."""
        raise NotImplementedError(
            f"Table {table!r}, whose rows are not in this process, cannot take this step: {why}. "
            "Use an optimizer of docs/optimizers.md without clipnorm, global_clipnorm, loss "
            "scaling and gradient_accumulation_steps, or keep the rows in this process."
        )

    def prepare(self) -> None:
        """Checks the step: raises its errors, and changes no row."""
        self._stand_ins.prepare()
        for update in self._updates:
            update.table.contains(update.keys[:1])  # the connection must work

    def commit(self, note: Callable[[], None] | None = None) -> None:
        """Takes the step, and then calls `note`."""
        for update in self._updates:
            _take_step(update, self._options)
        if note is not None:
            note()


class RemoteTable(Lockable):
    """Rows by key in a remote store. Several threads may use it at once.

    It has the methods and attributes of `EmbeddingTable` that the bridge uses. Lookups insert
    nothing. Its steps are `RemoteStep`.

    Args:
      make: makes an empty table of this process with the same options.
      rows: the store.
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
        # Has no keys. It has the formats, initial values, and columns for the states of each
        # optimizer that has trained the table in this process.
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
        """The error of a lookup over all ranks."""
        return (
            f"Table {self.name!r} cannot be looked up over all ranks: its rows are in a store "
            "outside of their processes, which all of them share. Each rank looks up its own keys, "
            "by tf.nn.embedding_lookup or de.embedding_lookup."
        )

    def summary(self) -> str:
        """Returns one line about the table."""
        return f"keys={self.size:,} not in this process"

    def facts(self, dtype: str) -> dict[str, str]:
        """Returns the facts that a notebook shows, by name."""
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
        """Returns the rows of keys; for keys without one, `missing`: "initial" values or "zeros".

        The row numbers are 0, or NO_ROW for keys without a row.

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
        """Sets the rows of keys, inserting missing keys. The last of a repeated key wins."""
        keys, values = checked_keys(self.like, keys), self.store.to_storage(values)
        check_rows(self.like, keys, values)
        self.rows.put(self.backend.to_host(keys), _bytes_of(self.backend.to_host(values)))

    def accum_or_assign(self, keys: Any, values: Any, is_found: Any) -> None:
        """Does what `EmbeddingTable.accum_or_assign` does, atomically for each key."""
        xp, keys = self.backend.xp, checked_keys(self.like, keys)
        values, flags = xp.asarray(values), xp.asarray(is_found)
        checked_deltas(self.like, keys, values)
        distinct = np.unique(self.backend.to_host(keys))

        def change(which: np.ndarray, found: np.ndarray, old: np.ndarray) -> tuple[Any, Any]:
            table, its_keys = self.local_table(distinct[which], found, old)
            table.accum_or_assign(keys, values, flags)  # also of keys that are not in `which`
            new = self.with_rows_of(table, its_keys, old)
            is_present = self.backend.to_host(table.contains(its_keys))
            return is_present & (~found | (new != old).any(axis=1)), new

        self.rows.update(distinct, change)

    def erase(self, keys: Any) -> int:
        """Removes keys; missing ones are skipped. Returns the number of removed keys."""
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
        chunks = [(keys, decode(values)) for keys, values in self.rows.export()]
        nothing = (np.empty(0, np.int64), decode(self.rows.get(np.empty(0, np.int64))[1]))
        keys, rows = map(np.concatenate, zip(nothing, *chunks, strict=True))
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
        """Returns the bytes of an optimizer's states in a value.

        Optimizers share states of the same kinds, if all of their states have the same names:
        `accumulator` of Adagrad is not that of Ftrl.
        """
        others = ",".join(sorted(kinds))
        return {
            name: self.rows.place_of_state(f"{name} of {others}", dim, initial)
            for name, (dim, initial) in kinds.items()
        }

    def _place_of(self, column: str) -> slice:
        """Returns the bytes in a value of a column of `like`."""
        states = self.store.state_groups[self.store.column(column).owner]
        return self.places_of(kinds_of(states))[self.store.column(column).state]

    def _decoding(self, column: str) -> Callable[[np.ndarray], np.ndarray]:
        """Returns the function that takes a column of `like` from values."""
        place = self._place_of(column)
        return lambda values: _view(values[:, place], np.dtype(np.float32))

    # ---------------------------------------------------------------- bytes and tables

    def as_rows(self, values: np.ndarray) -> np.ndarray:
        """Returns the rows in values, (n, dim) of the storage dtype."""
        return _view(values[:, : self.row_bytes], self.row_dtype.storage)

    def local_table(
        self, keys: np.ndarray, found: np.ndarray, values: np.ndarray
    ) -> tuple[EmbeddingTable, Array]:
        """Makes a table of this process with the rows of keys; returns it, and the keys on its
        device.

        Args:
          keys: (n,) int64, distinct.
          found: (n,) bool, which of them have a row.
          values: of all keys.
        """
        table = self.make()
        rows = self.backend.from_host(self.as_rows(values[found]))
        table.insert_or_assign(self.backend.from_host(keys[found]), rows)
        return table, self.backend.from_host(keys)

    def with_rows_of(self, table: EmbeddingTable, keys: Array, old: np.ndarray) -> np.ndarray:
        """Returns the values `old` of keys with the rows of a local table."""
        new = old.copy()
        rows = table.lookup(keys, insert=False).values
        new[:, : self.row_bytes] = _bytes_of(self.backend.to_host(rows))
        return new


def _take_step(update: Update, options: StepOptions) -> None:
    """Updates the rows of one remote table; the update's keys are distinct."""
    table: Any = update.table  # a RemoteTable
    keys = table.backend.to_host(update.keys)
    kinds = rule_step(update.rule, options.learning_rate, options.number).rule.kinds(table.dim)
    make_states([table], [kinds], update.optimizer)
    places = table.places_of(kinds)
    counts = [options.num_nonfinite]

    def change(which: np.ndarray, found: np.ndarray, old: np.ndarray) -> tuple[Any, Any]:
        local, its_keys = table.local_table(keys[which], found, old)
        local.find_or_insert(its_keys, unique_keys=True)
        make_states([local], [kinds], None)
        for name, place in places.items():
            states = np.ascontiguousarray(old[:, place]).view(np.float32)
            local.assign_state(name, its_keys, states)
        grads = update.grads[table.backend.from_host(which)]
        its_update = Update(local, update.rule, its_keys, grads, of_gradient=True)
        # A gradient is counted once, however often its row has to be updated again.
        count = counts.pop() if counts else None
        UpdateStep([its_update], options._replace(num_nonfinite=count, rank_info=None)).commit()
        new = table.with_rows_of(local, its_keys, old)
        for name, place in places.items():
            states = table.backend.to_host(local.read_state(name, its_keys))
            new[:, place] = np.ascontiguousarray(states).view(np.uint8)
        return np.ones(len(which), bool), new

    table.rows.update(keys, change)


def _view(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return np.ascontiguousarray(values).view(dtype)


def _bytes_of(rows: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(rows).view(np.uint8)
