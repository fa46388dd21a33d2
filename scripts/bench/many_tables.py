"""Times lookups and training steps of many tables at once: ours, dense variables, and TFRA.

Every system runs in a process of its own, with one thread and with two, and all take turns, so that
whatever else the machine does meets all of them alike. A turn is several calls, of which the first
does not count. Ours runs also on several ranks under horovodrun, one thread each, which share the
batch. Each case ends with one line `RESULT {json}`; the last words are a table of the medians.

Cases: `lookup-1024` is a lookup of 1,024 rows of one id a table (`sok_lite.lookup_sparse`),
`lookup-1024x10` of 1,024 rows of 1 to 19 ids and their means; `train-...` a training step: lookup,
gradient, and Adam (SGD for the dense variables, which is less work); `new-1024` a lookup of which
ten ids a table are new and get a row (the dense variables have all). All in a tf.function, with
keys that are else all present and Zipf(1.3), another sequence for each table.

Examples:
  python -m scripts.bench many_tables
  python -m scripts.bench many_tables --before ../older_checkout --cases lookup-1024
"""

import argparse
import functools
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from scripts.bench.common.systems import SYSTEMS, System
from scripts.bench.common.turns import (
    Contender,
    Worker,
    add_peer_option,
    add_worker_options,
    find_horovodrun,
    peer_python,
    print_machine,
    print_medians,
    serve,
    started,
    statistics_of,
    time_in_turns,
)
from scripts.bench.lookup import NUM_BATCHES, make_keys, zipf_positions

CASES = [f"{work}-{size}" for work in ("lookup", "train") for size in ("1024", "8192", "1024x10")]
CASES.append("new-1024")
NUM_NEW = 10
EXPONENT = 1.3


# ----------------------------------------------------------------- the work


def make_lengths(rng: np.random.Generator, num_rows: int, mean: int) -> np.ndarray:
    """Ids of each row: from 1 to 2 * mean - 1, and `mean` of them on average."""
    half = rng.integers(1, 2 * mean, (num_rows + 1) // 2)
    return np.concatenate([half, 2 * mean - half])[:num_rows]


class ManyTables:
    """Filled tables of a system, and the calls that are timed."""

    def __init__(self, system: System, args: argparse.Namespace) -> None:
        self.system, self.args = system, args
        self.keys = [make_keys(args.keys, seed=table) for table in range(args.tables)]
        self.tables = [system.filled_table(keys) for keys in self.keys]
        self.optimizer = system.many_tables_optimizer()  # one: each has states of its own
        self._functions: dict[tuple[str, int], Callable] = {}
        self._next_new = 1 << 40

    def timed_calls(self, case: str) -> Callable[[], float]:
        """Returns a function that does one call and returns its seconds."""
        work, _, size = case.partition("-")
        num_rows, hot = (int(number) for number in [*size.split("x"), "1"][:2])
        run = self._function(work, hot)
        batches = self._batches(num_rows, hot)

        def call() -> float:
            batches.append(batches.pop(0))
            ids, partitions = batches[-1]
            if work == "new" and self.system.grows:
                ids = self._with_new(ids)
            start = time.perf_counter()
            *_, number = run(ids, partitions)
            number.numpy()  # whatever was only enqueued is done
            return time.perf_counter() - start

        return call

    def _batches(self, num_rows: int, hot: int) -> list:
        """This rank's part of NUM_BATCHES batches: (ids, partitions), each a list over tables."""
        system, constant = self.system, self.system.tf.constant
        rng = np.random.default_rng(1)
        per_rank = num_rows // system.num_ranks
        batches = []
        for _ in range(NUM_BATCHES):
            ids, partitions = [], []
            for keys in self.keys:
                lengths = make_lengths(rng, num_rows, hot)
                ends = np.concatenate([[0], np.cumsum(lengths)])
                positions = zipf_positions(rng, self.args.keys, EXPONENT, int(ends[-1]))
                mine = ends[system.rank * per_rank : (system.rank + 1) * per_rank + 1]
                ids.append(constant(system.ids(keys, positions[mine[0] : mine[-1]])))
                partitions.append(constant(system.partition(mine - mine[0])))
            batches.append((ids, partitions))
        return batches

    def _with_new(self, ids: list) -> list:
        tf, first = self.system.tf, self._next_new
        self._next_new += NUM_NEW
        new = tf.range(first, self._next_new, dtype=tf.int64)
        return [tf.concat([new, its[NUM_NEW:]], 0) for its in ids]

    def _rows(self, ids: list, partitions: list, hot: int, is_training: bool) -> list:
        of_all = self.system.rows_of_all if hot == 1 else self.system.means_of_all
        return of_all(self.tables, ids, partitions, is_training)

    def _function(self, work: str, hot: int) -> Callable:
        # One for batches of all sizes: TFRA takes minutes to trace a training step.
        if (work, hot) not in self._functions:
            tf = self.system.tf
            each = [tf.TensorSpec([None], tf.int64)] * self.args.tables
            call = self._train if work == "train" else functools.partial(self._look_up, work)
            self._functions[work, hot] = tf.function(
                lambda ids, partitions: call(ids, partitions, hot),
                input_signature=[each, each],
            )
        return self._functions[work, hot]

    def _look_up(self, work: str, ids: list, partitions: list, hot: int) -> tuple:
        rows = self._rows(ids, partitions, hot, is_training=work == "new")
        return rows, rows[-1][-1, -1]

    def _train(self, ids: list, partitions: list, hot: int) -> tuple:
        weights = self.system.tf.range(self.args.dim, dtype=self.system.tf.float32)
        rows_of = functools.partial(self._rows, ids, partitions, hot, is_training=True)
        return (self.system.train(self.optimizer, self.tables, rows_of, weights),)


# ----------------------------------------------------------------- the process in front


def contenders_of(args: argparse.Namespace) -> list[Contender]:
    """Who takes part."""
    peer = peer_python(args.peers)
    found = []
    for threads in args.threads:
        found += [Contender("sok_lite", threads), Contender("dense", threads)]
        found += [Contender("tfra", threads, python=peer)] if peer else []
        if args.before:
            found.append(Contender("sok_lite", threads, root=args.before, label="before"))
    for ranks in args.ranks:
        if find_horovodrun():
            found.append(Contender("sok_lite", 1, ranks=ranks))
        else:
            print(f"{ranks} ranks are not measured: there is no horovodrun.")
    return found


def measure(args: argparse.Namespace, case: str, workers: Sequence[Worker]) -> dict:
    """Times one case in turns and returns its RESULT."""
    times = time_in_turns(workers, case, args.rounds, args.warm_ups, args.calls)
    return {
        "case": case,
        "tables": args.tables,
        "keys": args.keys,
        "dim": args.dim,
        "calls": args.rounds * args.calls,
        **statistics_of(times),
    }


def main(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--tables", type=int, default=26)
    add("--keys", type=int, default=20_000, help="in each table (%(default)s)")
    add("--dim", type=int, default=16, help="elements of a row (%(default)s)")
    add("--threads", type=int, nargs="+", default=[1, 2], help="of a process (1 2)")
    add("--ranks", type=int, nargs="*", default=[2], help="beside one rank (2)")
    add("--rounds", type=int, default=11, help="turns of each (%(default)s)")
    add("--warm-ups", type=int, default=3, help="turns before that do not count (%(default)s)")
    add("--calls", type=int, default=5, help="that count in a turn (%(default)s)")
    add("--cases", nargs="*", default=CASES, help="as above; another number is fine")
    add("--before", type=Path, help="a checkout of another version, timed as well")
    add("--quick", action="store_true", help="3 tables, few calls: does it run?")
    add_peer_option(parser)
    add_worker_options(parser, SYSTEMS)
    args = parser.parse_args()
    if args.worker:
        return serve(
            args.address,
            lambda: ManyTables(SYSTEMS[args.worker](args.dim, args.threads[0]), args),
            ManyTables.timed_calls,
        )
    if args.quick:
        args.tables, args.keys, args.rounds, args.warm_ups, args.calls = 3, 500, 1, 1, 2
        args.cases = ["lookup-32", "train-32", "train-32x4", "new-32"]

    print_machine()
    options = [f"--{name}={getattr(args, name)}" for name in ("tables", "keys", "dim")]
    results = []
    with started(contenders_of(args), "many_tables", options) as workers:
        for case in args.cases:
            results.append(measure(args, case, workers))
            print("RESULT " + json.dumps(results[-1]), flush=True)
    print_medians(results)
