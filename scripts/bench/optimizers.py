"""Times the update rules of optimizers; no TensorFlow.

Every rule x dimension x row format x order of the rows x backend, one line `RESULT {json}` a case.
A case is one step of --rows distinct rows, all rows of their store: in their order, or in a random
one as the rows of a batch lie in a table. Times are the fastest of --rounds.

`bytes_per_row` is what a step has to move: value and states read and written, gradient and row
number read. With --items a row has so many gradients, in any order, and they are summed as well:
first, and then rows are updated by the sums; and, on a GPU, by the kernel that updates them.

Example:
  python -m scripts.bench optimizers --backends cpu --rules Adam --dims 64
"""

import argparse
import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from scripts.bench.common.measuring import backends, fastest, num_threads, result, timed
from scripts.bench.common.row_steps import apply_rule, apply_rule_to_items
from sok_lite.backend import Backend
from sok_lite.engine import optimizers
from sok_lite.engine.dtypes import row_dtype
from sok_lite.engine.optimizers import Adam, RMSprop, UpdateRule
from sok_lite.engine.rows.store import RowStore
from sok_lite.engine.segments import Terms, group, segment_sums


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
        steps: dict[tuple[str, int], tuple[Callable[[], object], int]] = {}
        steps["update", 0] = step, num_bytes
        for items in args.items:
            of_items = num_bytes + 4 * dim * (items - 1)
            sums, summing = steps_of_items(table, rule, rows, items, rng)
            steps["sums, update", items] = sums, of_items + 8 * dim
            if backend.name != "cpu":
                steps["update that sums", items] = summing, of_items
        for (case, items), (take, case_bytes) in steps.items():
            timing = timed(backend, take, args.rounds, choose=fastest)
            seconds = timing.host if timing.device is None else timing.device
            result(
                case=case,
                backend=backend.name,
                threads=num_threads(backend),
                rule=name_of(rule),
                states=len(rule.states),
                dtype=dtype,
                dim=dim,
                rows=args.rows,
                items=items,
                order=order,
                ms=1e3 * seconds,
                ns_per_row=1e9 * seconds / args.rows,
                bytes_per_row=case_bytes,
                bytes_per_second=case_bytes * args.rows / seconds,
            )


def steps_of_items(
    table: Any, rule: UpdateRule, rows: Any, items: int, rng: np.random.Generator
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Returns steps of rows with so many gradients each, which are summed before or by the step."""
    backend, num_rows = table.backend, len(rows)
    labels = rng.permutation(np.repeat(np.arange(num_rows, dtype=np.int32), items))
    groups = group(backend, backend.from_host(labels), (0, len(labels)), (0, num_rows))
    terms = Terms([backend.xp.full((len(labels), table.store.dim), 0.5, np.float32)])

    def sums_and_update() -> object:
        return apply_rule(table, rule, rows, segment_sums(backend, groups, terms)[0], 1e-3, 1)

    return sums_and_update, functools.partial(
        apply_rule_to_items, table, rule, rows, groups, terms, 1e-3, 1
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
    parser.add_argument("--items", type=int, nargs="*", default=[])
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
