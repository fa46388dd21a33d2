"""The workloads of other systems' own benchmarks, done by our tables. operations.py runs them.

`hkv`: a table with uint64 keys is filled with the keys 0, 1, 2, ... by find_or_insert, --batch
(2^20) at a time, and with further ones by insert_or_assign until it is within 0.001 of the load
factor. The timed call has --batch keys: 60 % of them the last that were inserted, 40 % from the
largest uint64 downwards, which are missing. It is one call, timed by the host's clock to the end of
its kernels. For every operation and load factor the table is cleared, then fill and call are done
twice; the faster call counts (`best_of_two`). So at load factors below 1 the second call of an
operation that inserts finds all its keys.

That says little about new keys and much about a warm cache, so three further batches are measured
by medians of --rounds calls: `all_present`, the last keys that were inserted; `new`, 40 % of them
new ones every time; and `random`, keys from all over the table.

Operations that return rows where HKV copies values and row numbers where it returns addresses have
HKV's names: `find` and `find_or_insert` give rows, `find*` and `find_or_insert*` row numbers.

`dynamicemb`: one step of --lookups keys (1,048,570), dimension 128, all of them in the table. They
are those of 10 features with keys of their own in one table, each from a power law with exponent
1.05 over as many keys as make about --unique (350,280) of them distinct in all. Forward: unique,
lookup of the distinct keys, their rows gathered for every key. Backward: gradients summed over
equal keys, and Adam.
"""

import subprocess
from collections.abc import Callable
from typing import Any

import numpy as np

from scripts.bench.common.measuring import (
    Timing,
    median,
    note,
    num_threads,
    result,
    time_call,
    timed,
)
from scripts.bench.common.row_steps import apply_rule
from scripts.bench.lookup import zipf_positions
from scripts.bench.tables.peer import parse_hkv, peer_of
from sok_lite.backend import Array, Backend
from sok_lite.engine.dedup import unique
from sok_lite.engine.optimizers import Adam
from sok_lite.engine.segments import segment_sum

HIT_SHARE = 0.6
MakeTable = Callable[..., Any]
Call = Callable[[Array], Any]


class HkvTable:
    """A table as HKV's benchmark has it.

    Attributes:
      table: the table.
      grew: whether it had to, which HKV's does not.
    """

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

    def present(self) -> Array:
        """Returns a batch of the last keys that were inserted."""
        count = min(self.batch, self._end)
        return self.keys(self._end - count, count)

    def mixed(self, first_missing: int = 0) -> Array:
        """Returns the timed batch; `first_missing` counts from the largest uint64 downwards."""
        num_hits = min(int(HIT_SHARE * self.batch), self._end)
        hits = self.keys(self._end - num_hits, num_hits)
        missing = ~self.keys(first_missing, self.batch - num_hits)  # from 2^64 - 1 downwards
        return self.backend.xp.concatenate([hits, missing])

    def random(self, rng: np.random.Generator) -> Array:
        """Returns a batch of keys from all over the table."""
        return self.backend.from_host(rng.integers(0, self._end, self.batch).astype(np.uint64))

    def calls(self, load_factor: float) -> dict[str, Call | None]:
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


def hkv(backend: Backend, args: Any, make: MakeTable) -> dict[tuple[Any, ...], float]:
    """Runs HKV's workload.

    Returns:
      10^9 keys a second by (table, dim, load factor, operation), of the faster of two calls.
    """
    rates = {}
    for kind in args.tables:
        for dim in args.dims:
            for load in args.loads:
                # A new table: one that has grown would keep its size.
                table = make(backend, kind, dim, args.capacity, args, key_type="uint64")
                if table is None:
                    continue
                filled = HkvTable(backend, table, min(args.batch, int(load * args.capacity)))
                for name, call in filled.calls(load).items():
                    if args.hkv_ops and name not in args.hkv_ops:
                        continue
                    if call is None:
                        note(f"{kind} has no {name}. Left out.")
                        continue
                    timing = filled.best_of_two(name, load)
                    if timing is None:
                        note(f"{kind} cannot hold load factor {load}: it grew. Left out.")
                        break
                    rates[kind, dim, load, name] = filled.batch / timing.host / 1e9
                    _print(filled, kind, load, name, "best_of_two", timing)
                    if name in ("find", "find*", "find_or_insert", "find_or_insert*"):
                        _further_batches(filled, kind, load, name, args.rounds)
    return rates


def _further_batches(filled: HkvTable, kind: str, load: float, name: str, rounds: int) -> None:
    backend, table = filled.backend, filled.table
    missing = iter(range(1 << 32, 1 << 62, filled.batch))
    rng = np.random.default_rng(0)
    inserts = name.startswith("find_or_insert")
    for batch, prepare in (
        ("all_present", filled.present),
        ("new", lambda: filled.mixed(next(missing))),
        ("random", lambda: filled.random(rng)),
    ):
        filled.clear()
        filled.fill(load)
        call = filled.calls(load)[name]
        assert call is not None
        size = table.size

        def undo(keys: Array, size: int = size) -> None:
            # Keys that took the place of others stay; else the table would fill up, or grow.
            surplus = table.size - size
            if surplus > 0:
                table.erase(keys[keys.size - surplus :])

        undo_new = undo if inserts and batch == "new" else None
        timing = timed(backend, call, rounds, prepare, undo_new)
        _print(filled, kind, load, name, batch, timing)


def _print(filled: HkvTable, kind: str, load: float, name: str, batch: str, timing: Timing) -> None:
    result(
        case=name,
        workload="hkv",
        keys_are=batch,
        backend=filled.backend.name,
        threads=num_threads(filled.backend),
        table=kind,
        dim=filled.table.dim,
        load_factor=load,
        capacity=filled.table.capacity,
        keys_in_table=filled.table.size,
        keys=filled.batch,
        ms=1e3 * timing.host,
        device_ms=None if timing.device is None else 1e3 * timing.device,
        keys_per_second=filled.batch / timing.host,
    )


def hkv_with_peer(backend: Backend, args: Any, make: MakeTable) -> None:
    """Runs HKV's benchmark program and its workload on our tables in turns and prints ratios."""
    theirs: dict[tuple[Any, ...], list[float]] = {}
    ours: dict[tuple[Any, ...], list[float]] = {}
    for turn in range(args.turns):
        done = subprocess.run(args.peer_bin, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"{args.peer_bin} ended with {done.returncode}: {done.stderr[-2000:]}")
        for case in parse_hkv(done.stdout):
            theirs.setdefault(case.key, []).append(case.giga_keys_per_second)
        if turn == 0 and not theirs:
            raise SystemExit(f"{args.peer_bin} printed no table:\n{done.stdout[:2000]}")
        for key, rate in hkv(backend, args, make).items():
            ours.setdefault(key, []).append(rate)
    for (kind, dim, load, name), rates in ours.items():
        found = peer_of(theirs, dim, args.capacity, load, name)
        if found is None:
            note(f"{args.peer_bin} has no {name} for dim {dim}, {args.capacity} slots, {load}.")
            continue
        # The best of all turns: HKV's own figure is a best, too.
        mine, other = max(rates), max(theirs[found])
        result(
            case="ratio",
            workload="hkv",
            op=name,
            backend=backend.name,
            table=kind,
            dim=dim,
            load_factor=load,
            capacity=args.capacity,
            ours_giga_keys_per_second=mine,
            peer_giga_keys_per_second=other,
            ratio=mine / other,
        )


def keys_for_unique(count: int, wanted: int, exponent: float) -> int:
    """Returns how many keys a power law needs for about `wanted` distinct ones in `count`."""

    def expected(num_keys: int) -> float:
        weights = np.arange(1, num_keys + 1, dtype=np.float64) ** -exponent
        return float(-np.expm1(-count * weights / weights.sum()).sum())

    low = high = wanted
    while expected(high) < wanted:
        low, high = high, 2 * high
        if high > 1 << 26:
            raise SystemExit(f"{count:,} draws have at most {expected(high):,.0f} distinct keys.")
    while high - low > max(1, wanted // 1000):
        middle = (low + high) // 2
        low, high = (middle, high) if expected(middle) < wanted else (low, middle)
    return high


def _step(
    backend: Backend, table: Any, keys: Array, out: Array, grads: Array, number: int
) -> tuple[Timing, Timing]:
    """Returns the times of the forward and the backward half of one step."""

    def forward() -> None:
        distinct, inverse = unique(backend, keys)
        got = table.lookup(distinct, unique_keys=True)
        backend.xp.take(got.values, inverse, axis=0, out=out)
        trail.extend((int(distinct.size), inverse, got.rows))

    def backward() -> None:
        num_unique, inverse, rows = trail
        summed = segment_sum(backend, grads, inverse, num_unique)
        apply_rule(table, Adam(), rows, summed, 1e-3, number)

    trail: list[Any] = []
    return time_call(backend, forward), time_call(backend, backward)


def dynamicemb(backend: Backend, args: Any, make: MakeTable) -> None:
    """Runs the step of dynamicemb's benchmark."""
    exponent, dim, features = 1.05, 128, 10
    each = args.lookups // features
    n = each * features
    num_keys = keys_for_unique(each, args.unique // features, exponent)
    rng = np.random.default_rng(0)
    batches = []
    for _ in range(4):  # other keys in every step: the rows of one are not in a cache for the next
        parts = [
            f * num_keys + zipf_positions(rng, num_keys, exponent, each) for f in range(features)
        ]
        batches.append(backend.from_host(np.concatenate(parts)))
    for kind in args.tables:
        # Room for the keys of all batches and as many again.
        capacity = 1 << (2 * len(batches) * args.unique - 1).bit_length()
        table = make(backend, kind, dim, capacity, args)
        if table is None:
            continue
        num_unique = []
        for keys in batches:
            distinct = unique(backend, keys).unique_keys
            num_unique.append(int(distinct.size))
            table.find_or_insert(distinct, unique_keys=True)
        dense = backend.xp.ones((n, dim), np.float32), backend.xp.ones((n, dim), np.float32)
        steps = [
            _step(backend, table, batches[number % len(batches)], *dense, number + 1)
            for number in range(len(batches) + args.rounds)
        ]
        # The first turn touches each row's state for the first time.
        forward, backward = zip(*steps[len(batches) :], strict=True)
        times = median(forward), median(backward)
        result(
            case="step",
            workload="dynamicemb",
            backend=backend.name,
            threads=num_threads(backend),
            table=kind,
            dim=dim,
            lookups=n,
            unique=round(sum(num_unique) / len(num_unique)),
            keys_of_each_feature=num_keys,
            keys_in_table=table.size,
            forward_ms=1e3 * times[0].host,
            backward_ms=1e3 * times[1].host,
            forward_device_ms=None if times[0].device is None else 1e3 * times[0].device,
            backward_device_ms=None if times[1].device is None else 1e3 * times[1].device,
            step_ms=1e3 * (times[0].host + times[1].host),
            lookups_per_second=n / (times[0].host + times[1].host),
        )
