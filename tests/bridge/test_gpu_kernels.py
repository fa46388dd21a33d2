"""Nothing of tables that is on a GPU goes to the host on its way through a graph."""

import pytest
import tensorflow as tf

import sok_lite as sok
from tests.support import gpu_kernels
from tests.support.gpu_kernels import KNOWN
from tests.support.public_calls import IN_GRAPHS, Calls


def looked_up(tables, weights):
    """Returns a number that has a gradient by the weights and by the rows of two tables."""
    ids = tf.RaggedTensor.from_row_splits(
        tf.constant([1, 2, 3, 3, 1], tf.int64), tf.constant([0, 2, 3, 5], tf.int64)
    )
    given = ids.with_values(weights)
    pooled = sok.lookup_sparse(tables, [ids, ids], [given, given], ["sum", "mean"])
    own = tf.nn.embedding_lookup(tables[0], ids.values)
    return tf.add_n([tf.reduce_sum(each**2) for each in [*pooled, own]])


def in_a_loop(tables, weights):
    def more(i, total):
        return i + 1, total + looked_up(tables, weights * total)

    return tf.while_loop(lambda i, _: i < 3, more, (0, 1.0))[1]


def in_a_branch(tables, weights):
    chosen = tf.reduce_sum(weights) > 0
    return tf.cond(chosen, lambda: looked_up(tables, weights), lambda: 0.0 * weights[0])


def of_int32_in_a_loop(tables, weights):
    ids = tf.constant([1, 2, 3])

    def more(i, total):
        rows = tf.nn.embedding_lookup(tables[0], ids + i)
        return i + 1, total + weights[0] * tf.reduce_sum(rows)

    return tf.while_loop(lambda i, _: i < 3, more, (0, 0.0))[1]


PROGRAMS = {
    "int32 in a loop": of_int32_in_a_loop,
    "straight": looked_up,
    "loop": in_a_loop,
    "branch": in_a_branch,
}


def new_tables():
    return [sok.DynamicVariable(dim, "ones", name=f"t{dim}") for dim in (2, 3)]


def trace_function(program):
    """Traces a program and its gradient; a gradient out of a loop is refused when it runs."""
    tables, weights = new_tables(), tf.Variable(tf.ones([5]))

    @tf.function
    def gradient():
        with tf.GradientTape() as tape:
            number = program(tables, weights)
        return tape.gradient(number, weights)

    gradient.get_concrete_function()


def trace_graph(program):
    """Does the same with the branches and loops of TF1: Switch, Merge, stacks."""
    tf.compat.v1.disable_control_flow_v2()
    try:
        with tf.Graph().as_default():
            tables, weights = new_tables(), tf.compat.v1.get_variable("w", initializer=tf.ones([5]))
            tf.gradients(program(tables, weights), weights)
    finally:
        tf.compat.v1.enable_control_flow_v2()


def trace_dense_ids_of_uint64():
    tables = [sok.DynamicVariable(2, "ones", name=f"u{i}", key_type=tf.uint64) for i in range(2)]

    @tf.function(
        input_signature=[
            *[tf.TensorSpec([None, None], tf.uint64)] * 2,
            *[tf.TensorSpec([None, None], tf.float32)] * 2,
        ]
    )
    def gradients(*given):
        with tf.GradientTape() as tape:
            tape.watch(given[2:])
            rows = sok.lookup_sparse(tables, list(given[:2]), list(given[2:]), "sum")
        return tape.gradient(rows, given[2:])

    gradients.get_concrete_function()


def train():
    """Makes steps of tables and a dense variable in a loop that has the tape inside."""
    tables, weights = new_tables(), tf.Variable(tf.ones([5]))
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adam())
    optimizer.optimizer.build([weights])

    @tf.function
    def steps():
        for _ in tf.range(2):
            with tf.GradientTape() as tape:
                number = looked_up(tables, weights)
            variables = [*tables, weights]
            gradients = tape.gradient(number, variables)
            optimizer.apply_gradients(zip(gradients, variables, strict=True))

    steps()


@pytest.mark.usefixtures("initialised")
def test_what_programs_send_to_the_host_is_known(play):
    """By the names of all three APIs; the end of `play` refuses what is not known."""
    calls = Calls()
    for name in IN_GRAPHS:
        tf.function(getattr(calls, name))()
    for program in PROGRAMS.values():
        trace_function(program)
        trace_graph(program)
    trace_dense_ids_of_uint64()
    train()
    gone = sorted(KNOWN.keys() - play.watch.crossings)
    assert not gone, f"These are no more: take them out of {gpu_kernels.__file__}: {gone}."
