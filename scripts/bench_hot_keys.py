"""Measures lookups over several ranks with hot keys (`hot_keys=N`) and without.

Ranks are threads of this process, so bytes and counts are those of any machine, and times are of
ranks that share its cores. A step looks up a batch of Zipf ids on each rank; in training it also
sums the gradient and updates the table. Ends with one line `RESULT {json}` for each case: bytes a
step that leave a rank (the mean of the ranks, of keys, rows and gradients), rows that the busiest
rank sends to ranks and gradient rows that it gets, and milliseconds of the slowest rank.

Examples:
  .venv/bin/python scripts/bench_hot_keys.py
  .venv/bin/python scripts/bench_hot_keys.py --hot 1000 10000 --ranks 4 --exponents 1.2
"""

import argparse
import statistics
import time
from collections import Counter
from typing import Any

import numpy as np
from bench_common import result
from bench_lookup import zipf_positions
from bench_turns import print_machine

from sok_lite.backend import Backend, get_backend
from sok_lite.comm import Communicator, run_ranks
from sok_lite.comm.protocol import Gathered
from sok_lite.engine import lookup
from sok_lite.engine.batch import Part, batch_of
from sok_lite.engine.initializer_spec import make_initializer
from sok_lite.engine.optimizers import Adam
from sok_lite.engine.table import hot_keys, make_table
from sok_lite.engine.update import Update, apply_updates


class Counted:
    """Counts what a rank sends and gets in each trip of its lookups.

    Attributes:
      sent: bytes that leave the rank, by trip.
      rows: messages' bytes, those to itself too: of rows that it sends, of gradients that it gets.
    """

    def __init__(self, comm: Communicator) -> None:
        self.sent: Counter[str] = Counter()
        self.rows: Counter[str] = Counter()
        self._alltoallv, self._rank = comm.alltoallv, comm.rank
        comm.alltoallv = self._counted  # type: ignore[method-assign]

    def _counted(
        self,
        rows: Any,
        send_splits: Any,
        recv_splits: np.ndarray | None = None,
        call: str = "alltoallv",
    ) -> Gathered:
        received = self._alltoallv(rows, send_splits, recv_splits, call)
        trip, row_bytes = call.split()[0], rows[:1].nbytes
        self.sent[trip] += row_bytes * int(np.sum(send_splits) - send_splits[self._rank])
        self.rows[trip] += received.rows.nbytes if trip == "send_grads" else rows.nbytes
        return received


def steps(
    backend: Backend, comm: Communicator, args: argparse.Namespace, case: dict[str, Any]
) -> dict[str, Any]:
    """Makes the steps of a rank, and returns what was counted of the last ones."""
    ones = make_initializer("ones", args.dim)
    table = make_table("hbm", backend, args.dim, initializer=ones, hot_keys=case["hot"])
    warm = 3 * hot_keys.WINDOW if case["hot"] else 3  # then it is known what is hot
    rng, splits = np.random.default_rng(comm.rank), np.arange(args.rows + 1)
    shape = (warm + args.steps, args.rows)
    batches = zipf_positions(rng, args.keys, case["exponent"], shape).astype(np.int64)
    owned = np.arange(comm.rank, args.keys, comm.size)
    table.find_or_insert(backend.from_host(owned), unique_keys=True)
    grads = backend.from_host(np.ones((args.rows, args.dim), np.float32))
    counted, times = Counted(comm), []
    for number in range(-warm, args.steps):
        if number == 0:
            counted.sent.clear()
            counted.rows.clear()
        trains = case["work"] == "training"
        start = time.perf_counter()
        keys = backend.from_host(batches[number + warm])
        part = Part(table, keys, backend.from_host(splits), None, "sum", insert=trains)
        batch = batch_of(backend, [part])
        _, trail = lookup.forward_batch(backend, comm, batch)
        if trains:
            (found,) = lookup.backward(backend, [(table, None, "sum")], [grads], trail)
            update = Update(table, Adam(), found.keys, found.row_grads, of_gradient=True)
            apply_updates([update], 0.01, number + warm + 1)
        backend.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
        comm.barrier()
    hot = table.statistics()
    return {
        "sent": counted.sent,
        "rows": {trip: n / (4 * args.dim) for trip, n in counted.rows.items()},
        "ms": statistics.median(times[-args.steps :]),
        "hot": hot.hot_keys,
    }


def measured(backend: Backend, args: argparse.Namespace, ranks: int, **case: Any) -> None:
    """Prints what is measured of a case."""
    told = run_ranks(ranks, lambda comm: steps(backend, comm, args, case))
    trips = {"send_keys": "key_bytes", "return_rows": "row_bytes", "send_grads": "grad_bytes"}
    sent = {
        name: sum(each["sent"][trip] for each in told) / ranks / args.steps
        for trip, name in trips.items()
    }
    busiest = {
        name: max(each["rows"].get(trip, 0) for each in told) / args.steps
        for trip, name in (("return_rows", "busiest_rows"), ("send_grads", "busiest_grads"))
    }
    facts = {"case": f"hot_keys {case['work']}", "ranks": ranks, **case, "chosen": told[0]["hot"]}
    milliseconds = max(each["ms"] for each in told)
    result(**facts, bytes=sum(sent.values()), **sent, **busiest, median_ms=milliseconds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--rows", type=int, default=8192, help="ids of a rank's batch (8192)")
    parser.add_argument("--steps", type=int, default=48, help="measured (48)")
    parser.add_argument("--hot", type=int, nargs="+", default=[1000, 10_000])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--exponents", type=float, nargs="+", default=[1.05, 1.2])
    args = parser.parse_args()
    print_machine()
    for ranks in args.ranks:
        for exponent in args.exponents:
            for work in ("training", "reading"):
                for hot in (0, *args.hot):
                    backend = get_backend("cpu")
                    measured(backend, args, ranks, exponent=exponent, work=work, hot=hot)


if __name__ == "__main__":
    main()
