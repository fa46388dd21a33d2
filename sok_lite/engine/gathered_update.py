"""One optimizer step for rows of several tables by a function that gets the rows and their states.

For optimizers that no kernel follows. Slower than an update rule: rows and states are copied twice,
and each table and state is a launch of its own. What the rows of a step, absent keys and states are
is the same as of `update.apply_updates`, but that keys without a row are inserted before the
function is called, and stay if it raises.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from sok_lite.backend import Array
from sok_lite.backend.base import joined_launches
from sok_lite.backend.publish import Action, publish
from sok_lite.engine.foreign_keys import Place, refuse_foreign_keys
from sok_lite.engine.optimizer_states import Claim, claim_states
from sok_lite.engine.optimizers.rule import check_on_nonfinite, counting_nonfinite
from sok_lite.engine.rows.state_owner import Kinds, States
from sok_lite.engine.rows.store import ABSENT
from sok_lite.engine.segments import cut
from sok_lite.engine.table import EmbeddingTable
from sok_lite.engine.table.exclusive import holding
from sok_lite.engine.table.lookups import look_up_request, request_of
from sok_lite.engine.table.new_keys import Asked
from sok_lite.engine.update import merged, raise_if_nonfinite
from sok_lite.engine.update_rows import Ready, Update, marking, ready, see


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
    updates: Sequence[Update],
    kinds: Callable[[EmbeddingTable], Kinds],
    step: StepFunction,
    on_nonfinite: str = "allow",
    check_only: bool = False,
    along: Sequence[Action] = (),
    num_nonfinite: Array | None = None,
    place: Place | None = None,
) -> None:
    """Applies one step to all tables. A table that comes several times is updated once.

    Args:
      updates: one per gradient; their rules are not looked at.
      kinds: gives the states that the step needs of a table.
      step: takes the step, under the locks of all tables. With `check_only` what it gives is
        dropped.
      on_nonfinite, check_only, along, num_nonfinite, place: as of `update.apply_updates`.

    Raises:
      As `update.apply_updates`, and what `step` raises; then no row and no state has changed.
    """
    check_on_nonfinite(on_nonfinite)
    holding(
        [update.table for update in updates],
        lambda: _apply(updates, kinds, step, on_nonfinite, check_only, along, num_nonfinite, place),
    )


def _apply(
    updates: Sequence[Update],
    kinds: Callable[[EmbeddingTable], Kinds],
    step: StepFunction,
    on_nonfinite: str,
    check_only: bool,
    along: Sequence[Action],
    num_nonfinite: Array | None,
    place: Place | None,
) -> None:
    updates = merged(updates)
    if not updates:
        return
    by_row = ready(updates, marks=False)  # the step may raise, and then all is as it was
    if place is not None:
        refuse_foreign_keys(updates, by_row, place)
    if on_nonfinite == "error":
        raise_if_nonfinite(by_row)
    claims = [Claim(update.table, kinds(update.table), update.optimizer) for update in updates]
    states = claim_states(claims)
    inserting = [update.table for update in by_row if update.inserts]
    left_out = [
        update.table._counting(not_updated=update.num_absent)
        for update in by_row
        if update.num_absent and not update.inserts
    ]
    if not check_only:
        see(by_row)
    noting = marking(by_row)
    by_row = _with_rows_inserted(by_row)
    by_row = list(map(_held, by_row))
    stepped, more = step(list(map(_gathered, by_row, states)))
    if check_only:
        return
    writing = [
        action
        for update, its_states, went in zip(by_row, states, stepped, strict=True)
        for action in _writing(update, its_states, went)
    ]
    counting = [
        (update.table.backend, *counting_nonfinite(update.grads, None, num_nonfinite))
        for update in by_row
        if num_nonfinite is not None
    ]
    publish([*noting, *joined_launches(counting), *writing], [*left_out, *more, *along])
    for table in inserting:
        table._report_refused()


def _with_rows_inserted(updates: Sequence[Ready]) -> list[Ready]:
    """Returns updates after the insertion of absent keys, where the tables take any."""
    inserting = [update for update in updates if update.inserts]
    if not inserting:
        return list(updates)
    backend = inserting[0].table.backend
    sizes = [update.keys.size for update in inserting]
    keys = backend.xp.concatenate([update.keys for update in inserting])
    rows = backend.xp.empty(keys.size, np.uint32)
    asked = [
        Asked(update.table, size, unique_keys=True)
        for update, size in zip(inserting, sizes, strict=True)
    ]
    request = request_of(asked)._replace(is_lookup=False)
    num_absent = look_up_request(backend, keys, rows, request)
    rows_of, absent_of = iter(cut(rows, sizes)), iter(num_absent)
    return [
        update._replace(rows=next(rows_of), num_absent=next(absent_of))
        if update.inserts
        else update
        for update in updates
    ]


def _held(update: Ready) -> Ready:
    """Returns an update without the keys that have no row."""
    if not update.num_absent:
        return update
    held = update.table.backend.xp.flatnonzero(update.rows != np.uint32(ABSENT))
    keys, rows, grads = (part[held] for part in (update.keys, update.rows, update.grads))
    return Ready(update.table, keys, rows, grads, 0, update.are_seen)


def _gathered(update: Ready, states: States) -> Gathered:
    table, store = update.table, update.table.store
    rows = store.row_dtype.to_float32(table.backend.xp, store.read(update.rows))
    read = {name: store.read(update.rows, column.name) for name, column in states.items()}
    return Gathered(table, rows, update.grads, read)


def _writing(update: Ready, states: States, went: Stepped) -> list[Action]:
    store = update.table.store
    return [
        store.writing(update.rows, store.to_storage(went.rows)),
        *(
            store.writing(update.rows, values, states[name].name)
            for name, values in went.states.items()
        ),
    ]
