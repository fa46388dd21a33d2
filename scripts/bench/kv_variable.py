"""Times what a TF1 program does with a KvVariable, and the same with a dense variable of all rows.

Cases, each with one line `RESULT {json}`: `lookup` in training and `predict`, `train-adam` and
`train-ftrl` (a lookup, its gradient and a step of the stock optimizer), `save` and `restore` of a
tf.compat.v1.train.Saver, in a tf.compat.v1.Session. Keys are those of one variable of 1,000,000,
in batches of 65,536 ids, uniform. A dense variable's ids are its row numbers: it is what TensorFlow
does where the keys are known before, and it holds them all from the first step. Times are medians
of --rounds, in milliseconds; `dense / kv` above 1 says that the KvVariable was faster.

Example:
  .venv/bin/python -m scripts.bench kv_variable --partitions 1 4
"""

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from scripts.bench.common.measuring import num_threads, result, timed
from sok_lite.backend import get_backend
from sok_lite.kv_variable import get_kv_variable, training_mode

v1 = tf.compat.v1
OPTIMIZERS = {
    "adam": lambda: v1.train.AdamOptimizer(0.001),
    "ftrl": lambda: v1.train.FtrlOptimizer(0.01),
}
FILL_PARTS = 20


class Job:
    """A graph with one variable and all that is timed of it.

    Args:
      args: of the command.
      partitions: of a KvVariable; 0: a dense variable.
      optimizer: name of an optimizer; None: none.
    """

    def __init__(
        self, args: argparse.Namespace, partitions: int, optimizer: str | None = None
    ) -> None:
        self.args = args
        self._graph = tf.Graph()
        with self._graph.as_default():
            v1.set_random_seed(1)
            self._variable = self._made(partitions)
            self._ids = v1.placeholder(tf.int64, [None])
            self._rows = v1.nn.embedding_lookup(self._variable, self._ids)
            loss = tf.reduce_sum(tf.square(self._rows))
            self._step = OPTIMIZERS[optimizer]().minimize(loss) if optimizer else None
            self._predicted = self._rows
            if partitions:
                with training_mode(False):
                    self._predicted = v1.nn.embedding_lookup(self._variable, self._ids)
            self._saver = v1.train.Saver(max_to_keep=1)
            init = v1.global_variables_initializer()
        self._session = v1.Session(graph=self._graph)
        self._session.run(init)
        # Ids spread over all of int64, so that nothing is won by their being small.
        self._scale = 1 if not partitions else 9_000_000_000_007
        self._rng = np.random.default_rng(0)
        if partitions:
            for part in np.array_split(np.arange(args.keys), FILL_PARTS):
                self._session.run(self._rows.op, {self._ids: part * self._scale})

    def _made(self, partitions: int) -> Any:
        initializer = v1.random_normal_initializer(stddev=0.01)
        if not partitions:
            shape = [self.args.keys, self.args.dim]
            return v1.get_variable("dense", shape, initializer=initializer, use_resource=True)
        partitioner = v1.fixed_size_partitioner(partitions) if partitions > 1 else None
        return get_kv_variable(
            "kv", self.args.dim, initializer=initializer, partitioner=partitioner
        )

    def batch(self) -> np.ndarray:
        """Returns ids of all rows, with replacement."""
        return self._rng.integers(0, self.args.keys, self.args.batch) * self._scale

    def lookup(self, ids: np.ndarray) -> None:
        self._session.run(self._rows.op, {self._ids: ids})

    def predict(self, ids: np.ndarray) -> None:
        self._session.run(self._predicted.op, {self._ids: ids})

    def train(self, ids: np.ndarray) -> None:
        self._session.run(self._step, {self._ids: ids})

    def save(self, path: str) -> None:
        with self._graph.as_default():
            self._saver.save(self._session, path, write_meta_graph=False)

    def restore(self, path: str) -> None:
        with self._graph.as_default():
            self._saver.restore(self._session, path)


def seconds_of(args: argparse.Namespace, case: str, partitions: int) -> tuple[float, int]:
    """Returns the time of a call and the bytes of the checkpoint, 0 where there is none."""
    backend = get_backend("cpu")
    job = Job(args, partitions, case.partition("-")[2] or None)

    def took(call: Callable[..., None], prepare: Callable[[], Any]) -> float:
        return timed(backend, call, args.rounds, prepare).host

    if case in ("lookup", "predict"):
        return took(getattr(job, case), job.batch), 0
    if case.startswith("train"):
        return took(job.train, job.batch), 0
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model")
        job.save(path)
        size = sum(file.stat().st_size for file in Path(folder).iterdir())
        return took(job.save if case == "save" else job.restore, lambda: path), size


CASES = ("lookup", "predict", "train-adam", "train-ftrl", "save", "restore")


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--partitions", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=65_536)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    for case in args.cases:
        dense, dense_size = seconds_of(args, case, 0)
        for partitions in args.partitions:
            seconds, size = seconds_of(args, case, partitions)
            result(
                case=case,
                partitions=partitions,
                keys=args.keys,
                batch=args.batch,
                dim=args.dim,
                threads=num_threads(get_backend("cpu")),
                kv_ms=seconds * 1e3,
                dense_ms=dense * 1e3,
                dense_over_kv=dense / seconds,
                checkpoint_mb=size / 1e6 if size else None,
                dense_checkpoint_mb=dense_size / 1e6 if size else None,
            )
