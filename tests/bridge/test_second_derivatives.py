"""Derivatives of derivatives: right, or refused by name; and what several tapes go on doing."""

import itertools

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


def second_by(table, sources, ids, weights):
    """The gradients of a lookup, and those of their squares, which ask for what is refused."""
    with tf.GradientTape() as outer:
        outer.watch([] if weights is None else weights)
        with tf.GradientTape() as inner:
            inner.watch([] if weights is None else weights)
            total = tf.reduce_sum(table_lookup(table, "mean", ids, weights))
            if weights is None:
                total = total**2  # of a sum alone the gradient does not depend on the rows
        firsts = inner.gradient(total, [table] if weights is None else [table, weights])
        squares = [tf.reduce_sum(getattr(each, "values", each) ** 2) for each in firsts]
        number = tf.add_n(squares)
    return outer.gradient(number, sources)


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("by", ["the table", "weights"])
def test_a_second_derivative_of_lookup_sparse_is_refused(mode, by, weighted):
    """By weights the gradient depends on the rows even where the loss is a sum."""
    if by == "weights" and not weighted:
        pytest.skip("there are none")
    table, (ids, weights) = a_table(), a_batch()
    weights = weights if weighted else None
    before = sok.export(table)[1].numpy()
    source = table if by == "the table" else weights
    text = f"lookup_sparse in '{table.name}' has no second derivative.*tf.nn.embedding_lookup"
    with pytest.raises(REFUSALS, match=text):
        mode(lambda: second_by(table, source, ids, weights))()
    np.testing.assert_array_equal(sok.export(table)[1], before)


def test_it_is_refused_where_a_tape_is_around_a_function():
    table, (ids, weights) = a_table(), a_batch()

    @tf.function
    def first():
        with tf.GradientTape() as tape:
            tape.watch(weights)
            total = tf.reduce_sum(table_lookup(table, "mean", ids, weights) ** 2)
        return tape.gradient(total, weights)

    assert np.isfinite(first()).all()
    with tf.GradientTape() as tape:
        tape.watch(weights)
        number = tf.reduce_sum(first())  # nobody has asked for a second derivative yet
    with pytest.raises(REFUSALS, match="no second derivative"):
        tape.gradient(number, weights)


def test_it_is_refused_in_a_branch_and_in_a_loop():
    table, (ids, weights) = a_table(), a_batch()

    def second():
        with tf.GradientTape() as outer:
            outer.watch(weights)
            with tf.GradientTape() as inner:
                inner.watch(weights)
                total = tf.reduce_sum(table_lookup(table, "mean", ids, weights) ** 2)
            number = tf.reduce_sum(inner.gradient(total, weights) ** 2)
        return outer.gradient(number, weights)

    in_a_branch = tf.function(lambda flag: tf.cond(flag, second, lambda: tf.zeros_like(weights)))
    np.testing.assert_array_equal(in_a_branch(tf.constant(False)), np.zeros(len(weights)))
    with pytest.raises(REFUSALS, match="no second derivative"):
        in_a_branch(tf.constant(True))

    @tf.function
    def in_a_loop():
        total = tf.zeros_like(weights)
        for _ in tf.range(2):
            total += second()
        return total

    with pytest.raises(REFUSALS, match="no second derivative"):
        in_a_loop()


def test_it_is_refused_in_a_session():
    with tf.Graph().as_default():
        table, (ids, weights) = sok.DynamicVariable(DIM), a_batch()
        total = tf.reduce_sum(table_lookup(table, "sqrtn", ids, weights) ** 2)
        (first,) = tf.gradients(total, [weights])
        (second,) = tf.gradients(tf.reduce_sum(first), [weights])
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            session.run(sok.assign(table, np.arange(NUM_ROWS), some_rows()))
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


@pytest.mark.parametrize("persistent", [False, True])
def test_a_second_tape_for_the_dense_part_costs_no_exchange(mode, persistent):
    table, (ids, weights) = a_table(), a_batch()
    dense = tf.Variable(tf.ones([DIM, 1]))

    def step():
        with tf.GradientTape(persistent=persistent) as outer:
            with tf.GradientTape(persistent=persistent) as inner:
                out = table_lookup(table, "mean", ids, weights) @ dense
                total = tf.reduce_sum(out**2)
            by_rows, by_dense = inner.gradient(total, [table, dense])
            penalty = tf.reduce_sum(by_dense**2)
        return to_dense(by_rows), outer.gradient(penalty, dense)

    by_rows, by_dense = mode(step)()
    x = dense_lookup(tf.Variable(some_rows()), "mean", ids, weights).numpy()
    expected = 2 * (2 * x.T @ x) @ (2 * x.T @ x @ np.ones((DIM, 1)))
    np.testing.assert_allclose(by_dense, expected, rtol=1e-4)
    assert np.abs(by_rows).max() > 0


def test_a_function_between_two_tapes_gives_the_second_derivative_of_the_dense_part():
    """TensorFlow derives all outputs of its backward function, row gradients among them."""
    table, (ids, weights) = a_table(), a_batch()
    dense = tf.Variable(tf.ones([DIM, 1]))

    @tf.function
    def forward():
        return tf.reduce_sum((table_lookup(table, "mean", ids, weights) @ dense) ** 2)

    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            total = forward()
        by_rows, by_dense = inner.gradient(total, [table, dense])
        penalty = tf.reduce_sum(by_dense**2)
    by_dense = outer.gradient(penalty, dense)
    x = dense_lookup(tf.Variable(some_rows()), "mean", ids, weights).numpy()
    expected = 2 * (2 * x.T @ x) @ (2 * x.T @ x @ np.ones((DIM, 1)))
    np.testing.assert_allclose(by_dense, expected, rtol=1e-4)
    assert np.abs(to_dense(by_rows)).max() > 0


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


def test_jacobians_of_the_dense_part_go_on():
    table, (ids, _) = a_table(), a_batch()
    dense = tf.Variable(tf.ones([DIM, 2]))
    with tf.GradientTape() as tape:
        x = sok.lookup_sparse(table, ids)
        out = tf.reduce_sum(x @ dense, 0)
    jacobian = tape.jacobian(out, dense)
    sums = tf.reduce_sum(x, 0)
    for i, j in itertools.product(range(2), range(2)):
        np.testing.assert_allclose(jacobian[i, :, j], sums * float(i == j), rtol=1e-5, atol=1e-6)


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
