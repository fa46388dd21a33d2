"""Tables whose gradients travel as bfloat16, through TensorFlow and its optimizers: real ranks."""

import keras
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
        rng = np.random.default_rng([number, comm.rank])
        ids = rng.integers(0, 60, (5, 8, 3))
        step(tf.constant(ids), tf.constant(rng.normal(size=(5, 8, DIM)), tf.float32))


def left_of_all_ranks(comm, table):
    """key -> what rounding has left of its gradients, on all ranks together."""
    keys, rows = table._table.residuals.export()
    keys, rows = (comm.allgatherv(each).rows for each in (keys, rows))
    left = {}
    for key, row in zip(keys.tolist(), rows, strict=True):
        left[key] = left.get(key, 0) + row.astype(np.float64)
    return left


@pytest.mark.parametrize("is_graph", [False, True], ids=["eager", "graph"])
def test_tables_lack_what_rounding_has_left_and_nothing_else(comm, is_graph):
    rounded, exact = (new_tables(dtype, is_graph) for dtype in (tf.bfloat16, tf.float32))
    for tables in (rounded, exact):
        train(comm, tables, is_graph)
    for mine, other in zip(rounded[:2], exact[:2], strict=True):
        keys, rows = (each.numpy() for each in sok.export(mine))
        np.testing.assert_array_equal(sok.export(other)[0], keys)
        if comm.size == 1:
            assert mine._table.residuals is None
            np.testing.assert_array_equal(sok.export(other)[1], rows)
            continue
        left = left_of_all_ranks(comm, mine)
        lacking = RATE * np.array([left[key] for key in keys.tolist()])
        np.testing.assert_allclose(rows - lacking, sok.export(other)[1], atol=1e-4)
        assert 1e-3 < abs(lacking).max() < 0.5
    np.testing.assert_array_equal(sok.export(rounded[2])[1], sok.export(exact[2])[1])
    np.testing.assert_array_equal(rounded[3].numpy(), exact[3].numpy())
    assert rounded[2]._table.residuals is None


def test_ranks_of_other_gradient_dtypes_are_told(comm):
    if comm.size == 1:
        pytest.skip("one rank")
    dtype = tf.bfloat16 if comm.rank == 0 else tf.float32
    table = sok.DynamicVariable(DIM, name="differs in gradients", gradient_dtype=dtype)
    with pytest.raises(ValueError, match="gradients sent as bfloat16 of table 0 is True"):
        sok.lookup_sparse(table, tf.ragged.constant([[1, 2]], dtype=tf.int64), combiners="sum")
