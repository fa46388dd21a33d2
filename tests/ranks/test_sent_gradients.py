"""Tables whose gradients travel as bfloat16, through TensorFlow and its optimizers: real ranks."""

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite.bridge import job

DIM, NUM_STEPS, RATE = 3, 5, 0.25


@pytest.fixture(autouse=True)
def over(comm, monkeypatch):
    """Every test runs over each transport, as if `sok.init` had chosen it."""
    monkeypatch.setattr(job, "_communicator", comm)


def new_tables(dtype, at):
    """Two of the kinds that round, and two that never do."""
    return [
        sok.DynamicVariable(DIM, "uniform", name=f"hbm{at}", gradient_dtype=dtype),
        sok.DynamicVariable(DIM, "uniform", "hybrid", name=f"hybrid{at}", gradient_dtype=dtype),
        sok.DynamicVariable(DIM, "uniform", name=f"plain{at}"),
        sok.Variable(keras.ops.ones((60, DIM)), name=f"static{at}"),
    ]


def draws(number, rank):
    """The ids (5, 8, 3) and slopes (5, 8, DIM) of a rank's step. Sums of slopes are exact in
    float32, and have more bits than bfloat16."""
    rng = np.random.default_rng([number, rank])
    ids = rng.integers(0, 60, (5, 8, 3))
    return ids, (rng.integers(-400, 400, (5, 8, DIM)) / 256).astype(np.float32)


def train(comm, tables, is_graph):
    """Steps whose gradients do not depend on the rows. The first table comes twice, weighted."""
    optimizer = sok.OptimizerWrapper(keras.optimizers.SGD(RATE))
    combiners = ["sum"] * 5

    def step(ids, slopes):
        asked = [*tables, tables[0]]
        ids = [tf.RaggedTensor.from_tensor(each) for each in tf.unstack(ids)]
        weights = [tf.ones_like(each, tf.float32) * (1 + i) for i, each in enumerate(ids)]
        with tf.GradientTape() as tape:
            rows = sok.lookup_sparse(asked, ids, combiners=combiners, sp_weights=weights)
            loss = tf.reduce_sum(tf.stack(rows) * slopes)
        gradients = tape.gradient(loss, tables)
        optimizer.apply_gradients(zip(gradients, tables, strict=True))

    step = tf.function(step) if is_graph else step
    for number in range(NUM_STEPS):
        step(*map(tf.constant, draws(number, comm.rank)))


def lacking(size, parts):
    """What rounding takes from the rows of a table: (60, DIM), by key.

    Args:
      parts: the numbers of its parts in the call; each rank rounds the sum of each.
    """
    lost = np.zeros((60, DIM))
    for number in range(NUM_STEPS):
        for rank in range(size):
            ids, slopes = draws(number, rank)
            for part in parts:
                sums = np.zeros((60, DIM))
                np.add.at(sums, ids[part], slopes[part, :, None, :] * np.float64(1 + part))
                lost += sums - sums.astype(ml_dtypes.bfloat16).astype(np.float64)
    return RATE * lost


@pytest.mark.parametrize("is_graph", [False, True], ids=["eager", "graph"])
def test_rows_are_those_of_rounded_gradients(comm, is_graph):
    rounded, exact = (new_tables(dtype, is_graph) for dtype in (tf.bfloat16, tf.float32))
    for tables in (rounded, exact):
        train(comm, tables, is_graph)
    for mine, other, parts in zip(rounded[:2], exact[:2], ([0, 4], [1]), strict=True):
        keys, rows = (each.numpy() for each in sok.export(mine))
        np.testing.assert_array_equal(sok.export(other)[0], keys)
        if comm.size == 1:  # nothing travels
            np.testing.assert_array_equal(sok.export(other)[1], rows)
            continue
        lost = lacking(comm.size, parts)[keys]
        np.testing.assert_allclose(rows - lost, sok.export(other)[1], atol=1e-4)
        assert 1e-3 < abs(lost).max() < 0.5
    np.testing.assert_array_equal(sok.export(rounded[2])[1], sok.export(exact[2])[1])
    np.testing.assert_array_equal(rounded[3].numpy(), exact[3].numpy())


def test_ranks_of_other_gradient_dtypes_are_told(comm):
    if comm.size == 1:
        pytest.skip("one rank")
    dtype = tf.bfloat16 if comm.rank == 0 else tf.float32
    table = sok.DynamicVariable(DIM, name="differs in gradients", gradient_dtype=dtype)
    with pytest.raises(ValueError, match="gradients sent as bfloat16 of table 0 is True"):
        sok.lookup_sparse(table, tf.ragged.constant([[1, 2]], dtype=tf.int64), combiners="sum")
