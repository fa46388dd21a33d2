"""What the tests of the Keras face share: each Keras in turn, and its classes."""

import importlib.util
import os

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

HAS_TENSORFLOW = importlib.util.find_spec("tensorflow") is not None
# The modules import TensorFlow at their head; without it there is nothing to collect.
collect_ignore_glob = [] if HAS_TENSORFLOW else ["test_*.py"]


@pytest.fixture(params=["keras", "tf_keras"])
def keras(request):
    """Each Keras in turn."""
    return pytest.importorskip(request.param)


@pytest.fixture
def sk(keras):
    """The layers of that Keras."""
    import sok_lite.keras

    return sok_lite.keras.classes_for(keras)


@pytest.fixture(params=["cpu", "simt"])
def tables_on(request, monkeypatch):
    """Puts tables into RAM, and on the simulated GPU."""
    if request.param == "simt":
        from tests.support.gpu_play import play_gpu

        play_gpu(monkeypatch)
    return request.param
