"""A model of one training step on N GPUs: what it takes, and which tables fit.

A step is a lookup of all tables, a dense model, the gradient and Adam. Every number comes as a
range, from cautious to hopeful: tools/scaling_machine.py has the assumptions and their sources,
tools/scaling_work.py the work of a rank. tests/tools/test_scaling_model.py compares keys and
bytes with those of a real exchange. What is assumed of overlap: within a kernel, reading in order
goes on beside random reads; in the hopeful case the host prepares the next kernels beside the GPU;
nothing else overlaps.

The trips are flat, each rank to each. `--hierarchical` says what two stages would take, first to
the ranks of the node that have the same place in theirs as the receiver.

Examples:
  python -m tools.scaling_model
  python -m tools.scaling_model --explain
  python -m tools.scaling_model --ranks 64 --keys 1e10 --dim 128 --row bfloat16 --parts
"""

import argparse
import json
import math
from dataclasses import asdict
from typing import Any, NamedTuple

from tools.scaling_machine import H200, A, Machine
from tools.scaling_work import Job, Work

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
MACHINES = {"h200": H200, "a": A}
LINE = 64  # bytes of a random read
INDEX = 31  # bytes a key of an index, as docs/sizing.md has them
HEAT = 9  # bytes a key of what two tiers need
NOT_OF_TABLES = ("dense model", "allreduce", "framework")


# ----------------------------------------------------------------- memory


class Placement(NamedTuple):
    """Where the rows of a job are.

    Attributes:
      tiers: 1 or 2.
      near_rows: of all ranks together.
    """

    tiers: int
    near_rows: float


def bytes_a_key(job: Job, tiers: int = 1) -> float:
    """Returns what a key takes: row, states, index."""
    return job.row_size + 4 * job.dim * job.states + INDEX + (HEAT if tiers == 2 else 0)


def placement(job: Job, machine: Machine, ranks: int, is_hopeful: bool) -> Placement | None:
    """Returns where the rows are, in the fewest tiers; None: they do not fit."""
    near, far = (ranks * given.at(is_hopeful) for given in (machine.near, machine.far))
    if job.keys * bytes_a_key(job) <= near:
        return Placement(1, job.keys)
    row = bytes_a_key(job) - INDEX
    near_rows = (near - job.keys * (INDEX + HEAT)) / row
    if near_rows < 0 or (job.keys - near_rows) * row > far:
        return None
    return Placement(2, min(near_rows, job.keys))


def least_nodes(job: Job, machine: Machine, tiers: int, is_hopeful: bool) -> int | None:
    """Returns how many nodes the tables take, None if more than 100,000."""
    place = machine.ranks_per_node
    near, far = (place * given.at(is_hopeful) for given in (machine.near, machine.far))
    total = job.keys * bytes_a_key(job, tiers)
    nodes = (
        total / near if tiers == 1 else max(job.keys * (INDEX + HEAT) / near, total / (near + far))
    )
    return math.ceil(nodes) if nodes < 1e5 else None


# ----------------------------------------------------------------- time


def trip_seconds(
    sent: float, ranks: int, machine: Machine, is_hopeful: bool, is_hierarchical: bool = False
) -> float:
    """Returns what an all-to-all takes in which the busiest rank sends so many bytes to others."""
    if ranks == 1:
        return 0.0
    node = min(machine.ranks_per_node, ranks)
    link, network, local_latency, latency, peer = (
        given.at(is_hopeful)
        for given in (
            machine.local_link,
            machine.network,
            machine.local_latency,
            machine.latency,
            machine.peer,
        )
    )
    within = sent * (node - 1) / (ranks - 1)
    out = sent - within
    if ranks <= machine.ranks_per_node:
        return within / link + local_latency + peer * (ranks - 1)
    if not is_hierarchical:
        return max(within / link, out / network) + latency + peer * (ranks - 1)
    within += out * (node - 1) / node
    peers = node - 1 + ranks / node - 1
    return within / link + out / network + local_latency + latency + peer * peers


def step_parts(
    work: Work,
    machine: Machine,
    is_hopeful: bool,
    near_rows: float | None = None,
    is_hierarchical: bool = False,
) -> dict[str, float]:
    """Returns the seconds of each part of a step on the busiest rank.

    Args:
      near_rows: how many rows of the job are near, the most frequent ones; None: all.
    """
    job, ranks = work.job, work.ranks
    accesses, stream = machine.accesses.at(is_hopeful), machine.stream.at(is_hopeful)

    def kernel(reads: float, in_order: float) -> float:
        return max(reads / accesses, in_order / stream)

    items, sent = work.items, work.distinct
    came, owned = sent * work.busiest, work.owned * work.busiest
    row, lines = job.row_size, math.ceil(job.row_size / LINE)
    out, grad = 4 * job.dim * items / job.ids, 4 * job.dim
    states = 1 + job.states * math.ceil(grad / LINE) / lines
    parts: dict[str, float] = {}
    if ranks == 1:
        parts["find and pool"] = kernel(items * (1 + lines), 8 * items + out)
        parts["gradient"] = kernel(2 * items, 8 * items + grad * (items + owned))
    else:
        trips = {"keys": work.key_trip, "rows": work.row_trip, "gradients": work.grad_trip}
        parts["dedup and group"] = kernel(2 * items, 8 * items + 48 * sent)
        parts["find and copy"] = kernel(came * (1 + lines), came * (8 + row))
        parts["pack and unpack"] = kernel(0, 2 * (row + job.grad_size) * (came + sent))
        parts["pool"] = kernel(0, items * row + out)
        parts["gradient"] = kernel(2 * came, grad * (items + sent + came + owned))
        for name, size in trips.items():
            parts[f"trip of {name}"] = trip_seconds(
                size, ranks, machine, is_hopeful, is_hierarchical
            )
    parts["update"] = kernel(owned * lines * states, owned * 2 * lines * LINE * states)
    if near_rows is not None and near_rows < job.keys:
        # Read for the lookup; read with its states and written for the update.
        far = owned * work.far_share(near_rows) * (2 * row + grad * job.states)
        parts["far rows"] = far / machine.far_link.at(is_hopeful)
    parts["dense model"] = 6 * job.dense * job.batch / machine.dense.at(is_hopeful)
    if ranks > 1:
        reduced = 2 * 4 * job.dense * (ranks - 1) / ranks
        link = machine.local_link.at(is_hopeful)
        if ranks > machine.ranks_per_node:  # all adapters of a node carry a part
            link = min(link, machine.ranks_per_node * machine.network.at(is_hopeful))
        parts["allreduce"] = reduced / link + machine.latency.at(is_hopeful)
    parts["host"] = (machine.host if ranks > 1 else machine.host_alone).at(is_hopeful)
    parts["framework"] = machine.framework.at(is_hopeful)
    return parts


def step_seconds(parts: dict[str, float], is_hopeful: bool) -> float:
    """Returns what the parts take together."""
    rest = dict(parts)
    host = rest.pop("host")
    links = sum(seconds for name, seconds in rest.items() if name.startswith("trip"))
    device = sum(rest.values()) - links
    return links + (max(host, device) if is_hopeful else host + device)


# ----------------------------------------------------------------- words


def step_of(job: Job, machine: Machine, ranks: int, args: argparse.Namespace) -> dict[str, Any]:
    """Returns the RESULT of a step: milliseconds and million samples a second, both ends."""
    work = Work(job, ranks)
    fields: dict[str, Any] = {"case": "step", "ranks": ranks, "keys": job.keys, "dim": job.dim}
    fields |= {"distinct": work.distinct, "owned": work.owned, "busiest": work.busiest}
    fields |= {"mb_keys": work.key_trip / 1e6, "mb_rows": work.row_trip / 1e6}
    fields["mb_gradients"] = work.grad_trip / 1e6
    for is_hopeful, end in ((False, "cautious"), (True, "hopeful")):
        where = placement(job, machine, ranks, is_hopeful)
        fields[f"tiers_{end}"] = where.tiers if where else None
        near = where.near_rows if where else None
        parts = step_parts(work, machine, is_hopeful, near, args.hierarchical)
        of_tables = sum(s for name, s in parts.items() if name not in NOT_OF_TABLES)
        fields[f"tables_ms_{end}"] = 1e3 * of_tables
        seconds = step_seconds(parts, is_hopeful)
        fields[f"ms_{end}"] = 1e3 * seconds
        fields[f"million_samples_{end}"] = ranks * job.batch / seconds / 1e6
        if args.parts:
            fields[f"parts_ms_{end}"] = {name: rounded(1e3 * s) for name, s in parts.items()}
    return fields


def memory_of(job: Job, machine: Machine) -> dict[str, Any]:
    """Returns the RESULT of what the tables take."""
    fields: dict[str, Any] = {"case": "memory", "keys": job.keys, "dim": job.dim}
    fields["row_bytes"] = job.row_size
    for tiers in (1, 2):
        size = bytes_a_key(job, tiers)
        fields[f"bytes_a_key_{tiers}_tiers"] = size
        fields[f"tb_{tiers}_tiers"] = job.keys * size / 1e12
        for is_hopeful, end in ((False, "cautious"), (True, "hopeful")):
            fields[f"nodes_{tiers}_tiers_{end}"] = least_nodes(job, machine, tiers, is_hopeful)
    return fields


def rounded(value: Any) -> Any:
    """Returns a float with 4 significant digits and anything else as it is."""
    return float(f"{value:.4g}") if isinstance(value, float) else value


def say(fields: dict[str, Any]) -> None:
    """Prints a RESULT line."""
    print("RESULT " + json.dumps({name: rounded(value) for name, value in fields.items()}))


def main() -> None:
    assert __doc__
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--machine", choices=MACHINES, default="h200", help="(%(default)s)")
    add("--ranks", type=int, nargs="+", default=[1, 8, 64, 512], help="GPUs (1 8 64 512)")
    add("--tables", type=int, default=Job.tables, help="(%(default)s)")
    add("--keys", type=float, default=Job.keys, help="of all tables together (%(default)g)")
    add("--dim", type=int, default=Job.dim, help="(%(default)s)")
    add("--row", choices=ITEMSIZE, default="float32", help="dtype of rows (%(default)s)")
    add("--gradient", choices=ITEMSIZE, default="float32", help="as they travel (%(default)s)")
    add("--states", type=int, default=Job.states, help="arrays beside a row (%(default)s)")
    add("--batch", type=int, default=Job.batch, help="rows of a rank (%(default)s)")
    add("--ids", type=float, default=Job.ids, help="of a row and a table (%(default)s)")
    add("--zipf", type=float, default=Job.exponent, help="exponent (%(default)s)")
    add("--owner", choices=("hash", "mod"), default=Job.owner, help="(%(default)s)")
    add("--dense", type=float, default=Job.dense, help="parameters (%(default)g)")
    add("--hierarchical", action="store_true", help="trips in two stages")
    add("--parts", action="store_true", help="say what each part takes")
    add("--explain", action="store_true", help="say what is assumed")
    args = parser.parse_args()
    machine = MACHINES[args.machine]
    job = Job(
        args.tables,
        args.keys,
        args.dim,
        ITEMSIZE[args.row],
        ITEMSIZE[args.gradient],
        args.states,
        args.batch,
        args.ids,
        args.zipf,
        args.owner,
        args.dense,
    )
    if args.explain:
        print(machine.explain())
        print(
            "job: "
            + ", ".join(
                f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
                for name, value in asdict(job).items()
            )
        )
    say(memory_of(job, machine))
    for ranks in args.ranks:
        say(step_of(job, machine, ranks, args))


if __name__ == "__main__":
    main()
