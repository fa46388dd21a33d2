"""Times an all-to-all between ranks: over the tool alone, and with shared memory where it serves.

Where ranks are on one machine, or some are (`sok_lite.comm.local`), both ways take turns. One line
`RESULT {json}` for each size and way: milliseconds of a call on rank 0 (median and least),
milliseconds of processor time that all ranks together spent on it, and bytes that left a machine.

Examples:
  horovodrun -np 4 -H first:2,second:2 .venv/bin/python -m scripts.bench ranks alltoall
  python -m tools.on_machines --machines 2 --tool mpi scripts.bench ranks alltoall --tool mpi
"""

import argparse
import statistics
import time
from pathlib import Path

import numpy as np

from scripts.bench.common.measuring import result
from sok_lite.comm import Communicator, make_communicator

_ROW_BYTES = 64


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tool", default="horovod", choices=["horovod", "mpi"])
    parser.add_argument("--bytes", type=int, nargs="+", default=[1 << 10, 1 << 16, 1 << 22])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=10, help="of a round")
    args = parser.parse_args()
    comm = make_communicator(args.tool)
    base = getattr(comm, "_base", comm)
    ways = {type(way).__name__: way for way in (base, comm)}
    for num_bytes in args.bytes:
        for name, figures in time_ways(ways, num_bytes, args.rounds, args.calls).items():
            if comm.rank == 0:
                result(way=name, bytes=num_bytes, ranks=comm.size, **figures)


def time_ways(
    ways: dict[str, Communicator], num_bytes: int, rounds: int, calls: int
) -> dict[str, dict[str, float]]:
    """Returns the figures of each way to send so many bytes from each rank."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    busy_s, left_bytes = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, 0)
    for turn in range(rounds + 1):
        for name, comm in ways.items():
            rows = np.zeros((num_bytes // _ROW_BYTES, _ROW_BYTES), np.uint8)
            splits = np.full(comm.size, len(rows) // comm.size, np.int32)
            splits[: len(rows) % comm.size] += 1
            comm.barrier()
            busy, left = time.process_time(), _sent_bytes()
            for _ in range(calls):
                start = time.perf_counter()
                comm.alltoallv(rows, splits)
                if turn:  # the first round makes connections and memory
                    seconds[name].append(time.perf_counter() - start)
            if turn:
                busy_s[name] += time.process_time() - busy
                left_bytes[name] += _sent_bytes() - left
    number = rounds * calls
    figures = {}
    for name, comm in ways.items():
        one_a_machine = left_bytes[name] if comm.local_rank == 0 else 0
        figures[name] = {
            "median_ms": round(statistics.median(seconds[name]) * 1e3, 3),
            "least_ms": round(min(seconds[name]) * 1e3, 3),
            "busy_ms": round(float(comm.allreduce(busy_s[name])) / number * 1e3, 3),
            "left_bytes": int(comm.allreduce(one_a_machine)) // number,
        }
    return figures


def _sent_bytes() -> int:
    """Returns how many bytes have left this machine, by Linux' count of its interfaces."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    counts = (line.replace(":", " ").split() for line in lines)
    return sum(int(count[9]) for count in counts if count[0] != "lo")
