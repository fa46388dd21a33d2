"""Derivatives of derivatives through lookups, against those of a tf.Variable."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite.bridge import host_call

NUM_ROWS, DIM, BATCH = 12, 3, 7
COMBINERS = ("sum", "mean", "sqrtn")

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


def derivatives(look_up, rows, ids, weights, order):
    """The derivative of each order, by rows and by weights, of a number made of the one before."""
    sources = [rows] if weights is None else [rows, weights]
    tapes = [tf.GradientTape() for _ in range(order)]
    for tape in tapes:
        tape.__enter__()
        if weights is not None:
            tape.watch(weights)
    total = tf.reduce_sum(tf.sin(look_up(rows, ids, weights)))
    results = []
    for tape in reversed(tapes):
        tape.__exit__(None, None, None)
        gradients = [to_dense(gradient) for gradient in tape.gradient(total, sources)]
        results += gradients
        total = tf.add_n([tf.reduce_sum(gradient**3) for gradient in gradients])
    return results


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("combiner", COMBINERS)
def test_three_orders_are_tensorflows(mode, combiner, weighted):
    ids, weights = a_batch()
    weights = weights if weighted else None

    def run(look_up, rows):
        def look_up_with(*arguments):
            return look_up(arguments[0], combiner, *arguments[1:])

        return mode(lambda: derivatives(look_up_with, rows, ids, weights, 3))()

    ours = run(table_lookup, a_table())
    theirs = run(dense_lookup, tf.Variable(some_rows()))
    assert len(ours) == (6 if weighted else 3)
    for got, expected in zip(ours, theirs, strict=True):
        scale = float(tf.reduce_max(tf.abs(expected)))
        np.testing.assert_allclose(got, expected, rtol=2e-4, atol=2e-5 * scale)


def second_of(lookup, rows, weights, ids):
    """The function and its first derivatives within, the second by a tape around."""
    with tf.GradientTape() as tape:
        tape.watch(weights)
        total = tf.reduce_sum(tf.sin(lookup(rows, "mean", ids, weights)))
    gradients = [to_dense(g) for g in tape.gradient(total, [rows, weights])]
    return tf.add_n([tf.reduce_sum(g**3) for g in gradients])


@pytest.mark.parametrize("persistent", [False, True])
def test_a_tape_around_a_function_sees_the_second_derivative(persistent):
    ids, weights = a_batch()

    def run(lookup, rows):
        with tf.GradientTape(persistent=persistent) as tape:
            tape.watch(weights)
            total = tf.function(second_of)(lookup, rows, weights, ids)
        return [to_dense(g) for g in tape.gradient(total, [rows, weights])]

    ours = run(table_lookup, a_table())
    for got, expected in zip(ours, run(dense_lookup, tf.Variable(some_rows())), strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-4, atol=1e-4)


def test_two_tapes_around_a_function_see_the_second_derivative():
    ids, weights = a_batch()

    def run(lookup, rows):
        forward = tf.function(lambda w: tf.reduce_sum(tf.sin(lookup(rows, "sqrtn", ids, w))))
        with tf.GradientTape() as outer:
            outer.watch(weights)
            with tf.GradientTape() as inner:
                inner.watch(weights)
                total = forward(weights)
            gradients = [to_dense(g) for g in inner.gradient(total, [rows, weights])]
            total = tf.add_n([tf.reduce_sum(g**3) for g in gradients])
        return [to_dense(g) for g in outer.gradient(total, [rows, weights])]

    ours = run(table_lookup, a_table())
    for got, expected in zip(ours, run(dense_lookup, tf.Variable(some_rows())), strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-4, atol=1e-4)


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_gradients_of_gradients_in_a_session(weighted):
    def run(make_rows, lookup):
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            ids, weights = a_batch()
            weights = weights if weighted else None
            rows, ready = make_rows()
            sources = [rows] if weights is None else [rows, weights]
            total = tf.reduce_sum(tf.sin(lookup(rows, "mean", ids, weights)))
            for _ in range(2):
                gradients = [to_dense(g) for g in tf.gradients(total, sources)]
                total = tf.add_n([tf.reduce_sum(g**3) for g in gradients])
            session.run(ready)
            return session.run(gradients)

    def make_table():
        table = sok.DynamicVariable(DIM)
        return table, [
            tf.compat.v1.global_variables_initializer(),
            sok.assign(table, np.arange(NUM_ROWS), some_rows()),
        ]

    def make_variable():
        variable = tf.Variable(some_rows())
        return variable, variable.initializer

    ours = run(make_table, table_lookup)
    for got, expected in zip(ours, run(make_variable, dense_lookup), strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-4, atol=1e-4)


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


def test_several_tables_and_one_that_comes_twice(mode):
    ids, weights = a_batch()
    other_ids, other_weights = a_batch(2)

    def run(rows, other, lookup):
        with tf.GradientTape() as outer:
            outer.watch([weights, other_weights])
            with tf.GradientTape() as inner:
                inner.watch([weights, other_weights])
                a, b, c = lookup(rows, other)
                total = tf.reduce_sum(tf.sin(a * b) + tf.sin(c * a))
            sources = [rows, other, weights, other_weights]
            gradients = [to_dense(g) for g in inner.gradient(total, sources)]
            total = tf.add_n([tf.reduce_sum(g**3) for g in gradients])
        return [to_dense(g) for g in outer.gradient(total, sources)]

    def ours(rows, other):
        return sok.lookup_sparse(
            [rows, other, rows],
            [ids, ids, other_ids],
            [ids.with_flat_values(weights), None, other_ids.with_flat_values(other_weights)],
            list(COMBINERS),
        )

    def theirs(rows, other):
        arguments = [(rows, ids, weights), (other, ids, None), (rows, other_ids, other_weights)]
        return [
            dense_lookup(r, combiner, i, w)
            for (r, i, w), combiner in zip(arguments, COMBINERS, strict=True)
        ]

    tables = a_table(), a_table(some_rows(1))
    variables = tf.Variable(some_rows()), tf.Variable(some_rows(1))
    got = mode(lambda: run(*tables, ours))()
    for ours_, expected in zip(got, run(*variables, theirs), strict=True):
        scale = float(tf.reduce_max(tf.abs(expected)))
        np.testing.assert_allclose(ours_, expected, rtol=5e-4, atol=1e-4 * scale)


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_tables_that_share_a_gradient_or_weights(mode, weighted):
    """One tensor stands for several of what a second derivative is taken by."""
    ids, weights = a_batch()
    weights = weights if weighted else None
    tables = [a_table(), a_table(some_rows(1))]
    variables = [tf.Variable(some_rows()), tf.Variable(some_rows(1))]

    def derive(look_up, sources):
        with tf.GradientTape() as outer:
            outer.watch([] if weights is None else weights)
            with tf.GradientTape() as inner:
                inner.watch([] if weights is None else weights)
                # The sum gives both outputs one gradient; the weights are those of both.
                loss = tf.reduce_sum(tf.add_n(look_up(sources)) ** 3)
            first = inner.gradient(loss, sources if weights is None else [*sources, weights])
            number = tf.add_n([tf.reduce_sum(to_dense(each) ** 2) for each in first])
        wanted = sources if weights is None else [*sources, weights]
        return [to_dense(each) for each in outer.gradient(number, wanted)]

    def ours(sources):
        given = None if weights is None else [ids.with_flat_values(weights)] * 2
        return sok.lookup_sparse(sources, [ids, ids], given, combiners="sum")

    def theirs(sources):
        return [dense_lookup(each, "sum", ids, weights) for each in sources]

    found = mode(lambda: derive(ours, tables))()
    for mine, other in zip(found, derive(theirs, variables), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-3)


def test_weights_that_are_all_zero_have_derivatives_of_zero(mode):
    table, ids = a_table(), tf.ragged.constant([[1, 2], [3]], dtype=tf.int64)
    weights = tf.constant([0.0, 0.0, 1.0])

    def run(combiner):
        with tf.GradientTape() as outer:
            outer.watch(weights)
            with tf.GradientTape() as inner:
                inner.watch(weights)
                total = tf.reduce_sum(table_lookup(table, combiner, ids, weights) ** 2)
            gradients = [to_dense(g) for g in inner.gradient(total, [table, weights])]
            total = tf.add_n([tf.reduce_sum(g**2) for g in gradients])
        return [to_dense(g) for g in outer.gradient(total, [table, weights])]

    for combiner in ("mean", "sqrtn"):
        by_rows, by_weights = mode(run)(combiner)
        assert np.isfinite(by_rows).all() and np.isfinite(by_weights).all()
        np.testing.assert_array_equal(by_rows[1:3], 0)
        np.testing.assert_array_equal(by_weights[:2], 0)


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16])
def test_rows_of_16_bits_have_second_derivatives_too(dtype):
    ids, weights = a_batch()
    rounded = tf.cast(tf.cast(some_rows(), dtype), tf.float32)
    table = a_table(tf.cast(rounded, dtype), dtype=dtype)

    def look_up(rows, ids, weights):
        return tf.cast(table_lookup(rows, "mean", ids, weights), tf.float32)

    def look_up_dense(rows, ids, weights):
        return dense_lookup(rows, "mean", ids, weights)

    ours = derivatives(look_up, table, ids, weights, 2)
    theirs = derivatives(look_up_dense, tf.Variable(rounded), ids, weights, 2)
    for got, expected in zip(ours, theirs, strict=True):
        # Outputs and their gradients have 8 bits (bfloat16): 1 in 256 each, twice.
        scale = float(tf.reduce_max(tf.abs(expected)))
        np.testing.assert_allclose(got, expected, rtol=0.1, atol=0.03 * scale)


def test_in_a_branch_and_in_a_loop_with_both_tapes_inside():
    table, (ids, weights) = a_table(), a_batch()

    def second(rows, lookup):
        with tf.GradientTape() as outer:
            total = second_of(lookup, rows, weights, ids)
        return to_dense(outer.gradient(total, rows))

    @tf.function
    def in_a_branch(flag):
        return tf.cond(flag, lambda: second(table, table_lookup), lambda: tf.zeros([NUM_ROWS, DIM]))

    @tf.function
    def in_a_loop():
        total = tf.zeros([NUM_ROWS, DIM])
        for _ in tf.range(2):
            total += second(table, table_lookup)
        return total

    expected = second(tf.Variable(some_rows()), dense_lookup)
    np.testing.assert_allclose(in_a_branch(tf.constant(True)), expected, rtol=2e-4, atol=1e-4)
    np.testing.assert_allclose(in_a_loop(), 2 * expected, rtol=2e-4, atol=2e-4)


def test_a_branch_between_two_tapes(mode):
    ids, weights = a_batch()

    def run(rows, lookup, flag):
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                out = tf.cond(
                    flag,
                    lambda: lookup(rows, "mean", ids, weights),
                    lambda: tf.zeros([BATCH, DIM]),
                )
                total = tf.reduce_sum(tf.sin(out))
            total = tf.reduce_sum(to_dense(inner.gradient(total, rows)) ** 3)
        return to_dense(outer.gradient(total, rows))

    table, variable = a_table(), tf.Variable(some_rows())
    got = mode(lambda: run(table, table_lookup, tf.constant(True)))()
    expected = run(variable, dense_lookup, tf.constant(True))
    np.testing.assert_allclose(got, expected, rtol=2e-4, atol=1e-4)


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


@pytest.mark.parametrize("pfor", [False, True])
def test_hessians_by_weights_are_tensorflows(mode, pfor):
    table, (ids, weights) = a_table(), a_batch()

    def hessian(rows, look_up):
        with tf.GradientTape(persistent=not pfor) as outer:
            outer.watch(weights)
            with tf.GradientTape() as inner:
                inner.watch(weights)
                total = tf.reduce_sum(tf.sin(look_up(rows, "sqrtn", ids, weights)))
            gradient = inner.gradient(total, weights)
        return outer.jacobian(gradient, weights, experimental_use_pfor=pfor)

    got = mode(lambda: hessian(table, table_lookup))()
    expected = hessian(tf.Variable(some_rows()), dense_lookup)
    np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-4)
