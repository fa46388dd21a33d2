"""What the tests of TFPlus' API share: calls in each of TensorFlow's modes, and variables."""

import weakref

import pytest

from tests.support.tf_fixtures import collect_ignore_glob, initialised

__all__ = ["collect_ignore_glob", "here", "initialised", "made", "names", "parts"]


@pytest.fixture(autouse=True)
def names(monkeypatch):
    """Begins each test without a name in eager mode: a test that failed keeps its variables."""
    from sok_lite.kv_variable import variable_scope

    monkeypatch.setattr(variable_scope, "_by_name", weakref.WeakValueDictionary())


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
