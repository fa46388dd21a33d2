"""Lookups and training over real ranks: what all ranks do together is what one big batch does."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite.bridge import job
from sok_lite.comm import SingleCommunicator
from tests.support.step_oracle import flat, key_gradients, outputs, random_ragged

DIM = 4
COMBINERS = ("sum", "mean", "sqrtn")


@pytest.fixture(autouse=True)
def over(comm, monkeypatch):
    """Every test runs over each transport, as if `sok.init` had chosen it."""
    monkeypatch.setattr(job, "_communicator", comm)


def batch_of(rank, seed=0, batch=7):
    """The ragged keys and output gradients of a rank; batches differ in size."""
    rng = np.random.default_rng([seed, rank])
    ragged = random_ragged(rng, batch + rank, 5, -15, 15)
    return ragged, rng.normal(size=(len(ragged), DIM)).astype(np.float32)


def to_ragged(ragged):
    values, splits = flat(ragged, np.int64)
    return tf.RaggedTensor.from_row_splits(tf.constant(values), tf.constant(splits))


def row_of(key):
    """The row of a key in these tests: the same on whatever rank it lies."""
    return (key % 50) + np.arange(DIM) / 8


def new_table(comm, keys=range(-15, 15), **options):
    """A table whose keys are assigned where they belong, as a loader does."""
    table = sok.DynamicVariable(DIM, name="table", **options)
    mine = [key for key in keys if key % comm.size == comm.rank]
    sok.assign(table, mine, np.array([row_of(key) for key in mine]).reshape(-1, DIM).astype("f4"))
    return table


def eagerly(function):
    return function()


def traced(function):
    return tf.function(function)()


@pytest.mark.parametrize("run", [eagerly, traced], ids=["eager", "tf.function"])
@pytest.mark.parametrize("combiner", COMBINERS)
def test_outputs_and_gradients_are_those_of_all_ranks_together(comm, combiner, run):
    table = new_table(comm)
    ragged, out_grads = batch_of(comm.rank)
    ids = to_ragged(ragged)

    def step():
        with tf.GradientTape() as tape:
            out = sok.lookup_sparse(table, ids, combiners=combiner)
            loss = tf.reduce_sum(out * out_grads)
        return out, tape.gradient(loss, table)

    out, gradient = run(step)
    np.testing.assert_allclose(out, outputs(ragged, row_of, combiner, DIM), rtol=1e-5, atol=1e-5)
    expected = {}
    for rank in range(comm.size):
        for key, grad in key_gradients(*batch_of(rank), combiner).items():
            if key % comm.size == comm.rank:
                expected[key] = expected.get(key, 0) + grad
    keys = gradient.indices.numpy().tolist()
    assert sorted(keys) == sorted(expected)
    np.testing.assert_allclose(
        gradient.values,
        np.array([expected[k] for k in keys]).reshape(-1, DIM),
        rtol=1e-5,
        atol=1e-5,
    )


def test_many_tables_weights_and_a_rank_with_nothing(comm):
    tables = [new_table(comm) for _ in range(3)]
    ragged, _ = batch_of(comm.rank, seed=1)
    if comm.rank == comm.size - 1 and comm.size > 1:
        ragged = []
    ids = to_ragged(ragged)
    weights = ids.with_flat_values(tf.fill(tf.shape(ids.flat_values), 2.0))

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            outs = sok.lookup_sparse(
                tables, [ids, ids.to_sparse(), ids], [None, None, weights], list(COMBINERS)
            )
            loss = tf.add_n([tf.reduce_sum(out) for out in outs])
        return outs, tape.gradient(loss, tables)

    outs, gradients = step()
    twice = [[2.0] * len(row) for row in ragged]
    for out, combiner, weight in zip(outs, COMBINERS, [None, None, twice], strict=True):
        expected = outputs(ragged, row_of, combiner, DIM, weight)
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    assert all(np.isfinite(gradient.values).all() for gradient in gradients)


@pytest.mark.parametrize("key_type", [tf.int32, tf.uint64], ids=lambda d: d.name)
@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16], ids=lambda d: d.name)
def test_other_formats_travel(comm, key_type, dtype):
    table = sok.DynamicVariable(
        DIM, name="formats", key_type=key_type, dtype=dtype, initializer="2"
    )
    top = np.iinfo(key_type.as_numpy_dtype).max
    keys = np.array([top, 0, top - 1, top], key_type.as_numpy_dtype)
    ids = tf.RaggedTensor.from_row_lengths(tf.constant(keys), [3, 1])
    with tf.GradientTape() as tape:
        out = sok.lookup_sparse(table, ids, combiners="sum")
        loss = tf.reduce_sum(out)
    np.testing.assert_array_equal(tf.cast(out, tf.float32), [[6.0] * DIM, [2.0] * DIM])
    gradient = tape.gradient(loss, table)
    expected = {int(top): 2.0, 0: 1.0, int(top) - 1: 1.0}
    mine = {key: comm.size * n for key, n in expected.items() if key % comm.size == comm.rank}
    found = zip(gradient.indices.numpy().tolist(), gradient.values.numpy()[:, 0], strict=True)
    assert dict(found) == mine


def train(comm, size, make_optimizer, steps=20, batch=24):
    """Trains on a share of a global batch; returns every key's row, from all ranks."""
    table = sok.DynamicVariable(DIM, name="trained", initializer="uniform", seed=3)
    optimizer = sok.OptimizerWrapper(make_optimizer())
    share = slice(comm.rank * batch // size, (comm.rank + 1) * batch // size)
    first, second = tf.TensorSpec([None], tf.int64), tf.TensorSpec([None], tf.int64)

    @tf.function(input_signature=[first, second, tf.TensorSpec([None, DIM], tf.float32)])
    def step(values, splits, target):
        ids = tf.RaggedTensor.from_row_splits(values, splits)
        with tf.GradientTape() as tape:
            out = sok.lookup_sparse(table, ids, combiners="mean")
            loss = tf.reduce_sum((out - target) ** 2)
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])

    for number in range(steps):
        rng = np.random.default_rng([9, number])
        ragged = random_ragged(rng, batch, 4, -40, 40)
        target = rng.normal(size=(batch, DIM)).astype(np.float32)
        values, splits = flat(ragged[share], np.int64)
        step(tf.constant(values), tf.constant(splits), tf.constant(target[share]))
    return sok.export(table)


@pytest.mark.parametrize(
    "make",
    [lambda: keras.optimizers.SGD(0.05), lambda: keras.optimizers.Adam(0.01)],
    ids=["SGD", "Adam"],
)
def test_the_same_seed_trains_the_same_table_on_any_number_of_ranks(comm, make, monkeypatch):
    keys, values = train(comm, comm.size, make)
    assert all(key % comm.size == comm.rank for key in keys.numpy().tolist())
    all_keys = comm.allgatherv(keys.numpy()).rows
    all_values = comm.allgatherv(values.numpy()).rows
    order = np.argsort(all_keys)
    # Every rank trains the whole batch by itself, too.
    monkeypatch.setattr(job, "_communicator", SingleCommunicator())
    one_keys, one_values = train(SingleCommunicator(), 1, make)
    np.testing.assert_array_equal(all_keys[order], one_keys)
    np.testing.assert_allclose(all_values[order], one_values, rtol=0, atol=1e-5)


def test_parts_assigned_on_another_number_of_ranks_give_the_same_rows(comm, monkeypatch):
    table = new_table(comm)
    keys, values = sok.export(table)
    all_keys = comm.allgatherv(keys.numpy()).rows
    all_values = comm.allgatherv(values.numpy()).rows
    # Every rank by itself, as a job of one.
    monkeypatch.setattr(job, "_communicator", SingleCommunicator())
    whole = sok.DynamicVariable(DIM)
    sok.assign(whole, all_keys, all_values)
    rows = tf.nn.embedding_lookup(whole, np.arange(-15, 15))
    np.testing.assert_array_equal(rows, [row_of(key).astype("f4") for key in range(-15, 15)])


def test_different_lookups_on_different_ranks_raise_on_all(comm):
    if comm.size == 1:
        pytest.skip("one rank agrees with itself")
    table = sok.DynamicVariable(DIM + comm.rank, name="unequal")
    with pytest.raises(ValueError, match="dimension of table 0 is 4 on rank 0 and 5 on rank 1"):
        sok.lookup_sparse(table, to_ragged([[1]]))
    assert table.table.size == 0


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "function"])
def test_a_key_that_fits_on_no_rank_fails_on_all_of_them(comm, traced):
    table = sok.DynamicVariable(DIM, key_type=tf.int32, name=f"narrow_{traced}")

    def lookup(keys, splits):
        ids = tf.RaggedTensor.from_row_splits(keys, splits, validate=False)
        return sok.lookup_sparse(table, ids, combiners="sum")

    call = tf.function(lookup, reduce_retracing=True) if traced else lookup
    splits = tf.constant([0, 1], tf.int64)
    last = comm.size - 1
    key = 2**40 if comm.rank == last else 5
    with pytest.raises((ValueError, RuntimeError, tf.errors.OpError), match="must fit int32"):
        call(tf.constant([key], tf.int64), splits)
    assert table.table.size == 0
    assert call(tf.constant([5], tf.int64), splits).shape == (1, DIM)


def test_collectives_of_tensors(comm):
    x = tf.constant([[1.0, 2.0]]) * (comm.rank + 1)
    total = sum(range(1, comm.size + 1))
    np.testing.assert_array_equal(sok.communication.allreduce(x, "sum"), [[total, 2 * total]])
    np.testing.assert_array_equal(
        sok.communication.allreduce(x, "average"), [[total / comm.size, 2 * total / comm.size]]
    )
    np.testing.assert_array_equal(sok.communication.allgather(x)[:, 0], np.arange(1, comm.size + 1))
    rows = tf.fill([comm.size, 1], float(comm.rank))
    received, splits = sok.communication.alltoall(rows, tf.ones([comm.size], tf.int32))
    np.testing.assert_array_equal(received[:, 0], np.arange(comm.size))
    np.testing.assert_array_equal(splits, np.ones(comm.size))
    np.testing.assert_array_equal(sok.communication.broadcast(x, 0), [[1.0, 2.0]])
