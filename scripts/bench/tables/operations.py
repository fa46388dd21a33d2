"""Times the operations of the tables, without TensorFlow, beside what the memory can do at best.

Operations x tables x dimensions x load factors x backends, one line `RESULT {json}` a case. The
keys of a batch are distinct and calls say so (`unique_keys`). Every call gets a batch of its own,
so that none finds its rows in a cache because the one before it had the same. Medians of --rounds.

`bytes_per_second` counts compulsory traffic only, the bytes that any table would have to move: the
keys, row numbers and dense rows that come and go; one cache line of 64 bytes of the index for each
key, twice where the line is written; and each row once, twice where it is read and written. Probes
of further lines and passes over scratch arrays are not compulsory: they lower the figure.

`share_of_copy` is that divided by the bandwidth of a copy, `share_of_limit` is the time that the
same traffic would take at best divided by the measured one: streams at the rate of a copy, index
lines at that of random 64-byte reads over as much memory as the index has, rows at that of a gather
of rows by known row numbers from as many rows. All three are measured in the same run with the same
number of threads (limits.py) and printed as cases of their own.

`lookup_over_gather` is a lookup (find and gather) of random keys in a table of --mark-keys, divided
by a gather of as many rows by known row numbers, in turns.

`insert_growing` is the insertion of --mark-keys new keys, --batch at a time, into a small table
that has to grow for them.

`--workload hkv` and `--workload dynamicemb` do what these systems' own benchmarks do, see
workloads.py. `--peer hkv --peer-bin PATH` also runs HKV's benchmark program, in turns
with ours, and prints the ratios.

Examples:
  python -m scripts.bench tables operations --backends cpu --tables hbm --dims 64 --ops find lookup
  python -m scripts.bench tables operations --backends cuda --workload hkv --dims 8
"""

import argparse
import math
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from scripts.bench.common.measuring import (
    Timing,
    backends,
    median,
    note,
    num_threads,
    result,
    time_call,
    timed,
)
from scripts.bench.tables.limits import limits_of
from scripts.bench.tables.workloads import dynamicemb, hkv, hkv_with_peer
from sok_lite.backend import Array, Backend
from sok_lite.engine.initializer_spec import make_initializer
from sok_lite.engine.table import make_table
from sok_lite.engine.table.det_index import sizes_of, slots_for

LINE_BYTES = 64
NEW_SHARE = 0.4  # of a batch with new keys, as in HKV's benchmark


class Traffic(NamedTuple):
    """Compulsory traffic of an operation for one key.

    Attributes:
      stream: bytes that come or go one after another: keys, row numbers, answers.
      lines: cache lines of the index, read or written.
      gathers: rows copied between the row store and a dense array.
      fills: rows read or written alone.
    """

    stream: float
    lines: float
    gathers: float = 0
    fills: float = 0

    def num_bytes(self, row_bytes: int) -> float:
        return (
            self.stream
            + LINE_BYTES * self.lines
            + (2 * row_bytes + 4) * self.gathers
            + row_bytes * self.fills
        )


TRAFFIC = {
    "find": Traffic(8 + 4, 1),
    "contains": Traffic(8 + 1, 1),
    "find_or_insert": Traffic(8 + 4, 1),
    "find_or_insert_new": Traffic(8 + 4, 1 + NEW_SHARE, fills=NEW_SHARE),
    "lookup": Traffic(8, 1, gathers=1),
    "lookup_new": Traffic(8, 1 + NEW_SHARE, gathers=1, fills=NEW_SHARE),
    "insert_or_assign": Traffic(8, 1, gathers=1),
    "insert_or_assign_new": Traffic(8, 1 + NEW_SHARE, gathers=1),
    "assign": Traffic(8, 1, gathers=1),
    "accumulate": Traffic(8, 1, gathers=1, fills=1),
    "erase_insert": Traffic(8 + 8 + 4, 4, fills=1),
    "export": Traffic(16 + 8, 0, gathers=1),
    "insert_and_evict": Traffic(8, 1 + NEW_SHARE, gathers=1 + NEW_SHARE),
}
# These make tables of their own.
MARKS = ["lookup_over_gather", "insert_growing"]
OPS = [*TRAFFIC, *MARKS]


def distinct_keys(backend: Backend, first: int, count: int) -> Array:
    """Returns the keys number first, first + 1, ..., (count,) int64, distinct, in no order."""
    x = backend.xp.arange(first, first + count, dtype=np.uint64)
    for factor, shift in ((0xBF58476D1CE4E5B9, 30), (0x94D049BB133111EB, 27)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return (x ^ (x >> np.uint64(31))).view(np.int64)


def table_options(args: Any, capacity: int, dim: int) -> dict[str, Any]:
    """Returns the options of a hybrid table."""
    # A little more where all rows are to be near: they come in chunks.
    share = args.near_share if args.near_share < 1 else 1.1
    options: dict[str, Any] = {
        "init_capacity": capacity,
        "max_capacity": capacity,
        "max_hbm_for_vectors": share * capacity * dim * 4 / (1 << 30),
        "on_refused": "ignore",
    }
    for text in args.table_options:
        name, value = text.split("=", 1)
        try:
            options[name] = float(value) if "." in value else int(value)
        except ValueError:
            options[name] = value
    return options


def empty_table(
    backend: Backend, kind: str, dim: int, capacity: int, args: Any, key_type: str = "int64"
) -> Any:
    """Returns a table of that many slots, or None where there is no such kind of table yet."""
    options: dict[str, Any] = {"initializer": make_initializer("random", dim), "key_type": key_type}
    if kind == "hbm":
        # The most keys that it holds in so many slots.
        sizes = sizes_of(backend)
        keys = bisect_right(range(capacity), capacity, key=lambda n: slots_for(sizes, n)) - 1
        return make_table(kind, backend, dim, init_capacity=keys, **options)
    try:
        return make_table(kind, backend, dim, **options, **table_options(args, capacity, dim))
    except NotImplementedError as error:
        note(f"{kind} is left out: {error}")
        return None


def holds(backend: Backend, kind: str, load_factor: float, args: Any) -> bool:
    """Whether a table of that kind can be that full. Says so if not."""
    capacity = 1 << 12
    table = empty_table(backend, kind, args.dims[0], capacity, args)
    if table is None:
        return False
    if fill(backend, table, capacity, load_factor)[0]:
        return True
    note(
        f"{kind} cannot hold load factor {load_factor}: it grew from {capacity:,} to "
        f"{table.capacity:,} slots. Left out."
    )
    return False


def fill(backend: Backend, table: Any, capacity: int, load_factor: float) -> tuple[bool, int]:
    """Inserts new keys until the table is as full as asked.

    Returns:
      Whether it got there with as many slots as it had, and how many keys it was given.
    """
    given = 0
    wanted = int(load_factor * capacity)
    # In a full table most new keys only replace another: the last free slots take many of them.
    while table.size < 0.998 * wanted and table.capacity == capacity and given < 4 * capacity:
        count = min(max(wanted - table.size, capacity // 256, 1), 1 << 20)
        table.find_or_insert(distinct_keys(backend, given, count), unique_keys=True)
        given += count
    return table.capacity == capacity and table.size >= 0.99 * wanted, given


class Bench:
    """A filled table and the batches for it.

    Attributes:
      table, backend, dim: what is measured.
      kind: "hbm" or "hybrid".
      load_factor: as asked for.
      batch: keys of a call.
    """

    def __init__(
        self, backend: Backend, kind: str, dim: int, capacity: int, load_factor: float, args: Any
    ) -> None:
        self.backend, self.kind, self.dim = backend, kind, dim
        self.load_factor = load_factor
        self.batch = min(args.batch, int(load_factor * capacity) // 4)
        self.table = empty_table(backend, kind, dim, capacity, args)
        _, self._num_given = fill(backend, self.table, capacity, load_factor)
        # Ascending, which says nothing about where a key's slot and row are.
        self._held = self.table.export_rows()[0]
        self._next = 0
        self.values = backend.xp.ones((self.batch, dim), np.float32)
        self.out = backend.xp.empty((self.batch, dim), np.float32)

    def _order(self, n: int) -> Array:
        return self.backend.from_host(np.random.default_rng(n).permutation(n))

    def known(self, count: int) -> Array:
        """Returns keys in the table, (count,), other ones each time as long as there are any."""
        xp = self.backend.xp
        # A table that evicts may have lost some of them meanwhile. Then a few more are looked at:
        # else the last ones that are missing could take any number of rounds.
        evicts = self.kind != "hbm"
        parts, missing, seen = [], count, 0
        while missing and seen <= 8 * self._held.size:
            part = self._held[self._next :][: max(missing, 4096) if evicts else missing]
            self._next = (self._next + part.size) % self._held.size
            seen += part.size
            parts.append((part[self.table.contains(part)] if evicts else part)[:missing])
            missing -= parts[-1].size
        return xp.ascontiguousarray(xp.concatenate(parts))

    def mixed(self, count: int) -> Array:
        """Returns a batch of which NEW_SHARE were never in the table."""
        num_new = int(NEW_SHARE * count)
        new = distinct_keys(self.backend, self._num_given, num_new)
        self._num_given += num_new
        keys = self.backend.xp.concatenate([self.known(count - num_new), new])
        return keys[self._order(count)]

    def remove_new(self, keys: Array, size: int) -> None:
        """Erases as many keys of a batch as the table has more than it had."""
        surplus = self.table.size - size
        if surplus > 0:
            known = self.backend.xp.asarray(self._new_positions(keys))
            self.table.erase(keys[known][:surplus])

    def _new_positions(self, keys: Array) -> Array:
        first = keys.size - int(NEW_SHARE * keys.size)
        return self.backend.xp.flatnonzero(self._order(keys.size) >= first)

    def call_of(self, op: str) -> Callable[[Array], Any] | None:
        """Returns the function that an operation times; None where the table does not have it."""
        table, out, values = self.table, self.out, self.values
        calls: dict[str, Callable[[Array], Any]] = {
            "find": lambda keys: table.find(keys),
            "contains": lambda keys: table.contains(keys),
            "find_or_insert": lambda keys: table.find_or_insert(keys, unique_keys=True),
            "lookup": lambda keys: table.lookup(keys, unique_keys=True, out=out),
            "insert_or_assign": lambda keys: table.insert_or_assign(keys, values),
            "assign": lambda keys: table.assign(keys, values),
            "accumulate": lambda keys: table.accumulate(keys, values, 0.5),
            "erase_insert": lambda keys: (
                table.erase(keys),
                table.find_or_insert(keys, unique_keys=True),
            ),
            "export": lambda keys: table.export(),
        }
        if op == "insert_and_evict":
            if not hasattr(table, "insert_and_evict"):
                return None
            return lambda keys: table.insert_and_evict(keys, values)
        return calls[op.removesuffix("_new")]

    def measure(self, op: str, rounds: int) -> tuple[int, Timing] | None:
        """Returns the keys of a call and its time; None where the table has no such operation."""
        call = self.call_of(op)
        if call is None:
            return None
        if op == "export":
            return self.table.size, timed(
                self.backend, lambda: call(None), min(rounds, 3), warm_ups=1
            )
        if op.endswith("_new") or op == "insert_and_evict":
            size = self.table.size
            return self.batch, timed(
                self.backend,
                call,
                rounds,
                lambda: self.mixed(self.batch),
                lambda keys: self.remove_new(keys, size),
            )
        # All batches first: looking whether a key is there would bring its line into the cache.
        batches = iter([self.known(self.batch) for _ in range(rounds + 2)])
        return self.batch, timed(self.backend, call, rounds, lambda: next(batches))


class Yardstick:
    """What memory can do at best, measured when it is first asked for and printed then."""

    def __init__(self, backend: Backend, reads: int, rounds: int) -> None:
        self._limits = limits_of(backend)
        self._backend, self._reads, self._rounds = backend, reads, rounds
        self._rates: dict[tuple[str, int, int], float] = {}

    def _rate(self, what: str, footprint: int, size: int, measure: Callable[[], float]) -> float:
        key = (what, footprint, size)
        if key not in self._rates:
            rate = self._rates[key] = measure()
            unit = {"copy": 1, "random_read": size, "gather": 2 * size + 4}[what]
            result(
                case=what,
                backend=self._backend.name,
                threads=num_threads(self._backend),
                footprint_bytes=footprint,
                width=None if what == "copy" else size,
                per_second=None if what == "copy" else rate,
                bytes_per_second=rate * unit,
            )
        return self._rates[key]

    def copy(self) -> float:
        """Returns bytes a second."""
        num_bytes = 1 << (29 if self._backend.name == "cuda" else 27)
        return self._rate(
            "copy", 2 * num_bytes, 0, lambda: self._limits.copy(num_bytes, self._rounds)
        )

    def lines(self, index_bytes: int) -> float:
        """Returns random reads of LINE_BYTES a second over a memory as large as the index."""
        footprint = 1 << max(20, round(math.log2(index_bytes)))
        lanes = 4 if self._backend.name == "cuda" else 1

        def measure() -> float:
            memory = self._limits.memory(footprint)
            return self._limits.random_read(memory, LINE_BYTES, lanes, self._reads, self._rounds)

        return self._rate("random_read", footprint, LINE_BYTES, measure)

    def gather(self, num_rows: int, row_bytes: int) -> float:
        """Returns rows a second that are gathered from as many."""
        padded = -(-row_bytes // 16) * 16

        def measure() -> float:
            memory = self._limits.memory(num_rows * padded)
            return self._limits.gather(memory, padded, num_rows, self._reads, self._rounds)

        return self._rate("gather", num_rows * padded, padded, measure)

    def seconds(self, traffic: Traffic, table: Any, num_keys: int) -> float:
        """Returns the least time for an operation's compulsory traffic."""
        row_bytes = table.dim * 4
        # In size classes: the limits change little within a factor of two.
        num_rows = 1 << max(10, table.size.bit_length() - 1)
        per_key = traffic.stream / self.copy() + traffic.lines / self.lines(table.index_bytes)
        if traffic.gathers:
            per_key += traffic.gathers / self.gather(num_rows, row_bytes)
        return num_keys * (per_key + traffic.fills * row_bytes / self.copy())


def measure_case(bench: Bench, op: str, yardstick: Yardstick, args: Any) -> None:
    """Measures and prints one case."""
    measured = bench.measure(op, args.rounds)
    if measured is None:
        note(f"{bench.kind} has no {op}. Left out.")
        return
    num_keys, timing = measured
    table, traffic = bench.table, TRAFFIC[op]
    best = yardstick.seconds(traffic, table, num_keys)
    num_bytes = num_keys * traffic.num_bytes(4 * bench.dim)
    result(
        case=op,
        backend=bench.backend.name,
        threads=num_threads(bench.backend),
        table=bench.kind,
        dim=bench.dim,
        load_factor=bench.load_factor,
        capacity=table.capacity,
        keys_in_table=table.size,
        keys=num_keys,
        ms=1e3 * timing.host,
        device_ms=None if timing.device is None else 1e3 * timing.device,
        keys_per_second=num_keys / timing.host,
        bytes_per_second=num_bytes / timing.host,
        share_of_copy=num_bytes / timing.host / yardstick.copy(),
        share_of_limit=best / timing.host,
        table_options=(args.table_options or None) if bench.kind == "hybrid" else None,
    )


def lookup_over_gather(backend: Backend, kind: str, args: Any) -> None:
    """Measures what a lookup takes beyond a gather of the same rows by known row numbers."""
    capacity = 1 << (args.mark_keys * 10 // 9 - 1).bit_length()
    table = empty_table(backend, kind, args.mark_dim, capacity, args)
    given = 0
    while given < args.mark_keys:
        count = min(1 << 16, args.mark_keys - given)
        table.find_or_insert(distinct_keys(backend, given, count), unique_keys=True)
        given += count
    rng = np.random.default_rng(0)
    held = table.export_rows()[0]
    # More rows than a cache holds: each call meets keys that were not looked at for a while.
    batches = [held[backend.from_host(rng.integers(0, held.size, args.batch))] for _ in range(16)]
    rows = [table.find(keys) for keys in batches]
    out = backend.xp.empty((args.batch, args.mark_dim), np.float32)
    lookups, gathers = [], []
    for number in range(2 + 2 * args.rounds):
        # Half a turn apart, so that neither finds what the other has just brought into the cache.
        keys, known = batches[number % 16], rows[(number + 8) % 16]
        lookups.append(time_call(backend, lambda keys=keys: table.lookup(keys, out=out)))
        gathers.append(time_call(backend, lambda rows=known: table.store.read(rows, out=out)))
    lookup, gather = median(lookups[2:]).host, median(gathers[2:]).host
    result(
        case="lookup_over_gather",
        backend=backend.name,
        threads=num_threads(backend),
        table=kind,
        dim=args.mark_dim,
        keys_in_table=table.size,
        keys=args.batch,
        lookup_ms=1e3 * lookup,
        gather_ms=1e3 * gather,
        ratio=lookup / gather,
    )


def insert_growing(backend: Backend, kind: str, args: Any) -> None:
    """Measures the insertion of new keys into a table that grows."""
    options: dict[str, Any] = {"initializer": make_initializer("random", args.mark_dim)}
    if kind == "hybrid":
        most = 1 << (2 * args.mark_keys - 1).bit_length()
        options |= {**table_options(args, most, args.mark_dim), "init_capacity": 1 << 10}

    def batches() -> list[Array]:
        starts = range(0, args.mark_keys, args.batch)
        return [
            distinct_keys(backend, start, min(args.batch, args.mark_keys - start))
            for start in starts
        ]

    def insert(parts: list[Array]) -> None:
        table = make_table(kind, backend, args.mark_dim, **options)
        for keys in parts:
            table.find_or_insert(keys, unique_keys=True)

    timing = timed(backend, insert, 3, batches, warm_ups=1)
    result(
        case="insert_growing",
        backend=backend.name,
        threads=num_threads(backend),
        table=kind,
        dim=args.mark_dim,
        keys=args.mark_keys,
        ms=1e3 * timing.host,
        keys_per_second=args.mark_keys / timing.host,
    )


def cases(args: Any, backend: Backend) -> Iterator[Bench]:
    """Yields a filled table for each case."""
    for kind in args.tables:
        loads = [load for load in args.loads if holds(backend, kind, load, args)]
        for dim in args.dims:
            for load in loads:
                yield Bench(backend, kind, dim, args.capacity, load, args)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backends", nargs="+", default=["cpu", "cuda"])
    parser.add_argument("--tables", nargs="+", default=["hbm", "hybrid"])
    parser.add_argument("--dims", type=int, nargs="+", default=[8, 32, 64, 128])
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 0.75, 1.0])
    parser.add_argument(
        "--ops", nargs="+", choices=OPS, default=OPS, metavar="OP", help=", ".join(OPS)
    )
    parser.add_argument("--capacity", type=int, help="slots, a power of two; 2^20, on a GPU 2^24")
    parser.add_argument("--batch", type=int, help="keys of a call; 2^16, on a GPU 2^20")
    parser.add_argument("--rounds", type=int, default=7, help="calls that count")
    parser.add_argument("--threads", type=int, help="of the CPU; else SOK_LITE_NUM_THREADS or all")
    parser.add_argument("--near-share", type=float, default=1.0, help="of a hybrid table's rows")
    parser.add_argument(
        "--table-options",
        nargs="*",
        default=[],
        metavar="NAME=VALUE",
        help="of a hybrid table, such as max_bucket_size=32",
    )
    parser.add_argument(
        "--mark-keys", type=int, default=1_000_000, help=f"of {' and '.join(MARKS)}"
    )
    parser.add_argument("--mark-dim", type=int, default=64, help="of the same")
    parser.add_argument("--workload", choices=["hkv", "dynamicemb"])
    parser.add_argument("--hkv-ops", nargs="+", metavar="OP", help="of the hkv workload; else all")
    parser.add_argument("--lookups", type=int, default=1_048_570, help="of the dynamicemb workload")
    parser.add_argument("--unique", type=int, default=350_280, help="of the dynamicemb workload")
    parser.add_argument("--peer", choices=["hkv"])
    parser.add_argument("--peer-bin", help="the peer's benchmark program")
    parser.add_argument("--turns", type=int, default=2, help="runs of the peer")


def main(parser: argparse.ArgumentParser) -> None:
    add_options(parser)
    args = parser.parse_args()
    if (args.peer is None) != (args.peer_bin is None):
        parser.error("--peer and --peer-bin belong together.")
    if args.threads:
        os.environ["SOK_LITE_NUM_THREADS"] = str(args.threads)
    asked = argparse.Namespace(**vars(args))
    for backend in backends(args.backends):
        on_gpu = backend.name == "cuda"
        hkv_batch = args.peer or args.workload == "hkv"
        args.capacity = asked.capacity or 1 << (24 if on_gpu else 20)
        args.batch = asked.batch or 1 << (20 if on_gpu or hkv_batch else 16)
        if args.capacity & (args.capacity - 1):
            parser.error(f"--capacity must be a power of two. Received: {args.capacity}.")
        if args.peer:
            hkv_with_peer(backend, args, empty_table)
        elif args.workload == "hkv":
            hkv(backend, args, empty_table)
        elif args.workload == "dynamicemb":
            dynamicemb(backend, args, empty_table)
        else:
            run_cases(backend, args)


def run_cases(backend: Backend, args: Any) -> None:
    """Measures the operations on a backend."""
    for kind in args.tables:
        if empty_table(backend, kind, args.mark_dim, 1 << 12, args) is None:
            continue
        if "lookup_over_gather" in args.ops:
            lookup_over_gather(backend, kind, args)
        if "insert_growing" in args.ops:
            insert_growing(backend, kind, args)
    ops = [op for op in args.ops if op not in MARKS]
    if not ops:
        return
    yardstick = Yardstick(backend, args.batch, args.rounds)
    for bench in cases(args, backend):
        for op in ops:
            measure_case(bench, op, yardstick, args)
