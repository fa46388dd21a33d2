"""A click model that is served while it trains: rows from increments, layers from published models.

    python examples/serve.py train work                       trains on, an increment a second
    python examples/serve.py serve work --port 8500           answers, in another process
    python examples/serve.py ask http://localhost:8500        asks, and prints p50 and p99

`train` writes tables to work/tables, an increment every `--every` seconds and a whole dump every
`--whole` increments; with each whole dump it publishes the layers above them in work/dense. `serve`
is one process with threads: `sok.open_readonly` gives rows, which follow the increments, and the
published model makes scores of them. POST /score takes {"user": [1, 2], "item": [7, 8]}, GET
/metrics is for Prometheus. It needs waitress (`pip install waitress`), an HTTP server for WSGI.
"""

from __future__ import annotations

import argparse
import http.client
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

# before TensorFlow and Keras are imported
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import numpy as np

import sok_lite as sok

NAMES, DIM = ("user", "item"), 16


def train(folder: Path, every: float, whole: int, rounds: int) -> None:
    """Trains `rounds` times, 0: until it is stopped."""
    import keras

    import sok_lite.keras as sk

    sok.init("single")
    tables = {name: sk.Table(name, DIM) for name in NAMES}
    sok.log_removals(list(tables.values()))  # so that a server need not look for what has gone
    rows = {name: keras.Input([DIM], name=name) for name in NAMES}
    hidden = keras.layers.Concatenate()([rows[name] for name in NAMES])
    hidden = keras.layers.Dense(32, "relu")(hidden)
    dense = keras.Model(rows, keras.layers.Dense(1, "sigmoid")(hidden))
    ids = {name: keras.Input([], dtype="int64", name=name) for name in NAMES}
    model = keras.Model(ids, dense(sk.Embeddings(tables)(ids)))
    model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy")
    rng, number = np.random.default_rng(0), 0
    while number < rounds or rounds == 0:
        start = time.monotonic()
        drawn = {name: rng.integers(0, 1000 + 100 * number, 1000) for name in NAMES}
        model.fit(drawn, drawn["item"] % 2, batch_size=100, verbose=0)
        for table in tables.values():
            table.expire(num_lookups=100)  # what 10 rounds have not seen
        if number % whole == 0:
            sok.publish(dense, folder / "dense")
        sok.dump(folder / "tables", model, incremental=number % whole != 0)
        number += 1
        print("round", number, "keys", {name: len(tables[name]) for name in NAMES}, flush=True)
        time.sleep(max(0.0, every - (time.monotonic() - start)))


class Server:
    """Answers requests, from any number of threads."""

    def __init__(self, folder: Path, every: float) -> None:
        self.tables = sok.open_readonly(folder / "tables")
        for table in self.tables.values():
            table.prepare()
        self.tables.follow(every=every)
        self._latest, self._every = folder / "dense" / "latest", every
        self._version, self._dense = self._load()
        threading.Thread(target=self._follow, daemon=True).start()

    def score(self, ids: dict[str, list[int]]) -> list[float]:
        dense = self._dense
        keys = {name: np.asarray(ids[name], np.int64) for name in NAMES}
        rows = {name: self.tables[name].lookup(keys[name]) for name in NAMES}
        return dense(rows).numpy()[:, 0].tolist()  # type: ignore[no-any-return]

    def _load(self) -> tuple[str, Callable[..., Any]]:
        import tensorflow as tf

        version = os.path.realpath(self._latest)
        loaded = tf.saved_model.load(version)

        def dense(rows: dict[str, np.ndarray]) -> tf.Tensor:
            return loaded({name: tf.constant(its) for name, its in rows.items()})

        dense({name: np.zeros([1, DIM], np.float32) for name in NAMES})  # not in a request
        return version, dense

    def _follow(self) -> None:
        while True:
            time.sleep(self._every)
            try:
                if os.path.realpath(self._latest) != self._version:
                    self._version, self._dense = self._load()
            except Exception:  # such as one that was removed meanwhile: the next turn tries again
                logging.exception("The layers stay those of %s", self._version)

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        """The WSGI application."""
        status, kind = "200 OK", "application/json"
        path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        if path == ("GET", "/metrics"):
            text, kind = sok.metrics.prometheus(self.tables), sok.metrics.CONTENT_TYPE
        elif path == ("POST", "/score"):
            try:
                text = json.dumps({"scores": self.score(json.load(environ["wsgi.input"]))})
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                status, text = "400 Bad Request", json.dumps({"error": str(error)})
        else:
            status, text = "404 Not Found", json.dumps({"error": "POST /score or GET /metrics"})
        body = text.encode()
        start(status, [("Content-Type", kind), ("Content-Length", str(len(body)))])
        return [body]


def serve(folder: Path, port: int, threads: int, every: float) -> None:
    import waitress

    server = waitress.create_server(
        Server(folder, every), host="127.0.0.1", port=port, threads=threads
    )
    print(f"serves on http://127.0.0.1:{server.effective_port}", flush=True)
    server.run()


def ask(url: str, requests: int, batch: int, threads: int) -> None:
    """Asks from several threads, each by one connection, and prints how long answers took."""

    def go(seed: int) -> list[float]:
        rng, took = np.random.default_rng(seed), []
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
        for _ in range(requests // threads):
            ids = {name: rng.integers(0, 5000, batch).tolist() for name in NAMES}
            start = time.perf_counter()
            connection.request("POST", "/score", json.dumps(ids))
            answer = connection.getresponse()
            scores = json.load(answer)
            took.append(time.perf_counter() - start)
            if answer.status != 200 or len(scores["scores"]) != batch:
                raise RuntimeError(f"{answer.status}: {scores}")
        return took

    with ThreadPoolExecutor(threads) as pool:
        seconds = [each for took in pool.map(go, range(threads)) for each in took]
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    ages = [line.split()[-1] for line in lines if line.startswith("sok_served_age_seconds{")]
    p50, p99 = 1000 * np.quantile(seconds, [0.5, 0.99])
    print(f"{len(seconds)} answers of {batch} scores: p50 {p50:.2f} ms, p99 {p99:.2f} ms")
    print(f"rows are {max(map(float, ages)):.1f} s old")


def main() -> None:
    parser = argparse.ArgumentParser(description="Serves a model while it trains.")
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train")
    training.add_argument("folder", type=Path)
    training.add_argument("--every", type=float, default=1.0, help="seconds of an increment")
    training.add_argument("--whole", type=int, default=60, help="increments of a whole dump")
    training.add_argument("--rounds", type=int, default=0, help="0: until it is stopped")
    serving = commands.add_parser("serve")
    serving.add_argument("folder", type=Path)
    serving.add_argument("--port", type=int, default=8500, help="0: any that is free")
    serving.add_argument("--threads", type=int, default=4)
    serving.add_argument("--every", type=float, default=1.0, help="seconds between two looks")
    asking = commands.add_parser("ask")
    asking.add_argument("url")
    asking.add_argument("--requests", type=int, default=1000)
    asking.add_argument("--batch", type=int, default=20)
    asking.add_argument("--threads", type=int, default=2)
    given = vars(parser.parse_args())
    {"train": train, "serve": serve, "ask": ask}[given.pop("command")](**given)


if __name__ == "__main__":
    main()
