"""sok.init, sok.communication on one rank, and the import without TensorFlow."""

import logging
import os
import sys
import threading
from functools import partial

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite import communication
from sok_lite.bridge import collectives
from sok_lite.comm import Communicator
from sok_lite.comm.threads import run_ranks
from tests.support.own_process import run_program

pytestmark = pytest.mark.usefixtures("uninitialised")


@pytest.fixture(autouse=True)
def not_launched(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("HOROVOD_", "OMPI_", "PMI_", "MV2_", "SLURM_")):
            monkeypatch.delenv(name)


@pytest.mark.parametrize("tool", ["horovod", "mpi", "single", None])
def test_one_process_needs_nothing(tool, caplog, capsys):
    def facts():
        its = sok.communication
        return [
            *(its.rank(), its.local_rank(), its.id_in_rank(), its.global_gpu_id()),
            *(its.num_ranks(), its.num_gpus(), its.num_gpu_per_rank()),
        ]

    assert facts() == [0] * 4 + [1] * 3  # of a process by itself, which may call init later
    with caplog.at_level(logging.INFO, "sok_lite"):
        sok.init(*([tool] if tool else []))
    text = "[SOK INFO] Initialize finished, communication tool: single process"
    assert caplog.record_tuples == [("sok_lite", logging.INFO, text)]
    assert capsys.readouterr().out == ""
    assert facts() == [0] * 4 + [1] * 3
    if tool is None:
        with pytest.raises(RuntimeError, match="'horovod'.*'mpi'"):
            sok.init("mpi")


def test_a_tool_is_chosen_once():
    with pytest.raises(ValueError, match="'horovod', 'mpi', 'single'.*Received: 'nccl'"):
        sok.init("nccl")
    assert sok.communication.rank() == 0  # of a process by itself
    sok.init("single")
    first = communication.communicator()
    with pytest.raises(RuntimeError, match="cannot be set more than once.*'single'.*'mpi'"):
        sok.init("mpi")
    sok.init("single")
    assert communication.communicator() is first


def test_ranks_that_are_not_connected_are_told(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("HOROVOD_ELASTIC", "1")  # a job whose ranks come and go
        with pytest.raises(RuntimeError, match="Did you forget to call sok.init"):
            sok.communication.rank()
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="forget to call sok.init.*2 ranks were launched"):
        sok.communication.rank()
    for name in ("horovod", "horovod.tensorflow"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(RuntimeError, match="2 ranks were launched.*[Hh]orovod"):
        sok.init()


def test_one_tool_is_given():
    for arguments in ({}, {"tool": "mpi", "comm_tool": "mpi"}):
        with pytest.raises(TypeError, match="takes one tool"):
            sok.set_comm_tool(**arguments)
    for argument in ("tool", "comm_tool"):  # SOK's name and that of init
        sok.set_comm_tool(**{argument: "single"})
        with pytest.raises(RuntimeError, match="cannot be set more than once"):
            sok.set_comm_tool(**{argument: "mpi"})


def test_collectives_of_one_rank(mode):
    sok.init("single")
    x = tf.constant([[1.0, 2.0], [3.0, 4.0]])
    rows, splits = mode(lambda: sok.communication.alltoall(x, [2]))()
    np.testing.assert_array_equal(rows, x)
    np.testing.assert_array_equal(splits, [2])
    for op in ("sum", "average", "max", "min"):
        for given in (x, tf.constant(2.5)):
            found = mode(lambda op=op, given=given: sok.communication.allreduce(given, op))()
            np.testing.assert_array_equal(found, given)
    np.testing.assert_array_equal(mode(lambda: sok.communication.allgather(x))(), x)
    np.testing.assert_array_equal(mode(lambda: sok.communication.broadcast(x, 0))(), x)
    with pytest.raises(ValueError, match="'sum', 'average', 'max' or 'min'"):
        sok.communication.allreduce(x, "product")
    for wrong in (3, tf.constant([1, 2], tf.int64), tf.constant([True])):
        with pytest.raises(TypeError, match="averages floats.*Received: dtype=.*tf.cast"):
            sok.communication.allreduce(wrong, "average")
    with pytest.raises(TypeError, match="cannot sum booleans.*Received: dtype=bool"):
        sok.communication.allreduce(tf.constant([True]), "sum")


@pytest.fixture
def reduced(monkeypatch):
    """Returns what two ranks get of an allreduce of a tensor times the number of the rank + 1."""
    mine = threading.local()
    monkeypatch.setattr(collectives, "communicator", lambda: mine.comm)

    def reduce(comm: Communicator, x, op) -> tf.Tensor:
        mine.comm = comm
        return sok.communication.allreduce(x * tf.cast(comm.rank + 1, x.dtype), op)

    return lambda x, op: run_ranks(2, partial(reduce, x=tf.constant(x), op=op))


@pytest.mark.parametrize(
    ("op", "expected"),
    [("sum", [4.5, -6.0]), ("average", [2.25, -3.0]), ("max", [3.0, -2.0]), ("min", [1.5, -4.0])],
)
def test_bfloat16_is_reduced_as_numbers_not_as_bits(reduced, op, expected):
    for each in reduced(tf.constant([1.5, -2.0], tf.bfloat16), op):
        assert each.dtype == tf.bfloat16
        np.testing.assert_array_equal(tf.cast(each, tf.float32), expected)


@pytest.mark.parametrize("dtype", [tf.float32, tf.int32, tf.float16], ids=lambda d: d.name)
def test_a_scalar_is_reduced(reduced, dtype):
    for each in reduced(tf.cast(1, dtype), "sum"):
        assert (each.shape, each.dtype, float(each)) == ((), dtype, 3.0)


def test_versions():
    assert sok.tf_version == [int(part) for part in tf.__version__.split("-")[0].split(".")[:3]]
    assert isinstance(sok.__version__, str)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("2.21.0", [2, 21, 0]), ("2.22.0-rc1", [2, 22, 0]), ("2.20.1.dev2", [2, 20, 1])],
)
def test_versions_before_a_release_are_read(text, expected, monkeypatch):
    monkeypatch.setattr(tf, "__version__", text)
    assert sok._tf_version() == expected


def test_every_public_name_is_there():
    for name in sok.__all__:
        assert getattr(sok, name) is not None
        assert name in dir(sok)
    assert not {"Any", "importlib", "bridge", "engine", "_imported"} & set(dir(sok))
    assert sok.lookup.lookup_sparse is sok.lookup_sparse
    assert sok.optimizer.OptimizerWrapper is sok.OptimizerWrapper
    assert sok.dynamic_variable.DynamicVariable is sok.DynamicVariable
    assert communication is sok.communication
    with pytest.raises(AttributeError, match="no attribute 'Optimiser'"):
        _ = sok.Optimiser


WITHOUT_TENSORFLOW = """
import sys
sys.modules["tensorflow"] = None
import numpy as np
import sok_lite as sok
from sok_lite.backend import get_backend
from sok_lite.engine.initializer_spec import make_initializer
from sok_lite.engine.table import make_table
table = make_table("hbm", get_backend("cpu"), 2, initializer=make_initializer("13", 2))
assert table.lookup(np.array([1, 2])).values.tolist() == [[13.0, 13.0]] * 2
assert sok.hash_strings("alphabet") == -2427165924636348523
for name in {*sok.__all__, "lookup", "optimizer"} - {"__version__", *sok._WITHOUT_TENSORFLOW}:
    try:
        getattr(sok, name)
    except ImportError as error:
        assert 'pip install "sok_lite[cpu]"' in str(error), error
    else:
        raise AssertionError(name)
print("FINE")
"""


def test_without_tensorflow_there_is_the_engine_and_a_message():
    assert "FINE" in run_program(WITHOUT_TENSORFLOW)


LEGACY = """
import os
import tensorflow as tf, tf_keras, sok_lite as sok
child = os.fork()
use = child == 0
if child:
    assert os.waitpid(child, 0)[1] == 0  # so that they do not print at once
sok.init("single", use_legacy_optimizer=use)
names = [tf.keras.optimizers.SGD, tf.optimizers.SGD]
print("IS_LEGACY", use, *("legacy" in each.__module__ for each in names))
# As a program of SOK's goes on.
table, dense = sok.DynamicVariable(2, "1"), tf.Variable([1.0, 1.0])
optimizer = tf.keras.optimizers.SGD(0.5)
with tf.GradientTape() as tape:
    loss = tf.reduce_sum(tf.nn.embedding_lookup(table, [7]) * dense)
row_grads, grad = tape.gradient(loss, [table, dense])
sok.OptimizerWrapper(optimizer).apply_gradients([(row_grads, table)])
optimizer.apply_gradients([(grad, dense)])
assert sok.export(table)[1].numpy().tolist() == [dense.numpy().tolist()] == [[0.5, 0.5]]
"""


@pytest.mark.full_only("starts a process with tf_keras")
def test_legacy_optimizers_are_the_default_where_there_are_any():
    pytest.importorskip("tf_keras")
    said = run_program(LEGACY, TF_USE_LEGACY_KERAS="1").splitlines()
    assert {"IS_LEGACY True True True", "IS_LEGACY False False False"} <= {*said}
