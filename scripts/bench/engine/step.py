"""Times what the engine does around its tables, on any backend that this machine has.

Distinct keys, sums over groups of rows and their gradients, update rules; without TensorFlow. The
operations of the tables themselves are in tables/operations.py. One line `RESULT {json}` a case.

`step` is a training step of several tables on one rank, of known keys from Zipf(1.05), one id a
row: lookup, gradient, Adam. `ms` is its time by the host's clock, to the end of its kernels;
`device_ms` between two events on the GPU; `forward_ms`, `backward_ms` and `update_ms` are the same
by stage, with a wait for the GPU after each. Every step of several has a batch of its own.

Example:
  python -m scripts.bench engine step --backends cpu cuda --dim 64
  python -m scripts.bench engine step --backends cuda --cases step --step-tables 26 --dim 16 128
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
from scripts.bench.common.row_steps import apply_rule
from scripts.bench.lookup import zipf_positions
from sok_lite.comm import SingleCommunicator
from sok_lite.engine import lookup
from sok_lite.engine.dedup import unique
from sok_lite.engine.initializer_spec import make_initializer
from sok_lite.engine.optimizers import SGD, Adagrad, Adam
from sok_lite.engine.segments import group
from sok_lite.engine.step import StepOptions
from sok_lite.engine.table import make_table
from sok_lite.engine.update import UpdateStep
from sok_lite.engine.update_rows import Update
from tests.support.parts import Part, batch_of
from tests.support.pooled import combine, combine_grad


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
        ways = [(table, None, "sum") for table in self._tables]
        self._gradients = lookup.backward(self._backend, ways, self._grads, self._context)

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
    step = Step(backend, number, batch, dim, args.step_keys)
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
        keys_in_table=args.step_keys,
        keys=step.keys,
        dim=dim,
        ms=1e3 * whole.host,
        device_ms=None if whole.device is None else 1e3 * whole.device,
        **{f"{stage}_ms": 1e3 * median(took[stage]).host for stage in stages},
        keys_per_second=step.keys / whole.host,
    )


def cases(backend, args, dim):
    """Yields (name, keys of one call, function)."""
    rng = np.random.default_rng(0)
    all_keys = rng.permutation(np.unique(rng.integers(0, 2**62, args.keys + args.keys // 50)))
    all_keys = all_keys[: args.keys]

    def new_table():
        return make_table("hbm", backend, dim, initializer=make_initializer("random", dim))

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
    grads = backend.from_host(rng.random((num_unique, dim), np.float32))
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


def main(parser):
    parser.add_argument("--backends", nargs="*", default=["cpu", "cuda"])
    parser.add_argument("--keys", type=int, default=1_000_000, help="keys in a table")
    parser.add_argument("--batch", type=int, default=65_536, help="keys of one call")
    parser.add_argument("--dim", type=int, nargs="+", default=[64])
    parser.add_argument("--cases", nargs="+", choices=["parts", "step"], default=["parts", "step"])
    parser.add_argument("--step-tables", type=int, nargs="+", default=[1, 26])
    parser.add_argument("--step-keys", type=int, default=100_000, help="keys in each of them")
    parser.add_argument("--step-batch", type=int, nargs="+", default=[8_192], help="keys a table")
    parser.add_argument("--rounds", type=int, default=21)
    args = parser.parse_args()
    for backend in backends(args.backends):
        for dim in args.dim:
            if "parts" in args.cases:
                measure_parts(backend, dim, args)
            if "step" in args.cases:
                for number in args.step_tables:
                    for batch in args.step_batch:
                        measure_step(backend, number, batch, dim, args)


def measure_parts(backend, dim, args):
    for case, num_keys, call in cases(backend, args, dim):
        timing = timed(backend, call, args.rounds)
        result(
            backend=backend.name,
            threads=num_threads(backend),
            case=case,
            keys_in_table=args.keys,
            keys=num_keys,
            dim=dim,
            ms=1e3 * timing.host,
            device_ms=None if timing.device is None else 1e3 * timing.device,
            keys_per_second=num_keys / timing.host,
        )
