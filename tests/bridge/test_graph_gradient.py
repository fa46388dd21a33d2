"""Gradients of a function go with its graph."""

import gc
import weakref

import pytest
import tensorflow as tf
from tensorflow.python.framework.ops import gradient_registry

import sok_lite as sok

IDS = tf.constant([[1, 2], [3, 3]], tf.int64)


@pytest.fixture
def table():
    return sok.DynamicVariable(2, "ones", name="t")


def traced(table, gradients):
    """Returns the graph of a function that looks up and, if so, takes gradients, after a call."""

    @tf.function
    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.reduce_sum(tf.nn.embedding_lookup(table, ids), 1) ** 2)
        return tape.gradient(loss, table).values if gradients == "within" else loss

    with tf.GradientTape():
        step(IDS)
    return step.get_concrete_function(IDS).graph


@pytest.mark.parametrize("gradients", ["none", "within"])
def test_a_graph_that_nobody_has_is_gone(gradients):
    table = sok.DynamicVariable(2, "ones", name="t")
    traced(table, gradients)  # what TensorFlow makes once
    gc.collect()
    before = len(gradient_registry.list())
    graph = weakref.ref(traced(table, gradients))
    gc.collect()
    assert graph() is None
    assert len(gradient_registry.list()) <= before


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
@pytest.mark.parametrize(
    ("tape", "key_type"), [("outside", tf.int64), ("outside", tf.int32), ("in a loop", tf.int64)]
)
def test_a_branch_looks_up_what_comes_from_outside_of_it(look_up, tape, key_type):
    table, all_ids = sok.DynamicVariable(2, "ones", key_type=key_type), tf.cast(IDS, key_type)

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
        assert float(in_a_loop(all_ids, weights, tf.constant(3))) == 2 * 8.0
    else:
        with tf.GradientTape() as outer:
            loss = outside(all_ids, weights)
        assert float(tf.reduce_sum(outer.gradient(loss, table).values)) == 8.0


def test_a_nested_tape_in_a_graph_of_tf1_has_second_derivatives():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        table = sok.DynamicVariable(1, "2", name="t")
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = tf.reduce_sum(tf.nn.embedding_lookup(table, [5]) ** 3)
            first = inner.gradient(loss, table).values
            total = tf.reduce_sum(first)
        second = outer.gradient(total, table)
        session.run(tf.compat.v1.global_variables_initializer())
        # 3 x^2 and 6 x of x = 2.
        assert session.run([first, second.values]) == [[[12.0]], [[12.0]]]
