"""Trains the demo's model with gradients that travel as float32 and as bfloat16.

One line `RESULT {json}` for each seed and case: the AUC on held-out rows of the demo's own data,
the mean loss of training, bytes that rank 0 sends to other ranks in a step, and samples a second.

Example:
  horovodrun -np 2 python -m scripts.bench ranks gradient_dtype --rows 200000 --seeds 5
"""

import argparse
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import keras
import numpy as np

import sok_lite as sok
from scripts.bench.common.demo import demo_module
from scripts.bench.common.measuring import result
from sok_lite.bridge import job
from sok_lite.comm.rows import split_offsets

train_ctr = demo_module("train_ctr")
planted, criteo = demo_module("ctr.planted"), demo_module("ctr.criteo")

CASES = ("float32", "bfloat16")


class BytesSent:
    """What this rank sends to others.

    Attributes:
      of: by trip, such as "send_grads".
    """

    def __init__(self) -> None:
        self.of: Counter[str] = Counter()
        comm = job.communicator()
        alltoallv = comm.alltoallv

        def counting(rows: Any, send_splits: Any, *args: Any, **kwargs: Any) -> Any:
            start, end = split_offsets(send_splits)[comm.rank : comm.rank + 2]
            trip = str(kwargs.get("call", "alltoallv")).split()[0]
            self.of[trip] += rows.nbytes - rows[start:end].nbytes
            return alltoallv(rows, send_splits, *args, **kwargs)

        comm.alltoallv = counting  # type: ignore[method-assign]


def measure(case: str, rows: Any, ranks: Any, sent: BytesSent, args: Any, seed: int) -> None:
    """Trains once and prints the RESULT line. Every rank must call it."""
    keras.backend.clear_session()
    num_training = train_ctr.split(len(rows.labels), 0.2)
    training = rows.take(slice(num_training))
    model = demo_module("ctr.model").ClickModel(args.dim, seed, ranks, case)
    num_steps = -(-num_training // args.batch)
    schedule = keras.optimizers.schedules.CosineDecay(0.01, num_steps)
    model.optimizer = sok.OptimizerWrapper(keras.optimizers.Adam(schedule))
    order = np.random.default_rng([seed, 0]).permutation(num_training)
    loss_sum = 0.0
    sent.of.clear()
    for number, first in enumerate(range(0, num_training, args.batch)):
        if number == 1:
            start = time.perf_counter()  # behind the trace
        batch = order[first : first + args.batch]
        mine = training.take(batch[ranks.share(len(batch), args.batch)])
        loss_sum += float(model.train_step(*mine, np.float32(len(batch)))) * len(batch)
    seconds = time.perf_counter() - start
    per_step = {trip: round(count / num_steps) for trip, count in sorted(sent.of.items())}
    held_out = train_ctr.evaluate(model, rows.take(slice(num_training, None)))
    if ranks.rank == 0:
        result(
            case=case,
            seed=seed,
            ranks=ranks.size,
            auc=f"{held_out:.5f}",
            loss=f"{loss_sum / num_training:.5f}",
            samples_per_second=(num_training - args.batch) / seconds,
            **{f"{trip}_bytes": count for trip, count in per_step.items()},
        )


def main(parser: argparse.ArgumentParser) -> None:
    """Trains by all cases in turns, with one seed after the other."""
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--batch", type=int, default=1024, help="of all ranks (%(default)s)")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=5, help="how many (%(default)s)")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    args = parser.parse_args()
    sok.init(comm_tool="horovod")
    ranks, sent = demo_module("ctr.ranks").Ranks(), BytesSent()
    for seed in range(args.seeds):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "planted.tsv"  # every rank writes the same
            probabilities = planted.write(path, args.rows, seed)
            rows = criteo.read(path)
        held_out = slice(train_ctr.split(args.rows, 0.2), None)
        best = train_ctr.auc(rows.labels[held_out], probabilities[held_out])
        if ranks.rank == 0:
            print(f"NOTE seed {seed}: the true probabilities have an AUC of {best:.5f}", flush=True)
        for case in args.cases:
            measure(case, rows, ranks, sent, args, seed)
