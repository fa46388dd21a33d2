"""Times the update rules of optimizers; no TensorFlow.

Every rule x dimension x row format x order of the rows x backend, one line `RESULT {json}` a case.
A case is one step of --rows distinct rows, all rows of their store: in their order, or in a random
one as the rows of a batch lie in a table. Times are the fastest of --rounds.

`bytes_per_row` is what a step has to move: value and states read and written, gradient and row
number read.

Example:
  python -m scripts.bench optimizers --backends cpu --rules Adam --dims 64
"""

import argparse
import functools
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np

from scripts.bench.common.measuring import backends, fastest, num_threads, result, timed
from scripts.bench.common.row_steps import apply_rule
from sok_lite.backend import Backend
from sok_lite.engine import optimizers
from sok_lite.engine.dtypes import row_dtype
from sok_lite.engine.optimizers import Adam, RMSprop, UpdateRule
from sok_lite.engine.rows.store import RowStore


def all_rules() -> Iterator[UpdateRule]:
    """Yields every rule with its defaults, and those whose options bring more states."""
    seen = set()
    named = [getattr(optimizers, name) for name in optimizers.__all__]
    rules = [rule() for rule in named if rule is not UpdateRule]
    rules += [Adam(amsgrad=True), RMSprop(centered=True, momentum=0.9)]
    for rule in rules:
        work = rule.kernel, tuple(rule.states)  # AdamW's is Adam's
        if work not in seen:
            seen.add(work)
            yield rule


def bytes_per_row(rule: UpdateRule, dim: int, value_bytes: int) -> int:
    """Returns the bytes that a step of a row has to move."""
    return dim * (2 * value_bytes + 2 * 4 * len(rule.states) + 4) + 4


def measure(
    backend: Backend, rule: UpdateRule, dim: int, dtype: str, args: argparse.Namespace
) -> None:
    rng = np.random.default_rng(0)
    store = RowStore(backend, dim, row_dtype(dtype))
    table = SimpleNamespace(backend=backend, store=store)
    in_order = store.allocate(args.rows)
    store.write(in_order, store.to_storage(backend.xp.ones((args.rows, dim), np.float32)))
    grads = backend.from_host(rng.standard_normal((args.rows, dim), np.float32))
    num_bytes = bytes_per_row(rule, dim, store.row_dtype.storage.itemsize)
    for order in args.orders:
        mixed = rng.permutation(args.rows) if order == "random" else np.arange(args.rows)
        rows = backend.from_host(backend.to_host(in_order)[mixed])
        step = functools.partial(apply_rule, table, rule, rows, grads, 1e-3, 1)
        timing = timed(backend, step, args.rounds, choose=fastest)
        seconds = timing.host if timing.device is None else timing.device
        result(
            case="update",
            backend=backend.name,
            threads=num_threads(backend),
            rule=name_of(rule),
            states=len(rule.states),
            dtype=dtype,
            dim=dim,
            rows=args.rows,
            order=order,
            ms=1e3 * seconds,
            ns_per_row=1e9 * seconds / args.rows,
            bytes_per_row=num_bytes,
            bytes_per_second=num_bytes * args.rows / seconds,
        )


def name_of(rule: UpdateRule) -> str:
    """Returns the name of a rule, with the options that bring states."""
    options = [name for name in ("amsgrad", "centered") if getattr(rule, name, False)]
    return " ".join([type(rule).__name__, *options])


def main(parser: argparse.ArgumentParser) -> None:
    names = sorted({type(rule).__name__ for rule in all_rules()})
    parser.add_argument("--backends", nargs="*", default=["cpu", "cuda"])
    parser.add_argument("--rules", nargs="+", default=names, choices=names)
    parser.add_argument("--rows", type=int, default=1 << 18)
    parser.add_argument("--dims", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    orders = ["sequential", "random"]
    parser.add_argument("--orders", nargs="+", default=orders, choices=orders)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    for backend in backends(args.backends):
        for dim in args.dims:
            for dtype in args.dtypes:
                for rule in all_rules():
                    if type(rule).__name__ in args.rules:
                        measure(backend, rule, dim, dtype, args)
