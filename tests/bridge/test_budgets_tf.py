"""What a training step through TensorFlow asks of a GPU where Python launches: counted on the
simulated one. tests/bridge/test_native_on_gpu.py counts what native code asks."""

from typing import NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from tests.support.call_counts import counts_of, on_launch
from tests.support.gpu_play import play_gpu
from tests.support.simt import device


class Asked(NamedTuple):
    """Of one step.

    Attributes:
      launches: of our kernels.
      operations: of CuPy's.
      memsets: bytes that are set without a kernel of CuPy's.
      waits: of the host for the device, by our code: for kernels of ours, and for what TensorFlow
        does there.
      results: how often TensorFlow was asked for memory of results, of one output or more.
    """

    launches: int
    operations: int
    memsets: int
    waits: int
    results: int

    to_device: int
    to_host: int


# However many tables: launches, operations, memsets, waits and results. An operation waits when it
# begins, when it has memory of results, and when it ends; the lookup and the gradient once more,
# for numbers.
MOST = {"lookup": (2, 1, 1, 4, 2), "step": (12, 2, 2, 9, 4)}
# Bytes for each table, and for all of them; numbers of which no array is made but on the host.
BYTES = {"lookup": ((0, 0), (96, 0)), "step": ((0, 16), (104, 8))}


@pytest.fixture
def play(monkeypatch):
    """A play in which native code launches nothing."""
    play = play_gpu(monkeypatch, is_native=False)
    yield play
    play.watch.check()


@pytest.fixture
def asked(play, monkeypatch):
    """Returns a function that makes a call and gives its Asked, and the kernels it launched."""
    kernels = []
    on_launch(play.backend, monkeypatch, kernels.append)

    def ask(call):
        kernels.clear()
        before = play.num_allocations
        counts = counts_of(play.backend, call)
        return Asked(*counts[:4], play.num_allocations - before, *counts[4:]), kernels

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
@pytest.mark.parametrize("num_tables", [26, 300])
@pytest.mark.parametrize("mode", [lambda call: call, tf.function], ids=["eager", "tf.function"])
def test_what_is_asked_of_a_gpu_does_not_depend_on_the_number_of_tables(asked, mode, num_tables):
    """But for launches of more tables than one takes, and numbers of each table."""
    look_up, step = steps_of(num_tables, mode)
    for _ in range(3):
        look_up()
        step()
    for name, call in {"lookup": look_up, "step": step}.items():
        found, kernels = asked(call)
        launches, *others = MOST[name]
        assert found.launches <= launches + (num_tables > 200) * len(kernels)
        assert all(a <= b for a, b in zip(found[1:5], others, strict=True)), (name, found)
        for count, (of_each, of_all) in zip(found[5:], BYTES[name], strict=True):
            assert count <= num_tables * of_each + of_all, (name, found)
        assert kernels.count("find") == 1  # a step's update looks for no key again


# ---- where the host stops in a step of a tf.function


@pytest.mark.usefixtures("initialised")
@pytest.mark.parametrize(("num_tables", "length"), [(1, 6), (26, None)])
def test_a_step_stops_three_times_for_our_kernels(play, monkeypatch, num_tables, length):
    """The lookup waits for what it has found, the gradient for how many keys there are and for its
    sums; the step waits for nothing. To wait for nothing takes 2 us."""
    launched, waits = [], []  # since the last wait; whether there was something
    wait, enqueue = device.wait, device.enqueue

    def enqueued(name, *arguments):
        if name not in ("free", "copy to the host"):
            launched.append(name)
        enqueue(name, *arguments)

    def waiting(*arguments):
        waits.append(bool(launched))
        launched.clear()
        wait(*arguments)

    monkeypatch.setattr(device, "wait", waiting)
    monkeypatch.setattr(device, "enqueue", enqueued)
    tables = [sok.DynamicVariable(4, name=f"t{i}") for i in range(num_tables)]
    optimizer = sok.OptimizerWrapper(keras.optimizers.Adam())
    ids = [tf.constant(np.arange(6) % 4)] * num_tables

    @tf.function(input_signature=[[tf.TensorSpec([length], tf.int64)] * num_tables])
    def step(ids):
        with tf.GradientTape() as tape:
            found = sok.lookup_sparse(tables, ids, combiners="sum")
            loss = tf.add_n([tf.reduce_sum(rows) for rows in found])
        gradients = tape.gradient(loss, tables)
        optimizer.apply_gradients(zip(gradients, tables, strict=True))

    for _ in range(3):
        step(ids)
    device.wait()
    waits.clear()
    step(ids)
    assert sum(waits) == 3
