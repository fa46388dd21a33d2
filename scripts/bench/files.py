"""Measures dumps and loads of checkpoints, and what a dump in the background costs training.

Engine level, no TensorFlow: one table of float32 rows with the two states of Adam. One line
`RESULT {json}` per case:

  disk        the bytes of the checkpoint written to a file from memory, in chunks, with a wait at
              the end; and read again. The second is a matter of the page cache.
  dump        a dump that is waited for.
  load        into an empty table.
  background  `pause` is how long the call takes, which is how long training waits; `whole` until
              the checkpoint is there; `copied` the bytes of host memory that it needs.
  step        a lookup and a step of Adam: without a dump, and while one is written.

A step of a dump that is over sooner is not counted, so give enough keys.

Example:
  python -m scripts.bench files --keys 4000000 --dim 64
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from scripts.bench.common.measuring import backends, num_threads, result
from sok_lite.backend import Backend
from sok_lite.comm.single import SingleCommunicator
from sok_lite.engine.files.dump import dump, dump_in_background
from sok_lite.engine.files.load import load
from sok_lite.engine.files.shard import CHUNK_BYTES
from sok_lite.engine.initializer_spec import make_initializer
from sok_lite.engine.optimizers import Adam
from sok_lite.engine.table import EmbeddingTable, make_table
from sok_lite.engine.update import StepOptions, UpdateStep
from sok_lite.engine.update_rows import Update

_ONE = SingleCommunicator()


def seconds_of(call: Callable[[], Any]) -> float:
    """Returns how long a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def write_bytes(path: Path, num_bytes: int) -> None:
    """Writes as many bytes to a file and waits until they are on the disk."""
    chunk = np.random.default_rng(0).bytes(min(CHUNK_BYTES, num_bytes))
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for _ in range(max(1, num_bytes // len(chunk))):
        os.write(number, chunk)
    os.fsync(number)
    os.close(number)


def read_bytes(path: Path) -> None:
    """Reads a file in chunks."""
    with path.open("rb", buffering=0) as file:
        while file.read(CHUNK_BYTES):
            pass


class Training:
    """Steps on a table: a lookup of a batch, and Adam."""

    def __init__(self, backend: Backend, table: EmbeddingTable, args: argparse.Namespace) -> None:
        rng = np.random.default_rng(0)
        self._table, self._backend, self._step = table, backend, 0
        self._rule = Adam()
        self._batches = [
            backend.from_host(rng.integers(0, args.keys, args.batch)) for _ in range(16)
        ]
        grads = rng.normal(size=(args.batch, args.dim)).astype(np.float32)
        self._grads = backend.from_host(grads)

    def step(self) -> float:
        """Takes one and returns its seconds."""
        keys = self._batches[self._step % len(self._batches)]
        self._step += 1
        start = time.perf_counter()
        self._table.lookup(keys)
        update = Update(self._table, self._rule, keys, self._grads, optimizer=self._rule)
        UpdateStep([update], StepOptions(1e-3, self._step)).commit()
        self._backend.synchronize()
        return time.perf_counter() - start


def new_table(backend: Backend, args: argparse.Namespace) -> EmbeddingTable:
    """Returns an empty table."""
    initializer = make_initializer("random", args.dim)
    return make_table("hbm", backend, args.dim, name="t", initializer=initializer)


def run(backend: Backend, args: argparse.Namespace, folder: Path) -> None:
    """Measures all cases."""
    table = new_table(backend, args)
    for part in np.array_split(np.arange(args.keys), max(1, args.keys // 500_000)):
        table.find_or_insert(backend.from_host(part), unique_keys=True)
    training = Training(backend, table, args)
    training.step()
    about = {"backend": backend.name, "threads": num_threads(backend), "keys": args.keys}
    about["dim"] = args.dim

    def rates(case: str, seconds: list[float], num_bytes: int, **more: Any) -> None:
        middle = statistics.median(seconds)
        gigabytes = num_bytes / 1e9
        result(case=case, **about, gb=gigabytes, seconds=middle, gb_s=gigabytes / middle, **more)

    path = folder / "checkpoint"
    times = [seconds_of(lambda: dump(path, [table], _ONE)) for _ in range(args.rounds)]
    num_bytes = sum(file.stat().st_size for file in path.glob("*/*"))
    plain = folder / "plain"
    rates("disk", [seconds_of(lambda: write_bytes(plain, num_bytes)) for _ in times], num_bytes)
    rates("disk, read", [seconds_of(lambda: read_bytes(plain)) for _ in times], num_bytes)
    plain.unlink()
    rates("dump", times, num_bytes)
    loads = [
        seconds_of(lambda: load(path, [new_table(backend, args)], _ONE)) for _ in range(args.rounds)
    ]
    rates("load", loads, num_bytes)
    alone = [training.step() for _ in range(args.steps)]
    pauses, wholes, during = [], [], list[float]()
    for _ in range(args.rounds):
        start = time.perf_counter()
        begun = dump_in_background(path, [table], _ONE)
        pauses.append(time.perf_counter() - start)
        during.append(training.step())
        while not begun.done:
            during.append(training.step())
        begun.wait()
        wholes.append(time.perf_counter() - start)
    more = {"whole": statistics.median(wholes), "copied": num_bytes}
    rates("background", pauses, num_bytes, pause=statistics.median(pauses), **more)
    for case, steps in (("step, no dump", alone), ("step, while it is written", during)):
        ordered = sorted(steps)
        result(
            case=case,
            **about,
            batch=args.batch,
            steps=len(steps),
            ms=1e3 * statistics.median(steps),
            ms_95=1e3 * ordered[len(ordered) * 95 // 100],
            slower=statistics.median(steps) / statistics.median(alone),
        )


def main(parser: argparse.ArgumentParser) -> None:
    """Reads the arguments and measures."""
    parser.add_argument("--backends", nargs="+", default=["cpu"], choices=["cpu", "cuda"])
    parser.add_argument("--keys", type=int, default=2_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=65_536)
    parser.add_argument("--steps", type=int, default=50, help="without a dump")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="where to write; default: that of temporary files")
    args = parser.parse_args()
    for backend in backends(args.backends):
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            run(backend, args, Path(folder))
