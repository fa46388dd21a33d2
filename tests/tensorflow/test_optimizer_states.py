"""Whose the optimizer states of a table are: one optimizer's, as long as it lives."""

import gc

import keras
import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok

k3 = keras.optimizers
v1 = tf.compat.v1.train
KEYS = [5, -7, 2**40]
DIM = 4


def new_pair():
    table = sok.DynamicVariable(DIM, initializer="uniform")
    return table, tf.Variable(tf.nn.embedding_lookup(table, KEYS))


def rows_of(table):
    return tf.nn.embedding_lookup(table, KEYS).numpy()


def slices(grads):
    return tf.IndexedSlices(tf.convert_to_tensor(grads, tf.float32), tf.constant(KEYS, tf.int64))


def some_grads(steps):
    return np.random.default_rng(0).normal(size=(steps, len(KEYS), DIM)).astype(np.float32)


def train(optimizer, table, all_grads):
    for grads in all_grads:
        optimizer.apply_gradients([(slices(grads), table)])


def train_dense(optimizer, variable, all_grads):
    for grads in all_grads:
        optimizer.apply_gradients([(tf.constant(grads), variable)])


@pytest.mark.parametrize(
    ("first", "second", "state"),
    [
        (lambda: k3.Adam(0.1), lambda: k3.Adam(0.1), "m"),
        (lambda: k3.Adagrad(0.1), lambda: k3.Ftrl(0.1), "accumulator"),
        (lambda: k3.SGD(0.1, momentum=0.9), lambda: k3.RMSprop(0.1, momentum=0.9), "momentum"),
    ],
    ids=["two Adams", "Adagrad and Ftrl", "SGD and RMSprop"],
)
def test_two_living_optimizers_share_no_state(first, second, state, mode):
    table, variable = new_pair()
    ours, theirs = sok.OptimizerWrapper(first()), first()
    train(ours, table, some_grads(2))
    train_dense(theirs, variable, some_grads(2))
    dense, inner = tf.Variable([1.0]), second()
    other = sok.OptimizerWrapper(inner)

    @mode
    def step():
        pairs = [(slices(some_grads(1)[0]), table), (tf.constant([1.0]), dense)]
        other.apply_gradients(pairs)

    names = [type(optimizer).__name__ for optimizer in (theirs, inner)]
    text = "State {!r} of table .* belongs to another optimizer, {} .*Received: {}"
    refused = (ValueError, tf.errors.InvalidArgumentError)
    with pytest.raises(refused, match=text.format(state, *names)):
        step()
    np.testing.assert_array_equal(dense, [1.0])
    assert int(inner.iterations) == int(other.iterations) == 0
    # The first one goes on as if nothing had been.
    train(ours, table, some_grads(2))
    train_dense(theirs, variable, some_grads(2))
    np.testing.assert_allclose(rows_of(table), variable, rtol=1e-5, atol=1e-6)


def test_optimizers_with_states_of_other_names_may_take_turns():
    table, variable = new_pair()
    ours = [sok.OptimizerWrapper(k3.Adam(0.1)), sok.OptimizerWrapper(k3.Adagrad(0.1))]
    theirs = [k3.Adam(0.1), k3.Adagrad(0.1)]
    for grads in some_grads(3):
        for optimizer in ours:
            train(optimizer, table, [grads])
        for optimizer in theirs:
            train_dense(optimizer, variable, [grads])
    np.testing.assert_allclose(rows_of(table), variable, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize(
    "makers",
    [
        [lambda: k3.Adam(0.1), lambda: k3.Adam(0.1)],
        [lambda: k3.Adagrad(0.1), lambda: k3.Ftrl(0.1), lambda: k3.Adagrad(0.1)],
        [lambda: k3.SGD(0.1, momentum=0.9), lambda: k3.RMSprop(0.1, momentum=0.9)],
    ],
    ids=["Adam twice", "Adagrad and Ftrl", "SGD and RMSprop"],
)
def test_after_an_optimizer_is_gone_the_next_one_begins_anew(makers, traced):
    table, variable = new_pair()

    def phase(make):
        ours, theirs = sok.OptimizerWrapper(make()), make()

        def step(grads):
            ours.apply_gradients([(slices(grads), table)])

        step = tf.function(step) if traced else step
        for grads in some_grads(3):
            step(tf.constant(grads))
            theirs.apply_gradients([(tf.constant(grads), variable)])

    for make in makers:
        phase(make)
    np.testing.assert_allclose(rows_of(table), variable, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kept", [True, False], ids=["wrapped anew", "made anew"])
def test_an_optimizer_may_be_wrapped_or_made_in_every_step(kept):
    # Of a rule that counts no steps: the states are all there is to know.
    table, variable = new_pair()
    inner, theirs = k3.SGD(0.1, momentum=0.9), k3.SGD(0.1, momentum=0.9)
    for grads in some_grads(3):
        ours = inner if kept else k3.SGD(0.1, momentum=0.9)
        train(sok.OptimizerWrapper(ours), table, [grads])
        del ours
        train_dense(theirs, variable, [grads])
    np.testing.assert_allclose(rows_of(table), variable, rtol=1e-5, atol=1e-6)


def test_a_graph_keeps_the_optimizer_of_its_operations():
    grads = some_grads(1)[0]
    moved = []
    for keeps in (True, False):
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            table = sok.DynamicVariable(DIM, initializer="ones")
            rows = tf.nn.embedding_lookup(table, KEYS)
            optimizer = sok.OptimizerWrapper(v1.AdamOptimizer(0.1))
            step = optimizer.apply_gradients([(slices(grads), table)])
            session.run(tf.compat.v1.global_variables_initializer())
            session.run(rows)
            if not keeps:
                del optimizer
                gc.collect()
            for _ in range(3):
                session.run(step)
            moved.append(session.run(rows))
    np.testing.assert_array_equal(moved[0], moved[1])


@pytest.mark.parametrize("into", ["a new table", "a table whose optimizer is gone"])
def test_restored_states_are_adopted(tmp_path, into):
    table, variable = new_pair()
    ours, theirs = sok.OptimizerWrapper(k3.Adam(0.1)), k3.Adam(0.1)
    train(ours, table, some_grads(3))
    train_dense(theirs, variable, some_grads(3))
    path = tf.train.Checkpoint(table=table, optimizer=ours).save(str(tmp_path / "saved"))

    restored = sok.DynamicVariable(DIM, initializer="uniform", name="restored")
    if into != "a new table":
        tf.nn.embedding_lookup(restored, KEYS)
        train(sok.OptimizerWrapper(k3.Adam(0.1)), restored, some_grads(1))
    again = sok.OptimizerWrapper(k3.Adam(0.1))
    tf.train.Checkpoint(table=restored, optimizer=again).restore(path).assert_consumed()
    _, m = sok.export(again.get_slot(restored, "m"))
    np.testing.assert_array_equal(m, sok.export(ours.get_slot(table, "m"))[1])
    train(again, restored, some_grads(3))
    train_dense(theirs, variable, some_grads(3))
    np.testing.assert_allclose(rows_of(restored), variable, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="belongs to another optimizer"):
        train(sok.OptimizerWrapper(k3.Adam(0.1)), restored, some_grads(1))


def test_a_table_that_is_restored_keeps_a_living_optimizer(tmp_path):
    table, variable = new_pair()
    ours, theirs = sok.OptimizerWrapper(k3.Adam(0.1)), k3.Adam(0.1)
    train(ours, table, some_grads(3))
    checkpoint = tf.train.Checkpoint(table=table, optimizer=ours)
    path = checkpoint.save(str(tmp_path / "saved"))
    train(ours, table, some_grads(2))
    checkpoint.restore(path)
    with pytest.raises(ValueError, match="belongs to another optimizer"):
        train(sok.OptimizerWrapper(k3.Adam(0.1)), table, some_grads(1))
    train(ours, table, some_grads(2))
    train_dense(theirs, variable, [*some_grads(3), *some_grads(2)])
    np.testing.assert_allclose(rows_of(table), variable, rtol=1e-5, atol=1e-6)
