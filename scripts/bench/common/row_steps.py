"""Steps of a rule, and free states, of a table's rows whose numbers are known: without keys.

The package steps rows by keys only, and makes states for optimizers. Benchmarks and tests of the
kernels want less around them.
"""

import numpy as np

from sok_lite.engine.optimizers.rule import (
    RowStep,
    count_nonfinite_launch,
    rule_step,
)


def ensure_state(store, name, initial, dim=None):
    """Returns a free float32 state column of this name; it is made if there is none.

    Args:
      initial: the value of every element before the first update.
      dim: elements of a row; None: as many as a value row.
    """
    column = store.state_groups.get(None, {}).get(name)
    dim = store.dim if dim is None else dim
    if column is None:
        (column,) = store.add_states({name: (dim, initial)}, None)
    assert (column.dim, column.initial) == (dim, initial)
    return column


def apply_rule(table, rule, rows, grads, learning_rate, step, rounding=None):
    """Takes a step in place. State columns that the table lacks are made.

    Args:
      table: a table, or anything with `backend` and `store`.
      rows: (u,) uint32, distinct; NO_ROW is skipped.
      grads: (u, dim) float32, C-contiguous, one per row.
      step: 1 for the first update.
      rounding: of float16 and bfloat16 rows, keys and a seed; None: to nearest even.

    Returns:
      The number of rows whose gradient had a NaN or an infinity, as a 0-d integer array of the
      backend: `int()` of it waits for the GPU.
    """
    backend, store = table.backend, table.store
    taken = rule_step(rule, learning_rate, step)
    states = {
        name: ensure_state(store, name, initial, dim)
        for name, (dim, initial) in taken.rule.kinds(store.dim).items()
    }
    step_of_rows = RowStep(store, states, taken, rows, grads, rounding)
    count = backend.xp.zeros(1, np.int64)
    step_of_rows.launch(count)()
    return count[0]


def count_nonfinite(backend, grads, rows=None):
    """Counts the gradient rows that have a NaN or an infinity, as `apply_rule` does."""
    count = backend.xp.zeros(1, np.int64)
    count_nonfinite_launch(backend, grads, rows, count)()
    return count[0]
