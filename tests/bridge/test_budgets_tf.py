"""What a training step through TensorFlow asks of a GPU: counted on the simulated one."""

from typing import NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from tests.support.call_counts import counts_of, on_launch


class Asked(NamedTuple):
    """Of one step.

    Attributes:
      launches: of our kernels.
      operations: of CuPy's.
      waits: of the host for the device, by our code.
      views: of memory of TensorFlow's; to make one waits for what TensorFlow does on the GPU.
      results: tensors that TensorFlow was asked for.
    """

    launches: int
    operations: int
    waits: int
    views: int
    results: int

    to_device: int
    to_host: int


# However many tables: launches, operations, waits, views and results. A graph has more of these,
# for it carries the context of the way back in a tensor.
EAGER = {"lookup": (2, 1, 2, 2, 1), "step": (11, 5, 5, 7, 3)}
GRAPH = {"lookup": (2, 3, 2, 4, 2), "step": (11, 7, 6, 11, 4)}
# Bytes for each table, and for all of them; numbers of which no array is made but on the host.
EAGER_BYTES = {"lookup": ((0, 0), (96, 0)), "step": ((16, 16), (104, 8))}
GRAPH_BYTES = {"lookup": ((64, 136), (96, 0)), "step": ((80, 152), (168, 144))}


@pytest.fixture
def asked(play, monkeypatch):
    """Returns a function that makes a call and gives its Asked, and the kernels it launched."""
    views, kernels, to_dlpack = [], [], tf.experimental.dlpack.to_dlpack
    monkeypatch.setattr(
        tf.experimental.dlpack, "to_dlpack", lambda tensor: views.append(1) or to_dlpack(tensor)
    )
    on_launch(play.backend, monkeypatch, kernels.append)

    def ask(call):
        views.clear(), kernels.clear()
        before = play.num_allocations
        counts = counts_of(play.backend, call)
        of_tf = (len(views), play.num_allocations - before)
        return Asked(*counts[:3], *of_tf, *counts[3:]), kernels

    return ask


def steps_of(num_tables, mode):
    tables = [sok.DynamicVariable(4, name=f"t{i}") for i in range(num_tables)]
    optimizer = sok.OptimizerWrapper(keras.optimizers.Adam())
    ids = [tf.constant(np.arange(6) % 4)] * num_tables

    def look_up():
        return sok.lookup_sparse(tables, ids, combiners="sum")

    def step():
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(rows) for rows in look_up()])
        gradients = tape.gradient(loss, tables)
        optimizer.apply_gradients(zip(gradients, tables, strict=True))

    return mode(look_up), mode(step)


@pytest.mark.usefixtures("initialised")
@pytest.mark.parametrize("num_tables", [1, 26, 300])
@pytest.mark.parametrize(
    ("mode", "most", "most_bytes"),
    [(lambda call: call, EAGER, EAGER_BYTES), (tf.function, GRAPH, GRAPH_BYTES)],
    ids=["eager", "tf.function"],
)
def test_what_is_asked_of_a_gpu_does_not_depend_on_the_number_of_tables(
    asked, mode, most, most_bytes, num_tables
):
    """But for launches of more tables than one takes, and numbers of each table."""
    look_up, step = steps_of(num_tables, mode)
    for _ in range(3):
        look_up()
        step()
    for name, call in {"lookup": look_up, "step": step}.items():
        found, kernels = asked(call)
        launches, *others = most[name]
        assert found.launches <= launches + (num_tables > 200) * len(kernels)
        assert all(a <= b for a, b in zip(found[1:5], others, strict=True)), (name, found)
        for count, (of_each, of_all) in zip(found[5:], most_bytes[name], strict=True):
            assert count <= num_tables * of_each + of_all, (name, found)
        assert kernels.count("find") == 1  # a step's update looks for no key again
