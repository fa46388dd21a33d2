"""Gradient accumulation: the gradients of several batches in one step of an optimizer.

Two states of a row hold the sum of its gradients and the number of the step to which they belong.
Rows with the number of the present step take it, also where the sum is 0; with any other number the
step was taken, and the next gradient begins a new sum. Both are states like any other: they are
saved, restored and evicted with their row. They have an owner of their own, so that an optimizer
finds its other states whether or not it accumulates.

The keys of each batch are kept until the step. Only a table that is new here or was restored since
is scanned for the keys of the step, once.
"""

import weakref
from collections.abc import Sequence
from functools import partial

import numpy as np

from sok_lite.backend import Array
from sok_lite.backend.launches import Launch, launch_all
from sok_lite.engine.dedup import dedup
from sok_lite.engine.gathered_update import Gathered, GatheredStep, Stepped
from sok_lite.engine.optimizer_states import acquire_states
from sok_lite.engine.rows.column import Kinds
from sok_lite.engine.rows.store import RowStore
from sok_lite.engine.table import EmbeddingTable
from sok_lite.engine.table.export import filter_entries
from sok_lite.engine.table.find import rebalance
from sok_lite.engine.update import (
    Change,
    LocalStep,
    NonFiniteGradientError,
    StepOptions,
    merge_updates,
)
from sok_lite.engine.update_rows import Update, sum_duplicates

_SUM, _STEP = "gradient_accumulator", "accumulated_step"


class Accumulator:
    """Owner of the gradients that an optimizer has accumulated in the rows of tables."""

    def __init__(self) -> None:
        # Of each store the number of a step, and all keys that may have gradients of it. In a store
        # that is not there, such as a restored one, any key may.
        self._keys: weakref.WeakKeyDictionary[RowStore, tuple[int, list[Array]]] = (
            weakref.WeakKeyDictionary()
        )

    def add(self, updates: Sequence[Update], options: StepOptions) -> LocalStep:
        """Returns a step that adds gradients to the sums of their rows, and changes nothing else.

        It raises what UpdateStep does. With on_nonfinite="error" the sums must be finite too, or
        the last batch could not use them.

        Args:
          options: their number is that of the step to which the gradients belong.
        """
        updates = [each._replace(optimizer=self) for each in updates]
        add = partial(self._add, options.number, options.on_nonfinite == "error")
        # Rows that are not finite are counted with their step.
        return GatheredStep(updates, _kinds, add, options._replace(num_nonfinite=None))

    def _add(
        self, number: int, checks: bool, parts: Sequence[Gathered]
    ) -> tuple[list[Stepped], None]:
        stepped = []
        for table, keys, _, grads, states in parts:
            xp = table.backend.xp
            step = _as_state(table, number)
            has_sum = (states[_STEP] == step).all(axis=1, keepdims=True)
            with np.errstate(over="ignore", invalid="ignore"):  # a GPU says nothing either
                sums = xp.where(has_sum, states[_SUM] + grads, grads)
            if checks and not bool(xp.isfinite(sums).all()):
                raise NonFiniteGradientError(
                    f"The gradients of several batches of table {table.name!r} sum up to an "
                    "infinity; nothing was changed. Clip the gradients or scale the loss down, or "
                    "use on_nonfinite='allow'."
                )
            if table.store in self._keys:
                of_step, before = self._keys[table.store]
                kept = [*(before if of_step == number else []), xp.array(keys)]
                self._keys[table.store] = number, kept
            stepped.append(Stepped(None, {_SUM: sums, _STEP: xp.zeros_like(states[_STEP]) + step}))
        return stepped, None

    def with_sums(
        self, updates: Sequence[Update], number: int
    ) -> tuple[Sequence[Update], list[list[Launch]]]:
        """Returns merged updates plus the sums of a step, each key once.

        The launches reset the number of the step in its rows, for a counter may come to that number
        again. They are to be made after the step; their order does not matter.
        """
        tables = [each.table for each in updates]
        for table in tables:
            # Else an insertion of the step would, and move rows that are found here.
            if table.tiers is not None and table.tiers.is_due:
                rebalance(table)
        states = acquire_states(tables, list(map(_kinds, tables)), [self] * len(tables))
        total, resets = list[Update](), []
        for each, columns in zip(updates, states, strict=True):
            table = each.table
            xp, store = table.backend.xp, table.store
            step_column = columns[_STEP].name
            candidates = self._keys_of_step(table, step_column, number)
            rows = table.index.find(candidates).rows
            found = xp.flatnonzero(_is_of_step(table, step_column, number, rows))
            keys, rows = xp.concatenate([each.keys, candidates[found]]), rows[found]
            grads = xp.concatenate([each.grads, store.read(rows, columns[_SUM].name)])
            total.append(each._replace(keys=keys, grads=grads, of_gradient=False))
            zeros = xp.zeros((rows.size, 2), np.float32)
            resets.append([store.write_launch(rows, zeros, step_column)])
        return sum_duplicates(total), resets

    def _keys_of_step(self, table: EmbeddingTable, column: str, number: int) -> Array:
        """Returns keys (n,) int64, distinct, that may have gradients of a step."""
        xp, store = table.backend.xp, table.store
        if store not in self._keys:
            found = filter_entries(
                table,
                lambda entries: _is_of_step(
                    table, column, number, xp.ascontiguousarray(entries.rows)
                ),
            )
            self._keys[store] = number, [table.engine_keys(entries.keys) for entries in found]
        of_step, kept = self._keys[store]
        keys = xp.concatenate([xp.zeros(0, np.int64), *(kept if of_step == number else [])])
        return dedup(table.backend, keys, (0, keys.size)).keys


def _kinds(table: EmbeddingTable) -> Kinds:
    return {_SUM: (table.dim, 0.0), _STEP: (2, 0.0)}


def _as_state(table: EmbeddingTable, number: int) -> Array:
    """Returns the number of a step as a state, (1, 2) float32: exact up to 2**48."""
    return table.backend.from_host(np.array([divmod(number, 1 << 24)], np.float32))


def _is_of_step(table: EmbeddingTable, column: str, number: int, rows: Array) -> Array:
    """Returns which rows have gradients of a step, (n,) bool; False for NO_ROW."""
    return (table.store.read(rows, column) == _as_state(table, number)).all(axis=1)


class AccumulatedStep(LocalStep):
    """A step by the mean of the gradients of several batches.

    Args:
      step: of the last batch, with an update without keys for a table that has no gradient in it.
      accumulator: has the gradients of the batches before.
      batches: number of all batches.
    """

    def __init__(self, step: LocalStep, accumulator: Accumulator, batches: int) -> None:
        super().__init__(step.updates, step.options)
        self._step, self._accumulator, self._batches = step, accumulator, batches

    def new_change(self, commits_now: bool) -> Change:
        updates = merge_updates(self.updates)
        total, resets = self._accumulator.with_sums(updates, self.options.number)
        batches = np.float32(self._batches)
        self._step.updates = [each._replace(grads=each.grads / batches) for each in total]
        change = self._step.new_change(commits_now)

        def change_and_reset() -> Sequence[EmbeddingTable]:
            tables = change()
            launch_all(*resets)
            return tables

        return change_and_reset
