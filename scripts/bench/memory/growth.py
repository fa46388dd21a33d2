"""Measures what it costs that a table grows: the worst batch, memory, and lookups by size.

Engine level, no TensorFlow. A table grows from --first to --last keys by batches of new keys; after
each of them come, in turn, a batch of known keys and one of which half of the keys are new. One
line `RESULT {json}` a case:

  new, known, mixed   milliseconds of a batch: p50, p99 and the worst, and `worst_ratio`, the worst
                      to the median. On a CPU also of its time by the clock of the process
                      (`cpu_...`), which other work on the machine hardly changes.
  lookup              ns a key of a batch of known keys at that number of keys: of finding the row
                      numbers, and of a lookup with the rows. The fastest of --rounds batches.
  memory              bytes a key of the index beside the rows, when all has grown, and at the worst
                      moment: with one segment there twice. Gigabytes of near and of far rows.

At the end `MARK` lines say whether the worst batch is within 3 times the median, memory within 48
bytes a key, and a lookup at the last size within twice that at the first.

Examples:
  python -m scripts.bench memory growth --tables hbm hybrid
  python -m scripts.bench memory growth --large --tables hbm
  python -m scripts.bench memory growth --tables hybrid --last 110000000 --dim 64 --known-every 16 \
      --far-path /var/tmp --near-gb 4
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from scripts.bench.common.measuring import backends, num_threads, result
from sok_lite.backend import Array, Backend
from sok_lite.engine.initializer_spec import make_initializer
from sok_lite.engine.table import EmbeddingTable, make_table

WORST_RATIO, MOST_BYTES, LOOKUP_RATIO = 3.0, 48.0, 2.0


class Growth:
    """A table that grows.

    Attributes:
      table: the table.
      next: keys 0 to next - 1 are in it.
      times: for each kind of batch, its seconds: by the clock, and of the process.
      worst_bytes: of the index, a key, at the worst moment.
    """

    def __init__(self, backend: Backend, kind: str, args: Any) -> None:
        options: dict[str, Any] = {}
        if kind == "hybrid":
            most = 1 << (4 * args.last).bit_length()
            near_gb = most * args.dim * 4 / 2**30 if args.near_gb is None else args.near_gb
            options = {"max_capacity": most, "max_hbm_for_vectors": near_gb}
            options |= {"far_path": args.far_path}
            options |= {"init_capacity": 1 << 10, "evict_strategy": args.strategy}
        initializer = make_initializer("ones", args.dim)
        self.table: EmbeddingTable = make_table(
            kind, backend, args.dim, initializer=initializer, **options
        )
        self.backend, self.batch, self.next = backend, args.batch, 0
        self.rng = np.random.default_rng(args.seed)
        self.out = backend.xp.empty((args.batch, args.dim), np.float32)
        self.times: dict[str, list[tuple[float, float]]] = {}
        self.worst_bytes = 0.0

    def keys(self, first: int, count: int) -> Array:
        """Returns the keys number first, first + 1, ..., (count,) int64, in no order."""
        numbers = np.arange(first, first + count, dtype=np.uint64)
        return self.backend.from_host((numbers * np.uint64(0x9E3779B97F4A7C15)).view(np.int64))

    def known(self, count: int) -> Array:
        """Returns keys that are in the table, drawn evenly."""
        numbers = self.rng.integers(0, self.next, count).astype(np.uint64)
        return self.backend.from_host((numbers * np.uint64(0x9E3779B97F4A7C15)).view(np.int64))

    def lookup(self, name: str, keys: Array) -> None:
        """Looks keys up and notes how long it took."""
        rehashes = self.table.index.num_rehashes
        wall, process = timed(self.backend, lambda: self.table.lookup(keys, out=self.out))
        self.times.setdefault(name, []).append((wall, process))
        twice = 0
        if self.table.index.num_rehashes > rehashes:
            twice = max(segment.num_bytes for segment in self.table.index.directory.segments)
        if name != "first":
            most = (self.table.index_bytes + twice) / self.table.size
            self.worst_bytes = max(self.worst_bytes, most)

    def new_batch(self, name: str = "new") -> None:
        """Looks up a batch of new keys."""
        self.next += self.batch
        self.lookup(name, self.keys(self.next - self.batch, self.batch))

    def mixed_batch(self) -> None:
        """Looks up a batch of which half of the keys are new."""
        half = self.batch // 2
        keys = [self.known(self.batch - half), self.keys(self.next, half)]
        self.next += half
        self.lookup("mixed", self.backend.xp.concatenate(keys))


def timed(backend: Backend, call: Callable[[], Any]) -> tuple[float, float]:
    """Returns the seconds of a call: by the clock, and of all threads of the process."""
    backend.synchronize()
    start, process = time.perf_counter(), time.process_time()
    call()
    backend.synchronize()
    return time.perf_counter() - start, time.process_time() - process


def measure_lookup(growth: Growth, args: Any, **setting: Any) -> float:
    """Measures lookups of known keys and returns the ns a key of those with rows."""
    table, backend = growth.table, growth.backend
    find, lookup = [], []
    for _ in range(args.rounds):
        keys = growth.known(growth.batch)
        find.append(timed(backend, partial(table.find, keys))[0])
        lookup.append(timed(backend, partial(table.lookup, keys, out=growth.out))[0])
    find_ns, lookup_ns = (1e9 * min(seconds) / growth.batch for seconds in (find, lookup))
    result(case="lookup", keys=table.size, find_ns=find_ns, lookup_ns=lookup_ns, **setting)
    return lookup_ns


def report_batches(growth: Growth, name: str, **setting: Any) -> float:
    """Reports the batches of a kind and returns the ratio of the worst to the median."""
    figures: dict[str, float] = {}
    on_cpu = growth.backend.name == "cpu"
    for clock, prefix in ((0, ""), (1, "cpu_"))[: 1 + on_cpu]:
        ms = [1e3 * times[clock] for times in growth.times[name]]
        median, worst = statistics.median(ms), max(ms)
        figures |= {f"{prefix}p50_ms": median, f"{prefix}p99_ms": float(np.percentile(ms, 99))}
        figures |= {f"{prefix}worst_ms": worst, f"{prefix}worst_ratio": worst / median}
    result(case=name, batches=len(growth.times[name]), **figures, **setting)
    return figures["worst_ratio"]


def run(backend: Backend, kind: str, args: Any) -> None:
    """Grows a table and reports."""
    setting = {"table": kind, "backend": backend.name, "threads": num_threads(backend)}
    setting |= {"dim": args.dim, "batch": args.batch, "keys_at_the_end": args.last}
    growth = Growth(backend, kind, args)
    while growth.next < args.first:
        growth.new_batch("first")
    lookup_ns = [measure_lookup(growth, args, **setting)]
    wanted = 2 * args.first
    while growth.next < args.last:
        growth.new_batch()
        count = len(growth.times["new"])
        if count % args.known_every == 0:
            growth.lookup("known", growth.known(args.batch))
        if count % (4 * args.known_every) == 0:
            growth.mixed_batch()
        if growth.next >= min(wanted, args.last):
            lookup_ns.append(measure_lookup(growth, args, **setting))
            wanted *= 2
    ratios = {name: report_batches(growth, name, **setting) for name in ("new", "known", "mixed")}
    held = growth.table.statistics()
    result(
        case="memory",
        bytes_a_key=held.index_bytes / held.size,
        worst_bytes_a_key=growth.worst_bytes,
        load_factor=held.load_factor,
        mean_probe=held.mean_probe,
        near_gb=held.near_bytes / 2**30,
        **({"far_gb": held.far_bytes / 2**30} if held.far_bytes else {}),
        segments=len(growth.table.index.directory.segments),
        **setting,
    )
    mark(f"{kind}: worst batch of new keys to the median", ratios["new"], WORST_RATIO)
    mark(f"{kind}: bytes a key beside the rows", growth.worst_bytes, MOST_BYTES)
    mark(
        f"{kind}: lookup at the last size to the first", lookup_ns[-1] / lookup_ns[0], LOOKUP_RATIO
    )


def mark(what: str, value: float, most: float) -> None:
    """Says whether a mark is reached."""
    is_reached = "reached" if value <= most else "missed"
    print(f"MARK {what}: {value:.2f}, at most {most:g}: {is_reached}", flush=True)


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backends", nargs="+", default=["cpu"])
    parser.add_argument("--tables", nargs="+", default=["hbm", "hybrid"])
    parser.add_argument("--strategy", default="kLru", help='of "hybrid", see docs/tables.md')
    parser.add_argument("--first", type=int, default=1 << 20, help="keys to begin with")
    parser.add_argument("--last", type=int, default=1 << 25, help="keys at the end")
    parser.add_argument("--large", action="store_true", help="100 million keys at the end")
    parser.add_argument("--quick", action="store_true", help="few keys in small segments")
    parser.add_argument("--batch", type=int, default=1 << 18)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--near-gb", type=float, help='of rows of "hybrid"; default: all of them')
    parser.add_argument("--far-path", help="where the other rows are: a file of this folder")
    parser.add_argument(
        "--known-every", type=int, default=1, help="batches of new keys for one of known keys"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.large:
        args.last = 100_000_000
    if args.quick:
        args.first, args.last, args.batch, args.rounds = 1 << 12, 1 << 15, 1 << 10, 2
    for backend in backends(args.backends):
        if args.quick:
            backend.segment_slots = 1 << 10
        for kind in args.tables:
            run(backend, kind, args)
