"""Clipped gradients of tables over real ranks, against NumPy with the gradients of all of them."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite.bridge import job
from sok_lite.comm import CommunicatorError
from sok_lite.comm.local import LocalCommunicator, MultiHostCommunicator, connect_local

DIM = 3
LIMIT = 0.5


def of_all_ranks(comm, grad):
    """Keys and rows of a gradient on all ranks; a key has one row."""
    keys = comm.allgatherv(grad.indices.numpy()).rows
    rows = comm.allgatherv(grad.values.numpy()).rows
    return keys, rows


def norm(*arrays):
    return np.sqrt(sum((np.asarray(array, np.float64) ** 2).sum() for array in arrays))


def slices(keys, rows):
    return tf.IndexedSlices(tf.constant(rows, tf.float32), tf.constant(keys, tf.int64))


@pytest.mark.parametrize("clip", ["clipnorm", "global_clipnorm"])
def test_norms_are_those_of_the_gradients_of_all_ranks(comm, run, clip):
    last = comm.size - 1
    growing = [
        sok.DynamicVariable(DIM, initializer="uniform", name=f"spread {clip}"),
        sok.DynamicVariable(
            DIM, initializer="ones", name=f"on one {clip}", mode=f"localized:{last}"
        ),
    ]
    start = np.arange(20 * DIM, dtype=np.float32).reshape(20, DIM) / 50
    static = [sok.Variable(start), sok.Variable(start, mode="localized:0")]
    tables = [*growing, *static]
    dense, dense_grad = tf.Variable([1.0, 2.0]), np.array([0.6, -0.3], np.float32)
    optimizer = sok.OptimizerWrapper(keras.optimizers.SGD(1.0, **{clip: LIMIT}))
    factors = np.array([1e-3, 0.1, 0.1, 1e-3], np.float32)

    @run
    def step(ids):
        with tf.GradientTape() as tape:
            outs = sok.lookup_sparse(tables, [ids] * 4, combiners="sum")
            parts = [tf.reduce_sum(f * tf.exp(out)) for f, out in zip(factors, outs, strict=True)]
            loss = tf.add_n(parts)
        grads = tape.gradient(loss, tables)
        pairs = [(tf.constant(dense_grad), dense), *zip(grads, tables, strict=True)]
        before = [tf.gather(var, grad.indices) for grad, var in pairs[3:]]
        before += [tf.nn.embedding_lookup(var, grad.indices) for grad, var in pairs[1:3]]
        with tf.control_dependencies(before):
            optimizer.apply_gradients(pairs)
        return grads, [*before[2:], *before[:2]]

    mine = np.random.default_rng(comm.rank).integers(0, 20, (6, 3))
    grads, before = step(tf.RaggedTensor.from_tensor(tf.constant(mine)))
    everywhere = [of_all_ranks(comm, grad)[1] for grad in grads]
    norms = [norm(rows) for rows in everywhere]
    assert min(norms) < LIMIT < max(norms)
    if clip == "global_clipnorm":
        total = norm(*everywhere, dense_grad)
        scales = [LIMIT / total] * 4
        dense_scale = LIMIT / total
    else:
        scales = [min(1.0, LIMIT / each) for each in norms]
        dense_scale = min(1.0, LIMIT / norm(dense_grad))
    for table, grad, old, scale in zip(tables, grads, before, scales, strict=True):
        expected = old.numpy() - grad.values.numpy() * scale
        is_growing = isinstance(table, sok.DynamicVariable)
        look_up = tf.nn.embedding_lookup if is_growing else tf.gather
        rows = look_up(table, grad.indices)
        np.testing.assert_allclose(rows, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(dense, [1.0, 2.0] - dense_grad * dense_scale, rtol=1e-5)


@pytest.mark.parametrize(
    ("bad", "clip"), [(np.nan, "clipnorm"), (np.inf, "clipnorm"), (np.inf, "global_clipnorm")]
)
def test_what_is_not_finite_on_one_rank_counts_on_all(comm, run, bad, clip):
    table = sok.DynamicVariable(1, initializer="ones", name=f"{bad} {clip}")
    static, dense = sok.Variable(np.ones((2 * comm.size, 1), np.float32)), tf.Variable([1.0])
    optimizer = sok.OptimizerWrapper(keras.optimizers.SGD(1.0, **{clip: LIMIT}))
    first = bad if comm.rank == 0 else 2.0
    keys = [comm.rank, comm.rank + comm.size]
    grads = [slices(keys, [[first], [3.0]])]
    grads += [tf.IndexedSlices(grads[0].values, tf.constant([0, 1]), static.shape)]

    @run
    def step():
        pairs = zip([*grads, tf.constant([0.1])], [table, static, dense], strict=True)
        optimizer.apply_gradients(pairs)

    step()
    # An infinite norm makes 0 of what is finite; all of one norm share what is no number.
    other = 1.0 if np.isinf(bad) and clip == "clipnorm" else np.nan
    expected = [[np.nan if comm.rank == 0 else other], [other]]
    np.testing.assert_array_equal(tf.nn.embedding_lookup(table, keys), expected)
    np.testing.assert_array_equal(static, expected)
    np.testing.assert_allclose(dense, [0.9 if clip == "clipnorm" else np.nan], rtol=1e-6)


def test_ranks_with_other_tables_all_raise_and_change_nothing(comm, run):
    if comm.size == 1:
        pytest.skip("one rank agrees with itself")
    tables = [sok.DynamicVariable(1, initializer="ones", name=name) for name in "abc"]
    optimizer = sok.OptimizerWrapper(keras.optimizers.SGD(1.0, clipnorm=LIMIT))
    grad = slices([comm.rank], [[3.0]])
    for theirs, text in (
        (1, "number of tables is 2 on rank 0 and 1 on rank 1"),
        (2, "name of tabl"),
    ):
        chosen = tables[:2] if comm.rank == 0 else ([tables[0]] if theirs == 1 else tables[1:])

        @run
        def step(chosen=chosen):
            optimizer.apply_gradients([(grad, table) for table in chosen])

        with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match=text):
            step()
    assert [len(sok.export(table)[0]) for table in tables] == [0, 0, 0]
    assert optimizer.iterations == 0


def test_a_gradient_that_does_not_fit_on_one_rank_raises_on_all(comm, monkeypatch):
    if comm.size == 1:
        pytest.skip("there is no other rank")
    if isinstance(comm, (MultiHostCommunicator, LocalCommunicator)):
        comm = connect_local(comm._base)  # ranks that have disagreed do not go on with it
        monkeypatch.setattr(job, "_communicator", comm)
    table = sok.DynamicVariable(2, initializer="ones", name="misfit")
    optimizer = sok.OptimizerWrapper(keras.optimizers.SGD(1.0, global_clipnorm=LIMIT))
    grad = slices([comm.rank], np.ones([1, 2 if comm.rank else 3], np.float32))
    error = CommunicatorError if comm.rank else ValueError
    with pytest.raises(error, match="The gradient of table 'misfit'"):
        optimizer.apply_gradients([(grad, table)])
    assert len(sok.export(table)[0]) == 0


def test_a_step_takes_one_collective_whatever_the_number_of_tables(comm, run):
    tables = [sok.DynamicVariable(2, initializer="ones", name=f"{i}") for i in range(5)]
    optimizer = sok.OptimizerWrapper(keras.optimizers.SGD(1.0, global_clipnorm=LIMIT))
    dense = tf.Variable([1.0])

    @run
    def step():
        grad = slices([comm.rank], np.ones([1, 2], np.float32))
        optimizer.apply_gradients(
            [(tf.constant([1.0]), dense), *((grad, table) for table in tables)]
        )

    step()
    before = comm.turn
    step()
    assert comm.turn - before == (0 if comm.size == 1 else 1)


@pytest.mark.parametrize("bad", ["table", "static", "dense", None])
def test_all_ranks_skip_a_step_that_is_not_finite_on_one(comm, run, bad):
    table = sok.DynamicVariable(1, initializer="ones", name=f"skip {bad}")
    static, dense = sok.Variable(np.ones((comm.size, 1), np.float32)), tf.Variable([1.0])
    inner = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0, clipnorm=100.0), 8.0)
    inner.build([static, dense])
    optimizer = sok.OptimizerWrapper(inner)
    mine = {"table": [[2.0]], "static": [[2.0]], "dense": [2.0]}
    if bad is not None and comm.rank == comm.size - 1:
        mine[bad] = np.full_like(mine[bad], np.inf)
    grads = {name: tf.constant(value, tf.float32) for name, value in mine.items()}

    @run
    def step():
        slices_of_table = tf.IndexedSlices(grads["table"], tf.constant([comm.rank], tf.int64))
        pairs = [(slices_of_table, table), (grads["static"], static), (grads["dense"], dense)]
        optimizer.apply_gradients(pairs)

    step()
    value = 1.0 if bad else 0.75
    np.testing.assert_array_equal(tf.nn.embedding_lookup(table, [comm.rank]), [[value]])
    np.testing.assert_array_equal(static, [[value]])
    np.testing.assert_array_equal(dense, [value])
    assert float(inner.dynamic_scale) == (4.0 if bad else 8.0)
    assert int(inner.iterations) == int(optimizer.iterations) == (0 if bad else 1)
