"""Times what the engine does around its tables, on any backend that this machine has.

Distinct keys, sums over groups of rows and their gradients, update rules; without TensorFlow. The
operations of the tables themselves are in bench_tables.py. One line `RESULT {json}` a case.

Example:
  python3 scripts/bench_engine.py --backends cpu cuda --dim 64
"""

import argparse

import numpy as np
from bench_common import backends, num_threads, result, timed

from sok_lite.engine.initializer_spec import make_initializer
from sok_lite.engine.optimizers import SGD, Adagrad, Adam
from sok_lite.engine.optimizers.rule import apply_rule
from sok_lite.engine.pooling import combine, combine_grad
from sok_lite.engine.segments import group, unique
from sok_lite.engine.table import make_table


def cases(backend, args):
    """Yields (name, keys of one call, function)."""
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
    yield "unique", args.batch, lambda: unique(backend, batch)

    distinct, inverse = unique(backend, batch)
    num_unique = int(distinct.size)
    yield "group", args.batch, lambda: group(backend, inverse, (0, args.batch), (0, num_unique))
    source = table.lookup(distinct).values
    splits = backend.from_host(np.arange(0, args.batch + 1, 4, dtype=np.int64))
    pooled = combine(backend, source, inverse, splits, None, "mean")
    yield (
        "combine_mean_of_4",
        args.batch,
        lambda: combine(backend, source, inverse, splits, None, "mean"),
    )
    yield (
        "combine_grad",
        args.batch,
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
            lambda fresh=fresh, rule=rule, own_rows=own_rows: apply_rule(
                fresh, rule, own_rows, grads, 0.01, 1
            ),
        )


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
    for backend in backends(args.backends):
        for case, num_keys, call in cases(backend, args):
            seconds = timed(backend, call, args.rounds).host
            result(
                backend=backend.name,
                threads=num_threads(backend),
                case=case,
                keys_in_table=args.keys,
                keys=num_keys,
                dim=args.dim,
                ms=1e3 * seconds,
                keys_per_second=num_keys / seconds,
            )


if __name__ == "__main__":
    main()
