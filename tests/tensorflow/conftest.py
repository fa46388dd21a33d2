"""What the TensorFlow tests share: a job of one rank, and a function called at once or traced."""

import importlib.util
import os

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

HAS_TENSORFLOW = importlib.util.find_spec("tensorflow") is not None
# The modules import TensorFlow at their head; without it there is nothing to collect.
collect_ignore_glob = [] if HAS_TENSORFLOW else ["test_*.py"]


def pytest_report_header():
    return None if HAS_TENSORFLOW else "no TensorFlow: tests/tensorflow is left out"


@pytest.fixture
def initialised(monkeypatch):
    """As after `sok.init()` in a job of one rank."""
    from sok_lite import communication
    from sok_lite.comm import SingleCommunicator

    monkeypatch.setattr(communication, "_communicator", SingleCommunicator())


@pytest.fixture
def uninitialised(monkeypatch):
    """As before `sok.init()`."""
    from sok_lite import communication

    monkeypatch.setattr(communication, "_communicator", None)


def eagerly(function):
    return function


def traced(function):
    import tensorflow as tf

    return tf.function(function)


@pytest.fixture(params=[eagerly, traced], ids=["eager", "tf.function"])
def mode(request):
    """Calls a function at once, or traced."""
    return request.param
