"""Every optimizer on tables spread over real ranks, against its float64 twin.

The twin takes the steps of all ranks' batches together, over all keys.
"""

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok

pytest.importorskip("tf_keras")

from tests.support.optimizer_cases import CASES, MODULES, Made
from tests.support.own_optimizers import ALL, Twin

DIM = 4
NUM_STEPS = 20
KEYS = np.arange(-9, 10)


IN_TURN = "comm"


pytestmark = pytest.mark.usefixtures("over")


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


class OwnTwin(Twin):
    """The twin of optimizers that no rule follows, by positions in KEYS."""

    def __init__(self):
        super().__init__()
        self.by_key = dict(enumerate(start().astype(np.float64)))

    def step(self, touched, grads):
        super().step(self.by_key, touched.tolist(), grads)

    @property
    def rows(self):
        return np.stack([self.by_key[position] for position in range(len(KEYS))])


def made_of(family):
    """Returns [(name, Made, twin)] of all optimizers of a family."""
    if family == "own":
        return [(str(make), Made(make()), OwnTwin()) for make in ALL]
    cases = [case for case in CASES if case.family == family]
    return [(str(case), case.make(), case.new_twin(start())) for case in cases]


@pytest.mark.parametrize("family", [*MODULES, "own"])
def test_spread_rows_end_where_the_twin_of_the_whole_batch_puts_them(comm, family):
    """Rows, states and what goes on from step to step, on ranks that have no row in some steps."""
    names, made, twins = zip(*made_of(family), strict=True)
    tables = [new_table(comm, number) for number, _ in enumerate(made)]
    optimizers = [sok.OptimizerWrapper(each.optimizer) for each in made]
    for step in range(NUM_STEPS):
        positions, grads = batch_of(comm.rank, step, len(made))
        ids = tf.RaggedTensor.from_row_lengths(
            tf.constant(KEYS[positions]), tf.ones(len(positions), tf.int64)
        )
        with tf.GradientTape() as tape:
            outs = sok.lookup_sparse(tables, [ids] * len(tables), combiners=["sum"] * len(tables))
            loss = tf.add_n([tf.reduce_sum(o * g) for o, g in zip(outs, grads, strict=True)])
        gradients = tape.gradient(loss, tables)
        for each, optimizer, *pair in zip(made, optimizers, gradients, tables, strict=True):
            optimizer.apply_gradients([tuple(pair)], **each.arguments)
        batches = [batch_of(rank, step, len(made)) for rank in range(comm.size)]
        positions = np.concatenate([batch[0] for batch in batches])
        grads = np.concatenate([batch[1] for batch in batches], axis=1)
        touched, inverse = np.unique(positions, return_inverse=True)
        for twin, of_table in zip(twins, grads.astype(np.float64), strict=True):
            sums = np.zeros((len(touched), DIM))
            np.add.at(sums, inverse, of_table)
            twin.step(touched, sums)
    for name, table, twin in zip(names, tables, twins, strict=True):
        keys, values = sok.export(table)
        expected = twin.rows[np.searchsorted(KEYS, keys)]
        np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-5, err_msg=name)
        assert len(keys) == sum(KEYS % comm.size == comm.rank)
