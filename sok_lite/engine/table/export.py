"""What a table holds, as arrays: in pieces, all of it, or what a predicate chooses."""

from collections.abc import Callable, Iterator

import numpy as np

from sok_lite.backend import Array
from sok_lite.engine.table.exclusive import exclusive
from sok_lite.engine.table.index import CHUNK_SLOTS
from sok_lite.engine.table.parts import TableParts
from sok_lite.engine.table.results import Entries, Predicate


class Exports(TableParts):
    """The methods that give what a table holds. They change nothing."""

    @property
    def num_slots(self) -> int:
        """How many slots `export_chunk` can be asked for. It changes when the table grows."""
        return self.index.num_slots

    @exclusive
    def export_chunk(self, first_slot: int, num_slots: int) -> Entries:
        """Returns what is in the slots [first_slot, first_slot + num_slots), in their order."""
        held = self.index.entries(first_slot, num_slots)
        keys = self.key_dtype.from_int64(self.backend.xp, held.keys)
        return Entries(keys, held.rows, held.scores, self.store.for_reading())

    def chunks(self, num_slots: int = CHUNK_SLOTS) -> Iterator[Entries]:
        """Yields the whole table in pieces. Hold `lock` if it may change meanwhile."""
        first = 0
        while first < self.num_slots:
            yield self.export_chunk(first, num_slots)
            first += num_slots

    @exclusive
    def export_rows(self) -> tuple[Array, Array]:
        """Returns all keys, ascending, and their row numbers: (size,) key type, (size,) uint32."""
        return self._sorted(self.export_chunk(0, self.num_slots))

    @exclusive
    def export(
        self,
        column: str = "value",
        out: Callable[[int], Array] | None = None,
        cutoff: float | None = None,
    ) -> tuple[Array, Array]:
        """Returns all keys, ascending, and their rows: (n,) key type, (n, dim) storage.

        Args:
          column: "value", or the name of an optimizer state, whose rows are float32.
          out: gives memory for a number of rows; None: the backend's.
          cutoff: leaves out the keys whose row, whatever the column, has nothing but
            |element| < cutoff now; None: none.

        Raises:
          ValueError: the cutoff is not above 0.
        """
        if cutoff is None:
            keys, rows = self.export_rows()
        else:
            is_small = self._is_below(cutoff)
            keys, rows = self._sorted_of(self._chosen(lambda entries: ~is_small(entries)))
        rows = self.backend.xp.ascontiguousarray(rows)
        memory = None if out is None else out(int(keys.size))
        return keys, self.store.read(rows, column, memory)

    @exclusive
    def export_if(self, predicate: Predicate) -> tuple[Array, Array]:
        """Returns the entries that a predicate chooses, as `export` does all.

        Args:
          predicate: such as `lambda entries: entries.scores >= 100`; called with some at a time.
        """
        keys, rows = self._sorted_of(self._chosen(predicate))
        return keys, self.store.read(rows)

    @exclusive
    def num_zero_rows(self) -> int:
        """Returns how many keys have a row of nothing but 0 now. It looks at every row."""
        return sum(
            int(self.row_dtype.is_zero(self.backend.xp, entries.values).all(axis=1).sum())
            for entries in self.chunks()
        )

    @exclusive
    def shrunk_keys(self) -> Array:
        """Returns the keys that an optimizer has set to zero, (n,) of the key type, ascending.

        Their rows are nothing but 0 now, and an optimizer state is not what it began with: those of
        group lasso, among others. It looks at every row, some at a time.
        """
        keys, _ = self._sorted_of(self._chosen(self._is_shrunk))
        return keys

    def _is_shrunk(self, entries: Entries) -> Array:
        """Returns which entries have a row of 0 and a state that has changed, (n,) bool."""
        xp, store = self.backend.xp, entries.store
        is_shrunk = self.row_dtype.is_zero(xp, entries.values).all(axis=1)
        # The states of few keys are read: most rows are not 0.
        at = xp.flatnonzero(is_shrunk)
        rows = xp.take(entries.rows, at)
        has_changed = xp.zeros(int(rows.size), bool)
        for name in store.state_names:
            initial = np.float32(store.column(name).initial)
            has_changed |= (store.read(rows, name) != initial).any(axis=1)
        is_shrunk[at] = has_changed
        return is_shrunk

    def _is_below(self, cutoff: float) -> Predicate:
        """Returns what chooses the keys of whose row every |element| < cutoff.

        Raises:
          ValueError: the cutoff is not above 0.
        """
        if not cutoff > 0:
            raise ValueError(f"`cutoff` must be above 0. Received: {cutoff}.")
        return lambda entries: self.row_dtype.is_below(self.backend.xp, entries.values, cutoff).all(
            axis=1
        )

    def _chosen(self, predicate: Predicate) -> Iterator[Entries]:
        for entries in self.chunks():
            mask = self.backend.xp.asarray(predicate(entries))
            if mask.shape != entries.keys.shape or mask.dtype != np.bool_:
                raise ValueError(
                    f"A predicate must return one bool per key, shape {entries.keys.shape}. "
                    f"Received: {mask.dtype} of shape {mask.shape}."
                )
            chosen = (entries.keys[mask], entries.rows[mask], entries.scores[mask])
            yield Entries(*chosen, entries.store)

    def _sorted_of(self, chosen: Iterator[Entries]) -> tuple[Array, Array]:
        """Returns the keys and row numbers of several pieces together, by key."""
        xp, pieces = self.backend.xp, list(chosen)
        keys = xp.concatenate([entries.keys for entries in pieces])
        rows = xp.concatenate([entries.rows for entries in pieces])
        return self._sorted(Entries(keys, rows, rows, self.store))

    def _sorted(self, entries: Entries) -> tuple[Array, Array]:
        order = self.backend.xp.argsort(entries.keys)
        return entries.keys[order], entries.rows[order]
