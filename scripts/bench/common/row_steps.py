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

WORDS_OF_SUMS = 12  # a GroupedSums of kernels/grouped.cuh


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
    count = table.backend.xp.zeros(1, np.int64)
    _prepared(table, rule, rows, grads, learning_rate, step, rounding, count)()
    return count[0]


def _prepared(table, rule, rows, grads, learning_rate, step, rounding, count):
    taken = rule_step(rule, learning_rate, step)
    states = {
        name: ensure_state(table.store, name, initial, dim)
        for name, (dim, initial) in taken.rule.kinds(table.store.dim).items()
    }
    return RowStep(table.store, states, taken, rows, grads, rounding).launch(count)


def apply_rule_to_items(table, rule, rows, groups, terms, learning_rate, step, number=0):
    """The same by the items of groups, which a GPU's kernel sums itself: row r has group r.

    Args:
      groups, terms: of `segment_sums`.
      number: of the table in both.
    """
    backend, store = table.backend, table.store
    (begin, end), (first, last) = groups.begin[number:][:2], groups.starts[number:][:2]
    size, source = int(end - begin), terms.sources[number]
    index, weights = (its and its[number] for its in (terms.rows, terms.weights))
    told = backend.xp.empty(WORDS_OF_SUMS, np.uint64)
    pieces, sums = (backend.xp.empty((size // 32, store.dim), np.float32) for _ in range(2))
    words = (*(source, store.dim, index, weights), *groups[:3], int(first), int(last - first))
    words += (int(begin), size, pieces, sums, told)
    backend.launch("segment_sums", max(size // 32, 1), *words)
    backend.launch("segment_add_pieces", size, *words)
    count = backend.xp.zeros(1, np.int64)
    no_grads = object()
    given = _prepared(table, rule, rows, no_grads, learning_rate, step, None, count)
    arguments = list(given.args.arguments)
    at = next(i for i, each in enumerate(arguments) if each is no_grads)
    # In place of gradients and keys.
    arguments[at], arguments[at + 2] = None, told.view(np.int64)
    suffix = store.row_dtype.suffix
    name = f"{given.kernel.removesuffix(suffix)}summing_{suffix}"
    backend.launch(name, given.args.num_items, *arguments)
    return count[0]


def count_nonfinite(backend, grads, rows=None):
    """Counts the gradient rows that have a NaN or an infinity, as `apply_rule` does."""
    count = backend.xp.zeros(1, np.int64)
    count_nonfinite_launch(backend, grads, rows, count)()
    return count[0]
