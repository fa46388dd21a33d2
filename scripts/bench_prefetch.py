"""Times training steps over several ranks with `sok.prefetch` and without, in turns.

A step looks up many tables, computes a dense part of which `--dense` says how large it is, and
updates the tables. Ends with one line `RESULT {json}`: milliseconds of the slowest rank.

Examples:
  horovodrun -np 2 .venv/bin/python scripts/bench_prefetch.py
  horovodrun -np 2 .venv/bin/python scripts/bench_prefetch.py --dense 2048 --rows 8192
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from bench_lookup import zipf_positions
from bench_turns import print_machine

import sok_lite as sok


def make_step(args: argparse.Namespace, tables: list[Any], ahead: bool) -> Callable[..., Any]:
    optimizer = sok.SGD(0.01)
    width = args.tables * args.dim
    rng = np.random.default_rng(0)
    layers = [
        tf.constant(rng.normal(0, 0.01, shape), tf.float32)
        for shape in ((width, args.dense), (args.dense, args.dense), (args.dense, 1))
    ]

    @tf.function
    def step(ids: Any, following: Any) -> Any:
        with tf.GradientTape() as tape:
            outputs = sok.lookup_sparse(tables, ids, combiners="sum")
            if ahead:
                following = sok.prefetch(tables, following)
            hidden = tf.concat(outputs, 1)
            for layer in layers:
                hidden = tf.nn.relu(hidden @ layer)
            loss = tf.reduce_sum(hidden)
        optimizer.apply_gradients(zip(tape.gradient(loss, tables), tables, strict=True))
        return loss, following

    return step


def make_batches(args: argparse.Namespace, rank: int) -> list[list[tf.RaggedTensor]]:
    splits = tf.range(args.rows + 1, dtype=tf.int64)
    rng = np.random.default_rng(rank)
    return [
        [
            tf.RaggedTensor.from_row_splits(
                zipf_positions(rng, args.keys, 1.3, args.rows).astype(np.int64), splits
            )
            for _ in range(args.tables)
        ]
        for _ in range(4)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tables", type=int, default=26)
    parser.add_argument("--keys", type=int, default=20_000, help="of each table (20000)")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--rows", type=int, default=1024, help="of a rank's batch (1024)")
    parser.add_argument("--dense", type=int, default=512, help="units of a dense layer (512)")
    parser.add_argument("--rounds", type=int, default=15, help="turns of 5 steps (15)")
    parser.add_argument("--quick", action="store_true", help="3 tables, few steps: does it run?")
    args = parser.parse_args()
    if args.quick:
        args.tables, args.rows, args.rounds = 3, 32, 2
    # One thread more than computes: TensorFlow then has one to wait for a message.
    tf.config.threading.set_inter_op_parallelism_threads(2)
    sok.init()
    rank = sok.communication.rank()
    tables = [sok.DynamicVariable(args.dim, name=f"table{i}") for i in range(args.tables)]
    batches = make_batches(args, rank)
    times: dict[str, list[float]] = {"plain": [], "prefetched": []}
    steps = {name: make_step(args, tables, name == "prefetched") for name in times}
    for number in range(args.rounds + 2):
        for name, step in steps.items():
            ids: Any = batches[0]
            if name == "prefetched":
                ids = sok.prefetch(tables, ids)
            sok.communication.allreduce(0.0, "sum")
            for turn in range(6):
                start = time.perf_counter()
                loss, ids = step(ids, batches[(turn + 1) % 4])
                loss.numpy()
                if number >= 2 and turn > 0:  # tables are filled, memory is warm
                    times[name].append(1e3 * (time.perf_counter() - start))
    medians = {name: statistics.median(each) for name, each in times.items()}
    slowest = np.max(sok.communication.allgather(np.array([list(medians.values())])), axis=0)
    if rank == 0:
        print_machine()
        facts = {name: getattr(args, name) for name in ("tables", "rows", "dim", "dense")}
        facts["ranks"] = sok.communication.num_ranks()
        result = dict(zip(medians, [round(float(each), 2) for each in slowest], strict=True))
        print("RESULT", json.dumps({**facts, "median_ms": result}), flush=True)


if __name__ == "__main__":
    main()
