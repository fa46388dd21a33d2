"""One optimizer step for rows of several tables: unique -> sum over duplicates -> update rule.

In training the keys of an update are those of the gradient before it, which are distinct and whose
row numbers a table has kept. They are compared with those kept by the kernel that gives the row
numbers: a key that is another one is looked for. So an update whose caller says that its keys are
those of a gradient waits for nothing; of other keys the host asks first whether they repeat.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.base import Part, joined_launches
from sok_lite.backend.publish import Action, publish
from sok_lite.comm.protocol import split_offsets
from sok_lite.engine.optimizer_states import Claim, claim_states
from sok_lite.engine.optimizers import UpdateRule
from sok_lite.engine.optimizers.rule import (
    RuleStep,
    StochasticRounding,
    check_step,
    counting_nonfinite,
    rule_step,
    updating,
)
from sok_lite.engine.rows.state_owner import States
from sok_lite.engine.rows.store import ABSENT
from sok_lite.engine.segments import Terms, cut, dedup, group, segment_sums
from sok_lite.engine.table import EmbeddingTable
from sok_lite.engine.table.exclusive import holding
from sok_lite.engine.table.results import KnownRows


class Update(NamedTuple):
    """The step of one table.

    Attributes:
      table: the table.
      rule: its update rule.
      keys: (n,) integers; keys without a row are skipped.
      grads: (n, dim) float32; those of a repeated key are summed.
      optimizer: whose the states are; None: nobody's, the next optimizer may take them over.
      of_gradient: a promise that the keys are all those of a `lookup.Gradients` of a table with
        this key type: int64, and none repeats.
    """

    table: EmbeddingTable
    rule: UpdateRule
    keys: Array
    grads: Array
    optimizer: Any = None
    of_gradient: bool = False


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
) -> None:
    """Applies one step to all tables. A table that comes several times is updated once.

    It waits for the device only where keys may repeat or `on_nonfinite` is "error".

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

    Raises:
      NonFiniteGradientError: there are such rows and `on_nonfinite` is "error".
      ValueError, TypeError: an update does not fit its table. Nothing has changed in either case.
    """
    if on_nonfinite not in ("allow", "error"):
        raise ValueError(f"`on_nonfinite` must be 'allow' or 'error'. Received: {on_nonfinite!r}.")
    # Held from the first look at a table to its last change: row numbers stay good.
    holding(
        [update.table for update in updates],
        lambda: _apply(
            *(updates, learning_rate, step, on_nonfinite, stochastic_rounding, check_only, along),
            num_nonfinite,
        ),
    )


def make_states(tables: Sequence[EmbeddingTable], rule: UpdateRule, optimizer: Any) -> None:
    """Makes the states that a rule needs, before the first update, and gives them to an optimizer.

    Raises:
      MemoryError: there is none for the states of a table. Others may have theirs.
    """
    step = rule_step(rule, 0.0, 1)
    holding(tables, lambda: claim_states([Claim(table.store, step, optimizer) for table in tables]))


def _apply(
    updates: Sequence[Update],
    learning_rate: float,
    step: int,
    on_nonfinite: str,
    stochastic_rounding: bool,
    check_only: bool,
    along: Sequence[Action],
    num_nonfinite: Array | None,
) -> None:
    merged = _merged(updates)
    check_step(learning_rate, step)
    rules = {id(update.rule): update.rule for update in merged}
    steps = {key: rule_step(rule, learning_rate, step) for key, rule in rules.items()}
    taken = [steps[id(update.rule)] for update in merged]
    if not merged:
        return
    ready = _ready(merged)
    if on_nonfinite == "error":
        _raise_if_nonfinite(ready)
    states = claim_states(
        [
            Claim(update.table.store, its_step, update.optimizer)
            for update, its_step in zip(merged, taken, strict=True)
        ]
    )
    if not check_only:
        if num_nonfinite is None:
            num_nonfinite = merged[0].table.backend.xp.zeros(1, np.int64)
        publish(_launches(ready, states, taken, num_nonfinite, stochastic_rounding), along)


class _Ready(NamedTuple):
    """An update by row numbers: distinct keys (u,) int64, their rows (u,) uint32, grads (u, dim)
    float32."""

    table: EmbeddingTable
    keys: Array
    rows: Array
    grads: Array


def _launches(
    ready: Sequence[_Ready],
    states: Sequence[States],
    steps: Sequence[RuleStep],
    num_nonfinite: Array,
    stochastic_rounding: bool,
) -> list[Action]:
    """Returns a launch for each kernel."""
    parts: list[tuple[Backend, str, Part]] = []
    rounding = None
    for (table, keys, rows, grads), its_states, step in zip(ready, states, steps, strict=True):
        if stochastic_rounding:
            rounding = StochasticRounding(keys, table._table_seed)
        store = table.store
        kernel, part = updating(store, its_states, step, rows, grads, num_nonfinite, rounding)
        parts.append((table.backend, kernel, part))
    return joined_launches(parts)


# ---------------------------------------------------------------- arguments


def _merged(updates: Sequence[Update]) -> list[Update]:
    """Returns an update for each table, its keys as int64 and its gradient C-contiguous."""
    by_table: dict[int, list[Update]] = {}
    for update in updates:
        by_table.setdefault(id(update.table), []).append(_checked(update))
    merged = []
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
        merged.append(first)
    return merged


def _checked(update: Update) -> Update:
    table, _, keys, grads, _, of_gradient = update
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
    return update._replace(keys=keys, grads=table.backend.xp.ascontiguousarray(grads))


# ---------------------------------------------------------------- row numbers


def _ready(updates: Sequence[Update]) -> list[_Ready]:
    """Returns the updates with distinct keys and their row numbers."""
    updates = list(updates)
    backend = updates[0].table.backend
    rows: list[Array] = [None] * len(updates)
    doubtful = [i for i, update in enumerate(updates) if not update.of_gradient]
    # Most likely these are the keys of the last gradient as well.
    likely = [i for i in doubtful if _known(updates[i]) is not None]
    if likely:
        num_others = backend.xp.zeros(len(likely), np.int64)
        found = _recalled([updates[i] for i in likely], num_others)
        for i, its_rows, count in zip(
            likely, found, backend.to_host(num_others).tolist(), strict=True
        ):
            if count == 0:
                rows[i] = its_rows
    doubtful = [i for i in doubtful if rows[i] is None]
    for i, update in zip(doubtful, _summed([updates[i] for i in doubtful]), strict=True):
        updates[i] = update
    unknown = [i for i, its_rows in enumerate(rows) if its_rows is None]
    for i, its_rows in zip(unknown, _recalled([updates[i] for i in unknown]), strict=True):
        rows[i] = its_rows
    return [
        _Ready(update.table, update.keys, its_rows, update.grads)
        for update, its_rows in zip(updates, rows, strict=True)
    ]


def _known(update: Update) -> KnownRows | None:
    """Returns the keys of the table's last gradient if they may be those of an update."""
    known = update.table.last_gradient
    if known is None or known.generation != update.table.generation:
        return None
    return known if known.keys.size == update.keys.size else None


def _recalled(updates: Sequence[Update], num_others: Array | None = None) -> list[Array]:
    """Returns the row numbers of keys, by one launch.

    Args:
      num_others: (len(updates),) int64, grows by the keys of each that are not those of the last
        gradient; None: not wanted.

    Returns:
      (n,) uint32 for each update; absent for a key without a row.
    """
    if not updates:
        return []
    sizes = [len(update.keys) for update in updates]
    rows = cut(updates[0].table.backend.xp.empty(sum(sizes), np.uint32), sizes)
    parts = []
    for i, update in enumerate(updates):
        table, known, size = update.table, _known(update), sizes[i]
        keys_and_rows = (None, None) if known is None else (known.keys, known.rows)
        others = None if num_others is None else num_others[i : i + 1]
        arguments = (*table.index.place(), update.keys, *keys_and_rows, rows[i], others, size)
        parts.append((table.backend, "recall_rows", Part(size, arguments)))
    publish(joined_launches(parts))
    return rows


def _summed(updates: Sequence[Update]) -> list[Update]:
    """Returns the updates with each key once, and the sum of its gradients. It waits once."""
    if not updates:
        return []
    backend = updates[0].table.backend
    xp = backend.xp
    sizes = [len(update.keys) for update in updates]
    begin, keys = split_offsets(sizes), xp.concatenate([update.keys for update in updates])
    distinct = dedup(backend, keys, begin)
    if len(distinct.keys) == len(keys):
        return list(updates)  # distinct keys keep their order
    terms = [Terms(update.grads) for update in updates]
    sums = segment_sums(backend, group(backend, distinct.inverse, begin, distinct.starts), terms)
    return [
        update._replace(keys=keys, grads=grads)
        for update, keys, grads in zip(
            updates, cut(distinct.keys, distinct.sizes), sums, strict=True
        )
    ]


def _raise_if_nonfinite(ready: Sequence[_Ready]) -> None:
    backend = ready[0].table.backend
    counts = backend.xp.zeros(len(ready), np.int64)
    publish(
        joined_launches(
            (table.backend, *counting_nonfinite(grads, rows, counts[i : i + 1]))
            for i, (table, _, rows, grads) in enumerate(ready)
        )
    )
    for (table, _, rows, _), count in zip(ready, backend.to_host(counts).tolist(), strict=True):
        if count:
            held = int((rows != np.uint32(ABSENT)).sum())
            raise NonFiniteGradientError(
                f"{count} of {held} gradient rows of table {table.name!r} have a NaN or an "
                "infinity; nothing was changed. Clip the gradients or lower the learning rate, or "
                "use on_nonfinite='allow'."
            )
