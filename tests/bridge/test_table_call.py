"""Methods of tables in graphs: in order with lookups and updates, and without gradients."""

from functools import partial

import numpy as np
import pytest
import tensorflow as tf

from tests.conftest import QUICK
from tests.support.table_programs import NUM_FLAGS, Oracle, Program, drawn, flags_of

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
def test_programs_see_what_a_dict_does(run):
    for seed in range(4 if QUICK else 25):
        rng = np.random.default_rng(seed)
        block, oracle = drawn(rng.integers), Oracle()
        program = run(partial(Program, block))
        for _ in range(RUNS):
            flags = flags_of(int(rng.integers(2**NUM_FLAGS)))
            np.testing.assert_array_equal(
                program(flags), oracle.run(block, flags), f"{seed} {block}"
            )
