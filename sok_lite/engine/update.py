"""One optimizer step for rows of several tables: unique -> sum over duplicates -> update rule.

A key without a row gets one, as by a lookup of all keys of its table's update: it was erased or
evicted since its own lookup, or never looked up, or refused. Insertions and the step of all tables
are published together. Keys that a table refuses are left out, and so is every key without a row if
its table admits only some new keys; both are counted.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from sok_lite.backend import Array
from sok_lite.backend.base import F32, joined_launches
from sok_lite.backend.publish import Action, Launch, publish
from sok_lite.engine.foreign_keys import refuse_foreign_keys
from sok_lite.engine.optimizer_states import acquire_states
from sok_lite.engine.optimizers.row_step import RowSteps, counting_nonfinite, plan_update
from sok_lite.engine.optimizers.rule import RuleStep, check_step, rule_step
from sok_lite.engine.pieces import chosen, contiguous, dtypes_of, shapes_of
from sok_lite.engine.rows.state_owner import Kinds, States
from sok_lite.engine.rows.store import NO_ROW
from sok_lite.engine.segments import cut
from sok_lite.engine.step import HeldStep, Step, StepOptions
from sok_lite.engine.table import EmbeddingTable
from sok_lite.engine.table.exclusive import holding
from sok_lite.engine.table.lookups import batched, look_up_batch
from sok_lite.engine.table.new_keys import LookupRequest
from sok_lite.engine.update_rows import (
    ResolvedUpdates,
    Updates,
    plan_mark_seen,
    resolve_rows,
    touch,
)


class NonFiniteGradientError(ValueError, FloatingPointError):
    """A gradient has a NaN or an infinity and the program asked for an error."""


def step_of(updates: Updates, options: StepOptions) -> Step:
    """Returns one step of all tables by their update rules, whatever their kinds."""
    types = [table.step_type for table in updates.tables]
    if types.count(None) == len(types):
        return UpdateStep(updates, options)
    steps = [
        (UpdateStep if step_type is None else step_type)(
            updates.some([i for i, other in enumerate(types) if other is step_type]), options
        )
        for step_type in (*dict.fromkeys(filter(None, types)), None)
    ]
    return JoinedStep(steps)


class JoinedStep(Step):
    """Steps of tables of several kinds, as one. Every one is prepared before the first is taken.

    Args:
      steps: in the order in which they are taken. The last does not fail once it is prepared.
    """

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = steps
        self._is_prepared = False

    def prepare(self) -> None:
        """Checks all steps: raises their errors, and changes no row."""
        for step in reversed(self._steps):
            step.prepare()
        self._is_prepared = True

    def commit(self, extra_actions: Sequence[Action] = ()) -> None:
        """Takes the steps.

        Args:
          extra_actions: actions to be published together with the last one.
        """
        if not self._is_prepared:
            self.prepare()
        *others, last = self._steps
        for step in others:
            step.commit()
        last.commit(extra_actions)


class UpdateStep(HeldStep["_Steps | None"]):
    """One step of all tables by their update rules.

    It waits for the device only where keys may repeat or have no row, or `on_nonfinite` is "error".

    Either half raises:
      ForeignKeysError: keys that would be inserted belong to other ranks. Nothing has changed. Here
        and below, keys which are not those of the last gradient may count as seen by the last
        lookup.
      NonFiniteGradientError: there are such rows and `on_nonfinite` is "error".
      ValueError, TypeError: an update does not fit its table. Nothing has changed in either case.
      MemoryError: there is none for states or new keys. No row has changed and no key was inserted.
      RuntimeError: new keys find no slots under a second seed of the hash either: somebody has
        chosen them. No row has changed and no key was inserted.
    `commit` raises:
      RefusedError: a table with on_refused="error" has refused new keys. All other keys were
        updated.
    """

    def get_ready(self, is_whole: bool) -> "_Steps | None":
        options, updates = self.options, merged(self.updates)
        if not updates.tables:
            check_step(options.learning_rate, options.number)
            return None
        # Most steps have one rule: nothing is called for each table.
        order = list(map(id, updates.rules))
        rules = dict(zip(order, updates.rules, strict=True))
        steps = {
            key: rule_step(rule, options.learning_rate, options.number)
            for key, rule in rules.items()
        }
        by_row = resolve_rows(updates, marks=is_whole)
        if options.rank_info is not None:
            refuse_foreign_keys(updates, by_row, options.rank_info)
        if options.on_nonfinite == "error":
            raise_if_nonfinite(by_row)
        sorts = list(zip(order, [table.dim for table in updates.tables], strict=True))
        kinds = {each: steps[each[0]].kinds(each[1]) for each in dict.fromkeys(sorts)}
        states = acquire_states(updates.tables, [kinds[each] for each in sorts], updates.optimizers)
        if not is_whole:
            columns = (by_row.tables, by_row.num_without_row, by_row.inserts)
            for table, count, inserts in zip(*columns, strict=True):
                if inserts:
                    table.make_room(count)
        return _Steps(by_row, states, [steps[key] for key in order])

    def take(self, ready: "_Steps | None", extra_actions: Sequence[Action]) -> None:
        if ready is None:
            publish(extra_actions)
            return
        steps, rounding = ready, self.options.stochastic_rounding
        num_nonfinite = self.options.num_nonfinite
        if num_nonfinite is None:
            num_nonfinite = steps.resolved.tables[0].backend.xp.zeros(1, np.int64)
        touch(steps.resolved)
        inserts, has_rows = steps.resolved.inserts, steps
        if True in inserts:
            has_rows = steps.some([i for i, insert in enumerate(inserts) if not insert])
        found, rows_of_found = has_rows.resolved, _of_rows(has_rows, rounding)
        actions = [*plan_mark_seen(found), *plan_update(rows_of_found, num_nonfinite)]
        actions += [
            action
            for table, count in zip(found.tables, found.num_without_row, strict=True)
            if count
            for action in table.plan_count(not_updated=count)
        ]
        if True not in inserts:
            publish(actions, extra_actions)
            return
        new = steps.some([i for i, insert in enumerate(inserts) if insert])
        _insert(new.resolved, _of_rows(new, rounding), num_nonfinite, [actions, extra_actions])


def _insert(
    updates: ResolvedUpdates,
    steps: RowSteps,
    num_nonfinite: Array,
    extra_actions: Sequence[Sequence[Action]],
) -> None:
    """Inserts the keys of updates that have no row, and takes each step once its keys have theirs.

    Args:
      steps: of these updates, without row numbers yet.
      num_nonfinite: (1,) int64, grows by the rows whose gradient has a NaN or an infinity.
      extra_actions: published with the insertions.
    """
    tables, sizes = updates.tables, [keys.size for keys in updates.keys]
    backend = tables[0].backend
    keys = backend.xp.concatenate(list(updates.keys))
    rows = backend.xp.empty(keys.size, np.uint32)
    steps = steps._replace(rows=cut(rows, sizes))

    def then(number: int) -> list[Action]:
        step, backend = steps.of(number), steps.backends[number]
        return [Launch(backend, step.kernel, step.part(num_nonfinite))]

    requests = [
        LookupRequest(table, size, unique_keys=True, then=partial(then, i))
        for i, (table, size) in enumerate(zip(tables, sizes, strict=True))
    ]
    lookup = batched(requests)._replace(is_lookup=False)
    look_up_batch(backend, keys, rows, lookup, extra_actions)
    for table in tables:
        table.report_refused()


def make_states(tables: Sequence[EmbeddingTable], kinds: Sequence[Kinds], optimizer: Any) -> None:
    """Makes the states of tables before the first update, and gives them to an optimizer.

    Raises:
      MemoryError: there is none for the states of a table. Others may have theirs.
    """
    holding(tables, lambda: acquire_states(tables, kinds, [optimizer] * len(tables)))


class _Steps(NamedTuple):
    """The updates of tables, ready to be made.

    Attributes:
      resolved: their keys, rows and gradients.
      states: of each, the state columns that the rule works on.
      rules: of each, the rule in this step.
    """

    resolved: ResolvedUpdates
    states: Sequence[States]
    rules: Sequence[RuleStep]

    def some(self, numbers: Sequence[int]) -> "_Steps":
        """Returns those of some numbers."""
        return _Steps(self.resolved.some(numbers), *chosen(self[1:], numbers))


def _of_rows(steps: _Steps, stochastic_rounding: bool) -> RowSteps:
    """Returns the steps of the rows of the tables' keys."""
    tables, keys, rows, grads, *_ = steps.resolved
    stores, backends = [table.store for table in tables], [table.backend for table in tables]
    rounding = None
    if stochastic_rounding:
        rounding = keys, [table.table_seed for table in tables]
    return RowSteps(backends, stores, steps.states, steps.rules, rows, grads, rounding)


# ---------------------------------------------------------------- arguments


def merged(updates: Updates) -> Updates:
    """Returns an update for each table, its keys as int64 and its gradient C-contiguous."""
    updates = _checked_updates(updates)
    if len(set(updates.tables)) == len(updates.tables):
        return updates
    numbers_of: dict[int, list[int]] = {}
    for i, table in enumerate(updates.tables):
        numbers_of.setdefault(id(table), []).append(i)
    firsts = [numbers[0] for numbers in numbers_of.values()]
    all_merged = updates.some(firsts)
    keys, grads = list(all_merged.keys), list(all_merged.grads)
    of_gradients = list(all_merged.of_gradients)
    for number, (first, *others) in enumerate(numbers_of.values()):
        if not others:
            continue
        table, rule, optimizer = (
            updates.tables[first],
            updates.rules[first],
            updates.optimizers[first],
        )
        for other in others:
            if updates.rules[other] != rule or updates.optimizers[other] is not optimizer:
                raise ValueError(
                    f"Table {table.name!r} comes with two update rules in one step: {rule} and "
                    f"{updates.rules[other]}, or of two optimizers. Take one step after the other."
                )
        concatenate = table.backend.xp.concatenate
        keys[number] = concatenate([updates.keys[i] for i in (first, *others)])
        grads[number] = concatenate([updates.grads[i] for i in (first, *others)])
        of_gradients[number] = False
    return all_merged._replace(keys=keys, grads=grads, of_gradients=of_gradients)


def _checked_updates(updates: Updates) -> Updates:
    """Returns updates with keys as int64 and C-contiguous gradients, or raises."""
    tables, _, keys, grads, _, of_gradients = updates
    for table in [table for table in tables if not table.row_dtype.suffix]:
        instead = "Make it of float32, or assign its rows."
        table.row_dtype.require_floats(table.name, "trained", instead)
    if False in of_gradients:
        keys = [
            its_keys
            if of_gradient
            else table.key_dtype.to_int64(
                table.backend.xp, its_keys, f"keys of table {table.name!r}"
            )
            for table, its_keys, of_gradient in zip(tables, keys, of_gradients, strict=True)
        ]
    shapes = list(zip(shapes_of(keys), shapes_of(grads), strict=True))
    for table, (of_keys, of_rows) in [
        (table, shape)
        for table, shape in zip(tables, shapes, strict=True)
        if len(shape[0]) != 1 or shape[1] != (*shape[0], table.dim)
    ]:
        raise ValueError(
            f"The gradient of table {table.name!r} must have one row of dimension {table.dim} for "
            f"each of its keys (n,). Received: keys {of_keys}, rows {of_rows}."
        )
    if dtypes_of(grads) - {F32}:
        for table, its_grads in zip(tables, grads, strict=True):
            if its_grads.dtype != np.float32:
                raise TypeError(
                    f"The gradient of table {table.name!r} must be float32. "
                    f"Received: {its_grads.dtype}."
                )
    if not tables:
        return updates
    backend = tables[0].backend
    keys, grads = contiguous(backend, keys), contiguous(backend, grads)
    if keys is updates.keys and grads is updates.grads:
        return updates
    return updates._replace(keys=keys, grads=grads)


def raise_if_nonfinite(updates: ResolvedUpdates) -> None:
    """Raises NonFiniteGradientError if a row that is to be updated has a NaN or an infinity."""
    backend = updates.tables[0].backend
    counts = backend.xp.zeros(len(updates.tables), np.int64)
    # Keys that are to be inserted count as well. `rows` says which count, NO_ROW does not.
    rows = [
        None if inserts else its_rows
        for its_rows, inserts in zip(updates.rows, updates.inserts, strict=True)
    ]
    publish(
        joined_launches(
            (backend, *counting_nonfinite(grads, its_rows, counts[i : i + 1]))
            for i, (grads, its_rows) in enumerate(zip(updates.grads, rows, strict=True))
        )
    )
    of_tables = (updates.tables, updates.keys, rows, backend.to_host(counts).tolist())
    for table, keys, its_rows, count in zip(*of_tables, strict=True):
        if count:
            total = keys.size if its_rows is None else int((its_rows != np.uint32(NO_ROW)).sum())
            raise NonFiniteGradientError(
                f"{count} of {total} gradient rows of table {table.name!r} have a NaN or an "
                "infinity; nothing was changed. Clip the gradients or lower the learning rate, or "
                "use on_nonfinite='allow'."
            )
