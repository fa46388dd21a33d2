"""Times launches of kernels on the CPU: what more threads gain, and what a launch costs in Python.

Kernels run over 26 parts of 1,024 items, as a step over 26 tables does, in stretches of 15
launches, with 1 thread and with several in turns. Between two launches the caller is busy with
something else for a while; with --beside, so are other processes, in bursts on every core, as the
threads of TensorFlow would be. One line `RESULT {json}` a case; `ms` is a median, `low_ms` the
value that a tenth of the launches are below, which other work on the machine hardly changes;
`turns_beside` how much of the other work was done a second meanwhile.

Example:
  python -m scripts.bench engine launch --threads 1 2 --idle-us 0 20 200 5000
"""

import argparse
import contextlib
import hashlib
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from scripts.bench.common.measuring import result, timed
from sok_lite.backend.base import Work
from sok_lite.backend.cpu import CpuBackend
from sok_lite.engine.dtypes import key_dtype
from sok_lite.engine.table.det_index import DetIndex

STRETCH = 15
BLOCK = bytes(16384)


def column(rng: np.random.Generator, num_rows: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rows of a column in one chunk, and where they are, as a kernel is told."""
    rows = rng.random((num_rows, dim), np.float32)
    return rows, np.array([rows.ctypes.data], np.uint64)


def cases(rng: np.random.Generator, args: argparse.Namespace) -> Iterator[tuple[str, list[Work]]]:
    """Yields kernels and the parts of a launch of each."""
    num_rows, n = args.rows, args.items
    shift = num_rows.bit_length()
    memory: list[Any] = []  # columns and indexes, for as long as the parts are used

    def parts_of(arguments):
        return [Work(n, arguments()) for _ in range(args.parts)]

    def some_rows():
        return rng.permutation(num_rows)[:n].astype(np.uint32)

    def pointers(dim):
        rows, chunks = column(rng, num_rows, dim)
        memory.append(rows)
        return chunks

    yield (
        "rows_read_u32",
        parts_of(
            lambda: (pointers(16), shift, 16, some_rows(), np.zeros((n, 16), np.uint32), n),
        ),
    )

    def find():
        keys = rng.permutation(num_rows).astype(np.int64) * 7
        index = DetIndex(CpuBackend(num_threads=1), key_dtype("int64"), init_capacity=num_rows)
        index.insert(keys, np.arange(num_rows, dtype=np.uint32), 1)
        memory.append(index)
        where = index.place()
        reserved = (where.empty_key, where.reclaim_key)
        place = (where.directory, where.hashing, where.side, *reserved)
        return (*place, keys[:n].copy(), np.zeros(n, np.uint32), n)

    yield "det_stamps", parts_of(find)

    def dedup():
        keys, begin = rng.zipf(1.3, n).astype(np.int64), np.array([0, n], np.int64)
        heads, slots = np.full(2 * n, -1, np.int32), np.zeros(n, np.int32)
        return keys, None, begin, begin, 1, 1, 0, heads, slots, n

    yield "dedup_insert", parts_of(dedup)

    def adam():
        states = pointers(64), pointers(64), pointers(64)
        grads = rng.random((n, 64), np.float32)
        numbers = (1e-3, 0.0, 0.1, 1e-3, 1e-7)
        return (*states, None, shift, 64, some_rows(), grads, None, None, 0, 0, *numbers, n)

    yield "update_adam_f32", parts_of(adam)

    def normal():
        keys = rng.integers(0, 1 << 60, n)
        return pointers(16), shift, 16, some_rows(), keys, 3, 0.0, 1.0, n

    yield "init_normal_f32", parts_of(normal)


def burst(count: Any) -> None:
    """Works and rests in turns, some 0.3 ms each, and counts the turns."""
    while True:
        for _ in range(24):
            hashlib.sha256(BLOCK)
        count.value += 1
        time.sleep(3e-4)


@contextlib.contextmanager
def bursts(wanted: bool) -> Iterator[Callable[[], int]]:
    """Keeps every core busy half of the time, by processes that end with the block.

    Yields a function that says how many turns they have done.
    """
    cores = len(os.sched_getaffinity(0)) if wanted else 0
    context = multiprocessing.get_context("fork")
    counts = [context.RawValue("q", 0) for _ in range(cores)]
    processes = [context.Process(target=burst, args=(count,), daemon=True) for count in counts]
    for process in processes:
        process.start()
    try:
        yield lambda: sum(count.value for count in counts)
    finally:
        for process in processes:
            process.kill()
            process.join()


def wait(seconds: float) -> None:
    """Keeps this thread busy."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


class Times(NamedTuple):
    """Of the launches of one backend: their seconds, and turns of other work in all the seconds."""

    launches: list[float]
    turns: list[int]
    seconds: list[float]


def measure(
    backends: list[CpuBackend],
    kernel: str,
    parts: list[Work],
    idle: float,
    rounds: int,
    turns: Callable[[], int],
) -> list[Times]:
    """Returns the times of each backend."""
    actions = [action for backend in backends for action in backend.joined(kernel, parts)]
    times = [Times([], [], []) for _ in backends]
    for _ in range(rounds):
        for action, took in zip(actions, times, strict=True):
            began, turns_before = time.perf_counter(), turns()
            for _ in range(STRETCH):
                wait(idle)
                start = time.perf_counter()
                action()
                took.launches.append(time.perf_counter() - start)
            took.seconds.append(time.perf_counter() - began)
            took.turns.append(turns() - turns_before)
    return times


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--idle-us", type=float, nargs="*", default=[0, 20, 200, 5000])
    parser.add_argument("--parts", type=int, default=26)
    parser.add_argument("--items", type=int, default=1024, help="of a part")
    parser.add_argument("--rows", type=int, default=20_000, help="of a table")
    parser.add_argument("--kernels", nargs="*", help="only these")
    parser.add_argument("--rounds", type=int, default=20, help="stretches of each case")
    parser.add_argument("--beside", action="store_true", help="other work on every core")
    args = parser.parse_args()
    backends = [CpuBackend(num_threads=threads) for threads in args.threads]
    fields = {"parts": args.parts, "items": args.items, "beside": args.beside or None}
    with bursts(args.beside) as turns:
        for kernel, parts in cases(np.random.default_rng(0), args):
            if args.kernels and kernel not in args.kernels:
                continue
            fields["kernel"] = kernel
            joined = timed(backends[0], partial(backends[0].joined, kernel, parts), 21).host
            result(case="joined", **fields, arguments=len(parts[0].arguments), ms=1e3 * joined)
            for idle in args.idle_us:
                # A rest of some milliseconds makes a stretch long.
                rounds = args.rounds if idle < 1000 else -(-args.rounds // 4)
                times = measure(backends, kernel, parts, 1e-6 * idle, rounds, turns)
                one = times[0].launches
                for backend, took in zip(backends, times, strict=True):
                    median = statistics.median(took.launches)
                    low = float(np.quantile(took.launches, 0.1))
                    result(
                        case="launch",
                        **fields,
                        threads=backend.num_threads,
                        idle_us=idle,
                        ms=1e3 * median,
                        mean_ms=1e3 * statistics.fmean(took.launches),
                        low_ms=1e3 * low,
                        speedup=statistics.median(one) / median,
                        low_speedup=float(np.quantile(one, 0.1)) / low,
                        turns_beside=sum(took.turns) / sum(took.seconds) if args.beside else None,
                    )
