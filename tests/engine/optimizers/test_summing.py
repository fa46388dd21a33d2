"""Kernels of a GPU that sum the gradients of a row's items themselves, against sums of NumPy."""

import numpy as np
import pytest

from scripts.bench.common.row_steps import apply_rule, apply_rule_to_items
from sok_lite.engine.optimizers import SGD, Adam, GroupLamb, RowWiseAdagrad
from sok_lite.engine.rows.store import NO_ROW
from sok_lite.engine.segments import Terms, group
from tests.engine.optimizers.helpers import VARIANTS, new_table, read
from tests.support.helpers import on
from tests.support.reference import sum_in_pieces

# Items of each key: one, several, and more than the 32 that are summed one by one.
LENGTHS = [31, 32, 33, 1, 64, 65, 97, 2, 1]
NUM_KEYS, NUM_ITEMS = len(LENGTHS), sum(LENGTHS)
# Of each table: columns, whether items have indexes and weights, and floats before its gradients,
# which lie where four of them cannot be read at a time.
TABLES = [(4, False, False, 0), (3, True, False, 0), (8, True, True, 0), (4, False, False, 1)]
# A rule of each of the frames in which kernels are written has all formats.
OF_ALL_FORMATS = (SGD(), Adam(), RowWiseAdagrad(), GroupLamb())
CASES = [(rule, "float32") for rule in VARIANTS]
CASES += [(rule, dtype) for dtype in ("float16", "bfloat16", "float64") for rule in OF_ALL_FORMATS]


def items_of_tables(backend):
    """Returns groups and terms of all tables, and of each the sums; a NaN is in its key 3."""
    rng, numbers, columns, expected = np.random.default_rng(0), [], [], []
    for dim, has_index, has_weights, offset in TABLES:
        keys = rng.permutation(np.repeat(np.arange(NUM_KEYS), LENGTHS))
        numbers.append(keys + len(numbers) * NUM_KEYS)
        num_rows = NUM_ITEMS // 2 if has_index else NUM_ITEMS
        flat = rng.normal(size=offset + num_rows * dim).astype(np.float32)
        index = rng.integers(0, num_rows, NUM_ITEMS, np.int32) if has_index else None
        weights = rng.normal(size=NUM_ITEMS).astype(np.float32) if has_weights else None
        source = flat[offset:].reshape(num_rows, dim)
        item = np.flatnonzero(keys == 3)[0]
        source[item if index is None else index[item]] = np.nan
        added = source if index is None else source[index]
        added = added if weights is None else weights[:, None] * added
        expected.append(np.stack([sum_in_pieces(added[keys == key]) for key in range(NUM_KEYS)]))
        columns.append(on(backend, flat, index, weights))
        columns[-1][0] = columns[-1][0][offset:].reshape(num_rows, dim)
    labels = np.concatenate(numbers).astype(np.int32)
    begin, starts = (np.arange(len(TABLES) + 1) * each for each in (NUM_ITEMS, NUM_KEYS))
    groups = group(backend, backend.from_host(labels), begin, starts)
    return groups, Terms(*map(list, zip(*columns, strict=True))), expected


@pytest.mark.parametrize("rule, dtype", CASES, ids=repr)
def test_it_is_the_step_of_given_sums(backend, rule, dtype):
    if backend.name == "cpu":
        pytest.skip("a GPU's kernels")
    groups, terms, expected = items_of_tables(backend)
    for number, sums in enumerate(expected):
        values = np.random.default_rng(number).normal(size=sums.shape).astype(np.float32)
        (mine, rows), (theirs, _) = (new_table(backend, values, dtype) for _ in range(2))
        some = np.where(np.arange(NUM_KEYS) == 5, np.uint32(NO_ROW), rows)
        some, sums = on(backend, some, sums)
        for step in (1, 2):
            found = apply_rule_to_items(mine, rule, some, groups, terms, 0.1, step, number)
            assert found == apply_rule(theirs, rule, some, sums, 0.1, step) > 0
        for name in ("value", *rule.states):
            np.testing.assert_array_equal(read(mine, rows, name), read(theirs, rows, name))
