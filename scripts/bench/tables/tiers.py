"""Measures how well the hybrid table keeps hot rows near, and what that costs.

Engine level, no TensorFlow. One line `RESULT {json}` per case:

  zipf     Zipf(alpha) keys, the rows near at first being the coldest. `share` is the share of
           lookups, counted before keys are deduplicated, whose row was near, once warm; `best` is
           what the best fixed choice of near rows gives, computed exactly.
  shift    the same table after all ranks have changed places.
  uniform  equally likely keys: seconds of the same lookups with promotion and without, in turn.

`batches_to_95` counts batches until ten in a row have on average 0.95 of `best`.

Example:
  python -m scripts.bench tables tiers --backends cpu --batches 600
"""

import statistics
import time
from functools import partial

import numpy as np

from scripts.bench.common.measuring import backends, result
from sok_lite.engine.dedup import unique
from sok_lite.engine.initializer_spec import make_initializer
from sok_lite.engine.table import make_table

_TARGET = 0.95


def zipf_shares(num_keys, alpha):
    """Returns the probability of every rank, the largest first."""
    weights = np.arange(1, num_keys + 1, dtype=np.float64) ** -alpha
    return weights / weights.sum()


def new_table(backend, args, far_path=None):
    """Returns a hybrid table of keys 0 to args.keys - 1, inserted in that order."""
    row_bytes = args.dim * 4
    table = make_table(
        "hybrid",
        backend,
        args.dim,
        initializer=make_initializer("random", args.dim),
        init_capacity=1 << (2 * args.keys).bit_length(),
        max_hbm_for_vectors=args.near * args.keys * row_bytes / 2**30,
        far_path=far_path,
    )
    for part in np.array_split(np.arange(args.keys), max(1, args.keys // args.batch)):
        table.find_or_insert(backend.from_host(part), unique_keys=True)
    return table


def near_share(backend, table, batch):
    """Looks a batch up, each key once, and returns the share of its keys whose row was near."""
    distinct, inverse = unique(backend, backend.from_host(batch))
    rows = table.lookup(distinct, unique_keys=True).rows
    return float((rows < np.uint32(table.store.near_rows)).astype(np.float32)[inverse].mean())


def batches_to(shares, goal):
    """Returns how many batches came before ten in a row with that mean share, or None."""
    means = np.convolve(shares, np.full(10, 0.1), "valid")
    reached = np.flatnonzero(means >= goal)
    return int(reached[0]) if reached.size else None


def run_zipf(backend, args, report):
    """Warms a table, then changes which keys are hot."""
    rng = np.random.default_rng(args.seed)
    likely = zipf_shares(args.keys, args.alpha)
    bounds = np.cumsum(likely)
    best = float(likely[: int(args.near * args.keys)].sum())
    table = new_table(backend, args, args.far_path)
    # At first the hottest key is the one inserted last.
    key_of_rank = np.arange(args.keys)[::-1]
    for case in ("zipf", "shift"):
        moved, passes = table.tiers.num_moved, table.tiers.num_passes
        shares = []
        for _ in range(args.batches):
            ranks = np.searchsorted(bounds, rng.random(args.batch) * bounds[-1], side="right")
            shares.append(near_share(backend, table, key_of_rank[np.minimum(ranks, args.keys - 1)]))
        warm = statistics.fmean(shares[-args.batches // 4 :])
        report(
            case=case,
            near_rows=table.store.near_rows,
            share_at_first=round(shares[0], 4),
            share=round(warm, 4),
            best=round(best, 4),
            share_of_best=round(warm / best, 4),
            batches=args.batches,
            batches_to_95=batches_to(shares, _TARGET * best),
            rows_moved=table.tiers.num_moved - moved,
            passes=table.tiers.num_passes - passes,
        )
        key_of_rank = rng.permutation(args.keys)


def run_uniform(backend, args, report):
    """Times the same lookups by two tables in turn, of which one never promotes a row."""
    rng = np.random.default_rng(args.seed)
    tables = {"promoting": new_table(backend, args, args.far_path)}
    tables["fixed"] = new_table(backend, args, args.far_path)
    tables["fixed"].tiers.touched = lambda rows: None
    out = backend.xp.empty((args.batch, args.dim), np.float32)
    seconds: dict[str, list[float]] = {name: [] for name in tables}
    looked_up = 0
    for number in range(args.batches):
        drawn = rng.integers(0, args.keys, args.batch)
        keys, _ = unique(backend, backend.from_host(drawn))
        looked_up += int(keys.size)
        order = list(tables) if number % 2 else list(tables)[::-1]
        for name in order:
            backend.synchronize()
            start = time.perf_counter()
            tables[name].lookup(keys, unique_keys=True, out=out[: keys.size])
            backend.synchronize()
            seconds[name].append(time.perf_counter() - start)
    # Passes are rare and long, so that only means count them; the median over ten stretches of
    # time, each with several passes, is less moved by what else the machine does.
    stretches = [np.array_split(np.array(seconds[name]), 10) for name in tables]
    ratios = [promoting.sum() / fixed.sum() for promoting, fixed in zip(*stretches, strict=True)]
    report(
        case="uniform",
        ms_promoting=round(1e3 * statistics.fmean(seconds["promoting"]), 3),
        ms_fixed=round(1e3 * statistics.fmean(seconds["fixed"]), 3),
        cost=round(sum(seconds["promoting"]) / sum(seconds["fixed"]) - 1, 4),
        cost_median_of_ten=round(statistics.median(ratios) - 1, 4),
        batches=args.batches,
        rows_moved_per_row_looked_up=round(tables["promoting"].tiers.num_moved / looked_up, 5),
        passes=tables["promoting"].tiers.num_passes,
    )


def main(parser):
    """Runs the cases that were asked for."""
    parser.add_argument("--backends", nargs="+", default=["cpu"])
    parser.add_argument("--cases", nargs="+", default=["zipf", "uniform"])
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--near", type=float, default=0.1, help="share of the rows that is near")
    parser.add_argument("--batch", type=int, default=65_536)
    parser.add_argument("--batches", type=int, default=400)
    parser.add_argument("--alpha", type=float, default=1.05)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--far-path", help="a folder for far rows in files (cpu)")
    args = parser.parse_args()
    for backend in backends(args.backends):
        setting = {
            "backend": backend.name,
            "keys": args.keys,
            "near": args.near,
            "batch": args.batch,
        }
        setting |= {"dim": args.dim, "alpha": args.alpha, "far_path": args.far_path is not None}
        for case, run in (("zipf", run_zipf), ("uniform", run_uniform)):
            if case in args.cases:
                run(backend, args, partial(result, **setting))
