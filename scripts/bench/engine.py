"""Times a training step of several tables, without TensorFlow, on any backend of this machine.

On one rank, of known keys from Zipf(1.05), one id a row: lookup, gradient, Adam. One line `RESULT
{json}` a case. `ms` is its time by the host's clock, to the end of its kernels; `device_ms` between
two events on the GPU; `forward_ms`, `backward_ms` and `update_ms` are the same by stage, with a
wait for the GPU after each. Every step of several has a batch of its own.

Example:
  python -m scripts.bench engine --backends cpu cuda --dim 64
  python -m scripts.bench engine --backends cuda --tables 26 --dim 16 128
"""

import numpy as np

from scripts.bench.common.measuring import (
    Timing,
    backends,
    median,
    num_threads,
    result,
    time_call,
    timed,
)
from scripts.bench.lookup import zipf_positions
from sok_lite.comm import SingleCommunicator
from sok_lite.engine import lookup
from sok_lite.engine.initializer_spec import make_initializer
from sok_lite.engine.optimizers import Adam
from sok_lite.engine.table import make_table
from sok_lite.engine.update import StepOptions, UpdateStep
from sok_lite.engine.update_rows import Update
from tests.support.parts import Part, batch_of


class Step:
    """A training step of several tables; its stages are called in turn.

    Attributes:
      keys: of a step, of all tables.
    """

    def __init__(self, backend, number, batch, dim, num_keys):
        self._backend, self.keys = backend, number * batch
        initializer = make_initializer("random", dim)
        names = [f"t{i}" for i in range(number)]
        self._tables = [
            make_table("hbm", backend, dim, name=name, initializer=initializer) for name in names
        ]
        for part in np.array_split(np.arange(num_keys, dtype=np.int64), 8):
            for table in self._tables:
                table.find_or_insert(backend.from_host(part), unique_keys=True)
        rng = np.random.default_rng(0)
        # Other keys in every step: the rows of one are not in a cache for the next.
        splits = backend.from_host(np.arange(batch + 1, dtype=np.int64))
        self._batches = []
        for _ in range(4):
            drawn = zipf_positions(rng, num_keys, 1.05, (number, batch))
            parts = [
                Part(table, backend.from_host(rng.permutation(num_keys)[some]), splits, None, "sum")
                for table, some in zip(self._tables, drawn, strict=True)
            ]
            self._batches.append(batch_of(backend, parts))
        self._grads = [backend.xp.ones((batch, dim), np.float32) for _ in range(number)]
        self._count, self._rule = 0, Adam()

    def forward(self):
        keys = self._batches[self._count % len(self._batches)]
        _, self._context = lookup.forward(self._backend, SingleCommunicator(), keys)

    def backward(self):
        self._gradients = lookup.backward(self._backend, self._grads, self._context)

    def update(self):
        self._count += 1
        updates = [
            Update(table, self._rule, keys, row_grads, of_gradient=True)
            for table, keys, row_grads in zip(self._tables, *self._gradients[:2], strict=True)
        ]
        UpdateStep(updates, StepOptions(1e-3, self._count)).commit()

    def whole(self):
        self.forward()
        self.backward()
        self.update()


def measure_step(backend, number, batch, dim, args):
    step = Step(backend, number, batch, dim, args.keys)
    for _ in range(4):  # every row's states are there, every kernel is loaded
        step.whole()
    whole = timed(backend, step.whole, args.rounds)
    stages = ("forward", "backward", "update")
    took: dict[str, list[Timing]] = {stage: [] for stage in stages}
    for _ in range(args.rounds):
        for stage in stages:
            took[stage].append(time_call(backend, getattr(step, stage)))
    result(
        backend=backend.name,
        threads=num_threads(backend),
        case="step",
        tables=number,
        keys_in_table=args.keys,
        keys=step.keys,
        dim=dim,
        ms=1e3 * whole.host,
        device_ms=None if whole.device is None else 1e3 * whole.device,
        **{f"{stage}_ms": 1e3 * median(took[stage]).host for stage in stages},
        keys_per_second=step.keys / whole.host,
    )


def main(parser):
    parser.add_argument("--backends", nargs="*", default=["cpu", "cuda"])
    parser.add_argument("--tables", type=int, nargs="+", default=[1, 26])
    parser.add_argument("--keys", type=int, default=100_000, help="keys in each table")
    parser.add_argument("--batch", type=int, nargs="+", default=[8_192], help="keys of each table")
    parser.add_argument("--dim", type=int, nargs="+", default=[64])
    parser.add_argument("--rounds", type=int, default=21)
    args = parser.parse_args()
    for backend in backends(args.backends):
        for dim in args.dim:
            for number in args.tables:
                for batch in args.batch:
                    measure_step(backend, number, batch, dim, args)
