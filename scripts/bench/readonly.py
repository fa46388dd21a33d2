"""Measures lookups of `open_readonly` beside gathers of a dense array, and refreshes.

Engine level, no TensorFlow: one table of float32 rows with random keys. One line `RESULT {json}`
per case:

  prepare   the index of all keys, made by the first lookup.
  lookup    rows by key, of all keys; `take` is np.take of as many rows of an array that is as
            large, by number. Both from several threads, in turns. `us` is a call's time, of which a
            tenth are shorter, which other work on the machine hardly changes; `ratio` that of the
            rows a second of all threads, which it does.
  refresh   an increment, a share of the keys of which have changed and some are removed.
  anew      the same after a whole dump.

Example:
  python -m scripts.bench readonly --keys 1000000 --dim 64
"""

import argparse
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from scripts.bench.common.measuring import result
from sok_lite.backend import get_backend
from sok_lite.comm.single import SingleCommunicator
from sok_lite.engine.files.dump import dump
from sok_lite.engine.files.readonly import open_readonly
from sok_lite.engine.initializer_spec import make_initializer
from sok_lite.engine.table import make_table

_ONE = SingleCommunicator()
_ASKED = 16  # batches that are asked for in turn
_PIECE = 1 << 18


def together(work: Callable[[int], Any], threads: int, seconds: float) -> tuple[float, list[float]]:
    """Returns calls a second of all threads, and how long each took."""
    took: list[list[float]] = [[] for _ in range(threads)]
    start = threading.Barrier(threads)

    def go(thread: int) -> None:
        start.wait()
        end, before, number = time.perf_counter() + seconds, time.perf_counter(), 5 * thread
        while before < end:
            work(number % _ASKED)
            now = time.perf_counter()
            took[thread].append(now - before)
            before, number = now, number + 1

    running = [threading.Thread(target=go, args=(thread,)) for thread in range(threads)]
    begun = time.perf_counter()
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    every = [each for its in took for each in its]
    return len(every) / (time.perf_counter() - begun), sorted(every)


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batches", type=int, nargs="+", default=[20, 4096, 65_536])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--changed", type=float, default=0.01, help="share of keys, of a refresh")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.3, help="of a case and round")
    options = parser.parse_args()
    random = np.random.default_rng(0)
    keys = random.integers(-(2**62), 2**62, options.keys)
    initializer = make_initializer("0", options.dim)
    table = make_table("hbm", get_backend("cpu"), options.dim, name="t", initializer=initializer)
    table.log_removals()
    about = {"keys": options.keys, "dim": options.dim}

    def give(some: np.ndarray, number: float) -> None:
        for begin in range(0, some.size, _PIECE):
            part = some[begin : begin + _PIECE]
            table.insert_or_assign(part, np.full((part.size, options.dim), number, np.float32))

    with tempfile.TemporaryDirectory() as folder:

        def write(incremental: bool) -> None:
            table.lookup(np.empty(0, np.int64))
            dump(folder, [table], _ONE, incremental=incremental)

        give(keys, 1)
        write(False)
        tables = open_readonly(folder)
        served = tables["t"]
        result(case="prepare", **about, seconds=_seconds(served.prepare))
        dense = np.ones((options.keys, options.dim), np.float32)
        for begin in range(0, keys.size, _PIECE):  # all pages are there
            served.lookup(keys[begin : begin + _PIECE])
        for batch in options.batches:
            places = [random.integers(0, options.keys, batch) for _ in range(_ASKED)]
            asked = [keys[at] for at in places]
            for threads in options.threads:
                _compare(options, threads, dense, places, served.lookup, asked)
        num_changed = max(2, int(options.changed * options.keys))
        seconds = []
        for number in range(options.rounds):
            changed = random.permutation(keys)[:num_changed]
            give(changed, number + 2)
            table.erase(changed[: num_changed // 10])
            write(True)
            seconds.append(_seconds(tables.refresh))
        result(case="refresh", **about, changed=num_changed, seconds=min(seconds))
        write(False)
        result(case="anew", **about, seconds=_seconds(tables.refresh))


def _compare(
    options: argparse.Namespace,
    threads: int,
    dense: np.ndarray,
    places: list[np.ndarray],
    look_up: Callable[[np.ndarray], Any],
    asked: list[np.ndarray],
) -> None:
    def take(number: int) -> np.ndarray:
        return np.take(dense, places[number], axis=0)

    def lookup(number: int) -> Any:
        return look_up(asked[number])

    batch = asked[0].size
    best: dict[str, tuple[float, float]] = {}
    for _ in range(options.rounds):  # in turns: other work on the machine meets both
        for name, work in (("take", take), ("lookup", lookup)):
            rate, took = together(work, threads, options.seconds)
            before = best.get(name, (0.0, float("inf")))
            best[name] = max(rate, before[0]), min(took[len(took) // 10], before[1])
    result(
        case="lookup",
        batch=batch,
        threads=threads,
        rows_per_second=round(batch * best["lookup"][0]),
        us=best["lookup"][1] * 1e6,
        take_us=best["take"][1] * 1e6,
        ratio=best["take"][0] / best["lookup"][0],
    )


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
