"""The lookup on the rank that owns the keys, in its shard of the tables."""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.launches import launch_all
from sok_lite.backend.ragged import Shape, split
from sok_lite.engine.batch import Batch
from sok_lite.engine.table.find import look_up_batch
from sok_lite.engine.table.insert import LookupRequest, Output
from sok_lite.engine.table.locking import with_locks


class ShardLookup:
    """A lookup of the keys that this rank owns, in its tables.

    Args:
      batch: its tables and policies are used, not its keys.
      keys: (m,) int64, the received keys, feature by feature; with one rank those of the batch.
      sizes: number of keys of each feature.
      new_rows: allocates uint32 memory of a shape for the row numbers; None: the backend does.

    Attributes:
      rows: (m,) uint32, row numbers, or NO_ROW; not initialised before the lookup.
      sources: after `pool`, of features with weights the row of each key, (m, dim) storage; None of
        the others.
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
        self._found: list[tuple[int, int, int]] = [(0, 0, 0)] * len(sizes)
        self.sources: list[Array | None] = [None] * len(sizes)

    def found(self) -> np.ndarray:
        """Returns (3, num_features) int64, see `BackwardContext.found` of lookup.py."""
        return np.array(self._found, np.int64).reshape(-1, 3).T

    def look_up(self) -> list[Array]:
        """Looks up the keys of all features at once; returns the rows of each, (m, dim) storage."""
        results: list[Array] = [None] * len(self.sizes)
        requests = []
        for features in self._batch.layout.features_of_tables:
            sizes = [self.sizes[i] for i in features]
            size = sum(sizes)
            whole = self._tables[features[0]].store.output(size)
            requests.append(self._request(features[0], size, [Output(whole, 0, size)]))
            for i, rows in zip(features, split(whole, sizes), strict=True):
                results[i] = rows
        self._look_up(requests)
        return results

    def pool(self, out: Sequence[Array], begun: np.ndarray | None = None) -> None:
        """Looks up the keys of all features at once, and pools their rows.

        Args:
          out: (batch, dim) float32 of each feature, to write into.
          begun: the counters of a search that was made, see `look_up_batch`; `rows` and `out` have
            what it has found. None: none was.

        Raises:
          WrongSplitsError: row splits of a feature do not rise from 0 to its number of keys. No key
            was inserted; keys that have a row count as seen.
        """
        batch, splits = self._batch, self._batch.splits_per_feature()
        requests = []
        for features in batch.layout.features_of_tables:
            offsets = [*accumulate([self.sizes[i] for i in features], initial=0)]
            outputs = [
                Output(out[i], first, end, splits[i], batch.weights[i], batch.layout.combiners[i])
                for i, (first, end) in zip(features, pairwise(offsets), strict=True)
            ]
            requests.append(self._request(features[0], offsets[-1], outputs))
        self._look_up(requests, keeps_sources=True, begun=begun)

    def _request(self, feature: int, size: int, outputs: Sequence[Output]) -> LookupRequest:
        """Returns the request to the table of a feature, with the feature's policy."""
        batch, i = self._batch, feature
        policy = (batch.inserts[i], batch.missing[i], batch.filter_ratios[i])
        return LookupRequest(self._tables[i], size, outputs, *policy)

    def _look_up(
        self,
        requests: Sequence[LookupRequest],
        keeps_sources: bool = False,
        begun: np.ndarray | None = None,
    ) -> None:
        """Looks up, and keeps what the gradient needs, under the locks of all tables.

        Args:
          requests: one per table, in the order of `features_of_tables`.
          keeps_sources: whether to set `sources`.
          begun: as of `look_up_batch`.
        """
        if not self.sizes:
            return
        layout = self._batch.layout
        keys, rows, order = self.keys, self.rows, layout.order
        tables = [each.table for each in requests]
        if not layout.is_ordered:  # the keys of a table's features are looked up together
            keys = self._reorder(keys)
            rows = self._backend.xp.empty(keys.size, np.uint32)
            if begun is not None:
                rows = self._reorder(self.rows)

        def look_up_locked() -> None:
            num_without_row = look_up_batch(self._backend, keys, rows, requests, begun=begun)
            if not layout.is_ordered:
                in_order = split(rows, [self.sizes[i] for i in order])
                rows_of = dict(zip(order, in_order, strict=True))
                all_rows = [rows_of[i] for i in range(len(self.sizes))]
                self.rows[...] = self._backend.xp.concatenate(all_rows)
            of_tables = zip(layout.features_of_tables, num_without_row, requests, strict=True)
            for features, count, each in of_tables:
                lookup_number = each.table.clock.now if each.insert else 0
                for i in features:
                    self._found[i] = (each.table.row_version, count, lookup_number)
            if keeps_sources:
                self._read_sources()
            for table in [table for table in tables if not table.keeps_every_key]:
                table.report_refused()

        with_locks(tables, look_up_locked, continues_native=begun is not None)

    def _reorder(self, array: Array) -> Array:
        """Returns an array (m,) with its features in the layout's order."""
        parts = split(array, self.sizes)
        return self._backend.xp.concatenate(
            [array[:0], *(parts[i] for i in self._batch.layout.order)]
        )

    def _read_sources(self) -> None:
        """Reads the rows of features with weights, for the gradients of the weights."""
        batch = self._batch
        weighted = [i for i, weights in enumerate(batch.weights) if weights is not None]
        if not weighted:
            return
        keys, rows, launches = split(self.keys, self.sizes), split(self.rows, self.sizes), []
        for i in weighted:
            table = self._tables[i]
            source = self.sources[i] = table.store.output(self.sizes[i])
            reading = [table.store.read_launch(rows[i], source)]
            if self._found[i][1] and batch.missing[i] == "initial":
                reading.append(table.draw_launch(source, keys[i], rows[i]))
            launches.append(reading)
        launch_all(*launches)
