"""Derivatives of derivatives: right, or refused by name; and what several tapes go on doing."""

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite.bridge import host_call

NUM_ROWS, DIM, BATCH = 12, 3, 7
# At once in eager mode; in a graph when it runs, where TensorFlow keeps the kind of an error.
REFUSALS = (NotImplementedError, tf.errors.UnimplementedError)

pytestmark = pytest.mark.usefixtures("initialised")


def some_rows(seed=0):
    return np.random.default_rng(seed).normal(size=(NUM_ROWS, DIM)).astype(np.float32)


def a_table(rows=None, **options):
    table = sok.DynamicVariable(DIM, **options)
    sok.assign(table, np.arange(NUM_ROWS), some_rows() if rows is None else rows)
    return table


def a_batch(seed=1):
    """Ragged ids, with empty rows and repeated keys, and their weights."""
    rng = np.random.default_rng(seed)
    lengths = np.array([3, 0, 1, 5, 2, 4, 0])
    ids = tf.constant(rng.integers(0, NUM_ROWS - 2, lengths.sum()))
    weights = tf.constant(rng.uniform(0.5, 2, lengths.sum()), tf.float32)
    return tf.RaggedTensor.from_row_lengths(ids, lengths), weights


def table_lookup(table, combiner, ids, weights):
    weights = None if weights is None else ids.with_flat_values(weights)
    return sok.lookup_sparse(table, ids, weights, combiner)


def dense_lookup(variable, combiner, ids, weights):
    sparse = ids.to_sparse()
    flat = tf.ones_like(ids.values, tf.float32) if weights is None else weights
    weighted = tf.SparseTensor(sparse.indices, flat, sparse.dense_shape)
    out = tf.nn.embedding_lookup_sparse(variable, sparse, weighted, combiner)
    return tf.pad(out, [[0, BATCH - tf.shape(out)[0]], [0, 0]])


def to_dense(gradient):
    if gradient is None or isinstance(gradient, tf.Tensor):
        return gradient
    return tf.math.unsorted_segment_sum(gradient.values, gradient.indices, NUM_ROWS)


def second_by(table, source, ids, weights):
    """The gradients of a lookup, and those of their squares, which ask for what is refused."""
    watched = [] if weights is None else [weights]
    with tf.GradientTape() as outer:
        outer.watch(watched)
        with tf.GradientTape() as inner:
            inner.watch(watched)
            total = tf.reduce_sum(table_lookup(table, "mean", ids, weights))
            if weights is None:
                total = total**2  # of a sum alone the gradient does not depend on the rows
        firsts = inner.gradient(total, [table, *watched])
        number = tf.add_n([tf.reduce_sum(getattr(each, "values", each) ** 2) for each in firsts])
    return outer.gradient(number, source)


@tf.function
def in_a_branch(table, source, ids, weights, flag):
    none = tf.zeros_like(weights)
    return tf.cond(flag, lambda: second_by(table, weights, ids, weights), lambda: none)


@pytest.mark.parametrize("by", ["the table", "the table, weighted", "weights"])
@pytest.mark.parametrize("where", ["a tape", "a branch"])
def test_a_second_derivative_of_lookup_sparse_is_refused(mode, where, by):
    """By weights the gradient depends on the rows even where the loss is a sum."""
    table, (ids, weights) = a_table(), a_batch()
    weights = None if by == "the table" else weights
    source = weights if by == "weights" else table
    if where != "a tape" and by != "weights":
        pytest.skip("once is enough")
    before, given = sok.export(table)[1].numpy(), (table, source, ids, weights)
    call = mode(lambda: second_by(*given))
    if where == "a branch":
        call = lambda: in_a_branch(*given, tf.constant(True))  # noqa: E731
    text = f"lookup_sparse in '{table.name}' has no second derivative.*tf.nn.embedding_lookup"
    with pytest.raises(REFUSALS, match=text):
        call()
    if where == "a branch":
        assert not np.any(in_a_branch(*given, tf.constant(False)))
    np.testing.assert_array_equal(sok.export(table)[1], before)


def test_it_is_refused_in_a_session():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        table, (ids, weights) = sok.DynamicVariable(DIM), a_batch()
        total = tf.reduce_sum(table_lookup(table, "sqrtn", ids, weights) ** 2)
        (first,) = tf.gradients(total, [weights])
        (second,) = tf.gradients(tf.reduce_sum(first), [weights])
        session.run(tf.compat.v1.global_variables_initializer())
        assert np.isfinite(session.run(first)).all()
        with pytest.raises(REFUSALS, match="no second derivative"):
            session.run(second)


def penalised(lookup, rows, ids, weights, dense):
    """The gradients of a loss and of a penalty on its gradient by the looked-up rows."""
    with tf.GradientTape() as outer:
        outer.watch(weights)
        found = lookup(rows, "mean", ids, weights)
        with tf.GradientTape() as inner:
            inner.watch(found)
            loss = tf.reduce_sum(tf.tanh(found @ dense))
        slope = inner.gradient(loss, found)
        penalty = tf.reduce_sum((tf.norm(slope + 1e-3, axis=1) - 1) ** 2)
        # And FGM's: the loss once more, a step along the slope away.
        again = tf.reduce_sum(tf.tanh((found + 0.1 * tf.stop_gradient(slope)) @ dense))
        total = loss + penalty + again
    return [to_dense(each) for each in outer.gradient(total, [rows, weights, dense])]


def test_penalties_on_the_gradient_by_looked_up_rows_are_tensorflows(mode):
    """As of WGAN-GP and FGM: no derivative of the lookup's own gradient is in them."""
    ids, weights = a_batch()
    dense = tf.Variable(np.random.default_rng(3).normal(size=(DIM, 2)).astype(np.float32))
    table = a_table()
    ours = mode(lambda: penalised(table_lookup, table, ids, weights, dense))()
    theirs = penalised(dense_lookup, tf.Variable(some_rows()), ids, weights, dense)
    for found, expected in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_second_derivatives_of_embedding_lookup_are_tensorflows(mode):
    keys = tf.constant([1, 4, 4, 2])

    def second(rows):
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                total = tf.reduce_sum(tf.sin(tf.nn.embedding_lookup(rows, keys)))
            total = tf.reduce_sum(to_dense(inner.gradient(total, rows)) ** 3)
        return to_dense(outer.gradient(total, rows))

    table = a_table()
    got = mode(lambda: second(table))()
    expected = second(tf.Variable(some_rows()))
    np.testing.assert_allclose(got, expected, rtol=2e-4, atol=1e-5)


# ---- programs with several tapes that want no second derivative go on ---------------------------


@pytest.mark.parametrize("way", ["tape", "persistent tape", "function between"])
def test_the_second_derivative_of_the_dense_part_costs_no_exchange(mode, way):
    """TensorFlow derives all outputs of a function's gradient, those of rows among them."""
    table, (ids, weights) = a_table(), a_batch()
    dense, is_persistent = tf.Variable(tf.ones([DIM, 1])), way == "persistent tape"

    def forward():
        return tf.reduce_sum((table_lookup(table, "mean", ids, weights) @ dense) ** 2)

    if way == "function between":
        forward = tf.function(forward)

    def step():
        with tf.GradientTape(persistent=is_persistent) as outer:
            with tf.GradientTape(persistent=is_persistent) as inner:
                total = forward()
            by_rows, by_dense = inner.gradient(total, [table, dense])
            penalty = tf.reduce_sum(by_dense**2)
        return to_dense(by_rows), outer.gradient(penalty, dense)

    by_rows, by_dense = (step if way == "function between" else mode(step))()
    x = dense_lookup(tf.Variable(some_rows()), "mean", ids, weights).numpy()
    expected = 2 * (2 * x.T @ x) @ (2 * x.T @ x @ np.ones((DIM, 1)))
    np.testing.assert_allclose(by_dense, expected, rtol=1e-4)
    assert np.abs(by_rows).max() > 0


def test_a_step_that_returns_the_norm_of_its_gradients_is_called_under_a_tape():
    table, (ids, weights) = a_table(), a_batch()
    scale = tf.Variable(2.0)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(table_lookup(table, "mean", ids, weights) * scale)
        by_rows, by_scale = tape.gradient(loss, [table, scale])
        return loss, tf.norm(by_rows.values), by_scale

    with tf.GradientTape() as tape:
        loss, norm, by_scale = step()
    np.testing.assert_allclose(tape.gradient(loss, scale), by_scale, rtol=1e-5)
    assert norm > 0


@pytest.mark.parametrize("pfor", [False, True])
def test_jacobians_by_weights_go_on(monkeypatch, pfor):
    # As in a new process, whose first host call in a graph is that of the jacobian.
    monkeypatch.setattr(host_call, "_turn_variable", None)
    table, (ids, weights) = a_table(), a_batch()
    jacobians = []
    for rows, look_up in ((table, table_lookup), (tf.Variable(some_rows()), dense_lookup)):
        with tf.GradientTape(persistent=not pfor) as tape:
            tape.watch(weights)
            out = look_up(rows, "mean", ids, weights)
        jacobians.append(tape.jacobian(out, weights, experimental_use_pfor=pfor))
    np.testing.assert_allclose(*jacobians, rtol=1e-4, atol=1e-5)
