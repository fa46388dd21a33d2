"""Removing keys, with their rows and optimizer states: some, those that match, old ones, all."""

import numbers
from typing import Any

import numpy as np

from sok_lite.backend import Array
from sok_lite.backend.publish import Action, plan_set, publish
from sok_lite.engine.rows.store import NO_ROW
from sok_lite.engine.segments import unique
from sok_lite.engine.table.exclusive import changing, exclusive
from sok_lite.engine.table.history import History
from sok_lite.engine.table.parts import COUNTERS
from sok_lite.engine.table.results import Predicate


class Removes(History):
    """The methods that remove keys."""

    @changing
    def erase(self, keys: Any) -> int:
        """Removes keys with their rows and optimizer states; returns how many were there."""
        distinct, _ = unique(self.backend, self._keys(keys))
        return self._erase(distinct, self._plan_forget(distinct))

    @exclusive
    def erase_if(self, predicate: Predicate) -> int:
        """Removes the entries that a predicate chooses; returns how many.

        Args:
          predicate: called with some entries at a time. All are asked before the first goes. It
            must not wait for another thread that uses the table, such as a tf.function that looks
            it up.
        """
        xp = self.backend.xp
        doomed = [self._keys(entries.keys) for entries in self._chosen(predicate)]
        return self._erase_chosen(xp.concatenate([xp.empty(0, np.int64), *doomed]))

    @changing
    def expire(self, *, num_lookups: int | None = None, seconds: float | None = None) -> int:
        """Removes keys that were not seen lately; returns how many.

        A write into a row counts as of the last lookup that there was before it.

        Args:
          num_lookups: those that none of the last `num_lookups` lookups asked for. A training step
            is one lookup of a table where it is looked up once a step.
          seconds: those that no lookup asked for within that time, kept to a second or to 1/128 of
            it. Times are in checkpoints; what comes from an old one without counts as seen when it
            was restored.

        Raises:
          TypeError, ValueError: not exactly one of the two is given, or it is no number, negative,
            or a fraction of a lookup.
        """
        if (num_lookups is None) == (seconds is None):
            raise ValueError(
                "Give `num_lookups` or `seconds`, one of them. "
                f"Received: num_lookups={num_lookups}, seconds={seconds}."
            )
        name, limit = ("seconds", seconds) if num_lookups is None else ("num_lookups", num_lookups)
        if isinstance(limit, (bool, np.bool_)) or not isinstance(limit, numbers.Real):
            raise TypeError(f"`{name}` must be a number. Received: {name}={limit!r}.")
        if not limit >= 0 or (name == "num_lookups" and limit % 1 != 0):
            kind = "a whole number, 0 or more" if name == "num_lookups" else "0 or more"
            raise ValueError(f"`{name}` must be {kind}. Received: {name}={limit}.")
        if seconds is not None:
            oldest = self.clock.first_since(self.clock.read() - seconds)
        else:
            oldest = max(0, self.clock.now - int(num_lookups or 0) + 1)
        doomed = self._keys_where(lambda stamps: stamps < oldest)
        return self._erase(doomed, self._plan_forget_before(oldest))

    def erase_below(self, cutoff: float) -> int:
        """Removes the keys whose rows are nearly zero: every |element| < cutoff; returns how many.

        Raises:
          ValueError: the cutoff is not above 0.
        """
        return self.erase_if(self._is_below(cutoff))

    @changing
    def clear(self) -> None:
        """Removes every key and gives the memory back. Counters begin anew.

        Raises:
          MemoryError: no memory for the empty index; the table is as it was.
        """
        publish(self._plan_clear())
        self._finish()

    # ---------------------------------------------------------------- inside

    @changing
    def _erase_chosen(self, keys: Array) -> int:
        """Erases distinct keys, once a predicate has been asked: that may use the table."""
        return self._erase(keys, [])

    def _plan_clear(self) -> list[Action]:
        """Prepares to remove every key."""
        removed = [] if self.removals is None else self._plan_log(self.index.entries().keys)
        return [
            *removed,
            *self.index.plan_clear(),
            *self.store.plan_clear(),
            *plan_set(self, _counts=dict.fromkeys(COUNTERS, 0)),
            *self._plan_renew(),
        ]

    def _erase(self, keys: Array, forgetting: list[Action]) -> int:
        """Erases distinct keys, those that are there.

        Args:
          forgetting: actions to be taken along.
        """
        found = self._find(keys).rows
        held = self.backend.xp.flatnonzero(found != np.uint32(NO_ROW))
        count = int(held.size)
        if count == 0:
            publish(forgetting)
            return 0
        publish(
            [
                *self._plan_log(keys[held]),
                *self.index.plan_erase(keys[held]),
                *self._plan_release(found[held]),
                self._plan_count(erased=count),
                *self._plan_renew(),
                *forgetting,
            ]
        )
        self.index.clean()
        self.store.give_back()
        return count

    def _plan_log(self, keys: Array) -> list[Action]:
        """Prepares to note distinct keys that lose their rows, where there is a log."""
        return [] if self.removals is None else self.removals.plan_note(keys, self.clock.now)

    def _plan_release(self, rows: Array) -> list[Action]:
        """Prepares to give rows back."""
        return self.store.plan_release(rows)

    def _plan_forget(self, keys: Array) -> list[Action]:
        """Prepares to forget what else is known of distinct keys."""
        return []

    def _plan_forget_before(self, stamp: int) -> list[Action]:
        """Prepares to forget what else is known of keys that no lookup from `stamp` on has seen."""
        return []
