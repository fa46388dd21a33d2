"""One optimizer step for rows of several tables: unique -> sum over duplicates -> update rule.

A step has two halves, prepare and commit, with other parts between them, such as the step of dense
variables. Errors in the rows are raised by prepare, before anything has changed anywhere; after the
other parts, commit changes the rows.

A key without a row was erased, evicted or refused since its lookup, or never looked up. It gets a
row, as by a lookup of all keys of the update; insertions and the step of all tables are launched
together. Keys that a table refuses are left out, and so is every key without a row if its table
admits only some new keys; both are counted.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from sok_lite.backend import Array
from sok_lite.backend.base import F32
from sok_lite.backend.launches import Launch, launch_all
from sok_lite.backend.ragged import contiguous, split
from sok_lite.backend.uninterrupted import uninterrupted
from sok_lite.engine.foreign_keys import RankInfo, refuse_foreign_keys
from sok_lite.engine.optimizer_states import acquire_states
from sok_lite.engine.optimizers.rule import (
    RowStep,
    RuleStep,
    check_step,
    count_nonfinite_launch,
    rule_step,
)
from sok_lite.engine.rows.column import Kinds
from sok_lite.engine.rows.store import NO_ROW
from sok_lite.engine.table import EmbeddingTable
from sok_lite.engine.table.find import look_up_batch
from sok_lite.engine.table.insert import LookupRequest
from sok_lite.engine.table.locking import table_versions, with_locks, with_locks_since
from sok_lite.engine.update_rows import (
    ResolvedUpdate,
    Update,
    count_as_lookups,
    mark_seen_launches,
    resolve_rows,
)

# Changes the rows of a step, under the locks of its tables; returns those that have inserted keys.
Change = Callable[[], Sequence[EmbeddingTable]]


class NonFiniteGradientError(ValueError, FloatingPointError):
    """A gradient has a NaN or an infinity and the program asked for an error."""


class StepOptions(NamedTuple):
    """The options of a step, the same for all tables.

    Attributes:
      learning_rate: of this step, after any schedule.
      number: of the step, 1 for the first.
      on_nonfinite: "allow" or "error": whether a gradient with a NaN or an infinity raises.
      stochastic_rounding: of float16 and bfloat16 rows, in place of rounding to nearest even. The
        random bits depend on the table's seed and name, key, column and number alone.
      num_nonfinite: (1,) int64, grows by the rows whose gradient has a NaN or an infinity; None:
        they are not counted.
      rank_info: this rank among several: keys of the others are rejected; None: there are none.
    """

    learning_rate: float
    number: int
    on_nonfinite: str = "allow"
    stochastic_rounding: bool = False
    num_nonfinite: Array | None = None
    rank_info: RankInfo | None = None


class Step(Protocol):
    """A step that is taken once. Either half may raise the errors of the step."""

    def prepare(self) -> None:
        """Checks the step and raises its errors; no row changes. It may be left out."""

    def commit(self, note: Callable[[], None] | None = None) -> None:
        """Takes the step.

        Args:
          note: called with the change of the rows, before an error that follows it, such as
            RefusedError.
        """


class LocalStep(ABC):
    """Base of steps that hold the locks of their tables in each half.

    Between the halves the tables are free: a thread may hold one that another rank waits for. What
    was prepared is used if no table has changed meanwhile, and is prepared again otherwise.

    Args:
      updates: one per gradient. A table that comes several times is updated once.

    Raises:
      ValueError: `on_nonfinite` is neither "allow" nor "error".
    """

    def __init__(self, updates: Sequence[Update], options: StepOptions) -> None:
        if options.on_nonfinite not in ("allow", "error"):
            raise ValueError(
                f"`on_nonfinite` must be 'allow' or 'error'. Received: {options.on_nonfinite!r}."
            )
        self.updates, self.options = updates, options
        self._prepared: tuple[object, Change] | None = None

    def prepare(self) -> None:
        """Checks the step and raises its errors; no row changes."""

        def prepare() -> None:
            change = self.new_change(commits_now=False)
            if self.updates:
                self._prepared = table_versions(self._tables()), change

        with_locks(self._tables(), prepare)

    def commit(self, note: Callable[[], None] | None = None) -> None:
        """Takes the step; see `Step`."""
        if self._prepared is None:
            with_locks(self._tables(), partial(self._take, None, note))
            return
        since, change = self._prepared

        def take_prepared(is_unchanged: bool) -> None:
            self._take(change if is_unchanged else None, note)

        with_locks_since(self._tables(), since, take_prepared)

    def _tables(self) -> list[EmbeddingTable]:
        return [update.table for update in self.updates]

    def _take(self, change: Change | None, note: Callable[[], None] | None) -> None:
        change = change or self.new_change(commits_now=True)
        with uninterrupted():
            tables = change()
            if note is not None:
                note()
        for table in tables:
            table.report_refused()

    @abstractmethod
    def new_change(self, commits_now: bool) -> Change:
        """Checks the step, and returns what changes the rows. It is called under the tables' locks.

        Args:
          commits_now: whether the change follows at once: keys may count as seen already.
        """


def make_step(updates: Sequence[Update], options: StepOptions) -> Step:
    """Returns one step of all tables by their update rules, whatever their kinds."""
    types = [update.table.step_type for update in updates]
    if types.count(None) == len(types):
        return UpdateStep(updates, options)
    steps = [
        (UpdateStep if step_type is None else step_type)(
            [each for each, other in zip(updates, types, strict=True) if other is step_type],
            options,
        )
        for step_type in (*dict.fromkeys(filter(None, types)), None)
    ]
    return _JoinedStep(steps)


class _JoinedStep(Step):
    """Steps of tables of several kinds as one: all are prepared before the first is committed.

    Args:
      steps: in the order of their commits. That of tables in this process is the last: of a
        prepared one only insertions can fail.
    """

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = steps
        self._is_prepared = False

    def prepare(self) -> None:
        for step in reversed(self._steps):
            step.prepare()
        self._is_prepared = True

    def commit(self, note: Callable[[], None] | None = None) -> None:
        if not self._is_prepared:
            self.prepare()
        *others, last = self._steps
        for step in others:  # signals are not held back: they may wait for a remote store
            step.commit()
        last.commit(note)


class UpdateStep(LocalStep):
    """One step of all tables by their update rules.

    It waits for the device only where keys may repeat or have no row, or `on_nonfinite` is "error".

    Either half raises:
      ForeignKeysError: keys that would be inserted belong to other ranks. Nothing has changed. Here
        and below, keys which are not those of the last gradient may count as seen by the last
        lookup.
      NonFiniteGradientError: there are such rows and `on_nonfinite` is "error".
      ValueError, TypeError: an update does not fit its table. Nothing has changed in either case.
      MemoryError: no memory for states or new keys. No row has changed and no key was inserted.
      RuntimeError: new keys find no slots under a second seed of the hash either: somebody has
        chosen them. No row has changed and no key was inserted.
    `commit` raises:
      RefusedError: a table with on_refused="error" has refused new keys. All other keys were
        updated.
    """

    def new_change(self, commits_now: bool) -> Change:
        options, updates = self.options, merge_updates(self.updates)
        if not updates:
            check_step(options.learning_rate, options.number)
            return tuple
        # Most steps have one rule, and most tables one dimension.
        steps: dict[int, RuleStep] = {}
        kinds: dict[tuple[int, int], Kinds] = {}
        for update in updates:
            rule_id, dim = id(update.rule), update.table.dim
            if rule_id not in steps:
                steps[rule_id] = rule_step(update.rule, options.learning_rate, options.number)
            if (rule_id, dim) not in kinds:
                kinds[rule_id, dim] = steps[rule_id].rule.kinds(dim)
        resolved = resolve_and_check(updates, options, marks=commits_now)
        states = acquire_states(
            [each.table for each in updates],
            [kinds[id(each.rule), each.table.dim] for each in updates],
            [each.optimizer for each in updates],
        )
        if not commits_now:
            for its in resolved:
                if its.inserts:
                    its.table.make_room(its.num_without_row)
        row_steps = [
            RowStep(
                *(its.table.store, its_states, steps[id(each.rule)], its.rows, its.grads),
                (its.keys, its.table.table_seed) if options.stochastic_rounding else None,
            )
            for each, its, its_states in zip(updates, resolved, states, strict=True)
        ]
        return partial(self._change, list(zip(resolved, row_steps, strict=True)))

    def _change(self, pairs: Sequence[tuple[ResolvedUpdate, RowStep]]) -> list[EmbeddingTable]:
        num_nonfinite = self.options.num_nonfinite
        if num_nonfinite is None:
            num_nonfinite = pairs[0][0].table.backend.xp.zeros(1, np.int64)
        count_as_lookups([update for update, _ in pairs])
        new = [pair for pair in pairs if pair[0].inserts]
        others = [pair for pair in pairs if not pair[0].inserts] if new else pairs
        launches = [
            [*mark_seen_launches(update), step.launch(num_nonfinite)] for update, step in others
        ]
        if new:
            _insert(new, num_nonfinite, launches)
        else:
            launch_all(*launches)
        for update, _ in others:
            update.table.counters.not_updated += update.num_without_row
        return [update.table for update, _ in new]


def _insert(
    pairs: Sequence[tuple[ResolvedUpdate, RowStep]],
    num_nonfinite: Array,
    others: Sequence[Sequence[Launch]],
) -> None:
    """Inserts the keys of updates that have no row, and takes each step once its keys have theirs.

    Args:
      others: lists of launches that are made with the insertions.
    """
    backend = pairs[0][0].table.backend
    keys = backend.xp.concatenate([update.keys for update, _ in pairs])
    rows = backend.xp.empty(keys.size, np.uint32)

    def then(step: RowStep) -> list[Launch]:
        return [step.launch(num_nonfinite)]

    rows_of_each = split(rows, [update.keys.size for update, _ in pairs])
    requests = [
        LookupRequest(
            *(update.table, update.keys.size),
            unique_keys=True,
            then=partial(then, step._replace(rows=its_rows)),
        )
        for (update, step), its_rows in zip(pairs, rows_of_each, strict=True)
    ]
    look_up_batch(backend, keys, rows, requests, others, is_lookup=False)


def make_states(tables: Sequence[EmbeddingTable], kinds: Sequence[Kinds], optimizer: Any) -> None:
    """Makes the states of an optimizer in tables before its first update.

    Raises:
      MemoryError: no memory for the states of a table. Others may have theirs.
    """
    with_locks(tables, lambda: acquire_states(tables, kinds, [optimizer] * len(tables)))


# ---------------------------------------------------------------- checks


def merge_updates(updates: Sequence[Update]) -> list[Update]:
    """Returns one update per table, with int64 keys and a C-contiguous gradient, or raises."""
    by_table: dict[int, list[Update]] = {}
    for update in map(_checked_update, updates):
        by_table.setdefault(id(update.table), []).append(update)
    return [_joined(its) if len(its) > 1 else its[0] for its in by_table.values()]


def _joined(updates: Sequence[Update]) -> Update:
    first, *others = updates
    for other in others:
        if other.rule != first.rule or other.optimizer is not first.optimizer:
            raise ValueError(
                f"Table {first.table.name!r} comes with two update rules in one step: {first.rule} "
                f"and {other.rule}, or of two optimizers. Take one step after the other."
            )
    concatenate = first.table.backend.xp.concatenate
    keys, grads = ([getattr(each, name) for each in updates] for name in ("keys", "grads"))
    return first._replace(keys=concatenate(keys), grads=concatenate(grads), of_gradient=False)


def _checked_update(update: Update) -> Update:
    table, keys, grads = update.table, update.keys, update.grads
    if not table.row_dtype.suffix:
        instead = "Make it of float32, or assign its rows."
        table.row_dtype.require_floats(table.name, "trained", instead)
    xp = table.backend.xp
    if not update.of_gradient:
        keys = table.key_dtype.to_int64(xp, keys, f"keys of table {table.name!r}")
    if len(keys.shape) != 1 or grads.shape != (*keys.shape, table.dim):
        raise ValueError(
            f"The gradient of table {table.name!r} must have one row of dimension {table.dim} for "
            f"each of its keys (n,). Received: keys {keys.shape}, rows {grads.shape}."
        )
    if grads.dtype != F32:
        raise TypeError(
            f"The gradient of table {table.name!r} must be float32. Received: {grads.dtype}."
        )
    keys, grads = contiguous(table.backend, [keys, grads])
    return update._replace(keys=keys, grads=grads)


def resolve_and_check(
    updates: Sequence[Update], options: StepOptions, marks: bool
) -> list[ResolvedUpdate]:
    """Returns merged updates with row numbers; see `resolve_rows`.

    Raises:
      ForeignKeysError, NonFiniteGradientError: as UpdateStep.
    """
    resolved = resolve_rows(updates, marks=marks)
    if options.rank_info is not None:
        refuse_foreign_keys(updates, resolved, options.rank_info)
    if options.on_nonfinite == "error":
        _raise_if_nonfinite(resolved)
    return resolved


def _raise_if_nonfinite(updates: Sequence[ResolvedUpdate]) -> None:
    backend = updates[0].table.backend
    counts = backend.xp.zeros(len(updates), np.int64)
    # A key without a row counts if it is to be inserted.
    rows = [None if each.inserts else each.rows for each in updates]
    launch_all(
        *(
            [count_nonfinite_launch(each.table.backend, each.grads, its_rows, counts[i : i + 1])]
            for i, (each, its_rows) in enumerate(zip(updates, rows, strict=True))
        )
    )
    for each, its_rows, count in zip(updates, rows, backend.to_host(counts).tolist(), strict=True):
        if count:
            total = len(each.keys)
            if its_rows is not None:
                total = int((its_rows != np.uint32(NO_ROW)).sum())
            raise NonFiniteGradientError(
                f"{count} of {total} gradient rows of table {each.table.name!r} have a NaN or an "
                "infinity; nothing was changed. Clip the gradients or lower the learning rate, or "
                "use on_nonfinite='allow'."
            )
