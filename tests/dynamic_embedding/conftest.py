"""What the tests of TFRA's API share: calls in eager mode, in a tf.function and in a TF1 graph."""

import json

import pytest

from tests.support.tf_fixtures import collect_ignore_glob  # noqa: F401


@pytest.fixture(params=["eager", "tf.function", "graph"])
def here(request):
    """Calls functions in one of TensorFlow's modes; see `modes`."""
    from tests.support import modes

    with modes.MODES[request.param]() as mode:
        yield mode


@pytest.fixture
def initialised(monkeypatch):
    """As in a job of one rank that nobody has connected yet."""
    from sok_lite.bridge import job

    monkeypatch.setattr(job, "_communicator", None)
    monkeypatch.setattr(job, "_tool", None)


@pytest.fixture(params=["cpu", "simt"])
def tables_on(request, monkeypatch):
    """Puts tables into RAM, and on the simulated GPU."""
    if request.param == "simt":
        from tests.support.gpu_play import play_gpu

        play = play_gpu(monkeypatch)
        yield request.param
        play.check()
    else:
        yield request.param


@pytest.fixture(autouse=True)
def train_mode():
    """Begins each test in the mode for training, and in a session that knows no names."""
    import tensorflow as tf

    from sok_lite import dynamic_embedding as de

    tf.compat.v1.reset_default_graph()
    yield
    de.enable_train_mode()


@pytest.fixture(params=["keras", "tf_keras"])
def keras(request):
    """Each Keras in turn."""
    return pytest.importorskip(request.param)


@pytest.fixture
def layers(keras):
    """The layers of that Keras."""
    from sok_lite import dynamic_embedding as de

    return de.keras.layers_for(keras)


@pytest.fixture(scope="module")
def redis_port(tmp_path_factory):
    """A Redis of this module's own; skips where there is none."""
    from tests.support import redis_server

    if redis_server.unavailable() is not None:
        pytest.skip(f"no Redis: {redis_server.unavailable()}")
    with redis_server.server(tmp_path_factory.mktemp("server")) as port:
        yield port


@pytest.fixture
def creator(redis_port, tmp_path, request):
    """Makes tables in a Redis, under names of this test's own."""
    from sok_lite import dynamic_embedding as de

    path = tmp_path / "redis.json"
    tag = request.node.name
    path.write_text(
        json.dumps(
            {"redis_host_port": redis_port, "model_tag_runtime": tag, "model_tag_import": tag}
        )
    )
    return de.RedisTableCreator(de.RedisTableConfig(str(path)))
