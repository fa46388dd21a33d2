"""One optimizer step for rows of several tables whose rows are not in this process.

Such rows and their states are fetched into a table of this process, updated there, and written back
key by key, row and states together: a row that another worker has changed meanwhile is fetched and
updated again. So no step is lost when several workers train the same keys.
"""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, cast

import numpy as np

from sok_lite.engine.optimizers.rule import rule_step
from sok_lite.engine.update import Step, StepOptions, UpdateStep, make_states, merge_updates
from sok_lite.engine.update_rows import Update, sum_duplicates


class RemoteStep(Step):
    """One step of tables whose rows are not in this process.

    If the connection to the store fails, some rows may have changed.

    Args:
      updates: one per gradient.
      options: of the step.

    Raises:
      ForeignKeysError, NonFiniteGradientError, ValueError, TypeError, MemoryError: in the cases in
        which UpdateStep raises them.
      Exception: whatever the remote store raises.
    """

    def __init__(self, updates: Sequence[Update], options: StepOptions) -> None:
        self._updates = sum_duplicates(merge_updates(updates))
        stand_ins = [each._replace(table=cast(Any, each.table).make()) for each in self._updates]
        self._stand_ins, self._options = UpdateStep(stand_ins, options), options

    @staticmethod
    def refuse(table: str, why: str) -> NoReturn:
        """Raises for what a step cannot do with a table.

        Raises:
          NotImplementedError: always.
        """
        raise NotImplementedError(
            f"Table {table!r}, whose rows are not in this process, cannot take this step: {why}. "
            "Use an optimizer of docs/optimizers.md without clipnorm, global_clipnorm, loss "
            "scaling and gradient_accumulation_steps, or keep the rows in this process."
        )

    def prepare(self) -> None:
        """Checks the step: raises its errors, and changes no row."""
        self._stand_ins.prepare()
        for update in self._updates:
            update.table.contains(update.keys[:1])  # is there a connection?

    def commit(self, note: Callable[[], None] | None = None) -> None:
        """Takes the step.

        Args:
          note: called after it.
        """
        for update in self._updates:
            _take_step(update, self._options)
        if note is not None:
            note()


def _take_step(update: Update, options: StepOptions) -> None:
    """Updates the rows of one remote table.

    Args:
      update: its keys distinct.
      options: of the step.
    """
    table: Any = update.table  # a RemoteTable
    keys = table.backend.to_host(update.keys)
    kinds = rule_step(update.rule, options.learning_rate, options.number).rule.kinds(table.dim)
    make_states([table], [kinds], update.optimizer)
    places = table.places_of(kinds)
    counts = [options.num_nonfinite]

    def change(which: np.ndarray, found: np.ndarray, old: np.ndarray) -> tuple[Any, Any]:
        local, its_keys = table.holding(keys[which], found, old)
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
        new = table.changed(local, its_keys, old)
        for name, place in places.items():
            states = table.backend.to_host(local.read_state(name, its_keys))
            new[:, place] = np.ascontiguousarray(states).view(np.uint8)
        return np.ones(len(which), bool), new

    table.rows.update(keys, change)
