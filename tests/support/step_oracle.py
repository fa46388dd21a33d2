"""The oracle of a whole lookup: plain Python over the batches of all ranks, no code of sok_lite."""

import numpy as np


def divisor(weights, combiner):
    if combiner == "sum":
        return 1.0
    total = sum(weights) if combiner == "mean" else sum(w * w for w in weights) ** 0.5
    return total


def combined(rows, combiner, dim, weights=None):
    """One output row of the rows (list of float64 arrays) of a batch row's keys."""
    weights = [1.0] * len(rows) if weights is None else [float(w) for w in weights]
    by = divisor(weights, combiner) if rows else 0.0
    if by == 0:
        return np.zeros(dim)
    return sum(w * row for w, row in zip(weights, rows, strict=True)) / by


def outputs(ragged, row_of, combiner, dim, weights=None):
    """(batch, dim) float64 for a list of lists of keys."""
    result = np.zeros((len(ragged), dim))
    for b, keys in enumerate(ragged):
        rows = [np.asarray(row_of(key), np.float64) for key in keys]
        result[b] = combined(rows, combiner, dim, None if weights is None else weights[b])
    return result


def key_gradients(ragged, out_grads, combiner, weights=None):
    """key -> float64 gradient of its row, summed over one rank's batch."""
    total = {}
    for b, keys in enumerate(ragged):
        row_weights = [1.0] * len(keys) if weights is None else [float(w) for w in weights[b]]
        by = divisor(row_weights, combiner) if keys else 0.0
        for key, weight in zip(keys, row_weights, strict=True):
            if by != 0:
                grad = np.asarray(out_grads[b], np.float64) * weight / by
                total[key] = total.get(key, 0) + grad
            else:
                total.setdefault(key, np.zeros(len(out_grads[b])))
    return total


def random_ragged(rng, batch, most, low, high):
    """A list of lists of keys; some are empty, many keys repeat."""
    return [
        [int(key) for key in rng.integers(low, high, rng.integers(0, most + 1))]
        for _ in range(batch)
    ]


def flat(ragged, dtype):
    """(values, row_splits) of a list of lists."""
    values = np.array([x for row in ragged for x in row], dtype)
    splits = np.cumsum([0, *(len(row) for row in ragged)]).astype(np.int64)
    return values, splits
