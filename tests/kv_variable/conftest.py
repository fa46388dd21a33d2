"""What the tests of TFPlus' face share: calls in each of TensorFlow's modes, and variables."""

import importlib.util
import os

import pytest

from tests.tensorflow.conftest import initialised

__all__ = ["initialised"]

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

HAS_TENSORFLOW = importlib.util.find_spec("tensorflow") is not None
# The modules import TensorFlow at their head; without it there is nothing to collect.
collect_ignore_glob = [] if HAS_TENSORFLOW else ["test_*.py"]


@pytest.fixture(params=["eager", "tf.function", "graph"])
def here(request):
    """Calls functions in one of TensorFlow's modes; see `modes`."""
    from tests.support import modes

    with modes.MODES[request.param]() as mode:
        yield mode


@pytest.fixture(params=[None, 1, 3], ids=["whole", "1 part", "3 parts"])
def parts(request):
    """Number of partitions; None: a variable without."""
    return request.param


@pytest.fixture
def made(parts):
    """Makes a variable of so many partitions; takes the arguments of `get_kv_variable`."""
    import tensorflow as tf

    from sok_lite.kv_variable import get_kv_variable

    def make(name="kv", embedding_dim=3, **arguments):
        if parts is not None:
            arguments["partitioner"] = tf.compat.v1.fixed_size_partitioner(parts)
        return get_kv_variable(name, embedding_dim, **arguments)

    return make
