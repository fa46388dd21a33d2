"""Every optimizer on tables spread over real ranks, against its float64 twin.

The twin takes the steps of all ranks' batches together, over all keys.
"""

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite.bridge import job

pytest.importorskip("tf_keras")

from tests.support.optimizer_cases import CASES, MODULES
from tests.support.own_optimizers import ALL, Twin

DIM = 4
NUM_STEPS = 20
KEYS = np.arange(-9, 10)


IN_TURN = "comm"


@pytest.fixture(autouse=True)
def over(comm, monkeypatch):
    """Every test runs over each transport, as if `sok.init` had chosen it."""
    monkeypatch.setattr(job, "_communicator", comm)


def start():
    """The first rows of KEYS, for every table."""
    return np.random.default_rng(1).normal(0, 0.5, (len(KEYS), DIM)).astype(np.float32)


def batch_of(rank, step, num_tables):
    """(positions in KEYS, gradients of their rows in each table) of a rank: some keys come twice,
    and in some steps a rank has none."""
    rng = np.random.default_rng([rank, step])
    positions = rng.integers(0, len(KEYS), rng.integers(0, 12))
    return positions, rng.normal(size=(num_tables, len(positions), DIM)).astype(np.float32)


def new_table(comm, number):
    """A table whose keys are assigned where they belong."""
    mine = KEYS % comm.size == comm.rank
    table = sok.DynamicVariable(DIM, name=f"rows_{number}")
    sok.assign(table, KEYS[mine], start()[mine])
    return table


@pytest.mark.parametrize("family", MODULES)
def test_spread_rows_end_where_the_twin_of_the_whole_batch_puts_them(comm, family):
    cases = [case for case in CASES if case.family == family]
    tables = [new_table(comm, number) for number, _ in enumerate(cases)]
    made = [case.make() for case in cases]
    optimizers = [sok.OptimizerWrapper(each.optimizer) for each in made]
    twins = [case.new_twin(start()) for case in cases]
    for step in range(NUM_STEPS):
        positions, grads = batch_of(comm.rank, step, len(cases))
        ids = tf.RaggedTensor.from_row_lengths(
            tf.constant(KEYS[positions]), tf.ones(len(positions), tf.int64)
        )
        with tf.GradientTape() as tape:
            outs = sok.lookup_sparse(tables, [ids] * len(tables), combiners=["sum"] * len(tables))
            loss = tf.add_n([tf.reduce_sum(o * g) for o, g in zip(outs, grads, strict=True)])
        gradients = tape.gradient(loss, tables)
        for each, optimizer, gradient, table in zip(
            made, optimizers, gradients, tables, strict=True
        ):
            optimizer.apply_gradients([(gradient, table)], **each.arguments)
        batches = [batch_of(rank, step, len(cases)) for rank in range(comm.size)]
        positions = np.concatenate([batch[0] for batch in batches])
        grads = np.concatenate([batch[1] for batch in batches], axis=1)
        touched, inverse = np.unique(positions, return_inverse=True)
        for twin, of_table in zip(twins, grads.astype(np.float64), strict=True):
            sums = np.zeros((len(touched), DIM))
            np.add.at(sums, inverse, of_table)
            twin.step(touched, sums)
    for case, table, twin in zip(cases, tables, twins, strict=True):
        keys, values = sok.export(table)
        expected = twin.rows[np.searchsorted(KEYS, keys)]
        np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-5, err_msg=str(case))
        assert len(keys) == sum(KEYS % comm.size == comm.rank)


def test_optimizers_that_take_their_own_steps(comm):
    """Rows, states and what goes on from step to step, on ranks that have no row in some steps."""
    tables = [new_table(comm, number) for number, _ in enumerate(ALL)]
    optimizers = [sok.OptimizerWrapper(make()) for make in ALL]
    twin, rows = Twin(), dict(enumerate(start().astype(np.float64)))
    for step in range(NUM_STEPS):
        positions, grads = batch_of(comm.rank, step, 1)
        ids = tf.RaggedTensor.from_row_lengths(
            tf.constant(KEYS[positions]), tf.ones(len(positions), tf.int64)
        )
        with tf.GradientTape() as tape:
            outs = sok.lookup_sparse(tables, [ids] * len(tables), combiners=["sum"] * len(tables))
            loss = tf.add_n([tf.reduce_sum(out * grads[0]) for out in outs])
        gradients = tape.gradient(loss, tables)
        for optimizer, gradient, table in zip(optimizers, gradients, tables, strict=True):
            optimizer.apply_gradients([(gradient, table)])
        batches = [batch_of(rank, step, 1) for rank in range(comm.size)]
        positions = np.concatenate([batch[0] for batch in batches])
        touched, inverse = np.unique(positions, return_inverse=True)
        sums = np.zeros((len(touched), DIM))
        np.add.at(sums, inverse, np.concatenate([batch[1][0] for batch in batches]))
        twin.step(rows, touched.tolist(), sums)
    for make, table in zip(ALL, tables, strict=True):
        keys, values = sok.export(table)
        expected = [rows[position] for position in np.searchsorted(KEYS, keys).tolist()]
        np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-5, err_msg=str(make))
        assert len(keys) == sum(KEYS % comm.size == comm.rank)
