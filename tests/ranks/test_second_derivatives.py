"""Derivatives of derivatives over real ranks: those of the sum of all ranks' losses."""

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite.bridge import job

NUM_KEYS, DIM = 10, 3


@pytest.fixture(autouse=True)
def over(comm, monkeypatch):
    """Every test runs over each transport, as if `sok.init` had chosen it."""
    monkeypatch.setattr(job, "_communicator", comm)


def some_rows(seed=0):
    return np.random.default_rng(seed).normal(size=(NUM_KEYS, DIM)).astype(np.float32)


def batch_of(rank):
    """Ragged ids of a rank, which share keys with those of other ranks, and their weights."""
    rng = np.random.default_rng([7, rank])
    lengths = rng.integers(0, 4, 5 + rank)
    ids = tf.constant(rng.integers(0, NUM_KEYS, lengths.sum()))
    weights = tf.constant(rng.uniform(0.5, 2, lengths.sum()), tf.float32)
    return tf.RaggedTensor.from_row_lengths(ids, lengths), weights


def dense_mean(variable, ids, weights):
    rows, batch = ids.value_rowids(), ids.nrows()
    items = tf.gather(variable, ids.values) * weights[:, None]
    sums = tf.math.unsorted_segment_sum(items, rows, batch)
    divisors = tf.math.unsorted_segment_sum(weights, rows, batch)
    return tf.math.divide_no_nan(sums, divisors[:, None])


def to_dense(gradient):
    if isinstance(gradient, tf.IndexedSlices):
        return tf.math.unsorted_segment_sum(gradient.values, gradient.indices, NUM_KEYS)
    return tf.convert_to_tensor(gradient)


def derived_twice(look_up, rows, weights):
    """The gradients of a loss, and those of a loss made of them; rows first."""
    with tf.GradientTape() as outer:
        outer.watch(weights)
        with tf.GradientTape() as inner:
            inner.watch(weights)
            loss = tf.add_n([tf.reduce_sum(tf.sin(out)) for out in look_up(rows, weights)])
        first = [to_dense(g) for g in inner.gradient(loss, [rows, *weights])]
        loss = tf.add_n([tf.reduce_sum(g**3) for g in first])
    return first + [to_dense(g) for g in outer.gradient(loss, [rows, *weights])]


def eagerly(function):
    return function()


def traced(function):
    return tf.function(function)()


@pytest.mark.parametrize("run", [eagerly, traced], ids=["eager", "tf.function"])
def test_second_derivatives_are_those_of_all_ranks_together(comm, run):
    mine = np.arange(comm.rank, NUM_KEYS, comm.size)
    table = sok.DynamicVariable(DIM, name="derived")
    sok.assign(table, mine, some_rows()[mine])
    batches = [batch_of(rank) for rank in range(comm.size)]
    ids, weights = batches[comm.rank]

    def ours(table, weights):
        return [sok.lookup_sparse(table, ids, ids.with_flat_values(weights[0]), "mean")]

    def theirs(variable, weights):
        pairs = zip(batches, weights, strict=True)
        return [dense_mean(variable, ids, weight) for (ids, _), weight in pairs]

    got = run(lambda: derived_twice(ours, table, [weights]))
    all_weights = [weights for _, weights in batches]
    expected = derived_twice(theirs, tf.Variable(some_rows()), all_weights)
    for order in range(2):
        rows, by_weights = got[2 * order : 2 * order + 2]
        wanted = expected[order * (1 + comm.size) :][: 1 + comm.size]
        np.testing.assert_allclose(
            rows.numpy()[mine], wanted[0].numpy()[mine], rtol=1e-3, atol=1e-4
        )
        np.testing.assert_allclose(by_weights, wanted[1 + comm.rank], rtol=1e-3, atol=1e-4)


def test_weights_on_one_rank_only_are_an_error_on_all(comm):
    if comm.size == 1:
        pytest.skip("one rank has nothing to differ from")
    table = sok.DynamicVariable(DIM, name="derived")
    ids, weights = batch_of(comm.rank)
    ragged_weights = ids.with_flat_values(weights) if comm.rank == 0 else None
    with tf.GradientTape() as outer, tf.GradientTape() as inner:
        loss = tf.reduce_sum(sok.lookup_sparse(table, ids, ragged_weights) ** 2)
        gradient = inner.gradient(loss, table)
        loss = tf.reduce_sum(gradient.values**2)
    with pytest.raises(ValueError, match="second derivative.*which tables have weights"):
        outer.gradient(loss, table)
