"""Counts what the main calls of the engine ask of a GPU: launches, waits, allocations, copies.

It needs no GPU: the `cuda` backend runs on the simulated one of tests/support/simt, where time says
nothing and counts say all. So it runs in a checkout only, with g++ on x86-64 Linux. Every call is
made twice before it is counted: kernels are compiled then, and CuPy's pool has blocks to give. One
line `RESULT {json}` a call, then the same as a table in Markdown. Then a training step on several
ranks, threads of this process, of which each line says what one rank asks.

Example:
  python -m tools.count_launches
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from scripts.bench.common.measuring import result
from scripts.bench.common.turns import print_table
from sok_lite.backend import Array, Backend
from sok_lite.comm import Communicator, SingleCommunicator
from sok_lite.engine import lookup
from sok_lite.engine.initializer_spec import make_initializer
from sok_lite.engine.optimizers import Adam
from sok_lite.engine.table import EmbeddingTable, make_table
from sok_lite.engine.update import StepOptions, UpdateStep
from sok_lite.engine.update_rows import Update
from tests.support.call_counts import counts_of_ranks
from tests.support.parts import Part, forward_parts
from tests.support.simt import device
from tests.support.simt.backend import simt_backend, unavailable

# What is counted, by the names of tests/support/simt/device.py, and the columns' heads.
COLUMNS = {
    "kernels": "our kernels",
    "array operations": "CuPy operations",
    "memsets": "memsets",
    "waits": "waits",
    "cudaMalloc": "cudaMalloc",
    "from the pool": "from the pool",
    "copies to the device": "copies to the GPU",
    "copies to the host": "copies to the host",
}


class Call(NamedTuple):
    """What is counted.

    Attributes:
      name: in the table.
      arguments: makes what the call takes; not counted.
      run: makes the call.
    """

    name: str
    arguments: Callable[[], Any]
    run: Callable[[Any], Any]


class Keys:
    """Gives keys in the memory of the GPU, `count` at a time."""

    def __init__(self, backend: Backend, count: int) -> None:
        self.backend, self.count = backend, count
        self.next = 0

    def known(self) -> Any:
        """Returns the first keys there were."""
        return self._from(0)

    def new(self, count: int | None = None) -> Any:
        """Returns keys that nobody has seen."""
        self.next += count or self.count
        return self._from(self.next, count)

    def _from(self, first: int, count: int | None = None) -> Any:
        numbers = np.arange(first, first + (count or self.count), dtype=np.int64)
        return self.backend.from_host(numbers)


def new_table(backend: Backend, dim: int, name: str = "table", **options: Any) -> EmbeddingTable:
    """Returns a table as a user makes it."""
    initializer = make_initializer("random", dim)
    return make_table(
        options.pop("var_type", "hbm"), backend, dim, name=name, initializer=initializer, **options
    )


def table_calls(backend: Backend, var_type: str, count: int, dim: int) -> Iterator[Call]:
    """Yields the calls of one table."""
    keys, half = Keys(backend, count), count // 2
    options: dict[str, Any] = {"var_type": var_type}
    if var_type == "hybrid":  # without growth and eviction
        options["init_capacity"] = options["max_capacity"] = 1 << (16 * count).bit_length()
    table = new_table(backend, dim, **options)
    table.reserve(8 * count)
    table.lookup(keys.known())
    rows = backend.xp.zeros((count, dim), np.float32)

    def mixed() -> Array:
        return backend.xp.concatenate([keys.known()[half:], keys.new(half)])

    def held() -> Array:
        some = keys.new()
        table.lookup(some)
        return some

    def to_double() -> EmbeddingTable:
        small = new_table(backend, dim)
        small.lookup(keys.new(40))
        return small

    yield Call(f"{var_type}: lookup, known keys", keys.known, table.lookup)
    yield Call(f"{var_type}: lookup, half of the keys new", mixed, table.lookup)
    yield Call(f"{var_type}: assign", keys.known, lambda some: table.assign(some, rows))
    yield Call(
        f"{var_type}: insert_or_assign, new keys",
        keys.new,
        lambda some: table.insert_or_assign(some, rows),
    )
    yield Call(f"{var_type}: erase", held, table.erase)
    yield Call(f"{var_type}: export", lambda: None, lambda _: table.export())
    if var_type == "hbm":
        yield Call(
            "hbm: lookup, new keys, the index grows",
            to_double,
            lambda small: small.lookup(keys.new()),
        )


def training_step(
    backend: Backend, comm: Communicator, number: int, count: int, dim: int
) -> Callable[[Any], None]:
    """Returns a step of `number` tables: lookup of items that repeat, gradient, Adam."""
    batch, rule = count // 4, Adam()
    splits = backend.from_host(np.arange(0, count + 1, 4, dtype=np.int64))
    tables = [new_table(backend, dim, f"t{i}") for i in range(number)]
    grads = [backend.xp.ones((batch, dim), np.float32) for _ in tables]
    items = backend.from_host(np.arange(count, dtype=np.int64) % (count // 2))

    def train(_: Any) -> None:
        parts = [Part(table, items, splits, None, "mean") for table in tables]
        _, context = forward_parts(backend, comm, parts)
        gradients = lookup.backward(backend, grads, context)
        updates = [
            Update(table, rule, keys, row_grads, of_gradient=True)
            for table, keys, row_grads in zip(tables, *gradients[:2], strict=True)
        ]
        UpdateStep(updates, StepOptions(0.01, 1)).commit()

    return train


def training_steps(backend: Backend, count: int, dim: int) -> Iterator[Call]:
    """Yields a step of 1 and of 26 tables on one rank."""
    for number in (1, 26):
        train = training_step(backend, SingleCommunicator(), number, count, dim)
        yield Call(f"training step of {number} hbm", lambda: None, train)


def counted_on_ranks(backend: Backend, size: int, count: int, dim: int) -> dict[str, Any]:
    """Counts a training step of 26 tables on several ranks, of each rank on average."""

    def prepare(comm: Communicator) -> Callable[[], None]:
        train = partial(training_step(backend, comm, 26, count, dim), None)
        for _ in range(2):
            train()
        return train

    counts, collectives = counts_of_ranks(backend, size, prepare)
    return {
        "kernels": counts.launches / size,
        "array operations": counts.operations / size,
        "memsets": counts.memsets / size,
        "waits": counts.waits / size,
        "bytes to the device": counts.to_device / size,
        "bytes to the host": counts.to_host / size,
        "collectives": sum(collectives.values()),
    }


def counted(call: Call) -> dict[str, int]:
    """Counts a call that was made before."""
    for _ in range(3):
        given = call.arguments()
        device.wait()
        with device.counted() as counts:
            call.run(given)
    return {name: counts[name] for name in COLUMNS}


def main() -> None:
    assert __doc__
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keys", type=int, default=1000, help="keys of a call (1000)")
    parser.add_argument("--dim", type=int, default=16, help="elements of a row (16)")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4], help="as well (2 4)")
    args = parser.parse_args()
    reason = unavailable()
    if reason is not None:
        parser.error(f"no simulated GPU: {reason}")
    backend = simt_backend()
    lines = []
    for call in (
        *table_calls(backend, "hbm", args.keys, args.dim),
        *table_calls(backend, "hybrid", args.keys, args.dim),
        *training_steps(backend, args.keys, args.dim),
    ):
        counts = counted(call)
        result(case=call.name, keys=args.keys, **counts)
        lines.append([call.name, *(f"{counts[column]:,}" for column in COLUMNS)])
    print_table(["call", *COLUMNS.values()], lines)
    for size in args.ranks:
        fields = counted_on_ranks(backend, size, args.keys, args.dim)
        result(case=f"training step of 26 hbm, {size} ranks", keys=args.keys, **fields)


if __name__ == "__main__":
    main()
