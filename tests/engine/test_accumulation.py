"""Gradients of several batches in one step, where rows move between the tiers of their table."""

import numpy as np
import pytest

from sok_lite.engine.accumulation import AccumulatedStep, Accumulator
from sok_lite.engine.optimizers import SGD
from sok_lite.engine.update import StepOptions, UpdateStep
from tests.support.helpers import new_table, update_of

DIM = 4
HOT = np.arange(50, 54)  # far at first, looked up most


@pytest.mark.parametrize("is_prepared", [False, True])
def test_a_sum_is_taken_once_though_its_row_moves_in_the_step(backend, is_prepared):
    """A counter of steps may come to its number again: nothing of the first time is left then."""
    table = new_table(
        backend,
        DIM,
        var_type="hybrid",
        max_hbm_for_vectors=8 * DIM * 4 / 2**30,
        init_capacity=128,
        max_capacity=256,
    )
    table.find_or_insert(np.arange(64))
    while not table.tiers.is_due:
        table.find_or_insert(HOT)
    first = backend.to_host(table.lookup(HOT, insert=False).values)
    accumulator, options, moved = Accumulator(), StepOptions(1.0, 1), table.tiers.num_moved

    def take(key, times):
        update = update_of(table, SGD(), [key], np.zeros((1, DIM)))
        step = AccumulatedStep(UpdateStep([update], options), accumulator, times)
        if is_prepared:
            step.prepare()
        step.commit()

    accumulator.add([update_of(table, None, HOT, np.full((4, DIM), 2.0))], options).commit()
    take(1000, 2)  # it gets a row, and the hot rows move before that
    assert table.tiers.num_moved > moved
    after = backend.to_host(table.lookup(HOT, insert=False).values)
    np.testing.assert_array_equal(after, first - 1.0)
    take(1000, 2)
    again = backend.to_host(table.lookup(HOT, insert=False).values)
    np.testing.assert_array_equal(again, after)
