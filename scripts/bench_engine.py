"""Times the engine's operations without TensorFlow, on any backend that this machine has.

One line `RESULT {json}` per case: the median milliseconds of a call and millions of keys a second.
A plain copy of the same rows by known row numbers (`read`) is timed beside the lookups: what a
lookup takes beyond it is the price of the hash table.

Example:
  python3 scripts/bench_engine.py --backends cpu cuda --dim 64
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sok_lite.backend import cuda_unavailable, get_backend
from sok_lite.engine.combine import combine, combine_grad
from sok_lite.engine.initializer import make_initializer
from sok_lite.engine.table import make_table
from sok_lite.engine.unique import group, unique
from sok_lite.engine.update_rules import SGD, Adagrad, Adam, apply_rule


def timed(backend, call, rounds):
    """Returns the median seconds of a call, its kernels' end included."""
    times = []
    for number in range(rounds + 2):
        backend.synchronize()
        start = time.perf_counter()
        call()
        backend.synchronize()
        if number >= 2:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def cases(backend, args):
    """Yields (name, keys of one call, rounds, function)."""
    rng = np.random.default_rng(0)
    all_keys = rng.permutation(np.unique(rng.integers(0, 2**62, args.keys + args.keys // 50)))
    all_keys = all_keys[: args.keys]

    def new_table():
        return make_table(
            "hbm", backend, args.dim, initializer=make_initializer("random", args.dim)
        )

    table = new_table()
    for part in np.array_split(all_keys, 16):
        table.find_or_insert(backend.from_host(part))
    batch = backend.from_host(all_keys[rng.integers(0, args.keys, args.batch)])
    rows = table.find(batch)
    out = backend.xp.empty((args.batch, args.dim), np.float32)
    yield "read", args.batch, args.rounds, lambda: table.store.read(rows, out=out)
    yield "find", args.batch, args.rounds, lambda: table.find(batch)
    yield "lookup", args.batch, args.rounds, lambda: table.lookup(batch, out=out)
    yield "unique", args.batch, args.rounds, lambda: unique(backend, batch)

    distinct, inverse = unique(backend, batch)
    num_unique = int(distinct.size)
    yield "group", args.batch, args.rounds, lambda: group(backend, inverse, num_unique)
    source = table.lookup(distinct).values
    splits = backend.from_host(np.arange(0, args.batch + 1, 4, dtype=np.int64))
    pooled = combine(backend, source, inverse, splits, None, "mean")
    yield (
        "combine_mean_of_4",
        args.batch,
        args.rounds,
        lambda: combine(backend, source, inverse, splits, None, "mean"),
    )
    yield (
        "combine_grad",
        args.batch,
        args.rounds,
        lambda: combine_grad(backend, pooled, inverse, splits, None, "mean", num_unique),
    )
    distinct_rows = table.find(distinct)
    grads = backend.from_host(rng.random((num_unique, args.dim), np.float32))
    for rule in (SGD(), Adagrad(), Adam()):
        fresh = new_table()
        own_rows = fresh.find_or_insert(distinct)
        yield (
            f"update_{type(rule).__name__.lower()}",
            int(distinct_rows.size),
            args.rounds,
            lambda fresh=fresh, rule=rule, own_rows=own_rows: apply_rule(
                fresh, rule, own_rows, grads, 0.01, 1
            ),
        )

    parts = [backend.from_host(part) for part in np.array_split(all_keys, 16)]

    def insert():
        empty = new_table()
        for part in parts:
            empty.find_or_insert(part)

    yield "insert_new_growing", args.keys, 3, insert


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backends", nargs="*", default=["cpu", "cuda"])
    parser.add_argument("--keys", type=int, default=1_000_000, help="keys in the table")
    parser.add_argument("--batch", type=int, default=65_536, help="keys of one call")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=21)
    args = parser.parse_args()
    for name in args.backends:
        if name == "cuda" and cuda_unavailable():
            print(f"cuda is not measured: {cuda_unavailable()}")
            continue
        backend = get_backend(name)
        for case, num_keys, rounds, call in cases(backend, args):
            seconds = timed(backend, call, rounds)
            result = {
                "backend": name,
                "case": case,
                "keys_in_table": args.keys,
                "keys_per_call": num_keys,
                "dim": args.dim,
                "median_ms": round(1e3 * seconds, 3),
                "million_keys_per_second": round(num_keys / seconds / 1e6, 1),
            }
            print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
