"""One optimizer step for rows of several tables, some of whose rows are not in this process.

Such rows and their states are fetched into a table of this process, updated there, and written back
key by key, each as a whole: a row that another worker has changed meanwhile is fetched and updated
again. So each step of each worker counts, whoever trains the same keys.
"""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from sok_lite.backend.publish import Action
from sok_lite.engine.optimizers.rule import rule_step
from sok_lite.engine.step import Step, StepOptions
from sok_lite.engine.update import UpdateStep, make_states, merged
from sok_lite.engine.update_rows import Update, Updates, summed


def step_of(updates: Updates, options: StepOptions) -> Step:
    """Returns one step of all tables by their update rules, wherever their rows are."""
    are_remote = [table.is_remote for table in updates.tables]
    return RemoteStep(updates, options) if True in are_remote else UpdateStep(updates, options)


class RemoteStep(Step):
    """One step of all tables, where the rows of some are not in this process. Those go first.

    Where the connection to rows fails, those of this process have not changed; of the others some
    may have.

    Args, raises: as of UpdateStep. What a remote store raises comes as it is.
    """

    def __init__(self, updates: Updates, options: StepOptions) -> None:
        remote = [i for i, table in enumerate(updates.tables) if table.is_remote]
        here = [i for i, table in enumerate(updates.tables) if not table.is_remote]
        self._remote = list(map(Update, *summed(merged(updates.some(remote)))))
        stand_ins = [each._replace(table=cast(Any, each.table).make()) for each in self._remote]
        self._stand_ins = UpdateStep(stand_ins, options)
        self._here, self._options = UpdateStep(updates.some(here), options), options
        self._is_prepared = False

    def prepare(self) -> None:
        """Raises what there is to raise, and changes no row; see `Step`."""
        self._here.prepare()
        self._stand_ins.prepare()
        for update in self._remote:
            update.table.contains(update.keys[:1])  # is there a connection?
        self._is_prepared = True

    def commit(self, extra_actions: Sequence[Action] = ()) -> None:
        """Takes the step; see `Step`."""
        if not self._is_prepared:  # all is refused before the first row changes anywhere
            self._here.prepare()
            self._stand_ins.prepare()
        for update in self._remote:
            _take_step(update, self._options)
        self._here.commit(extra_actions)


def _take_step(update: Update, options: StepOptions) -> None:
    """Updates the rows of one remote table.

    Args:
      update: its keys distinct.
      options: of the step.
    """
    table: Any = update.table  # a RemoteTable
    keys = table.backend.to_host(update.keys)
    kinds = rule_step(update.rule, *options[:2]).kinds(table.dim)
    make_states([table], [kinds], update.optimizer)
    places = table.places_of(kinds)
    counts = [options.num_nonfinite]

    def change(which: np.ndarray, found: np.ndarray, old: np.ndarray) -> tuple[Any, Any]:
        held, its_keys = table.holding(keys[which], found, old)
        held.find_or_insert(its_keys, unique_keys=True)
        make_states([held], [kinds], None)
        for name, place in places.items():
            states = np.ascontiguousarray(old[:, place]).view(np.float32)
            held.assign_state(name, its_keys, states)
        grads = update.grads[table.backend.from_host(which)]
        its_update = Update(held, update.rule, its_keys, grads, of_gradient=True)
        # A gradient is counted once, however often its row has to be updated again.
        count = counts.pop() if counts else None
        UpdateStep([its_update], options._replace(num_nonfinite=count, rank_info=None)).commit()
        new = table.changed(held, its_keys, old)
        for name, place in places.items():
            states = table.backend.to_host(held.read_state(name, its_keys))
            new[:, place] = np.ascontiguousarray(states).view(np.uint8)
        return np.ones(len(which), bool), new

    table.rows.update(keys, change)
