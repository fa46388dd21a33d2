"""What the TensorFlow tests share: a job of one rank, and variables with names of their own."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import pytest

tf = pytest.importorskip("tensorflow")

from sok_lite import communication  # noqa: E402
from sok_lite.comm import SingleCommunicator  # noqa: E402


@pytest.fixture
def initialised(monkeypatch):
    """As after `sok.init()` in a job of one rank."""
    monkeypatch.setattr(communication, "_communicator", SingleCommunicator())


@pytest.fixture
def uninitialised(monkeypatch):
    """As before `sok.init()`."""
    monkeypatch.setattr(communication, "_communicator", None)


def eagerly(function):
    return function


def in_a_function(function):
    return tf.function(function)


@pytest.fixture(params=[eagerly, in_a_function], ids=["eager", "tf.function"])
def mode(request):
    """Calls a function at once, or traced."""
    return request.param
