"""What a training step through TensorFlow asks of a GPU: counted on the simulated one."""

import itertools
from typing import NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite.bridge import tensor
from tests.support.call_counts import counts_of, on_launch
from tests.support.simt import device


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


# However many tables: launches, operations, waits, views and results. A graph has more of the last
# two, for it carries the row numbers from the lookup to its gradient in a tensor. An operation has
# no views: it waits once for what TensorFlow does on the GPU.
EAGER = {"lookup": (2, 1, 2, 2, 1), "step": (11, 5, 5, 5, 3)}
GRAPH = {"lookup": (2, 1, 2, 3, 2), "step": (11, 5, 5, 8, 4)}
# Bytes for each table, and for all of them; numbers of which no array is made but on the host.
BYTES = {"lookup": ((0, 0), (96, 0)), "step": ((16, 16), (104, 8))}


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
    ("mode", "most"),
    [(lambda call: call, EAGER), (tf.function, GRAPH)],
    ids=["eager", "tf.function"],
)
def test_what_is_asked_of_a_gpu_does_not_depend_on_the_number_of_tables(
    asked, mode, most, num_tables
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
        for count, (of_each, of_all) in zip(found[5:], BYTES[name], strict=True):
            assert count <= num_tables * of_each + of_all, (name, found)
        assert kernels.count("find") == 1  # a step's update looks for no key again


# ---- where the host stops in a step of a tf.function


class Stops(NamedTuple):
    """Where the host stops for a GPU.

    Attributes:
      for_kernels: waits for work of ours that had not run yet; to wait for nothing takes 2 us.
      for_tensorflow: calls that looked at memory of TensorFlow's, which each waits for what
        TensorFlow has to do: an operation when it begins, a host call when it looks first.
      read_back: what went into a host call and was read by the host: copied from the GPU.
      copied: what came out of a host call and was not made by TensorFlow on the GPU.
    """

    for_kernels: int
    for_tensorflow: int
    read_back: list
    copied: list


@pytest.fixture
def stops(play, monkeypatch):
    """Returns a function that gives the Stops of a call. To be taken before a graph is traced."""
    waits, looking, seen, made, read_back, copied = [], set(), [], [], [], []
    to_dlpack, py_function = tf.experimental.dlpack.to_dlpack, tf.py_function
    wait, enqueue, gpu_tensor = device.wait, device.enqueue, tensor._gpu_tensor
    launched, numbers = [], itertools.count()  # since the last wait; of calls

    def enqueued(name, *arguments):
        if name not in ("free", "copy to the host"):
            launched.append(name)
        enqueue(name, *arguments)

    def waiting(*arguments):
        waits.append(bool(launched))
        launched.clear()
        wait(*arguments)

    def viewed(each):
        # Not its id, which a later call's may have again.
        looking.add(vars(tensor._memory()).setdefault("number", next(numbers)))
        seen.append(each)
        return to_dlpack(each)

    def allocated(*arguments):
        made.append(gpu_tensor(*arguments))
        return made[-1]

    def noted(tensors, known):
        known = {id(each) for each in known}
        return [f"{t.dtype.name} {t.shape}" for t in tensors if tf.size(t) and id(t) not in known]

    def placed(function, inputs, dtypes):
        def run(*tensors):
            results = function(*tensors)
            read_back.extend(noted(tensors, seen))
            copied.extend(noted(results, made))
            return results

        return py_function(run, inputs, dtypes)

    def synchronised(backend):
        looking.add(next(numbers))
        synchronise(backend)

    synchronise = type(play.backend).synchronize_device
    monkeypatch.setattr(type(play.backend), "synchronize_device", synchronised)
    monkeypatch.setattr(device, "wait", waiting)
    monkeypatch.setattr(device, "enqueue", enqueued)
    monkeypatch.setattr(tf.experimental.dlpack, "to_dlpack", viewed)
    monkeypatch.setattr(tensor, "_gpu_tensor", allocated)
    monkeypatch.setattr(tf, "py_function", placed)

    def ask(call):
        device.wait()
        for each in (waits, looking, seen, made, read_back, copied):
            each.clear()
        call()
        return Stops(sum(waits), len(looking), list(read_back), list(copied))

    return ask


@pytest.mark.usefixtures("initialised")
@pytest.mark.parametrize("num_tables", [1, 26])
@pytest.mark.parametrize("length", [6, None], ids=["known lengths", "any lengths"])
def test_a_step_stops_three_times_for_our_kernels_and_once_a_call_for_tensorflow(
    stops, num_tables, length
):
    """The lookup waits for what it has found, the gradient for how many keys there are and for its
    sums; the step waits for nothing. No length, header or setting comes from the GPU or goes there.
    """
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
    found = stops(lambda: step(ids))
    assert found == Stops(3, 3, [], [])
