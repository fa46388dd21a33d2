"""Redis connections: TFRA's settings, their file, and a client made from them.

These of the 31 settings have an effect:

    redis_connection_mode         0: a cluster, 1: a master behind sentinels, 2: one server
    redis_master_name             the master's name at the sentinels
    redis_host_ip, _host_port     lists: nodes of the cluster, sentinels, or servers to try in turn
    redis_user, _password, _db    an empty password: none is needed
    redis_connect_keep_alive, _connect_timeout, _socket_timeout       of a connection; milliseconds
    redis_conn_pool_size, _wait_timeout       connections per process, and the wait for one; mode 2
    redis_sentinel_user, _password, _connect_timeout, _socket_timeout  the same for a sentinel
    keys_sending_size             keys per request
    model_tag_runtime             the model's version, part of every name in Redis
    model_tag_import              the version from which a new table takes its rows

The others are accepted without effect: reads go to the master, rows are spread by a hash of their
keys, do not expire, and stay in Redis.
"""

import os
from typing import Any

from sok_lite.engine.files.disk import read_whole
from sok_lite.engine.json_text import parsed

_MOST_BYTES = 1 << 20  # size limit of a settings file

CLUSTER, SENTINEL, ONE_SERVER = 0, 1, 2

# TFRA's defaults, except the mode, where its page and its code differ: one server.
DEFAULTS: dict[str, Any] = {
    "redis_connection_mode": ONE_SERVER,
    "redis_master_name": "master",
    "redis_host_ip": ["127.0.0.1"],
    "redis_host_port": [6379],
    "redis_user": "default",
    "redis_password": "",
    "redis_db": 0,
    "redis_read_access_slave": False,
    "redis_connect_keep_alive": False,
    "redis_connect_timeout": 1000,
    "redis_socket_timeout": 1000,
    "redis_conn_pool_size": 20,
    "redis_wait_timeout": 100000000,
    "redis_connection_lifetime": 100,
    "redis_sentinel_user": "default",
    "redis_sentinel_password": "",
    "redis_sentinel_connect_timeout": 1000,
    "redis_sentinel_socket_timeout": 1000,
    "storage_slice_import": -1,
    "storage_slice": 1,
    "using_hash_storage_slice": False,
    "keys_sending_size": 1024,
    "using_md5_prefix_name": False,
    "redis_hash_tags_hypodispersion": False,
    "model_tag_import": "test",
    "redis_hash_tags_import": [],
    "model_tag_runtime": "test",
    "redis_hash_tags_runtime": [],
    "expire_model_tag_in_seconds": 604800,
    "table_store_mode": 1,
    "model_lib_abs_dir": "/tmp/",
}
# From an example in TFRA's documents.
_OF_OLD_FILES = {"using_model_lib"}


def read_settings(
    redis_config_abs_dir: str | None = None, redis_config_abs_dir_env: str | None = None
) -> dict[str, Any]:
    """Returns the settings of a JSON file; defaults for those it leaves out, or without a file.

    Args:
      redis_config_abs_dir: path of a file, used if the environment variable is not set.
      redis_config_abs_dir_env: environment variable with the path, which must be set; None:
        TFRA_REDIS_CONFIG_PATH, if set.

    Raises:
      ValueError: no such variable or file, or an invalid file.
    """
    environment = redis_config_abs_dir_env or "TFRA_REDIS_CONFIG_PATH"
    path = os.environ.get(environment)
    if path is None and redis_config_abs_dir_env is not None:
        raise ValueError(
            f"redis_config_abs_dir_env names the variable {redis_config_abs_dir_env!r}, which the "
            "environment does not have. Set it to the path of a JSON file, or leave it out."
        )
    path = path or redis_config_abs_dir
    if path is None:
        return make_settings({})
    try:
        overrides = parsed(read_whole(path, _MOST_BYTES))
    except OSError as error:
        raise ValueError(
            f"The settings of Redis must be a JSON file. Received: {path!r}, which cannot be "
            f"read: {error.strerror}."
        ) from error
    except ValueError as error:
        raise ValueError(
            f"{path!r} must hold JSON, without comments. It does not: {error}."
        ) from error
    return make_settings(overrides)


def make_settings(overrides: dict[str, Any]) -> dict[str, Any]:
    """Returns all settings: `overrides` by name, and defaults for the rest.

    A scalar may replace a list of one, 0 or 1 a bool. ValueError: an unknown setting, or an invalid
    value.
    """
    if not isinstance(overrides, dict):
        raise ValueError(
            f"The settings of Redis must be names and values. Received: {overrides!r}."
        )
    settings = dict(DEFAULTS)
    for name, value in overrides.items():
        if name in DEFAULTS:
            settings[name] = _convert(name, value)
        elif name not in _OF_OLD_FILES:
            raise ValueError(
                f"There is no setting {name!r} of Redis. Expected some of {', '.join(DEFAULTS)}."
            )
    hosts, ports = settings["redis_host_ip"], settings["redis_host_port"]
    if not hosts or len(hosts) != len(ports):
        raise ValueError(
            "redis_host_ip and redis_host_port must have as many elements, one or more. "
            f"Received: {hosts} and {ports}."
        )
    if settings["redis_connection_mode"] not in (CLUSTER, SENTINEL, ONE_SERVER):
        raise ValueError(
            "redis_connection_mode must be 0 (a cluster), 1 (sentinels) or 2 (one server). "
            f"Received: {settings['redis_connection_mode']}."
        )
    if settings["keys_sending_size"] < 1:
        raise ValueError(
            f"keys_sending_size must be at least 1. Received: {settings['keys_sending_size']}."
        )
    return settings


def connect(settings: dict[str, Any]) -> Any:
    """Returns a thread-safe client of the Redis in the settings.

    It never retries a command: if the answer is lost, the caller gets the error. ConnectionError:
    no Redis answers, or it rejects the user. ImportError: the package `redis` is not installed.
    """
    try:
        import redis
    except ImportError as error:
        raise ImportError(
            "Tables in a Redis need the Python package redis. Install it with `pip install "
            "'sok_lite[redis]'` or `pip install 'redis>=6'`."
        ) from error
    addresses = list(zip(settings["redis_host_ip"], settings["redis_host_port"], strict=True))
    try:
        client = _client(redis, settings, addresses)
        client.ping()
    except (redis.RedisError, redis.exceptions.RedisClusterException) as error:
        raise ConnectionError(
            f"No Redis to use in mode {settings['redis_connection_mode']} at "
            f"{', '.join(f'{host}:{port}' for host, port in addresses)}: {error} Check "
            "redis_connection_mode, redis_host_ip, redis_host_port, redis_user and redis_password."
        ) from error
    return client


def _convert(name: str, value: Any) -> Any:
    """Converts a value to the type of its setting."""
    default = DEFAULTS[name]
    if isinstance(default, list):
        values = value if isinstance(value, list) else [value]
        element = int if name == "redis_host_port" else str
        if all(type(each) is element for each in values):
            return values
    elif isinstance(default, bool):
        if value in (0, 1):
            return bool(value)
    elif type(value) is type(default):
        return value
    raise ValueError(f"{name} must be like {default!r}. Received: {value!r}.")


def _client(redis: Any, settings: dict[str, Any], addresses: list[tuple[str, int]]) -> Any:
    def access(start: str) -> dict[str, Any]:
        password = settings[f"{start}_password"]
        return {
            "username": settings[f"{start}_user"] if password else None,
            "password": password or None,
            "socket_connect_timeout": settings[f"{start}_connect_timeout"] / 1000,
            "socket_timeout": settings[f"{start}_socket_timeout"] / 1000,
            # A change whose answer was lost must not be made twice.
            "retry": redis.retry.Retry(redis.backoff.NoBackoff(), 0),
        }

    options = {**access("redis"), "socket_keepalive": settings["redis_connect_keep_alive"]}
    if settings["redis_connection_mode"] == CLUSTER:
        nodes = [redis.cluster.ClusterNode(host, port) for host, port in addresses]
        return redis.RedisCluster(startup_nodes=nodes, **options)
    options["db"] = settings["redis_db"]
    if settings["redis_connection_mode"] == SENTINEL:
        sentinels = redis.sentinel.Sentinel(
            addresses, sentinel_kwargs=access("redis_sentinel"), **options
        )
        return sentinels.master_for(settings["redis_master_name"])
    return _first_that_answers(redis, settings, addresses, options)


def _first_that_answers(
    redis: Any, settings: dict[str, Any], addresses: list[tuple[str, int]], options: dict[str, Any]
) -> Any:
    for number, (host, port) in enumerate(addresses, 1):
        pool = redis.BlockingConnectionPool(
            max_connections=settings["redis_conn_pool_size"],
            timeout=settings["redis_wait_timeout"] / 1000,
            host=host,
            port=port,
            **options,
        )
        client = redis.Redis.from_pool(pool)
        try:
            client.ping()
        except redis.RedisError:
            client.close()
            if number == len(addresses):
                raise
        else:
            break
    return client
