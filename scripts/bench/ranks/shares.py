"""Counts what each rank does in a step, on as many ranks as were launched.

Counts depend on no machine: items, distinct keys, keys that others are asked for and that it is
asked for, bytes that leave it in each trip, collectives, launches. What waits for a GPU is counted
by tools/count_launches.py. Each case ends with one line `RESULT {json}`: the mean over ranks and
the busiest rank, of a step.

Cases: those of many_tables/systems.py, where the rows are those of all ranks together, and
`demo-8192`, a step of examples/train_ctr.py with its own data. Bytes are what tables send; dense
gradients, which Horovod sums, and what transports add to a message are not among them. One number
depends on the machine, `engine_cpu_ms`: how long the engine's thread was on a core, in the fastest
step.

Examples:
  .venv/bin/python -m scripts.bench ranks shares
  horovodrun -np 4 .venv/bin/python -m scripts.bench ranks shares --cases train-8192 demo-8192
"""

import argparse
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from scripts.bench.common.measuring import result
from scripts.bench.common.systems import SYSTEMS
from scripts.bench.common.turns import print_machine
from scripts.bench.many_tables.systems import ManyTables
from scripts.bench.ranks.pinned import Demo
from sok_lite.backend import get_backend
from sok_lite.comm import Communicator
from tests.support.call_counts import counts_of

CASES = ("lookup-8192", "train-8192", "demo-8192")
TRIPS = ("send_keys", "return_rows", "send_grads")
STEPS = 8  # that are counted: one of each batch


class Noted(Counter[str]):
    """What this rank has done so far, by name."""

    def watch(self, comm: Communicator) -> None:
        """Notes from now on what a communicator and the engine of this process do."""
        from sok_lite.engine import lookup, update

        self._watch_collectives(comm)
        for module, name, note in (
            (lookup, "forward", self._note_items),
            (lookup, "send", self._note_sent),
            (lookup, "dedup", self._note_owned),
        ):
            setattr(module, name, _then(getattr(module, name), note))
        timed: list[tuple[Any, str]] = [
            (lookup, "forward"),
            (lookup, "backward"),
            (update.UpdateStep, "commit"),
        ]
        for owner, name in timed:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _watch_collectives(self, comm: Communicator) -> None:
        together = comm._together

        def noting(collective: Callable, call: str, *arguments: Any) -> Any:
            self["collectives"] += 1
            trip = call.split()[0]
            if trip in TRIPS:
                rows, splits = arguments
                others = len(rows) - int(splits[comm.rank])
                self[f"{trip}_bytes"] += others * rows.shape[1] * rows.itemsize
            return together(collective, call, *arguments)

        comm._together = noting  # type: ignore[method-assign]

    def _note_items(self, _: Any, args: tuple) -> None:
        self["items"] += sum(args[2].layout.sizes)

    def _note_sent(self, sent: Any, args: tuple) -> None:
        comm, counts = args[1], sent.route.send_counts
        self["distinct_keys"] += int(counts.sum())
        self["keys_for_others"] += int(counts.sum() - counts[comm.rank].sum())
        self["keys_asked"] += sent.received.size

    def _note_owned(self, distinct: Any, _: tuple) -> None:
        self["keys_owned"] += distinct.keys.size

    def _timed(self, function: Callable) -> Callable:
        def call(*args: Any, **options: Any) -> Any:
            start = time.thread_time()
            try:
                return function(*args, **options)
            finally:
                self["engine_cpu_us"] += round(1e6 * (time.thread_time() - start))

        return call


def _then(function: Callable, note: Callable[[Any, tuple], None]) -> Callable:
    def call(*args: Any, **options: Any) -> Any:
        returned = function(*args, **options)
        note(returned, args)
        return returned

    return call


def measure(comm: Communicator, case: str, step: Callable[[], float], noted: Noted) -> None:
    """Counts STEPS steps on all ranks; rank 0 prints. Every rank must call it."""
    took = []
    for _ in range(3 * STEPS):  # in the first ones keys are inserted and kernels compiled
        before = noted["engine_cpu_us"]
        step()
        took.append(noted["engine_cpu_us"] - before)
    noted.clear()
    launches = sum(counts_of(get_backend(), step).launches for _ in range(STEPS))
    least = STEPS * min(took) / 1000
    mine = {**noted, "launches": launches, "engine_cpu_ms": least}
    names = ["items", "distinct_keys", "keys_for_others", "keys_asked", "keys_owned"]
    names += [*(f"{trip}_bytes" for trip in TRIPS), "collectives", "launches", "engine_cpu_ms"]
    row = np.array([mine.get(name, 0) for name in names], np.float64)
    ranks = comm.allgatherv(row[None]).rows / STEPS
    if comm.rank == 0:
        fields: dict[str, Any] = {"case": case, "ranks": comm.size}
        for name, of_ranks in zip(names, ranks.T, strict=True):
            if of_ranks.any():
                fields[name] = float(of_ranks.mean())
                if of_ranks.min() < of_ranks.max():
                    fields[f"{name}_busiest"] = float(of_ranks.max())
        result(**fields)


def main(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--cases", nargs="+", default=CASES, help="(%(default)s)")
    add("--tables", type=int, default=26)
    add("--keys", type=int, default=20_000, help="in each table (%(default)s)")
    add("--dim", type=int, default=16, help="elements of a row (%(default)s)")
    args = parser.parse_args()
    demo = Demo()  # sets threads, which must come first, and connects the ranks
    from sok_lite.bridge.job import communicator

    comm, noted = communicator(), Noted()
    if comm.rank == 0:
        print_machine()
    many = None
    noted.watch(comm)
    for case in args.cases:
        if case.startswith("demo-"):
            step = demo.timed_calls(case.replace("demo", "step"))
        else:
            many = many or ManyTables(SYSTEMS["sok_lite"](args.dim, None), args)
            step = many.timed_calls(case)
        measure(comm, case, step, noted)
