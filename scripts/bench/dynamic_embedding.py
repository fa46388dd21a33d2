"""Times the same lines of a program with TFRA's dynamic_embedding and with sok_lite's.

Each package runs in a process of its own and they take turns, one call each, so that whatever else
the machine does meets both alike. Each case ends with one line `RESULT {json}`: for each package
the lowest of the medians of several runs, in milliseconds. The last words are a table of them.

Cases: `lookup`, `upsert` and `accum` of keys that are all present, and `train`: a unique lookup
through a shadow variable, its gradient, and Adam; each eager and in a tf.function. `uniform` and
`zipf` (exponent 1.05) are keys of one variable of 1,000,000 keys in batches of 65,536 ids, rows of
64; `many` are 26 variables of 20,000 keys, 1,024 ids of each (Zipf, 1.3), rows of 16.

TFRA needs an environment of its own: scripts/bench/peers.sh makes it. Without it ours is timed.

Example:
  .venv/bin/python -m scripts.bench dynamic_embedding --runs 3
"""

import argparse
import importlib
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

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
from scripts.bench.lookup import NUM_BATCHES, make_keys, zipf_positions

WORKS = ("lookup", "upsert", "accum", "train")
CASES = [
    f"{work}-{mode}-{keys}"
    for keys in ("uniform", "zipf", "many")
    for work in WORKS
    for mode in ("eager", "function")
]
SYSTEMS = ("sok_lite", "tfra")
FILL_PARTS = 20  # calls that fill a variable, so that no single one is large


# ----------------------------------------------------------------- the work


class Size:
    """How much there is to do.

    Attributes:
      tables: variables.
      keys: in each.
      batch: ids of each in a call.
      dim: elements of a row.
    """

    def __init__(self, args: argparse.Namespace, is_many: bool) -> None:
        self.tables = args.tables if is_many else 1
        self.keys = args.many_keys if is_many else args.keys
        self.batch = args.many_batch if is_many else args.batch
        self.dim = args.many_dim if is_many else args.dim

    def positions(self, rng: np.random.Generator, distribution: str) -> np.ndarray:
        """Positions of the keys of a batch, with replacement, as a click log has them."""
        if distribution == "uniform":
            return rng.integers(0, self.keys, self.batch)
        return zipf_positions(rng, self.keys, 1.05 if distribution == "zipf" else 1.3, self.batch)


class Program:
    """Filled variables and the calls that are timed: the same lines for both packages."""

    def __init__(self, de: Any, tf: Any, size: Size) -> None:
        """Makes and fills the variables.

        Args:
          de: the package `dynamic_embedding`.
          tf: TensorFlow.
          size: how many variables, of how many keys.
        """
        self.de, self.tf, self.size = de, tf, size
        self.keys = [make_keys(size.keys, seed=number) for number in range(size.tables)]
        self.tables, self.shadows = [], []
        for number, keys in enumerate(self.keys):
            table = de.get_variable(f"table_{number}", dim=size.dim, initializer=0.0)
            for part in np.array_split(keys, FILL_PARTS):
                table.upsert(tf.constant(part), tf.zeros([len(part), size.dim]))
            self.tables.append(table)
            self.shadows.append(de.shadow_ops.ShadowVariable(table, name=f"shadow_{number}"))
        self.rows = tf.random.stateless_uniform([size.batch, size.dim], seed=[1, 2])
        self.are_there = tf.ones([size.batch], tf.bool)
        self.optimizer = de.DynamicEmbeddingOptimizer(tf.keras.optimizers.Adam(1e-3))

    def lookup(self, *ids: Any) -> tuple:
        """Reads rows that are there."""
        rows = [table.lookup(some) for table, some in zip(self.tables, ids, strict=True)]
        return rows, rows[-1][-1, -1]

    def upsert(self, *ids: Any) -> tuple:
        """Overwrites rows that are there."""
        for table, some in zip(self.tables, ids, strict=True):
            table.upsert(some, self.rows)
        return (self.tf.constant(0.0),)

    def accum(self, *ids: Any) -> tuple:
        """Adds to rows that are there."""
        for table, some in zip(self.tables, ids, strict=True):
            table.accum(some, self.rows, self.rows, self.are_there)
        return (self.tf.constant(0.0),)

    def train(self, *ids: Any) -> tuple:
        """Takes one step."""
        tf, look_up = self.tf, self.de.shadow_ops.embedding_lookup_unique
        with tf.GradientTape() as tape:
            losses = [
                tf.reduce_sum(look_up(shadow, some, self.size.dim, True) * self.rows)
                for shadow, some in zip(self.shadows, ids, strict=True)
            ]
            loss = tf.add_n(losses)
        grads = tape.gradient(loss, self.shadows)
        self.optimizer.apply_gradients(zip(grads, self.shadows, strict=True))
        return (loss,)

    def timed_calls(self, work: str, mode: str, distribution: str) -> Callable[[], float]:
        """Returns a function that does one call and returns its seconds."""
        tf, rng = self.tf, np.random.default_rng(1)
        batches = [
            [tf.constant(keys[self.size.positions(rng, distribution)]) for keys in self.keys]
            for _ in range(NUM_BATCHES)
        ]
        run = getattr(self, work)
        if mode == "function":
            run = tf.function(run)

        def call() -> float:
            batches.append(batches.pop(0))
            start = time.perf_counter()
            *_, number = run(*batches[-1])
            number.numpy()  # whatever was only enqueued is done
            return time.perf_counter() - start

        return call


def timed_calls(system: str, args: argparse.Namespace, case: str) -> Callable[[], float]:
    """Returns what `Program.timed_calls` does, in the process of one package."""
    import tensorflow as tf

    package = "tensorflow_recommenders_addons" if system == "tfra" else "sok_lite"
    de = importlib.import_module(f"{package}.dynamic_embedding")
    work, mode, keys = case.split("-")
    return Program(de, tf, Size(args, is_many=keys == "many")).timed_calls(work, mode, keys)


# ----------------------------------------------------------------- the process in front


def measure(args: argparse.Namespace, case: str, workers: Sequence[Worker]) -> dict:
    """Times one case in turns, once; returns the statistics of its calls."""
    return statistics_of(time_in_turns(workers, case, args.rounds, warm_ups=3))


def lowest(runs: Sequence[dict]) -> dict:
    """Returns for each statistic and each package the lowest of several runs."""
    return {
        field: {name: min(run[field][name] for run in runs) for name in runs[0][field]}
        for field in runs[0]
    }


def main(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--cases", nargs="*", default=CASES, choices=CASES)
    add("--systems", nargs="*", default=SYSTEMS, choices=SYSTEMS)
    add("--runs", type=int, default=1, help="of each case, in new processes (%(default)s)")
    add("--rounds", type=int, default=21, help="timed calls in a run (%(default)s)")
    add("--keys", type=int, default=1_000_000, help="of one variable (%(default)s)")
    add("--batch", type=int, default=65_536, help="ids of one variable (%(default)s)")
    add("--dim", type=int, default=64, help="of one variable (%(default)s)")
    add("--tables", type=int, default=26, help="many variables (%(default)s)")
    add("--many-keys", type=int, default=20_000, help="of each of many (%(default)s)")
    add("--many-batch", type=int, default=1_024, help="ids of each of many (%(default)s)")
    add("--many-dim", type=int, default=16, help="of each of many (%(default)s)")
    add("--threads", type=int, help="of a process (as it chooses)")
    add_peer_option(parser)
    add_worker_options(parser, SYSTEMS)
    args = parser.parse_args()
    if args.worker:
        return serve(
            args.address, lambda: args.worker, lambda name, case: timed_calls(name, args, case)
        )

    ours, tfra = (Contender(name, args.threads) for name in SYSTEMS)
    contenders = [ours] if "sok_lite" in args.systems else []
    peer = peer_python(args.peers) if "tfra" in args.systems else None
    contenders += [tfra._replace(python=peer)] if peer else []
    print_machine()
    names = ("keys", "batch", "dim", "tables", "many-keys", "many-batch", "many-dim")
    options = [f"--{name}={getattr(args, name.replace('-', '_'))}" for name in names]
    results = []
    for case in args.cases:
        runs = []
        for _ in range(args.runs):
            with started(contenders, "dynamic_embedding", options) as workers:
                runs.append(measure(args, case, workers))
        size = vars(Size(args, is_many=case.endswith("many")))
        results.append({"case": case, **size, "rounds": args.rounds, **lowest(runs)})
        print("RESULT " + json.dumps(results[-1]), flush=True)
    print_medians(results)
