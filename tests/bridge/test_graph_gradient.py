"""Gradients of a function go with its graph."""

import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite.bridge.tf_private import gradient_registry

IDS = tf.constant([[1, 2], [3, 3]], tf.int64)


@pytest.fixture
def table():
    return sok.DynamicVariable(2, "ones", name="t")


def traced(table, gradients):
    """A traced function that looks up and, if so, takes gradients; and what it gives."""

    @tf.function
    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.reduce_sum(tf.nn.embedding_lookup(table, ids), 1) ** 2)
        return tape.gradient(loss, table).values if gradients == "within" else loss

    with tf.GradientTape() as tape:
        found = step(IDS)
    if gradients == "outside":
        found = tape.gradient(found, table).values
    return step.get_concrete_function(IDS).graph, found


@pytest.mark.parametrize("gradients", ["none", "within"])
def test_a_graph_that_nobody_has_is_gone(gradients):
    table = sok.DynamicVariable(2, "ones", name="t")
    traced(table, gradients)  # what TensorFlow makes once
    gc.collect()
    before = len(gradient_registry.list())
    graph = weakref.ref(traced(table, gradients)[0])
    gc.collect()
    assert graph() is None
    assert len(gradient_registry.list()) <= before


@pytest.mark.parametrize("gradients", ["within", "outside"])
def test_gradients_of_a_function_are_there(gradients):
    table = sok.DynamicVariable(2, "ones", name="t")
    found = traced(table, gradients)[1]
    # A sample is 2 in each element, so that each of the four ids has a gradient of 4 there.
    np.testing.assert_array_equal(found, np.full((4, 2), 4.0))


def test_a_lookup_reads_no_variable(table):
    @tf.function
    def read(ids):
        return tf.nn.embedding_lookup(table, ids)

    graph = read.get_concrete_function(IDS).graph
    reads = [op for op in graph.get_operations() if op.type == "ReadVariableOp"]
    assert {op.outputs[0].dtype for op in reads} == {tf.int64}  # what orders calls


@pytest.mark.parametrize("order", ["traced in the loop", "traced before"])
def test_dense_gradients_pass_a_loop_that_calls_a_lookup(table, order):
    sok.assign(table, [1, 2, 3], [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]])
    scale = tf.Variable(2.0)

    @tf.function
    def looked_up(ids):
        return scale * tf.reduce_sum(tf.nn.embedding_lookup(table, ids))

    if order == "traced before":
        looked_up(IDS)

    @tf.function
    def gradient():
        def more(i, total):
            return i + 1, total + looked_up(IDS)

        with tf.GradientTape() as tape:
            loss = tf.while_loop(lambda i, _: i < 3, more, (0, 0.0))[1]
        return tape.gradient(loss, scale)

    assert float(gradient()) == 3 * 2 * (1.0 + 2.0 + 3.0 + 3.0)


@pytest.mark.parametrize("branch", [True, False])
def test_a_gradient_comes_from_a_branch_that_looks_up(table, branch):
    @tf.function
    def gradient(chosen):
        with tf.GradientTape() as tape:
            loss = tf.cond(
                chosen,
                lambda: tf.reduce_sum(tf.nn.embedding_lookup(table, IDS)),
                lambda: tf.constant(0.0),
            )
        return tape.gradient(loss, table)

    found = tf.convert_to_tensor(gradient(tf.constant(branch)).values)
    assert float(tf.reduce_sum(found)) == (8.0 if branch else 0.0)


def pooled(table, ids, weights):
    weights = tf.RaggedTensor.from_tensor(weights) if weights is not None else None
    ids = tf.RaggedTensor.from_tensor(ids)
    return sok.lookup_sparse(table, ids, sp_weights=weights, combiners="sum")


BRANCHES = {
    "embedding_lookup": lambda table, ids, _: tf.nn.embedding_lookup(table, ids),
    "lookup_sparse": lambda table, ids, _: pooled(table, ids, None),
    "with weights": pooled,
}


@pytest.mark.usefixtures("initialised")
@pytest.mark.parametrize("look_up", BRANCHES.values(), ids=BRANCHES.keys())
@pytest.mark.parametrize("tape", ["outside", "in a loop"])
def test_a_branch_looks_up_what_comes_from_outside_of_it(table, look_up, tape):
    # TensorFlow's gradient of a branch takes no tensor of a graph further out than the next.
    def looked_up(ids, weights, chosen):
        return tf.cond(
            chosen,
            lambda: tf.reduce_sum(look_up(table, ids, weights)),
            lambda: tf.constant(0.0),
        )

    @tf.function
    def outside(ids, weights):
        return looked_up(ids, weights, tf.shape(ids)[0] > 0)

    @tf.function
    def in_a_loop(ids, weights, rounds):
        def more(i, total):
            with tf.GradientTape() as tape:
                loss = looked_up(ids, weights, i > 0)
            return i + 1, total + tf.reduce_sum(tape.gradient(loss, table).values)

        return tf.while_loop(lambda i, _: i < rounds, more, (0, 0.0))[1]

    weights = tf.ones([2, 2])
    if tape == "in a loop":  # two of three rounds look up
        assert float(in_a_loop(IDS, weights, tf.constant(3))) == 2 * 8.0
    else:
        with tf.GradientTape() as outer:
            loss = outside(IDS, weights)
        assert float(tf.reduce_sum(outer.gradient(loss, table).values)) == 8.0
