"""Methods of tables in graphs: in order with lookups and updates, and without gradients."""

from functools import partial

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite import kv_variable as kv
from tests.conftest import QUICK
from tests.support.table_programs import DIM, NUM_FLAGS, Oracle, Program, drawn, flags_of

v1 = tf.compat.v1
RUNS = 3


def in_a_function(make):
    traced = tf.function(make(), autograph=False)
    return lambda flags: traced(tf.constant(flags)).numpy()


def in_a_function_of_tf1(make):
    """Within a graph of TF1 a function is all that has an order."""
    graph = tf.Graph()
    with graph.as_default():
        flags = v1.placeholder(tf.bool, [NUM_FLAGS])
        seen = tf.function(make(), autograph=False)(flags)
        session = v1.Session(graph=graph)
        session.run(v1.global_variables_initializer())
    return lambda given: session.run(seen, {flags: given})


@pytest.mark.usefixtures("initialised")
@pytest.mark.parametrize("run", [in_a_function, in_a_function_of_tf1])
def test_programs_see_what_a_dict_does(run, request):
    """The order is one of a graph: some programs are enough with tables on a GPU."""
    is_on_gpu = request.node.callspec.params["tables_on"] == "simt"
    for seed in range(4 if QUICK else 8 if is_on_gpu else 25):
        rng = np.random.default_rng(seed)
        block, oracle = drawn(rng.integers), Oracle()
        program = run(partial(Program, block))
        for _ in range(RUNS):
            flags = flags_of(int(rng.integers(2**NUM_FLAGS)))
            np.testing.assert_array_equal(
                program(flags), oracle.run(block, flags), f"{seed} {block}"
            )


def before(operation):
    """All operations that an operation waits for, but by way of the variable that has the turn."""
    found, waiting = set(), [operation]
    while waiting:
        one = waiting.pop()
        for other in [*one.control_inputs, *(each.op for each in one.inputs)]:
            if other not in found and other.type != "AssignAddVariableOp":
                found.add(other)
                waiting.append(other)
    return found


def of_type(graph, name):
    return [each for each in graph.get_operations() if each.type == name]


def test_texts_have_their_place_among_the_operations_on_a_table():
    """What a checkpoint has is of the moment between two writes."""
    table = sok.DynamicVariable(DIM, initializer="ones")

    @tf.function(autograph=False)
    def function():
        sok.assign(table, [1], tf.fill([1, DIM], 5.0))
        saved = table._serialize_to_tensors()["values"]
        sok.assign(table, [1], tf.fill([1, DIM], 7.0))
        return saved

    graph = function.get_concrete_function().graph
    (saving,) = of_type(graph, "EagerPyFunc")
    first, second = of_type(graph, "SokMethod")
    assert first in before(saving) and saving in before(second)
    np.testing.assert_array_equal(function(), [[5.0] * DIM])
    np.testing.assert_array_equal(table.sparse_read([1]), [[7.0] * DIM])


def test_partitions_of_one_table_are_in_order():
    partitioner = v1.fixed_size_partitioner(2)
    table = kv.get_kv_variable("in_order", DIM, initializer=1.0, partitioner=partitioner)

    @tf.function(autograph=False)
    def function():
        for part in table:
            part.insert(tf.constant([4], tf.int64), tf.ones([1, DIM]))

    graph = function.get_concrete_function().graph
    first, second = of_type(graph, "SokMethod")
    assert first in before(second)


@pytest.mark.usefixtures("initialised")
@pytest.mark.parametrize("is_persistent", [False, True])
def test_a_tape_takes_no_gradient_through_methods(is_persistent):
    table = sok.DynamicVariable(DIM, initializer="ones")

    @tf.function
    def function():
        with tf.GradientTape(persistent=is_persistent) as tape:
            rows = tf.nn.embedding_lookup(table, tf.constant([1, 2, 2]))
            exported = sok.export(table)[1]
            loss = tf.reduce_sum(rows) + tf.reduce_sum(exported) * 10.0
        gradient = tape.gradient(loss, table)
        return gradient.indices, gradient.values

    for _ in range(2):
        keys, values = function()
        np.testing.assert_array_equal(keys, [1, 2, 2])
        np.testing.assert_array_equal(values, np.ones((3, DIM)))


def test_tf_gradients_takes_none_through_methods():
    with tf.Graph().as_default():
        table = sok.DynamicVariable(DIM, initializer="ones")
        seen = tf.reduce_sum(sok.export(table)[1])
        assert tf.gradients(seen, [table.handle]) == [None]


@pytest.mark.usefixtures("initialised")
def test_a_step_takes_its_lock_after_one_in_a_branch_before_it():
    """A step that had the lock while it waited for the one in the branch would wait for ever."""
    table, optimizer = sok.DynamicVariable(DIM), sok.SGD(0.5)

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.embedding_lookup(table, tf.constant([1])))
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])
        return loss

    step()  # states are not made in a graph

    @tf.function(autograph=False)
    def function(flag):
        first = tf.cond(flag, step, lambda: 0.0)
        return first + step()

    graph = function.get_concrete_function(tf.constant(True)).graph
    (lock,) = of_type(graph, "MutexLock")
    (branch,) = of_type(graph, "If")
    assert branch in before(lock)
    function(tf.constant(True))
