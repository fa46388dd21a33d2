"""One optimizer step for rows of several tables by a function that gets the rows and their states.

For optimizers that no kernel follows. Slower than an update rule: rows and states are copied twice,
and each table and state is a launch of its own. What the rows of a step, absent keys and states are
is the same as of `update.apply_updates`, but that keys without a row are inserted before the
function is called, and stay if it raises.
"""

from collections.abc import Callable, Sequence
from itertools import compress
from typing import NamedTuple

import numpy as np

from sok_lite.backend import Array
from sok_lite.backend.base import joined_launches
from sok_lite.backend.publish import Action, publish
from sok_lite.engine.foreign_keys import RankInfo, refuse_foreign_keys
from sok_lite.engine.optimizer_states import acquire_states
from sok_lite.engine.optimizers.rule import check_on_nonfinite, counting_nonfinite
from sok_lite.engine.rows.state_owner import Kinds, States
from sok_lite.engine.rows.store import ABSENT, RowStore
from sok_lite.engine.segments import cut
from sok_lite.engine.table import EmbeddingTable
from sok_lite.engine.table.exclusive import holding
from sok_lite.engine.table.lookups import batched, look_up_batch
from sok_lite.engine.table.new_keys import LookupRequest
from sok_lite.engine.update import merged, raise_if_nonfinite
from sok_lite.engine.update_rows import (
    ResolvedUpdates,
    Update,
    Updates,
    plan_marking,
    resolve_rows,
    touch,
)


class Gathered(NamedTuple):
    """Rows of a table that have a gradient in a step.

    Attributes:
      table: the table.
      rows: (u, dim) float32.
      grads: (u, dim) float32.
      states: by name, (u, elements of the state) float32.
    """

    table: EmbeddingTable
    rows: Array
    grads: Array
    states: dict[str, Array]


class Stepped(NamedTuple):
    """Where a step has taken them.

    Attributes:
      rows: (u, dim) float32.
      states: by name, (u, elements of the state) float32.
    """

    rows: Array
    states: dict[str, Array]


# Takes what was gathered of each table, maybe no row of some. Gives where that is to go, in the
# same order, and actions to be taken with the change of the rows.
StepFunction = Callable[[Sequence[Gathered]], tuple[Sequence[Stepped], Sequence[Action]]]


def apply_gathered(
    updates: Sequence[Update] | Updates,
    kinds: Callable[[EmbeddingTable], Kinds],
    step: StepFunction,
    on_nonfinite: str = "allow",
    check_only: bool = False,
    extra_actions: Sequence[Action] = (),
    num_nonfinite: Array | None = None,
    rank_info: RankInfo | None = None,
) -> None:
    """Applies one step to all tables. A table that comes several times is updated once.

    Args:
      updates: one per gradient; their rules are not looked at.
      kinds: gives the states that the step needs of a table.
      step: takes the step, under the locks of all tables. With `check_only` what it gives is
        dropped.
      on_nonfinite, check_only, extra_actions, num_nonfinite, rank_info: as of
        `update.apply_updates`.

    Raises:
      As `update.apply_updates`, and what `step` raises; then no row and no state has changed.
    """
    check_on_nonfinite(on_nonfinite)
    together = Updates.of(updates)
    holding(
        together.tables,
        lambda: _apply(
            together, kinds, step, on_nonfinite, check_only, extra_actions, num_nonfinite, rank_info
        ),
    )


def _apply(
    updates: Updates,
    kinds: Callable[[EmbeddingTable], Kinds],
    step: StepFunction,
    on_nonfinite: str,
    check_only: bool,
    extra_actions: Sequence[Action],
    num_nonfinite: Array | None,
    rank_info: RankInfo | None,
) -> None:
    updates = merged(updates)
    if not updates.tables:
        return
    by_row = resolve_rows(updates, marks=False)  # the step may raise, and then all is as it was
    if rank_info is not None:
        refuse_foreign_keys(updates, by_row, rank_info)
    if on_nonfinite == "error":
        raise_if_nonfinite(by_row)
    states = acquire_states(updates.tables, list(map(kinds, updates.tables)), updates.optimizers)
    inserts = by_row.inserts
    inserting = list(compress(by_row.tables, inserts))
    left_out = [
        table._counting(not_updated=count)
        for table, count, insert in zip(by_row.tables, by_row.num_absent, inserts, strict=True)
        if count and not insert
    ]
    if not check_only:
        touch(by_row)
    noting = plan_marking(by_row)
    by_row = _held(_with_rows_inserted(by_row))
    stores = [table.store for table in by_row.tables]
    gathered = map(_gathered, by_row.tables, by_row.rows, by_row.grads, states)
    stepped, more = step(list(gathered))
    if check_only:
        return
    writing = [
        action
        for each in zip(stores, by_row.rows, states, stepped, strict=True)
        for action in _writing(*each)
    ]
    counting = [
        (table.backend, *counting_nonfinite(grads, None, num_nonfinite))
        for table, grads in zip(by_row.tables, by_row.grads, strict=True)
        if num_nonfinite is not None
    ]
    publish([*noting, *joined_launches(counting), *writing], [*left_out, *more, *extra_actions])
    for table in inserting:
        table._report_refused()


def _with_rows_inserted(updates: ResolvedUpdates) -> ResolvedUpdates:
    """Returns updates after the insertion of absent keys, where the tables take any."""
    inserting = [i for i, insert in enumerate(updates.inserts) if insert]
    if not inserting:
        return updates
    some = updates.some(inserting)
    backend, sizes = some.tables[0].backend, [keys.size for keys in some.keys]
    keys = backend.xp.concatenate(list(some.keys))
    rows = backend.xp.empty(keys.size, np.uint32)
    pairs = zip(some.tables, sizes, strict=True)
    requests = [LookupRequest(table, size, unique_keys=True) for table, size in pairs]
    lookup = batched(requests)._replace(is_lookup=False)
    num_absent = look_up_batch(backend, keys, rows, lookup)
    all_rows, all_absent = list(updates.rows), list(updates.num_absent)
    for i, its_rows, count in zip(inserting, cut(rows, sizes), num_absent, strict=True):
        all_rows[i], all_absent[i] = its_rows, count
    return updates._replace(rows=all_rows, num_absent=all_absent)


def _held(updates: ResolvedUpdates) -> ResolvedUpdates:
    """Returns updates without the keys that have no row."""
    lacking = [i for i, count in enumerate(updates.num_absent) if count]
    if not lacking:
        return updates
    parts = [list(updates.keys), list(updates.rows), list(updates.grads)]
    for i in lacking:
        held = updates.tables[i].backend.xp.flatnonzero(updates.rows[i] != np.uint32(ABSENT))
        for part in parts:
            part[i] = part[i][held]
    keys, rows, grads = parts
    return updates._replace(keys=keys, rows=rows, grads=grads, num_absent=[0] * len(keys))


def _gathered(table: EmbeddingTable, rows: Array, grads: Array, states: States) -> Gathered:
    store = table.store
    values = store.row_dtype.to_float32(table.backend.xp, store.read(rows))
    read = {name: store.read(rows, column.name) for name, column in states.items()}
    return Gathered(table, values, grads, read)


def _writing(store: RowStore, rows: Array, states: States, went: Stepped) -> list[Action]:
    return [
        store.writing(rows, store.to_storage(went.rows)),
        *(store.writing(rows, values, states[name].name) for name, values in went.states.items()),
    ]
