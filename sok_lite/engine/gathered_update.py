"""The fallback step: one optimizer step by a function that gets rows and states as arrays.

For optimizers that no kernel follows. Slower than an update rule: rows and states are copied twice,
and each table and state is a launch of its own. Duplicates are summed and states acquired as in
`update.UpdateStep`. But keys without a row are inserted before the function is called, and stay if
it raises.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from sok_lite.backend import Array
from sok_lite.backend.launches import Launch, launch_all
from sok_lite.backend.ragged import split
from sok_lite.engine.optimizer_states import acquire_states
from sok_lite.engine.optimizers.rule import count_nonfinite_launch
from sok_lite.engine.rows.column import Kinds, States
from sok_lite.engine.rows.store import NO_ROW
from sok_lite.engine.table import EmbeddingTable
from sok_lite.engine.table.find import look_up_batch
from sok_lite.engine.table.insert import LookupRequest
from sok_lite.engine.update import Change, LocalStep, StepOptions, merge_updates, resolve_and_check
from sok_lite.engine.update_rows import (
    ResolvedUpdate,
    Update,
    count_as_lookups,
    mark_seen_launches,
)


class Gathered(NamedTuple):
    """The rows of a table that have a gradient in a step.

    Attributes:
      keys: (u,) int64, distinct.
      rows, grads: (u, dim) float32.
      states: by name, (u, elements of the state) float32.
    """

    table: EmbeddingTable
    keys: Array
    rows: Array
    grads: Array
    states: dict[str, Array]


class Stepped(NamedTuple):
    """Rows and states of a table after the step, as in `Gathered`; rows None: unchanged."""

    rows: Array | None
    states: dict[str, Array]


# Takes what was gathered of each table, which may be no rows. Returns the result for each in the
# same order, and a function to be called with the change of the rows, or None.
StepFunction = Callable[[Sequence[Gathered]], tuple[Sequence[Stepped], Callable[[], None] | None]]


class GatheredStep(LocalStep):
    """One step of all tables by a function of rows and states.

    Args:
      updates: one per gradient; their rules are not used.
      kinds: returns the states that the step needs of a table.
      function: takes the step, under the locks of all tables.
      options: of the step; rounding of rows is up to the function.

    Raises:
      ForeignKeysError, NonFiniteGradientError, ValueError, TypeError, MemoryError, RuntimeError and
        RefusedError: as UpdateStep.
      Exception: whatever `function` raises; then no row and no state has changed.
    """

    def __init__(
        self,
        updates: Sequence[Update],
        kinds: Callable[[EmbeddingTable], Kinds],
        function: StepFunction,
        options: StepOptions,
    ) -> None:
        super().__init__(updates, options)
        self._kinds, self._function = kinds, function

    def new_change(self, commits_now: bool) -> Change:
        updates = merge_updates(self.updates)
        if not updates:
            return tuple
        # No key is marked as seen before the function has returned: it may raise.
        resolved = resolve_and_check(updates, self.options, marks=False)
        tables = [each.table for each in updates]
        optimizers = [each.optimizer for each in updates]
        states = acquire_states(tables, list(map(self._kinds, tables)), optimizers)
        with_rows = list(map(_without_missing, _with_rows_inserted(resolved)))
        stepped, note = self._function(list(map(_gather, with_rows, states)))
        refused = [(each.table, each.table.refused) for each in resolved if each.inserts]
        results = list(zip(resolved, with_rows, states, stepped, strict=True))

        def change() -> list[EmbeddingTable]:
            count_as_lookups(resolved)
            launch_all(*(self._launches(*each) for each in results))
            for each in resolved:
                if not each.inserts:
                    each.table.counters.not_updated += each.num_without_row
            if note is not None:
                note()
            for table, count in refused:
                table.refused = count  # of the insertion, which may have been another call
            return [table for table, _ in refused]

        return change

    def _launches(
        self, resolved: ResolvedUpdate, with_rows: ResolvedUpdate, states: States, result: Stepped
    ) -> list[Launch]:
        """Returns the launches that write the step of a table."""
        store, rows, num_nonfinite = (
            with_rows.table.store,
            with_rows.rows,
            self.options.num_nonfinite,
        )
        launches = mark_seen_launches(resolved)
        if num_nonfinite is not None:
            count = count_nonfinite_launch(store.backend, with_rows.grads, None, num_nonfinite)
            launches.append(count)
        for name, values in result.states.items():
            launches.append(store.write_launch(rows, values, states[name].name))
        if result.rows is not None:
            launches.append(store.write_launch(rows, store.to_storage(result.rows)))
        return launches


def _with_rows_inserted(updates: Sequence[ResolvedUpdate]) -> Sequence[ResolvedUpdate]:
    """Returns updates after the insertion of missing keys, where the tables insert for updates."""
    inserting = [each for each in updates if each.inserts]
    if not inserting:
        return updates
    backend, sizes = inserting[0].table.backend, [each.keys.size for each in inserting]
    keys = backend.xp.concatenate([each.keys for each in inserting])
    rows = backend.xp.empty(keys.size, np.uint32)
    pairs = zip(inserting, sizes, strict=True)
    requests = [LookupRequest(each.table, size, unique_keys=True) for each, size in pairs]
    num_without_row = look_up_batch(backend, keys, rows, requests, is_lookup=False)
    results = zip(inserting, split(rows, sizes), num_without_row, strict=True)
    inserted = iter([each._replace(rows=its, num_without_row=n) for each, its, n in results])
    return [next(inserted) if each.inserts else each for each in updates]


def _without_missing(update: ResolvedUpdate) -> ResolvedUpdate:
    """Returns an update without the keys that have no row."""
    table, keys, rows, grads, count, _ = update
    if not count:
        return update
    present = table.backend.xp.flatnonzero(rows != np.uint32(NO_ROW))
    keys, rows, grads = keys[present], rows[present], grads[present]
    return update._replace(keys=keys, rows=rows, grads=grads, num_without_row=0)


def _gather(update: ResolvedUpdate, states: States) -> Gathered:
    table, keys, rows, grads, *_ = update
    store = table.store
    values = store.row_dtype.to_float32(table.backend.xp, store.read(rows))
    read = {name: store.read(rows, column.name) for name, column in states.items()}
    return Gathered(table, keys, values, grads, read)
