"""Fixtures of rooms with TensorFlow: a job of one rank, and a function called at once or traced.

The conftest.py of such a room imports those that it takes.
"""

import importlib.util
import os

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

HAS_TENSORFLOW = importlib.util.find_spec("tensorflow") is not None
# The modules import TensorFlow at their head; without it there is nothing to collect.
collect_ignore_glob = [] if HAS_TENSORFLOW else ["test_*.py"]


@pytest.fixture
def initialised(monkeypatch):
    """As after `sok.init()` in a job of one rank."""
    from sok_lite.bridge import job
    from sok_lite.comm import SingleCommunicator

    monkeypatch.setattr(job, "_communicator", SingleCommunicator())


@pytest.fixture
def uninitialised(monkeypatch):
    """As before `sok.init()`."""
    from sok_lite.bridge import job

    monkeypatch.setattr(job, "_communicator", None)


def eagerly(function):
    return function


def traced(function):
    import tensorflow as tf

    return tf.function(function)


@pytest.fixture(params=[eagerly, traced], ids=["eager", "tf.function"])
def mode(request):
    """Calls a function at once, or traced."""
    return request.param


@pytest.fixture
def play(monkeypatch):
    """As on a machine with a GPU: see `gpu_play`."""
    from tests.support.gpu_play import play_gpu

    return play_gpu(monkeypatch)


# The tests of all modules but these, which choose for themselves, run once more with tables on the
# simulated GPU.
_NOT_ON_GPU = {
    *("test_every_optimizer", "test_gpu", "test_host_call", "test_interrupts_tf", "test_joined"),
    *("test_on_gpu", "test_tensor"),
}


def pytest_generate_tests(metafunc):
    module = metafunc.module.__name__.rpartition(".")[2]
    if module not in _NOT_ON_GPU:
        metafunc.parametrize("tables_on", ["cpu", "simt"], indirect=True)


@pytest.fixture(autouse=True)
def tables_on(request):
    """Puts tables on the simulated GPU where a test is to run there."""
    if getattr(request, "param", "cpu") == "simt":
        request.getfixturevalue("play")
