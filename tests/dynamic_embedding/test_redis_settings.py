"""TFRA's settings of a Redis: where they are read from, what is refused, and who answers."""

import json
import sys

import pytest

from sok_lite.dynamic_embedding.redis_settings import (
    DEFAULTS,
    connect,
    make_settings,
    read_settings,
)
from tests.support import redis_server

needs_redis = pytest.mark.skipif(
    redis_server.unavailable() is not None, reason=f"no Redis: {redis_server.unavailable()}"
)


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    monkeypatch.delenv("TFRA_REDIS_CONFIG_PATH", raising=False)


def write(path, **settings):
    path.write_text(json.dumps(settings))
    return str(path)


def test_the_environments_variable_comes_first_then_tfras_then_the_path(tmp_path, monkeypatch):
    paths = [write(tmp_path / f"{name}.json", redis_db=db) for db, name in enumerate("abc", 1)]
    assert read_settings() == DEFAULTS
    assert read_settings(paths[2])["redis_db"] == 3
    monkeypatch.setenv("TFRA_REDIS_CONFIG_PATH", paths[1])
    assert read_settings(paths[2])["redis_db"] == 2
    monkeypatch.setenv("MY_MODELS_REDIS", paths[0])
    assert read_settings(paths[2], "MY_MODELS_REDIS")["redis_db"] == 1
    assert read_settings()["redis_db"] == 2


def test_a_variable_or_file_that_is_not_there_is_named(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="'NOT_SET'"):
        read_settings(write(tmp_path / "a.json"), "NOT_SET")
    for path in (tmp_path, tmp_path / "none.json"):
        with pytest.raises(ValueError, match=f"Received: '{path}', which cannot be read"):
            read_settings(str(path))
    monkeypatch.setenv("TFRA_REDIS_CONFIG_PATH", str(tmp_path / "none.json"))
    with pytest.raises(ValueError, match=r"none\.json"):
        read_settings(write(tmp_path / "a.json"))


def test_a_file_that_holds_no_settings_is_refused(tmp_path):
    path = tmp_path / "a.json"
    for text, error in (
        ('{"redis_db": 1 // one\n}', "must hold JSON"),
        ("[1]", "names and values"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=error):
            read_settings(str(path))


def test_the_31_settings_of_tfra_are_accepted():
    assert len(DEFAULTS) == 31
    assert make_settings(DEFAULTS) == DEFAULTS
    given = {"redis_host_port": 6380, "using_md5_prefix_name": 1, "using_model_lib": False}
    settings = make_settings(given)
    assert settings["redis_host_port"] == [6380]
    assert settings["using_md5_prefix_name"] is True
    assert settings.keys() == DEFAULTS.keys()


WRONG = [
    ({"redis_host": "a"}, "no setting 'redis_host'"),
    ({"redis_host_ip": ["a", "b"]}, "as many elements"),
    ({"redis_host_ip": [], "redis_host_port": []}, "as many elements"),
    ({"redis_host_port": ["6379"]}, "redis_host_port must be like"),
    ({"redis_host_ip": [1]}, "redis_host_ip must be like"),
    ({"redis_db": "0"}, "redis_db must be like 0"),
    ({"redis_db": True}, "redis_db must be like 0"),
    ({"redis_connect_keep_alive": 2}, "redis_connect_keep_alive must be like False"),
    ({"redis_password": None}, "redis_password must be like ''"),
    ({"redis_connection_mode": 3}, "redis_connection_mode must be 0"),
    ({"keys_sending_size": 0}, "keys_sending_size must be at least 1"),
]


def test_what_cannot_be_a_setting_is_refused():
    for given, text in WRONG:
        with pytest.raises(ValueError, match=text):
            make_settings(given)


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ImportError, match=r"pip install 'sok_lite\[redis\]'"):
        connect(make_settings({}))


@needs_redis
def test_without_a_redis_the_error_says_where():
    # The ports of two hosts that are none, where nobody listens.
    given = {"redis_host_ip": ["127.0.0.1"] * 2, "redis_host_port": [1, 2]}
    for mode in (0, 1, 2):
        text = rf"mode {mode} at 127\.0\.0\.1:1, 127\.0\.0\.1:2"
        with pytest.raises(ConnectionError, match=text):
            connect(make_settings({**given, "redis_connection_mode": mode}))


@needs_redis
def test_servers_are_tried_in_turn_and_one_is_no_cluster(tmp_path):
    with redis_server.server(tmp_path) as port:
        given = {"redis_host_ip": ["127.0.0.1"] * 2, "redis_host_port": [1, port]}
        client = connect(make_settings(given))
        assert client.config_get("port")["port"] == str(port)
        client.close()
        given = {"redis_host_port": port, "redis_connection_mode": 0}
        with pytest.raises(ConnectionError, match="in mode 0"):
            connect(make_settings(given))


@needs_redis
def test_a_password_and_a_database(tmp_path):
    with redis_server.server(tmp_path, "--requirepass", "secret") as port:
        given = {"redis_host_port": port, "redis_password": "secret"}
        first = connect(make_settings({**given, "redis_db": 1}))
        first.set("here", 1)
        second = connect(make_settings({**given, "redis_db": 2}))
        assert first.get("here") == b"1"
        assert second.get("here") is None
        for wrong in ({"redis_password": "other"}, {"redis_password": ""}, {"redis_user": "me"}):
            with pytest.raises(ConnectionError, match="redis_user and redis_password"):
                connect(make_settings({**given, **wrong}))
        first.close()
        second.close()
