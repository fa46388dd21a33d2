"""Gradients of several batches in one step of an optimizer: what has come is a state of the rows.

A row has the sum of its gradients beside its other states, and of which step they are. Rows with
the number of the present step take it, also those whose gradients sum up to 0; with any other
number a sum is of a step that was taken, and the next gradient begins a new one. Both are states
like any other: they are saved, restored and evicted with their row. They have an owner of their
own, so that an optimizer finds its other states whether or not it accumulates.

Which keys a step has is not searched for in the whole table: those of each batch are kept until
then. Only a table that was restored since, or is new here, is looked through once.
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
from sok_lite.engine.table.export import chosen
from sok_lite.engine.update import Change, HeldStep, NonFiniteGradientError, StepOptions, merged
from sok_lite.engine.update_rows import Update, summed

_SUM, _STEP = "gradient_accumulator", "accumulated_step"


class Accumulator:
    """The owner of what an optimizer has accumulated in the rows of tables."""

    def __init__(self) -> None:
        # Of each store, a step and all keys that may have something of it. In a store that is not
        # there any may; what a restore brings is a new one.
        self._keys: weakref.WeakKeyDictionary[RowStore, tuple[int, list[Array]]] = (
            weakref.WeakKeyDictionary()
        )

    def add(self, updates: Sequence[Update], options: StepOptions) -> HeldStep:
        """Returns a step that adds gradients to what their rows have, and changes nothing else.

        It raises what UpdateStep does. With on_nonfinite="error" the sums must be finite too: else
        the last batch, and any in its place, would find one that it cannot use.

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
            goes_on = (states[_STEP] == step).all(axis=1, keepdims=True)
            with np.errstate(over="ignore", invalid="ignore"):  # a GPU says nothing either
                sums = xp.where(goes_on, states[_SUM] + grads, grads)
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

    def with_waiting(
        self, updates: Sequence[Update], number: int
    ) -> tuple[Sequence[Update], list[list[Launch]]]:
        """Returns gradients and what the rows of their tables have of a step, each key once.

        The launches are to be made with that step, which do not depend on each other: they have
        the rows forget which one it was, for a counter may come to its number again.

        Args:
          updates: as `merged` gives them.
          number: of the step.
        """
        tables = [each.table for each in updates]
        states = acquire_states(tables, list(map(_kinds, tables)), [self] * len(tables))
        total, forgetting = list[Update](), []
        for each, columns in zip(updates, states, strict=True):
            table = each.table
            xp, store = table.backend.xp, table.store
            waiting = self._keys_of_step(table, columns[_STEP].name, number)
            rows = table.index.find(waiting).rows
            found = xp.flatnonzero(_is_of_step(table, columns[_STEP].name, number, rows))
            keys, rows = xp.concatenate([each.keys, waiting[found]]), rows[found]
            grads = xp.concatenate([each.grads, store.read(rows, columns[_SUM].name)])
            total.append(each._replace(keys=keys, grads=grads, of_gradient=False))
            forgotten = xp.zeros((rows.size, 2), np.float32)
            forgetting.append([store.write_launch(rows, forgotten, columns[_STEP].name)])
        return summed(total), forgetting

    def _keys_of_step(self, table: EmbeddingTable, column: str, number: int) -> Array:
        """Returns keys (n,) int64, all that have something of a step, and maybe others."""
        xp, store, none = table.backend.xp, table.store, table.backend.xp.zeros(0, np.int64)
        if store not in self._keys:
            found = chosen(
                table,
                lambda entries: _is_of_step(
                    table, column, number, xp.ascontiguousarray(entries.rows)
                ),
            )
            what = f"keys of table {table.name!r}"
            keys = [table.key_dtype.to_int64(xp, entries.keys, what) for entries in found]
            self._keys[store] = number, keys
        of_step, kept = self._keys[store]
        keys = xp.concatenate([none, *(kept if of_step == number else [])])
        return dedup(table.backend, keys, (0, keys.size)).keys


def _kinds(table: EmbeddingTable) -> Kinds:
    return {_SUM: (table.dim, 0.0), _STEP: (2, 0.0)}


def _as_state(table: EmbeddingTable, number: int) -> Array:
    """Returns the number of a step as rows have it, (1, 2) float32: exact up to 2**48."""
    return table.backend.from_host(np.array([divmod(number, 1 << 24)], np.float32))


def _is_of_step(table: EmbeddingTable, column: str, number: int, rows: Array) -> Array:
    """Returns which rows have something of a step, (n,) bool; NO_ROW has not."""
    return (table.store.read(rows, column) == _as_state(table, number)).all(axis=1)


class AccumulatedStep(HeldStep):
    """A step by the mean of its gradients and of those of the batches before.

    Args:
      step: that of the last batch; of a table without a gradient in it with no keys.
      accumulator: has the gradients of the others.
      batches: how many there are.
    """

    def __init__(self, step: HeldStep, accumulator: Accumulator, batches: int) -> None:
        super().__init__(step.updates, step.options)
        self._step, self._accumulator, self._batches = step, accumulator, batches

    def get_ready(self, is_whole: bool) -> Change:
        updates, number = merged(self.updates), self.options.number
        total, forgetting = self._accumulator.with_waiting(updates, number)
        batches = np.float32(self._batches)
        self._step.updates = [each._replace(grads=each.grads / batches) for each in total]
        change = self._step.get_ready(is_whole)

        def change_and_forget() -> Sequence[EmbeddingTable]:
            tables = change()
            launch_all(*forgetting)
            return tables

        return change_and_forget
