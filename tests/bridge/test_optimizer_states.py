"""Whose the optimizer states of a table are: those of the optimizer that made them."""

import gc
import re
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from tests.support.own_optimizers import KEYS, slices

k3 = keras.optimizers
v1 = tf.compat.v1.train
DIM = 4


def new_pair():
    table = sok.DynamicVariable(DIM, initializer="uniform")
    return table, tf.Variable(tf.nn.embedding_lookup(table, KEYS))


def rows_of(table):
    return tf.nn.embedding_lookup(table, KEYS).numpy()


def some_grads(steps):
    return np.random.default_rng(0).normal(size=(steps, len(KEYS), DIM)).astype(np.float32)


def train(optimizer, table, all_grads):
    for grads in all_grads:
        optimizer.apply_gradients([(slices(grads), table)])


def train_dense(optimizer, variable, all_grads):
    for grads in all_grads:
        optimizer.apply_gradients([(tf.constant(grads), variable)])


TWO = {
    "Adagrad and Ftrl": (lambda: k3.Adagrad(0.1), lambda: k3.Ftrl(0.1)),
    "two Adams": (lambda: k3.Adam(0.1), lambda: k3.Adam(0.1)),
    "SGD and RMSprop": (lambda: k3.SGD(0.1, momentum=0.9), lambda: k3.RMSprop(0.1, momentum=0.9)),
    "other initial values": (lambda: k3.Adagrad(0.1), lambda: k3.Adagrad(0.1, 0.5)),
}


def test_optimizers_of_a_session_share_no_state():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        table = sok.DynamicVariable(DIM, initializer="ones")
        rows = tf.nn.embedding_lookup(table, KEYS)
        variable = tf.Variable(tf.ones([len(KEYS), DIM]))
        grads = some_grads(1)[0]
        pairs = [(v1.AdagradOptimizer(0.1), v1.AdagradOptimizer(0.1)) for _ in range(2)]
        steps = [
            (
                sok.OptimizerWrapper(ours).apply_gradients([(slices(grads), table)]),
                theirs.apply_gradients([(tf.constant(grads), variable)]),
            )
            for ours, theirs in pairs
        ]
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(rows)
        del pairs
        gc.collect()  # the graph keeps the optimizers of its operations
        for i in (0, 1, 1, 0, 1):
            for step in steps[i]:
                session.run(step)
        np.testing.assert_allclose(*session.run([rows, variable]), rtol=1e-5)


def test_states_go_with_their_optimizer(tmp_path):
    table, _ = new_pair()
    used = table.table.store.used_bytes
    for number in range(4):
        optimizer = sok.OptimizerWrapper(k3.Adam(0.1))
        step = tf.function(
            lambda grads, ours=optimizer: ours.apply_gradients([(slices(grads), table)])
        )
        step(tf.constant(some_grads(1)[0]))
        assert table.table.store.used_bytes == 3 * used, number
    # One that is gone and one that is not, and a checkpoint.
    keep = sok.OptimizerWrapper(k3.SGD(0.1, momentum=0.9))
    train(keep, table, some_grads(1))
    assert table.table.store.used_bytes == 4 * used
    del optimizer, step
    tf.train.Checkpoint(table=table).save(str(tmp_path / "saved"))
    assert table.table.store.used_bytes == 2 * used
    del keep
    gc.collect()
    tf.train.Checkpoint(table=table).save(str(tmp_path / "saved"))
    assert (table.table.store.used_bytes, table.table.store.state_names) == (used, [])


@pytest.mark.parametrize("kept", [True, False], ids=["wrapped anew", "made anew"])
def test_a_wrapper_made_anew_goes_on_and_an_optimizer_made_anew_does_not(kept):
    """As in SOK, whose slots are in the wrapped optimizer. Of a rule that counts no steps."""
    table, variable = new_pair()

    def make():
        return k3.SGD(0.1, momentum=0.9)

    ours, theirs = make(), make()
    for grads in some_grads(3):
        train(sok.OptimizerWrapper(ours), table, [grads])
        train_dense(theirs, variable, [grads])
        if not kept:
            ours, theirs = make(), make()
            variable = tf.Variable(variable)
    np.testing.assert_allclose(rows_of(table), variable, rtol=1e-5, atol=1e-6)


def test_a_wrapper_made_anew_counts_steps_anew():
    table, _ = new_pair()
    inner = k3.Adam(0.1)
    m = v = 0.0
    for grads in some_grads(3):
        before, ours = rows_of(table), sok.OptimizerWrapper(inner)
        train(ours, table, [grads])
        m, v = 0.9 * m + 0.1 * grads, 0.999 * v + 0.001 * grads**2
        alpha = 0.1 * np.sqrt(1 - 0.999) / (1 - 0.9)
        expected = before - alpha * m / (np.sqrt(v) + 1e-7)
        np.testing.assert_allclose(rows_of(table), expected, rtol=1e-4, atol=1e-5)
        assert ours.iterations == 1


@pytest.mark.pairs
@pytest.mark.parametrize("into", ["new optimizers", "the same optimizers"])
@pytest.mark.parametrize("makers", TWO.values(), ids=TWO)
def test_the_states_of_two_optimizers_are_saved_and_restored(tmp_path, makers, into):
    """In the order in which they first trained the table; those in use find theirs in any order."""
    table, variable = new_pair()
    ours = [sok.OptimizerWrapper(make()) for make in makers]
    theirs = [make() for make in makers]
    before, after = some_grads(4), some_grads(4)
    for i, grads in zip([1, 0, 0, 1], before, strict=True):
        train(ours[i], table, [grads])
        train_dense(theirs[i], variable, [grads])
    checkpoint = tf.train.Checkpoint(table=table, first=ours[0], second=ours[1])
    path = checkpoint.save(str(tmp_path / "saved"))
    if into == "new optimizers":
        table = sok.DynamicVariable(DIM, initializer="uniform", name="restored")
        ours = [sok.OptimizerWrapper(make()) for make in makers]
        checkpoint = tf.train.Checkpoint(table=table, first=ours[0], second=ours[1])
    else:
        for optimizer in ours:
            train(optimizer, table, some_grads(2))
    checkpoint.restore(path).assert_consumed()
    order = [1, 1, 0, 0] if into == "new optimizers" else [0, 1, 1, 0]
    for i, grads in zip(order, after, strict=True):
        train(ours[i], table, [grads])
        train_dense(theirs[i], variable, [grads])
    np.testing.assert_allclose(rows_of(table), variable, rtol=1e-5, atol=1e-6)


def test_a_load_says_which_of_two_like_optimizers_gets_which_states(tmp_path):
    table, _ = new_pair()
    ours = [sok.OptimizerWrapper(k3.SGD(0.1, momentum=0.5)) for _ in range(2)]
    for number, optimizer in enumerate(ours):
        train(optimizer, table, [np.full((len(KEYS), DIM), 1.0 + number)])
    path = tf.train.Checkpoint(table=table).save(str(tmp_path / "saved"))
    momenta = []
    for drops_first in (False, True):
        restored = sok.DynamicVariable(DIM)
        tf.train.Checkpoint(table=restored).restore(path).assert_consumed()
        if drops_first:
            sok.optimizer_states(restored)["momentum"].drop()
        again = sok.OptimizerWrapper(k3.SGD(0.1, momentum=0.5))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            train(again, restored, [np.zeros((len(KEYS), DIM))])
        momenta.append(sok.export(again.get_slot(restored, "momentum"))[1][0, 0])
        texts = [str(each.message) for each in said if each.category is RuntimeWarning]
        fits = f"{restored.table.name!r} has the states of 2 .*: 'momentum'; 'momentum \\(2\\)'"
        assert [bool(re.search(fits, text)) for text in texts] == ([] if drops_first else [True])
    np.testing.assert_allclose(momenta, [-0.1 * 1 * 0.5, -0.1 * 2 * 0.5])


@pytest.mark.usefixtures("initialised")
def test_a_merge_brings_no_states_of_an_optimizer_that_is_gone(tmp_path):
    table, _ = new_pair()
    sok.dump(tmp_path, table)
    gone = sok.OptimizerWrapper(k3.Adagrad(0.1))
    train(gone, table, some_grads(2))
    del gone
    gc.collect()
    sok.load(tmp_path, table, mode="merge")
    assert sok.optimizer_states(table) == {}
