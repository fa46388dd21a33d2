"""Times the operations of the tables, without TensorFlow.

Operations x tables x dimensions x load factors x backends, one line `RESULT {json}` a case. The
keys of a batch are distinct and calls say so (`unique_keys`). Every call gets a batch of its own,
so that none finds its rows in a cache because the one before it had the same. Of a batch for an
operation `..._new` 40 % were never in the table. Medians of --rounds.

`lookup_over_gather` is a lookup (find and gather) of random keys in a table of --mark-keys, divided
by a gather of as many rows by known row numbers, in turns.

`--workload hkv` does what HierarchicalKV's own benchmark does. A table with uint64 keys is filled
with the keys 0, 1, 2, ... by find_or_insert, --batch (2^20) at a time, and with further ones by
insert_or_assign until it is within 0.001 of the load factor. The timed call has --batch keys: 60 %
of them the last that were inserted, 40 % from the largest uint64 downwards, which are missing. For
every operation and load factor the table is cleared, then fill and call are done twice; the faster
call counts. So at load factors below 1 the second call of an operation that inserts finds all its
keys. Operations have HKV's names: `find` and `find_or_insert` give rows where HKV copies values,
`find*` and `find_or_insert*` row numbers where it returns addresses. With --hkv-source, a checkout
of HKV, its own program is built by nvcc and runs after ours on a GPU, in lines with `system`.

Examples:
  python -m scripts.bench tables --backends cpu --tables hbm --dims 64 --ops find lookup
  python -m scripts.bench tables --backends cuda --workload hkv --dims 8
"""

import argparse
import os
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from scripts.bench.common import hkv_peer
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
from sok_lite.backend import Array, Backend
from sok_lite.engine.initializer_spec import make_initializer
from sok_lite.engine.table import make_table
from sok_lite.engine.table.det_index import sizes_of, slots_for

NEW_SHARE = 0.4  # of a batch with new keys, as in HKV's benchmark
# It makes a table of its own.
MARK = "lookup_over_gather"
OPS = [
    *("find", "contains", "find_or_insert", "find_or_insert_new", "lookup", "lookup_new"),
    *("insert_or_assign", "insert_or_assign_new", "assign", "accumulate", "erase_insert"),
    *("export", "insert_and_evict", MARK),
]
# HKV's names.
HKV_OPS = [
    *("insert_or_assign", "find", "find_or_insert", "assign", "find*", "find_or_insert*"),
    *("insert_and_evict", "export_batch", "export_batch_if", "contains"),
]


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
    """Returns a table of that many slots."""
    options: dict[str, Any] = {"initializer": make_initializer("random", dim), "key_type": key_type}
    if kind == "hbm":
        # The most keys that it holds in so many slots.
        sizes = sizes_of(backend)
        keys = bisect_right(range(capacity), capacity, key=lambda n: slots_for(sizes, n)) - 1
        return make_table(kind, backend, dim, init_capacity=keys, **options)
    return make_table(kind, backend, dim, **options, **table_options(args, capacity, dim))


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
      is_filled: whether the table holds as many keys without growing.
    """

    def __init__(
        self, backend: Backend, kind: str, dim: int, capacity: int, load_factor: float, args: Any
    ) -> None:
        self.backend, self.kind, self.dim = backend, kind, dim
        self.load_factor = load_factor
        self.batch = min(args.batch, int(load_factor * capacity) // 4)
        self.table = empty_table(backend, kind, dim, capacity, args)
        self.is_filled, self._num_given = fill(backend, self.table, capacity, load_factor)
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


def print_case(
    backend: Backend, kind: str, table: Any, load: float, op: str, keys: int, timing: Timing
) -> None:
    result(
        case=op,
        backend=backend.name,
        threads=num_threads(backend),
        table=kind,
        dim=table.dim,
        load_factor=load,
        capacity=table.capacity,
        keys_in_table=table.size,
        keys=keys,
        ms=1e3 * timing.host,
        device_ms=None if timing.device is None else 1e3 * timing.device,
        keys_per_second=keys / timing.host,
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


class HkvTable:
    """A table as HKV's benchmark has it."""

    def __init__(self, backend: Backend, table: Any, batch: int) -> None:
        self.backend, self.table, self.batch = backend, table, batch
        self._capacity = table.capacity
        self._end = 0  # the first key that was not inserted
        self._values = backend.xp.ones((batch, table.dim), np.float32)
        self._out = backend.xp.empty((batch, table.dim), np.float32)

    @property
    def grew(self) -> bool:
        return bool(self.table.capacity != self._capacity)

    def clear(self) -> None:
        self.table.clear()
        self._end = 0

    def keys(self, first: int, count: int) -> Array:
        return self.backend.xp.arange(first, first + count, dtype=np.uint64)

    def fill(self, load_factor: float) -> None:
        """Brings the table to a load factor with the keys 0, 1, 2, ..."""
        wanted = int(load_factor * self._capacity)
        for first in range(0, wanted, self.batch):
            keys = self.keys(first, min(self.batch, wanted - first))
            self.table.find_or_insert(keys, unique_keys=True)
        self._end = max(self._end, wanted)
        end = wanted
        # Not for ever: buckets that are full already may never take the last few.
        while wanted - self.table.size > 0.001 * self._capacity and end < 4 * wanted:
            count = min(self.batch, wanted - self.table.size)
            self.table.insert_or_assign(self.keys(end, count), self._values[:count])
            end += count
            if self.grew:
                return
        self._end = end

    def mixed(self) -> Array:
        """Returns the timed batch."""
        num_hits = min(self.batch - int(NEW_SHARE * self.batch), self._end)
        hits = self.keys(self._end - num_hits, num_hits)
        missing = ~self.keys(0, self.batch - num_hits)  # from 2^64 - 1 downwards
        return self.backend.xp.concatenate([hits, missing])

    def calls(self, load_factor: float) -> dict[str, Callable[[Array], Any] | None]:
        """Returns the operations by HKV's names; None where the table does not have one."""
        table, values, out = self.table, self._values, self._out
        # HKV exports as many slots as should hold one batch.
        num_slots = int(self.batch / load_factor * 0.995)
        evict = getattr(table, "insert_and_evict", None)

        def export_if(_: Array) -> Array:
            entries = table.export_chunk(0, num_slots)
            return table.store.read(entries.rows[entries.scores >= np.uint64(0)])

        return {
            "insert_or_assign": lambda keys: table.insert_or_assign(keys, values[: keys.size]),
            "find": lambda keys: table.lookup(
                keys, unique_keys=True, out=out[: keys.size], insert=False, missing="zeros"
            ),
            "find_or_insert": lambda keys: table.lookup(
                keys, unique_keys=True, out=out[: keys.size]
            ),
            "assign": lambda keys: table.assign(keys, values[: keys.size]),
            "find*": lambda keys: table.find(keys),
            "find_or_insert*": lambda keys: table.find_or_insert(keys, unique_keys=True),
            "insert_and_evict": evict and (lambda keys: evict(keys, values[: keys.size])),
            "export_batch": lambda _: table.store.read(table.export_chunk(0, num_slots).rows),
            "export_batch_if": export_if,
            "contains": lambda keys: table.contains(keys),
        }

    def best_of_two(self, name: str, load_factor: float) -> Timing | None:
        """Returns the faster of HKV's two calls; None if the table cannot hold as many keys."""
        self.clear()
        timings = []
        for _ in range(2):
            self.fill(load_factor)
            if self.grew:
                return None
            call = self.calls(load_factor)[name]
            assert call is not None
            for _ in range(9):
                call(self.keys(0, 1))
            timings.append(time_call(self.backend, call, self.mixed()))
        return min(timings, key=lambda timing: timing.host)


def hkv(backend: Backend, args: Any) -> None:
    """Runs HKV's workload."""
    for kind in args.tables:
        for dim in args.dims:
            for load in args.loads:
                # A new table: one that has grown would keep its size.
                table = empty_table(backend, kind, dim, args.capacity, args, key_type="uint64")
                filled = HkvTable(backend, table, min(args.batch, int(load * args.capacity)))
                for name in args.hkv_ops or filled.calls(load):
                    if filled.calls(load)[name] is None:
                        note(f"{kind} has no {name}. Left out.")
                        continue
                    timing = filled.best_of_two(name, load)
                    if timing is None:
                        note(f"{kind} cannot hold load factor {load}: it grew. Left out.")
                        break
                    print_case(backend, kind, table, load, name, filled.batch, timing)
    if args.hkv_source and backend.name == "cuda":
        for dim in args.dims:
            hkv_itself(backend, dim, args)


def hkv_itself(backend: Backend, dim: int, args: Any) -> None:
    """Runs HKV's own program on its workload."""
    program = hkv_peer.build(args.hkv_source, backend.xp.cuda.Device().compute_capability)
    backend.xp.get_default_memory_pool().free_all_blocks()  # of the tables before
    ops = args.hkv_ops or HKV_OPS
    size = (dim, args.capacity, args.batch)
    for (load, op), speed in hkv_peer.keys_per_second(program, *size, args.loads, ops).items():
        result(
            case=op,
            system="HierarchicalKV",
            backend=backend.name,
            dim=dim,
            load_factor=load,
            capacity=args.capacity,
            keys=args.batch,
            ms=1e3 * args.batch / speed,
            keys_per_second=speed,
        )


def operations(backend: Backend, args: Any) -> None:
    """Measures the operations on a backend."""
    for kind in args.tables:
        if MARK in args.ops:
            lookup_over_gather(backend, kind, args)
    ops = [op for op in args.ops if op != MARK]
    for kind in args.tables if ops else []:
        for dim in args.dims:
            for load in args.loads:
                bench = Bench(backend, kind, dim, args.capacity, load, args)
                if not bench.is_filled:
                    note(f"{kind} cannot hold load factor {load}: it grew. Left out.")
                    continue
                for op in ops:
                    measured = bench.measure(op, args.rounds)
                    if measured is None:
                        note(f"{kind} has no {op}. Left out.")
                    else:
                        print_case(backend, kind, bench.table, load, op, *measured)


def main(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--backends", nargs="+", default=["cpu", "cuda"])
    add("--tables", nargs="+", default=["hbm", "hybrid"])
    add("--dims", type=int, nargs="+", default=[8, 32, 64, 128])
    add("--loads", type=float, nargs="+", default=[0.5, 0.75, 1.0])
    add("--ops", nargs="+", choices=OPS, default=OPS, metavar="OP", help=", ".join(OPS))
    add("--capacity", type=int, help="slots, a power of two; 2^20, on a GPU 2^24")
    add("--batch", type=int, help="keys of a call; 2^16, on a GPU and of HKV's 2^20")
    add("--rounds", type=int, default=7, help="calls that count")
    add("--threads", type=int, help="of the CPU; else SOK_LITE_NUM_THREADS or all")
    add("--near-share", type=float, default=1.0, help="of a hybrid table's rows")
    options_help = "of a hybrid table, such as max_bucket_size=32"
    add("--table-options", nargs="*", default=[], metavar="NAME=VALUE", help=options_help)
    add("--mark-keys", type=int, default=1_000_000, help=f"of {MARK}")
    add("--mark-dim", type=int, default=64, help="of the same")
    add("--workload", choices=["hkv"])
    add("--hkv-ops", nargs="+", metavar="OP", help="of the hkv workload; else all")
    add("--hkv-source", type=Path, metavar="FOLDER", help="a checkout of HKV, to run it as well")
    args = parser.parse_args()
    if args.threads:
        os.environ["SOK_LITE_NUM_THREADS"] = str(args.threads)
    asked = argparse.Namespace(**vars(args))
    for backend in backends(args.backends):
        on_gpu = backend.name == "cuda"
        args.capacity = asked.capacity or 1 << (24 if on_gpu else 20)
        args.batch = asked.batch or 1 << (20 if on_gpu or args.workload else 16)
        if args.capacity & (args.capacity - 1):
            parser.error(f"--capacity must be a power of two. Received: {args.capacity}.")
        run = hkv if args.workload else operations
        run(backend, args)
