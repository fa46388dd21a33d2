"""Kernels of a GPU that sum the gradients of a row's items themselves, against sums of NumPy."""

import numpy as np
import pytest

from scripts.bench.common.row_steps import apply_rule, apply_rule_to_items
from sok_lite.engine.optimizers import SGD, Adam, GroupLamb, RowWiseAdagrad
from sok_lite.engine.rows.store import NO_ROW
from sok_lite.engine.segments import group
from tests.engine.optimizers.helpers import VARIANTS, new_table, read
from tests.engine.test_segments import many_tables, terms_on
from tests.support.helpers import on

# Keys with one item, with several, and with more than are summed one by one.
SIZES, DISTINCT, DIMS = [150, 90, 150, 1, 40, 10], 12, (4, 3, 8)
# A rule of each of the frames in which kernels are written has all formats.
OF_ALL_FORMATS = (SGD(), Adam(), RowWiseAdagrad(), GroupLamb())
CASES = [(rule, "float32") for rule in VARIANTS]
CASES += [(rule, dtype) for dtype in ("float16", "bfloat16", "float64") for rule in OF_ALL_FORMATS]


@pytest.mark.parametrize("rule, dtype", CASES, ids=repr)
def test_it_is_the_step_of_given_sums(backend, rule, dtype):
    if backend.name == "cpu":
        pytest.skip("a GPU's kernels")
    inverse, begin, starts, terms, expected = many_tables(SIZES, DISTINCT, DIMS)
    terms[0][0][7] = np.nan
    expected[0][inverse[7]] = np.nan
    groups = group(backend, backend.from_host(inverse), begin, starts)
    terms, rng = terms_on(backend, terms), np.random.default_rng(3)
    for number, sums in enumerate(expected):
        values = rng.normal(size=sums.shape).astype(np.float32)
        (mine, rows), (theirs, _) = (new_table(backend, values, dtype) for _ in range(2))
        some = rows.copy()
        some[1::5] = NO_ROW
        some, sums = on(backend, some, sums)
        for step in (1, 2):
            found = apply_rule_to_items(mine, rule, some, groups, terms, 0.1, step, number)
            assert found == apply_rule(theirs, rule, some, sums, 0.1, step)
            assert found == (number == 0)
        for name in ("value", *rule.states):
            np.testing.assert_array_equal(read(mine, rows, name), read(theirs, rows, name))
