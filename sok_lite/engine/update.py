"""One optimizer step for rows of several tables: unique -> sum over duplicates -> update rule."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from sok_lite.backend import Array
from sok_lite.backend.publish import Action, publish
from sok_lite.engine.optimizer_states import check_states, claim_states
from sok_lite.engine.optimizers import UpdateRule
from sok_lite.engine.optimizers.rule import (
    StochasticRounding,
    check_step,
    count_nonfinite,
    updating,
)
from sok_lite.engine.recent import recall
from sok_lite.engine.rows.store import ABSENT
from sok_lite.engine.segments import segment_sum, unique
from sok_lite.engine.table import EmbeddingTable
from sok_lite.engine.table.exclusive import holding
from sok_lite.engine.table.parts import table_seed


class Update(NamedTuple):
    """The step of one table.

    Attributes:
      table: the table.
      rule: its update rule.
      keys: (n,) integers; keys without a row are skipped.
      grads: (n, dim) float32; those of a repeated key are summed.
      optimizer: whose the states are; None: nobody's in particular.
    """

    table: EmbeddingTable
    rule: UpdateRule
    keys: Array
    grads: Array
    optimizer: Any = None


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
) -> int:
    """Applies one step to all tables. A table that comes several times is updated once.

    Args:
      updates: one per gradient.
      learning_rate: of this step.
      step: 1 for the first.
      on_nonfinite: "allow" or "error".
      stochastic_rounding: of float16 and bfloat16 rows, in place of rounding to nearest even. The
        random bits depend on the table's seed and name, key, column and step alone.
      check_only: raises what there is to raise and changes no row, for a step that has other parts.
      along: actions to be taken with the change of the rows.

    Returns:
      How many rows had a gradient with a NaN or an infinity.

    Raises:
      NonFiniteGradientError: there are such rows and `on_nonfinite` is "error".
      ValueError, TypeError: an update does not fit its table. Nothing has changed in either case.
    """
    if on_nonfinite not in ("allow", "error"):
        raise ValueError(f"`on_nonfinite` must be 'allow' or 'error'. Received: {on_nonfinite!r}.")
    # Held from the first look at a table to its last change: row numbers stay good.
    return holding(
        (update.table for update in updates),
        lambda: _apply(
            *(updates, learning_rate, step, on_nonfinite, stochastic_rounding, check_only, along)
        ),
    )


def _apply(
    updates: Sequence[Update],
    learning_rate: float,
    step: int,
    on_nonfinite: str,
    stochastic_rounding: bool,
    check_only: bool,
    along: Sequence[Action],
) -> int:
    merged = _merged(updates)
    check_step(learning_rate, step)
    for update in merged:
        check_states(update.table, update.rule, update.optimizer)
        update.rule.scalars(learning_rate, step)
    ready = [_ready(update) for update in merged]
    if on_nonfinite == "error":
        _raise_if_nonfinite(ready)
    for update in merged:
        claim_states(update.table, update.rule, update.optimizer)
    if check_only or not ready:
        return 0
    count = ready[0].table.backend.xp.zeros(1, np.int64)
    lists: list[list[Action]] = []
    for table, rule, keys, rows, grads in ready:
        rounding = None
        if stochastic_rounding:
            rounding = StochasticRounding(keys, table_seed(table.seed, table.name))
        lists.append(
            updating(table, rule, rows, grads, learning_rate, step, count, rounding=rounding)
        )
    publish(*lists, along)
    return int(count[0])


class _Ready(NamedTuple):
    """An update by row numbers: distinct keys (u,) int64, their rows (u,) uint32, grads (u, dim)
    float32."""

    table: EmbeddingTable
    rule: UpdateRule
    keys: Array
    rows: Array
    grads: Array


def _merged(updates: Sequence[Update]) -> list[Update]:
    by_table: dict[int, list[Update]] = {}
    for update in updates:
        by_table.setdefault(id(update.table), []).append(update)
    merged = []
    for parts in by_table.values():
        table = parts[0].table
        what = f"keys of table {table.name!r}"
        keys = [table.key_dtype.to_int64(table.backend.xp, part.keys, what) for part in parts]
        for part, key in zip(parts, keys, strict=True):
            _check(part, key)
            if part.rule != parts[0].rule:
                raise ValueError(
                    f"Table {table.name!r} comes with two update rules in one step: "
                    f"{parts[0].rule} and {part.rule}. Use one optimizer per table."
                )
        xp = table.backend.xp
        first = parts[0]._replace(keys=keys[0])
        if len(parts) > 1:
            grads: Any = xp.concatenate([part.grads for part in parts])
            first = first._replace(keys=xp.concatenate(keys), grads=grads)
        merged.append(first)
    return merged


def _check(update: Update, keys: Array) -> None:
    expected = (keys.size, update.table.dim)
    if keys.ndim != 1 or update.grads.shape != expected:
        raise ValueError(
            f"The gradient of table {update.table.name!r} must have one row of dimension "
            f"{update.table.dim} for each of its keys (n,). Received: keys {keys.shape}, rows "
            f"{update.grads.shape}."
        )
    if update.grads.dtype != np.float32:
        raise TypeError(
            f"The gradient of table {update.table.name!r} must be float32. "
            f"Received: {update.grads.dtype}."
        )


def _ready(update: Update) -> _Ready:
    table, rule, keys, grads, _ = update
    backend = table.backend
    rows = recall(table, keys)
    if rows is None:
        distinct, inverse = unique(backend, keys)
        if distinct.size < keys.size:
            # Distinct keys keep their order: without duplicates the gradients stay where they are.
            grads = segment_sum(backend, grads, inverse, int(distinct.size))
        keys = distinct
        rows = table.find(table.key_dtype.from_int64(backend.xp, keys))
    return _Ready(table, rule, keys, rows, backend.xp.ascontiguousarray(grads))


def _raise_if_nonfinite(updates: Sequence[_Ready]) -> None:
    for table, _, _, rows, grads in updates:
        count = int(count_nonfinite(table.backend, grads, rows))
        if count:
            held = int((rows != np.uint32(ABSENT)).sum())
            raise NonFiniteGradientError(
                f"{count} of {held} gradient rows of table {table.name!r} have a NaN or an "
                "infinity; nothing was changed. Clip the gradients or lower the learning rate, or "
                "use on_nonfinite='allow'."
            )
