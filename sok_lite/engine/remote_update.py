"""One optimizer step for rows of several tables, some of whose rows are not in this process.

Such rows and their states are fetched into a table of this process, updated there, and written back
key by key, each as a whole: a row that another worker has changed meanwhile is fetched and updated
again. So each step of each worker counts, whoever trains the same keys.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias, cast

import numpy as np

from sok_lite.backend import Array
from sok_lite.backend.publish import Action, publish
from sok_lite.engine.foreign_keys import RankInfo
from sok_lite.engine.optimizers.rule import rule_step
from sok_lite.engine.update import apply_updates, make_states, merged
from sok_lite.engine.update_rows import Update, Updates, summed

# Learning rate, step, `on_nonfinite` and `stochastic_rounding` of `apply_updates`.
Options: TypeAlias = tuple[float, int, str, bool]


def apply_all_updates(
    updates: Sequence[Update] | Updates,
    learning_rate: float,
    step: int,
    on_nonfinite: str = "allow",
    stochastic_rounding: bool = False,
    check_only: bool = False,
    extra_actions: Sequence[Action] = (),
    num_nonfinite: Array | None = None,
    rank_info: RankInfo | None = None,
) -> None:
    """Does what `apply_updates` does, of remote tables too. Those go first.

    Where the connection to rows fails, those of this process have not changed; of the others some
    may have.

    Args, raises: as of `apply_updates`. What a remote store raises comes as it is.
    """
    options = (learning_rate, step, on_nonfinite, stochastic_rounding)
    updates = Updates.of(updates)
    are_remote = [table.is_remote for table in updates.tables]
    if True not in are_remote:
        apply_updates(updates, *options, check_only, extra_actions, num_nonfinite, rank_info)
        return
    here = updates.some([i for i, is_remote in enumerate(are_remote) if not is_remote])
    there = updates.some([i for i, is_remote in enumerate(are_remote) if is_remote])
    remote = list(map(Update, *summed(merged(there))))
    # All is refused that is to be refused, before the first row changes anywhere.
    stand_ins = [update._replace(table=cast(Any, update.table).make()) for update in remote]
    checked = [*map(Update, *here), *stand_ins]
    apply_updates(checked, *options, check_only=True, rank_info=rank_info)
    if check_only:
        for update in remote:
            update.table.contains(update.keys[:1])  # is there a connection?
        return
    for update in remote:
        _take_step(update, options, num_nonfinite)
    if here.tables:
        apply_updates(here, *options, check_only, extra_actions, num_nonfinite, rank_info)
    else:
        publish(extra_actions)


def _take_step(update: Update, options: Options, num_nonfinite: Array | None) -> None:
    """Updates the rows of one remote table.

    Args:
      update: its keys distinct.
      options: of `apply_updates`, from the learning rate on.
      num_nonfinite: see there.
    """
    table: Any = update.table  # a RemoteTable
    keys = table.backend.to_host(update.keys)
    kinds = rule_step(update.rule, *options[:2]).kinds(table.dim)
    make_states([table], [kinds], update.optimizer)
    places = table.places_of(kinds)
    counts = [num_nonfinite]

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
        apply_updates([its_update], *options, num_nonfinite=count)
        new = table.changed(held, its_keys, old)
        for name, place in places.items():
            states = table.backend.to_host(held.read_state(name, its_keys))
            new[:, place] = np.ascontiguousarray(states).view(np.uint8)
        return np.ones(len(which), bool), new

    table.rows.update(keys, change)
