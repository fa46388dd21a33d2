"""One optimizer step for rows of several tables: unique -> sum over duplicates -> update rule.

A key that has no row by then gets one, as by a lookup of all keys of its table's update: it was
erased or evicted since its own lookup, or never looked up, or refused. Insertions and the step of
all tables are published together. What a table refuses then is left out, and so is every key
without a row of a table that turns new keys away; both are counted.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from sok_lite.backend import Array
from sok_lite.backend.base import joined_launches
from sok_lite.backend.publish import Action, Launch, publish
from sok_lite.engine.foreign_keys import Place, refuse_foreign_keys
from sok_lite.engine.optimizer_states import Claim, claim_states
from sok_lite.engine.optimizers.rule import (
    RowStep,
    RuleStep,
    StochasticRounding,
    check_on_nonfinite,
    check_step,
    check_trained,
    counting_nonfinite,
    rule_step,
    updating,
)
from sok_lite.engine.rows.state_owner import Kinds, States
from sok_lite.engine.rows.store import ABSENT
from sok_lite.engine.segments import cut
from sok_lite.engine.table import EmbeddingTable
from sok_lite.engine.table.exclusive import holding
from sok_lite.engine.table.lookups import look_up_request, request_of
from sok_lite.engine.table.new_keys import Asked
from sok_lite.engine.update_rows import Ready, Update, marking, ready, see


class NonFiniteGradientError(ValueError, FloatingPointError):
    """A gradient has a NaN or an infinity and the program asked for an error."""


def apply_updates(
    updates: Sequence[Update],
    learning_rate: float,
    step: int,
    on_nonfinite: str = "allow",
    stochastic_rounding: bool = False,
    check_only: bool = False,
    along: Sequence[Action] = (),
    num_nonfinite: Array | None = None,
    place: Place | None = None,
) -> None:
    """Applies one step to all tables. A table that comes several times is updated once.

    It waits for the device only where keys may repeat or have no row, or `on_nonfinite` is "error".

    Args:
      updates: one per gradient.
      learning_rate: of this step.
      step: 1 for the first.
      on_nonfinite: "allow" or "error".
      stochastic_rounding: of float16 and bfloat16 rows, in place of rounding to nearest even. The
        random bits depend on the table's seed and name, key, column and step alone.
      check_only: raises what there is to raise and changes no row, for a step that has other parts.
      along: actions to be taken with the change of the rows.
      num_nonfinite: (1,) int64, grows by the rows that had a gradient with a NaN or an infinity;
        None: nobody wants to know.
      place: this rank among several, whose keys are refused; None: there are no others.

    Raises:
      ForeignKeysError: see `refuse_foreign_keys`. Nothing has changed. Here and below, keys which
        are not those of the last gradient may count as seen by the last lookup.
      NonFiniteGradientError: there are such rows and `on_nonfinite` is "error".
      ValueError, TypeError: an update does not fit its table. Nothing has changed in either case.
      MemoryError: there is none for states or new keys. No row has changed and no key was inserted.
      RuntimeError: new keys are chosen against the hash, see `EmbeddingTable.find_or_insert`. The
        same holds.
      RefusedError: a table had no room for new keys, and was made to say so. All others were
        updated.
    """
    check_on_nonfinite(on_nonfinite)
    # Held from the first look at a table to its last change: row numbers stay good.
    holding(
        [update.table for update in updates],
        lambda: _apply(
            *(updates, learning_rate, step, on_nonfinite, stochastic_rounding, check_only, along),
            *(num_nonfinite, place),
        ),
    )


def make_states(tables: Sequence[EmbeddingTable], kinds: Sequence[Kinds], optimizer: Any) -> None:
    """Makes the states of tables before the first update, and gives them to an optimizer.

    Raises:
      MemoryError: there is none for the states of a table. Others may have theirs.
    """
    claims = [
        Claim(table, its_kinds, optimizer) for table, its_kinds in zip(tables, kinds, strict=True)
    ]
    holding(tables, lambda: claim_states(claims))


def _apply(
    updates: Sequence[Update],
    learning_rate: float,
    step: int,
    on_nonfinite: str,
    stochastic_rounding: bool,
    check_only: bool,
    along: Sequence[Action],
    num_nonfinite: Array | None,
    place: Place | None,
) -> None:
    updates = merged(updates)
    check_step(learning_rate, step)
    rules = {id(update.rule): update.rule for update in updates}
    steps = {key: rule_step(rule, learning_rate, step) for key, rule in rules.items()}
    taken = [steps[id(update.rule)] for update in updates]
    if not updates:
        return
    updates_by_row = ready(updates, marks=not check_only)
    if place is not None:
        refuse_foreign_keys(updates, updates_by_row, place)
    if on_nonfinite == "error":
        raise_if_nonfinite(updates_by_row)
    states = claim_states(
        [
            Claim(update.table, its_step.kinds(update.table.dim), update.optimizer)
            for update, its_step in zip(updates, taken, strict=True)
        ]
    )
    if check_only:
        for update in updates_by_row:
            if update.inserts:
                update.table._room_for(update.num_absent)
        return
    if num_nonfinite is None:
        num_nonfinite = updates[0].table.backend.xp.zeros(1, np.int64)
    ready_steps = list(map(_Step, updates_by_row, states, taken))
    _take(ready_steps, _Options(stochastic_rounding, num_nonfinite), along)


class _Step(NamedTuple):
    """The update of one table, but for the moment when it is made.

    Attributes:
      ready: its keys, rows and gradients.
      states, step: what the rule works on, and the rule.
    """

    ready: Ready
    states: States
    step: RuleStep


class _Options(NamedTuple):
    """Of the updates of all tables, see `apply_updates`."""

    stochastic_rounding: bool
    num_nonfinite: Array


def _of_rows(step: _Step, options: _Options, rows: Array) -> RowStep:
    """Returns the step of the rows (u,) uint32 of a table's keys, absent ones not."""
    (table, keys, _, grads, *_), states, rule = step
    rounding = StochasticRounding(keys, table._table_seed) if options.stochastic_rounding else None
    return RowStep(table.store, states, rule, rows, grads, rounding)


def _take(steps: Sequence[_Step], options: _Options, along: Sequence[Action]) -> None:
    """Changes the rows of all tables, and inserts the keys that have none where they are taken."""
    see([step.ready for step in steps])
    inserting: list[_Step] = []
    others: list[_Step] = []
    for step in steps:
        (inserting if step.ready.inserts else others).append(step)
    launches = [
        *marking([step.ready for step in others]),
        *updating(
            [
                (step.ready.table.backend, _of_rows(step, options, step.ready.rows))
                for step in others
            ],
            options.num_nonfinite,
        ),
    ]
    left_out = [
        step.ready.table._counting(not_updated=step.ready.num_absent)
        for step in others
        if step.ready.num_absent
    ]
    if not inserting:
        publish([*launches, *left_out], along)
        return
    backend = inserting[0].ready.table.backend
    sizes = [step.ready.keys.size for step in inserting]
    keys = backend.xp.concatenate([step.ready.keys for step in inserting])
    rows = backend.xp.empty(keys.size, np.uint32)

    def then(step: _Step, its_rows: Array) -> list[Action]:
        taken = _of_rows(step, options, its_rows)
        backend = step.ready.table.backend
        return [Launch(backend, taken.kernel, taken.part(options.num_nonfinite))]

    asked = [
        Asked(step.ready.table, size, unique_keys=True, then=partial(then, step, its_rows))
        for step, size, its_rows in zip(inserting, sizes, cut(rows, sizes), strict=True)
    ]
    request = request_of(asked)._replace(is_lookup=False)
    look_up_request(backend, keys, rows, request, [[*launches, *left_out], along])
    for step in inserting:
        step.ready.table._report_refused()


# ---------------------------------------------------------------- arguments


def merged(updates: Sequence[Update]) -> list[Update]:
    """Returns an update for each table, its keys as int64 and its gradient C-contiguous."""
    by_table: dict[int, list[Update]] = {}
    for update in updates:
        by_table.setdefault(id(update.table), []).append(_checked(update))
    all_merged = []
    for first, *others in by_table.values():
        if others:
            for other in others:
                if other.rule != first.rule or other.optimizer is not first.optimizer:
                    raise ValueError(
                        f"Table {first.table.name!r} comes with two update rules in one step: "
                        f"{first.rule} and {other.rule}, or of two optimizers. Take one step after "
                        "the other."
                    )
            xp = first.table.backend.xp
            first = first._replace(
                keys=xp.concatenate([first.keys, *(other.keys for other in others)]),
                grads=xp.concatenate([first.grads, *(other.grads for other in others)]),
                of_gradient=False,
            )
        all_merged.append(first)
    return all_merged


def _checked(update: Update) -> Update:
    table, _, keys, grads, _, of_gradient = update
    check_trained(table.row_dtype, table.name)
    if not of_gradient:
        what = f"keys of table {table.name!r}"
        keys = table.key_dtype.to_int64(table.backend.xp, keys, what)
    if keys.ndim != 1 or grads.shape != (keys.size, table.dim):
        raise ValueError(
            f"The gradient of table {table.name!r} must have one row of dimension {table.dim} for "
            f"each of its keys (n,). Received: keys {keys.shape}, rows {grads.shape}."
        )
    if grads.dtype != np.float32:
        raise TypeError(
            f"The gradient of table {table.name!r} must be float32. Received: {grads.dtype}."
        )
    if of_gradient and grads.flags.c_contiguous:
        return update
    contiguous = table.backend.xp.ascontiguousarray
    return update._replace(keys=contiguous(keys), grads=contiguous(grads))


def raise_if_nonfinite(updates: Sequence[Ready]) -> None:
    """Raises NonFiniteGradientError if a row that is to be updated has a NaN or an infinity."""
    backend = updates[0].table.backend
    counts = backend.xp.zeros(len(updates), np.int64)
    # Keys that are to be inserted count as well. `rows` says which count, absent ones do not.
    rows = [None if update.inserts else update.rows for update in updates]
    publish(
        joined_launches(
            (backend, *counting_nonfinite(update.grads, its_rows, counts[i : i + 1]))
            for i, (update, its_rows) in enumerate(zip(updates, rows, strict=True))
        )
    )
    for update, its_rows, count in zip(
        updates, rows, backend.to_host(counts).tolist(), strict=True
    ):
        if count:
            table, num_keys = update.table, update.keys.size
            held = num_keys if its_rows is None else int((its_rows != np.uint32(ABSENT)).sum())
            raise NonFiniteGradientError(
                f"{count} of {held} gradient rows of table {table.name!r} have a NaN or an "
                "infinity; nothing was changed. Clip the gradients or lower the learning rate, or "
                "use on_nonfinite='allow'."
            )
