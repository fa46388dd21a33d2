"""Times lookups and training steps of one table through TensorFlow: ours, a dense tf.Variable, and
TFRA.

Every system runs in a process of its own and they are timed in turns, one call each, so that
whatever else the machine does meets all of them alike. Each case ends with one line
`RESULT {json}` that holds the median milliseconds of each system and ours against the others. The
last words are a table of the medians.

Cases: lookup of keys that are all present, a training step (lookup, gradient, Adam on the touched
rows), both eager and in a tf.function, with uniform and Zipf(1.05) keys; and the insertion of
1,000,000 new keys.

TFRA needs TensorFlow 2.16 and its own environment: scripts/bench/peers.sh makes it. Without it the
other two are timed.

Example:
  bash scripts/setup.sh && bash scripts/bench/peers.sh
  .venv/bin/python -m scripts.bench lookup
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence

import numpy as np

from scripts.bench.common.systems import SYSTEMS, System
from scripts.bench.common.turns import (
    Contender,
    Worker,
    add_peer_option,
    add_worker_options,
    peer_python,
    print_machine,
    print_medians,
    serve,
    started,
    statistics_of,
    time_in_turns,
)

CASES = [
    f"{work}-{mode}-{keys}"
    for work in ("lookup", "train")
    for mode in ("eager", "function")
    for keys in ("uniform", "zipf")
] + ["insert"]
NUM_BATCHES = 8


# ----------------------------------------------------------------- the work


def make_keys(num_keys: int, seed: int = 0) -> np.ndarray:
    """Distinct random keys of 62 bits, as hashed features are."""
    rng = np.random.default_rng(seed)
    keys = np.unique(rng.integers(0, 2**62, num_keys + num_keys // 100, dtype=np.int64))
    return rng.permutation(keys)[:num_keys]


def zipf_positions(
    rng: np.random.Generator, num_keys: int, exponent: float, shape: int | tuple[int, ...]
) -> np.ndarray:
    """Positions of keys, of which the k-th comes with a chance in proportion to k^-exponent."""
    edges = np.cumsum(np.arange(1, num_keys + 1) ** -exponent)
    return np.searchsorted(edges / edges[-1], rng.random(shape)).clip(0, num_keys - 1)


def make_positions(args: argparse.Namespace, distribution: str) -> np.ndarray:
    """Positions of keys, (NUM_BATCHES, batch): with replacement, as a click log has them."""
    rng = np.random.default_rng(1)
    if distribution == "uniform":
        return rng.integers(0, args.keys, (NUM_BATCHES, args.batch))
    return zipf_positions(rng, args.keys, 1.05, (NUM_BATCHES, args.batch))


def timed_calls(system: System, args: argparse.Namespace, case: str) -> Callable[[], float]:
    """Returns a function that does one call and returns its seconds."""
    tf = system.tf
    keys = make_keys(args.keys)
    if case == "insert":
        parts = [tf.constant(part) for part in np.array_split(keys, 16)]

        def insert() -> float:
            table = system.new_table()
            start = time.perf_counter()
            for part in parts:
                system.insert(table, part)
            return time.perf_counter() - start

        return insert

    work, mode, distribution = case.split("-")
    table = system.filled_table(keys)
    batches = [
        tf.constant(system.ids(keys, positions)) for positions in make_positions(args, distribution)
    ]
    weights = tf.random.stateless_uniform([args.batch, args.dim], seed=[1, 2])
    optimizer = system.adam()

    def step(ids):
        if work == "lookup":
            return system.rows(table, ids, False)
        return system.train(optimizer, [table], lambda: [system.rows(table, ids, True)], weights)

    run = tf.function(step) if mode == "function" else step

    def call() -> float:
        batches.append(batches.pop(0))
        start = time.perf_counter()
        result = run(batches[-1])
        # Reads one element, so that whatever was only enqueued is done.
        float(tf.reshape(result, [-1])[0])
        return time.perf_counter() - start

    return call


# ----------------------------------------------------------------- the process in front


def measure(args: argparse.Namespace, case: str, workers: Sequence[Worker]) -> dict:
    """Times one case in turns and returns its RESULT."""
    rounds = 3 if case == "insert" else args.rounds
    times = time_in_turns(workers, case, rounds, warm_ups=1 if case == "insert" else 3)
    fields = {
        "case": case,
        "keys": args.keys,
        "batch": args.keys if case == "insert" else args.batch,
        "dim": args.dim,
        "rounds": rounds,
        **statistics_of(times),
    }
    medians = fields["median_ms"]
    for threads in args.threads:
        ours = medians[Contender("sok_lite", threads).name]
        for system in SYSTEMS:
            name = Contender(system, threads).name
            if system != "sok_lite" and name in medians:
                # Above 1: ours is so many times faster.
                over = name.replace(system, f"{system}_over_sok_lite")
                fields[over] = round(medians[name] / ours, 2)
    return fields


def main(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--keys", type=int, default=1_000_000, help="keys in the table")
    add("--batch", type=int, default=65_536, help="ids of one call")
    add("--dim", type=int, default=64)
    add("--rounds", type=int, default=21, help="timed calls of each system")
    add("--cases", nargs="*", default=CASES, choices=CASES)
    add("--threads", type=int, nargs="+", default=[None], help="of a process (as it chooses)")
    add_peer_option(parser)
    add_worker_options(parser, SYSTEMS)
    args = parser.parse_args()
    if args.worker:
        return serve(
            args.address,
            lambda: SYSTEMS[args.worker](args.dim, args.threads[0]),
            lambda system, case: timed_calls(system, args, case),
        )

    peer = peer_python(args.peers)
    print_machine()
    contenders = []
    for threads in args.threads:
        contenders += [Contender("sok_lite", threads), Contender("dense", threads)]
        contenders += [Contender("tfra", threads, python=peer)] if peer else []
    options = [f"--{name}={getattr(args, name)}" for name in ("keys", "batch", "dim")]
    results = []
    for case in args.cases:
        able = [each for each in contenders if not (case == "insert" and each.system == "dense")]
        # New processes for each case: a table of a million rows is not left behind for the next.
        with started(able, "lookup", options) as workers:
            results.append(measure(args, case, workers))
        print("RESULT " + json.dumps(results[-1]), flush=True)
    print_medians(results)
