"""Kernels of a GPU that sum the gradients of a row's items themselves, against sums of NumPy."""

import numpy as np
import pytest

from scripts.bench.common.row_steps import apply_rule, ensure_state
from sok_lite.engine.optimizers import SGD, Adam, GroupLamb, RowWiseAdagrad
from sok_lite.engine.optimizers.rule import RowStep, rule_step
from sok_lite.engine.rows.store import NO_ROW
from sok_lite.engine.segments import group
from tests.engine.optimizers.helpers import VARIANTS, new_table, read
from tests.engine.test_segments import many_tables, terms_on

# Keys with one item, with several, and with more than are summed one by one.
SIZES, DISTINCT, DIMS = [150, 90, 150, 1, 40, 10], 12, (4, 3, 8)
WORDS = 12  # of a GroupedSums (kernels/grouped.cuh)


def grouped_sums(backend, groups, terms):
    """Launches the sums of long groups; returns of each table its GroupedSums, and all memory."""
    told, memory = [], []
    for t, source in enumerate(terms.sources):
        (begin, end), (first, last) = groups.begin[t : t + 2], groups.starts[t : t + 2]
        size, dim = int(end - begin), source.shape[1]
        record = backend.xp.zeros(WORDS, np.uint64)
        pieces, sums = (backend.xp.empty((size // 32, dim), np.float32) for _ in range(2))
        words = (*(source, dim, terms.rows[t], terms.weights[t]), *groups[:3], int(first))
        words += (int(last - first), int(begin), size, pieces, sums, record)
        backend.launch("segment_sums", max(size // 32, 1), *words)
        backend.launch("segment_add_pieces", size, *words)
        told.append(record)
        memory += [pieces, sums]
    return told, memory


def step_by_items(table, rule, rows, told, step):
    """Takes a step of rows by the items of their groups; returns as `apply_rule` does."""
    store, count = table.store, table.backend.xp.zeros(1, np.int64)
    taken = rule_step(rule, 0.1, step)
    states = {
        name: ensure_state(store, name, initial, dim)
        for name, (dim, initial) in taken.rule.kinds(store.dim).items()
    }
    launch = RowStep(store, states, taken, rows, grads := object()).launch(count)
    arguments = list(launch.args.arguments)
    at = next(i for i, each in enumerate(arguments) if each is grads)
    arguments[at] = None
    assert arguments[at + 2] is None
    arguments[at + 2] = told.view(np.int64)  # in place of keys
    suffix = store.row_dtype.suffix
    name = launch.kernel.removesuffix(suffix) + "summing_" + suffix
    table.backend.launch(name, launch.args.num_items, *arguments)
    return count[0]


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
    told, memory = grouped_sums(backend, groups, terms_on(backend, terms))
    rng = np.random.default_rng(3)
    for record, sums in zip(told, expected, strict=True):
        values = rng.normal(size=sums.shape).astype(np.float32)
        (mine, numbers), (theirs, _) = (new_table(backend, values, dtype) for _ in range(2))
        rows = numbers.copy()
        rows[1::5] = NO_ROW
        for step in (1, 2):
            found = step_by_items(mine, rule, backend.from_host(rows), record, step)
            given = backend.from_host(sums)
            assert found == apply_rule(theirs, rule, backend.from_host(rows), given, 0.1, step)
        for name in ("value", *rule.states):
            np.testing.assert_array_equal(read(mine, numbers, name), read(theirs, numbers, name))
    del memory  # which kernels have written and read
