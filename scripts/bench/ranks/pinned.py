"""Times two ranks with a core each, one rank with one core, and one with both, at one global batch.

The work is a step of examples/train_ctr.py: 26 tables, a dense model, Horovod's allreduce of its
gradients. The jobs take turns, a few steps each, and rest in the turns of the others, so that
whatever else the machine does meets all. A case ends with one line `RESULT {json}`, milliseconds of
a step until the slower rank has finished, of

  step            the whole
  no allreduce    the whole, but dense gradients stay where they are: what summing them takes
  own allreduce   the whole, but they travel as the rows of tables do, without Horovod
  dense           the dense model alone, without a table or a message: what the cores can do

A case whose name ends with ", cpu" counts only while threads of the rank are on its core, which
other work disturbs less, and `waits` only while the rank waits for the other in a collective of
tables. The last lines say how many times as many samples a second two ranks do as one with one core
and as one with both, by the medians; by processor time, how many they would do if no core were ever
idle.

Examples:
  .venv/bin/python -m scripts.bench ranks pinned
  .venv/bin/python -m scripts.bench ranks pinned --batches 1024 8192 --cases step --cycles-ms 1 5
"""

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from scripts.bench.common.demo import demo_module
from scripts.bench.common.turns import (
    Contender,
    add_worker_options,
    find_horovodrun,
    print_machine,
    serve,
    started,
    statistics_of,
    time_in_turns,
)

WORKS = ("step", "no allreduce", "own allreduce", "dense")
CASES = (*(f"{work}{clock}" for work in WORKS for clock in ("", ", cpu")), "waits")
NUM_BATCHES = 8
DIM = 16


# ----------------------------------------------------------------- one rank


def pin(threads: int) -> None:
    """Gives this process the core of its number, or all to two threads; before TensorFlow counts
    the cores."""
    if threads > 1:
        return
    cores = sorted(os.sched_getaffinity(0))
    rank = int(os.environ.get("HOROVOD_LOCAL_RANK", "0"))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})


class Demo:
    """The demo's model on its planted data, and the calls that are timed."""

    def __init__(self, threads: int = 1) -> None:
        import tensorflow as tf

        import sok_lite as sok
        from sok_lite.bridge.job import communicator

        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(threads)
        sok.init(comm_tool="horovod")
        self._tf, self._sok, self._ranks = tf, sok, demo_module("ctr.ranks").Ranks()
        self._models: dict[str, Any] = {}
        self._waited_s = noted_waits(communicator())

    def timed_calls(self, case: str) -> Callable[[], float]:
        """Returns a function that takes one step and returns what the case says, in seconds."""
        name, _, batch = case.rpartition("-")
        work, _, clock = name.partition(", ")
        now = time.process_time if clock == "cpu" else time.perf_counter
        if work == "waits":
            work, now = "step", lambda: self._waited_s[0]
        if work == "dense":
            step, batches = self._dense_step(int(batch))
        else:
            step, batches = self._model(work).train_step, self._batches(int(batch))

        def call() -> float:
            batches.append(batches.pop(0))
            start = now()
            float(step(*batches[-1]))
            return now() - start

        return call

    def _model(self, work: str) -> Any:
        """Returns the model of some work; they differ in how dense gradients are summed."""
        import keras

        sums = {"no allreduce": list, "own allreduce": self._own_sum}
        if work not in self._models:
            ranks, models = demo_module("ctr.ranks").Ranks(), demo_module("ctr.model")
            model = self._models[work] = models.ClickModel(DIM, 0, ranks)
            model.optimizer = self._sok.OptimizerWrapper(keras.optimizers.Adam(0.01))
            ranks.sum = sums.get(work, ranks.sum)
        return self._models[work]

    def _own_sum(self, tensors: Sequence[Any]) -> list[Any]:
        """Sums tensors over ranks, all in one message."""
        tf = self._tf
        flat = tf.concat([tf.reshape(each, [-1]) for each in tensors], 0)
        total = self._sok.communication.allreduce(flat, "sum")
        pieces = tf.split(total, [each.shape.num_elements() for each in tensors])
        return [tf.reshape(x, each.shape) for x, each in zip(pieces, tensors, strict=True)]

    def _dense_step(self, batch: int) -> tuple[Callable[..., Any], list[tuple]]:
        """Returns the loss of the dense model and its gradients, and what it is given."""
        tf, dense = self._tf, self._model("step").dense
        batches = self._batches(batch)
        vectors = [tf.ones([len(batches[0][0]), DIM])] * batches[0][2].shape[1]

        @tf.function
        def step(labels: Any, numbers: Any, vectors: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(vectors)
                logits = dense(numbers, vectors)
                loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, logits))
            grads = tape.gradient(loss, [*vectors, *(v.value for v in dense.trainable_weights)])
            return loss + 0.0 * tf.add_n([tf.reduce_sum(each) for each in grads])

        given = [
            (tf.constant(some), tf.constant(numbers), vectors) for some, numbers, *_ in batches
        ]
        return step, given

    def _batches(self, batch: int) -> list[tuple[np.ndarray, ...]]:
        """Returns this rank's part of NUM_BATCHES batches, as `train_step` takes them."""
        planted = demo_module("ctr.planted")
        source, mine, batches = planted.PlantedModel(0), self._ranks.share(batch, batch), []
        for number in range(NUM_BATCHES):
            labels, _, numbers, places = source.draw(number, batch)
            keys = (places * 2_654_435_761 + 1_234_567_891 * np.arange(places.shape[1])) % 2**32
            arrays = (labels.astype(np.float32), numbers.astype(np.float32), keys)
            batches.append((*(array[mine] for array in arrays), np.float32(batch)))
        return batches


def noted_waits(comm: Any) -> list[float]:
    """Lets a communicator note its waits; returns a list of one number, their seconds so far."""
    waited = [0.0]
    if hasattr(comm, "_receive_all"):  # ranks of one machine, which share memory
        receive_all = comm._receive_all

        def noting(kind: str) -> Any:
            start = time.perf_counter()
            try:
                return receive_all(kind)
            finally:
                waited[0] += time.perf_counter() - start

        comm._receive_all = noting
    return waited


# ----------------------------------------------------------------- the process in front


def ratios(results: Sequence[dict[str, Any]], one: str, two: str) -> dict[str, float]:
    """Returns for each case how many times as fast `two` is, by medians."""
    found = {}
    for result in results:
        its = result["median_ms"]
        if result["case"] != "waits":
            found[result["case"]] = round(its[one] / its[two], 3)
    return found


def main(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--batches", type=int, nargs="+", default=[8192], help="rows of all ranks (8192)")
    add("--cases", nargs="+", choices=CASES, default=CASES, help="(all)")
    add("--rounds", type=int, default=15, help="turns of each job and case (%(default)s)")
    add("--calls", type=int, default=4, help="steps that count in a turn (%(default)s)")
    add("--cycles-ms", type=float, nargs="+", default=[1.0], help="HOROVOD_CYCLE_TIME (1)")
    add("--threads", type=int, help=argparse.SUPPRESS)
    add_worker_options(parser, ("sok_lite",))
    args = parser.parse_args()
    if args.worker:
        pin(args.threads)
        return serve(args.address, partial(Demo, args.threads), Demo.timed_calls)
    if find_horovodrun() is None:
        sys.exit("Two ranks cannot be timed: there is no horovodrun.")
    print_machine()
    one, both, *two = [
        Contender("sok_lite", 1, label="one rank", rests=True),
        Contender("sok_lite", 2, label="one rank", rests=True),
        *(
            Contender("sok_lite", 1, ranks=2, label=f"cycle {ms:g} ms", cycle_ms=ms, rests=True)
            for ms in args.cycles_ms
        ),
    ]
    with started([one, both, *two], "ranks pinned", []) as workers:
        for batch in args.batches:
            results = []
            for case in args.cases:
                times = time_in_turns(workers, f"{case}-{batch}", args.rounds, 3, args.calls)
                results.append({"case": case, "batch": batch, **statistics_of(times)})
                print("RESULT " + json.dumps(results[-1]), flush=True)
            for each, beside in itertools.product(two, (one, both)):
                facts = {"case": "ratio", "batch": batch, "job": each.name, "beside": beside.name}
                facts |= ratios(results, beside.name, each.name)
                print("RESULT " + json.dumps(facts), flush=True)
