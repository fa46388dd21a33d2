"""The lookup at the owner: the keys that ranks have sent to this one, in its own tables."""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.launches import launch_all
from sok_lite.backend.ragged import Shape, split
from sok_lite.engine.batch import Batch
from sok_lite.engine.table.exclusive import holding
from sok_lite.engine.table.find import look_up_batch
from sok_lite.engine.table.insert import LookupRequest, Output


class OwnerLookup:
    """A lookup in the tables of this rank, of the keys that were sent to it.

    Args:
      batch: the tables, and how they are looked up.
      keys: (m,) int64, the received keys of all parts, part by part.
      sizes: number of keys of each part.
      new_rows: allocates uint32 memory of a shape for the row numbers; None: the backend does.

    Attributes:
      keys, sizes: as given.
      rows: (m,) uint32, row numbers, or NO_ROW; not initialised before the lookup.
      row_epochs: `row_epoch` of the table of each part when the row numbers were found.
      num_without_row: of the table of each part, how many keys of this call have no row.
      lookup_numbers: of the table of each part, the number of this lookup; 0: it inserts nothing.
      sources: (m, dim) storage, the row of each key, of parts that have weights and whose rows were
        pooled; None of the others.
    """

    def __init__(
        self,
        backend: Backend,
        batch: Batch,
        keys: Array,
        sizes: list[int],
        new_rows: Callable[[Shape], Array] | None,
    ) -> None:
        self._backend, self._batch = backend, batch
        self._tables: Sequence[Any] = batch.tables
        self.keys, self.sizes = keys, sizes
        if new_rows is None:
            self.rows = backend.xp.empty(keys.size, np.uint32)
        else:
            self.rows = new_rows((keys.size,))
        num_parts = len(sizes)
        self.row_epochs = [0] * num_parts
        self.num_without_row = [0] * num_parts
        self.lookup_numbers = [0] * num_parts
        self.sources: list[Array | None] = [None] * num_parts
        self._numbers_of = batch.layout.numbers_of

    def look_up(self) -> list[Array]:
        """Looks up the keys of all parts at once; returns the rows of each, (m, dim) storage."""
        if not self.sizes:
            return []
        results: list[Array] = [None] * len(self.sizes)
        requests = []
        for numbers in self._numbers_of:
            size = self._size_of(numbers)
            whole = self._tables[numbers[0]].store.output(size)
            requests.append(self._request(numbers, [Output(whole, 0, size)]))
            pieces = split(whole, [self.sizes[i] for i in numbers])
            for i, piece in zip(numbers, pieces, strict=True):
                results[i] = piece
        self._look_up(requests, self._read_none)
        return results

    def pool(self, out: Sequence[Array], begun: np.ndarray | None = None) -> None:
        """Looks up the keys of all parts at once, and pools their rows.

        Args:
          out: (batch, dim) float32 of each part, to write into.
          begun: the counters of a search that was made, see `look_up_batch`; `rows` and `out` have
            what it has found. None: none was.

        Raises:
          WrongSplitsError: row splits of a part do not rise from 0 to its number of keys. No key
            was inserted; keys that have a row count as seen.
        """
        if not self.sizes:
            return
        self._look_up(self._requests(out), self._read_weighted, begun)

    # ---------------------------------------------------------------- the requests

    def _size_of(self, numbers: Sequence[int]) -> int:
        """Returns the number of keys of some parts together."""
        return sum([self.sizes[i] for i in numbers])

    def _request(self, numbers: Sequence[int], outputs: Sequence[Output]) -> LookupRequest:
        """Returns the request to the table of some parts."""
        batch, i = self._batch, numbers[0]
        policy = (batch.inserts[i], batch.missing[i], batch.filter_ratios[i])
        return LookupRequest(self._tables[i], self._size_of(numbers), outputs, *policy)

    def _requests(self, out: Sequence[Array]) -> list[LookupRequest]:
        batch, splits = self._batch, self._batch.splits_of_parts()
        requests = []
        for numbers in self._numbers_of:
            ends = accumulate([self.sizes[i] for i in numbers], initial=0)
            outputs = [
                Output(out[i], first, end, splits[i], batch.weights[i], batch.layout.combiners[i])
                for i, (first, end) in zip(numbers, pairwise(ends), strict=True)
            ]
            requests.append(self._request(numbers, outputs))
        return requests

    # ---------------------------------------------------------------- what is found

    def _look_up(
        self,
        requests: Sequence[LookupRequest],
        keep: Callable[[Sequence[int]], None],
        begun: np.ndarray | None = None,
    ) -> None:
        """Looks up, and stores what the gradient needs, under the locks of all tables.

        Args:
          requests: one to each table, in the order of `numbers_of`.
          keep: called with the number of keys without a row of each table.
          begun: as of `look_up_batch`.
        """
        order = self._batch.layout.order
        keys, rows, is_ordered = self.keys, self.rows, self._batch.layout.is_ordered
        tables = [each.table for each in requests]
        if not is_ordered:  # a table comes twice: its keys are one batch
            keys = self._reorder(keys, self.sizes, order)
            rows = self._backend.xp.empty(keys.size, np.uint32)
            if begun is not None:
                rows = self._reorder(self.rows, self.sizes, order)

        def found() -> None:
            num_without_row = look_up_batch(self._backend, keys, rows, requests, begun=begun)
            if not is_ordered:
                found_of = dict(
                    zip(order, split(rows, [self.sizes[i] for i in order]), strict=True)
                )
                all_rows = [found_of[i] for i in range(len(self.sizes))]
                self.rows[...] = self._backend.xp.concatenate(all_rows)
            self.row_epochs = [table.row_epoch for table in self._tables]
            of_tables = zip(self._numbers_of, num_without_row, requests, strict=True)
            for numbers, count, each in of_tables:
                lookup_number = each.table.clock.now if each.insert else 0
                for i in numbers:
                    self.num_without_row[i], self.lookup_numbers[i] = count, lookup_number
            keep(num_without_row)
            for table in [table for table in tables if not table.keeps_every_key]:
                table.report_refused()

        holding(tables, found, goes_on=begun is not None)

    def _reorder(self, array: Array, sizes: Sequence[int], order: Sequence[int]) -> Array:
        """Returns the pieces of an array, of those sizes, in another order."""
        pieces = split(array, sizes)
        return self._backend.xp.concatenate([array[:0], *(pieces[i] for i in order)])

    def _read_none(self, _: Sequence[int]) -> None:
        """Stores no row: with several ranks each has the rows that were returned to it."""

    def _read_weighted(self, num_without_row: Sequence[int]) -> None:
        """Stores the rows of parts with weights: the gradients by the weights need them."""
        batch = self._batch
        if not [weights for weights in batch.weights if weights is not None]:
            return
        keys, rows, readings = split(self.keys, self.sizes), split(self.rows, self.sizes), []
        for numbers, count in zip(self._numbers_of, num_without_row, strict=True):
            for i in numbers:
                if batch.weights[i] is not None:
                    table = self._tables[i]
                    source = table.store.output(self.sizes[i])
                    launches = [table.store.read_launch(rows[i], source)]
                    if count and batch.missing[i] == "initial":
                        launches.append(table.draw_launch(source, keys[i], rows[i]))
                    self.sources[i] = source
                    readings.append(launches)
        launch_all(*readings)
