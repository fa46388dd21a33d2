"""`sok-lite plan`: whether tables have room on machines, and how to make them."""

import argparse
import json
import math
from collections.abc import Sequence
from typing import Any

from sok_lite.cli.arguments import local, rank_count
from sok_lite.cli.errors import FINDINGS, FINE, WrongUse
from sok_lite.cli.plan_text import text
from sok_lite.cli.planned import GIB, Machines, Need, Plan, plan, room, sent
from sok_lite.cli.reading import open_sources
from sok_lite.engine import optimizers
from sok_lite.engine.dtypes import row_dtype
from sok_lite.engine.files.source import columns_of
from sok_lite.engine.optimizers import Adam, UpdateRule

HELP = "say whether tables have room on machines, and how to make them"
EXAMPLES = (
    "sok-lite plan --keys 2e8 --dim 64 --gpus 8 --gpu-gb 80\n"
    "sok-lite plan --keys 2e9 --dim 64 --optimizer adam --gpus 8 --gpu-gb 80 --host-gb 1400\n"
    "sok-lite plan --table name=user,keys=3e8,dim=32 --table name=item,keys=1e7,dim=64 "
    "--gpus 1 --gpu-gb 80 --host-gb 500\n"
    "sok-lite plan runs/model --times 100 --ranks 2 --host-gb 8"
)
_RULES: dict[str, UpdateRule] = {
    name.lower(): getattr(optimizers, name)() for name in optimizers.__all__ if name != "UpdateRule"
} | {"amsgrad": Adam(amsgrad=True)}
_DEFAULT = "adam"
_RANKS_OF_HOST = 8
_ROW_TYPES = ("float32", "float16", "bfloat16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path",
        metavar="PATH",
        nargs="?",
        type=local,
        help="a checkpoint whose tables there are to be",
    )
    parser.add_argument(
        "--times", type=_factor, default=1.0, help="so many times as many keys: 100 (default: 1)"
    )
    parser.add_argument("--keys", type=_count, help="of one table, of all ranks together: 2e9")
    parser.add_argument("--dim", type=_count, help="elements of a row of it")
    parser.add_argument(
        "--table",
        action="append",
        default=[],
        metavar="name=N,keys=K,dim=D",
        help="one of several tables; may have dtype=, optimizer= and ids= (of a row of the batch)",
    )
    parser.add_argument("--dtype", choices=_ROW_TYPES, help="of rows (default: float32)")
    parser.add_argument(
        "--optimizer",
        choices=sorted(_RULES),
        metavar="NAME",
        help=f"{', '.join(sorted(_RULES))} (default: {_DEFAULT}, or states as in PATH)",
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--gpus", type=rank_count, help="a rank for each")
    where.add_argument("--ranks", type=rank_count, help="ranks on machines without GPUs")
    parser.add_argument("--gpu-gb", type=_size, help="memory of a GPU, in GiB")
    parser.add_argument("--host-gb", type=_size, help="memory of a machine, in GiB")
    parser.add_argument(
        "--ranks-per-host",
        type=rank_count,
        help=f"on one machine (default: all, up to {_RANKS_OF_HOST})",
    )
    parser.add_argument(
        "--reserve",
        type=float,
        default=0.1,
        metavar="SHARE",
        help="of all memory, for everything else than tables (default: 0.1)",
    )
    parser.add_argument(
        "--batch", type=_count, default=65536, help="rows of a step, of all ranks (default: 65536)"
    )
    parser.add_argument(
        "--new-keys-per-day", type=_count, default=0, help="to say how long there will be room"
    )
    parser.add_argument("--json", action="store_true", help="write JSON, for programs")


def run(args: argparse.Namespace) -> int:
    now, needs, machines = _now(args), _needs(args), _machines(args)
    grown = [need._replace(num_keys=math.ceil(need.num_keys * args.times)) for need in needs]
    found = plan(grown, machines)
    described = {"now": now, "times": args.times} | _describe(found, args)
    print(json.dumps(described, indent=1) if args.json else text(described))
    return FINE if found.fits else FINDINGS


# ---- what is asked -------------------------------------------------------------------------------


def _count(number: str) -> int:
    try:
        count = float(number)
    except ValueError:
        count = 0
    if not (count >= 1 and count % 1 == 0 and math.isfinite(count)):
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 on, and is {number!r}")
    return int(count)


def _size(number: str) -> float:
    return _above_0(number, "a number of GiB")


def _factor(number: str) -> float:
    factor = _above_0(number, "a number")
    if factor > 1e12:
        raise argparse.ArgumentTypeError(f"must be at most 1e12, and is {number!r}")
    return factor


def _above_0(number: str, what: str) -> float:
    try:
        found = float(number)
    except ValueError:
        found = 0
    if not (found > 0 and math.isfinite(found)):
        raise argparse.ArgumentTypeError(f"must be {what} above 0, and is {number!r}")
    return found


def _needs(args: argparse.Namespace) -> list[Need]:
    has_one = args.keys is not None or args.dim is not None
    if [has_one, bool(args.table), args.path is not None].count(True) != 1:
        raise WrongUse("say which tables: --keys and --dim, or --table, or PATH")
    if args.path is not None:
        return _needs_of(args)
    if args.table:
        needs = [_parse_table(each, args) for each in args.table]
        names = [need.name for need in needs]
        if len(set(names)) < len(names):
            raise WrongUse(f"tables must have different names: {', '.join(names)}")
        return needs
    if args.keys is None or args.dim is None:
        raise WrongUse("give --keys and --dim, both")
    return [_need("table", args.keys, args.dim, args.dtype, args.optimizer)]


def _need(
    name: str, keys: int, dim: int, dtype: str | None, optimizer: str | None, ids: float = 1
) -> Need:
    num_states = len(_RULES[optimizer or _DEFAULT].states)
    return Need(name, keys, dim, dtype or "float32", num_states * dim, ids)


def _parse_table(given: str, args: argparse.Namespace) -> Need:
    """Returns a table of --table."""
    parts = dict(part.partition("=")[::2] for part in given.split(","))
    known = {"name", "keys", "dim", "dtype", "optimizer", "ids"}
    if set(parts) - known or not {"name", "keys", "dim"} <= set(parts):
        raise WrongUse(f"--table must be name=N,keys=K,dim=D[,...], and is {given!r}")
    dtype, optimizer = parts.get("dtype", args.dtype), parts.get("optimizer", args.optimizer)
    if optimizer is not None and optimizer not in _RULES:
        raise WrongUse(f"--table {given!r}: optimizer must be one of {', '.join(sorted(_RULES))}")
    if dtype is not None and dtype not in _ROW_TYPES:
        raise WrongUse(f"--table {given!r}: dtype must be one of {', '.join(_ROW_TYPES)}")
    try:
        keys, dim = _count(parts["keys"]), _count(parts["dim"])
        ids = _size(parts.get("ids", "1"))
    except argparse.ArgumentTypeError as error:
        raise WrongUse(f"--table {given!r}: a number {error}") from error
    return _need(parts["name"], keys, dim, dtype, optimizer, ids)


def _now(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns what each table of PATH has; none without PATH."""
    if args.path is None:
        return []
    found = []
    for source in open_sources(args.path):
        sizes = {each.name: each.row_bytes * source.num_keys for each in columns_of(source)}
        found.append(
            {
                "name": source.name,
                "keys": source.num_keys,
                "dim": source.dim,
                "dtype": row_dtype(source.dtype).name,
                "bytes": sum(sizes.values()),
                "rows_bytes": sizes["values"],
                "states": [
                    {"name": state.name, "dim": state.dim, "bytes": sizes[state.tensor]}
                    for state in source.states
                ],
            }
        )
    return found


def _needs_of(args: argparse.Namespace) -> list[Need]:
    """Returns the tables of a checkpoint."""
    needs = []
    for source in open_sources(args.path):
        dtype = args.dtype or row_dtype(source.dtype).name
        states = sum(state.dim for state in source.states)
        if args.optimizer is not None:
            states = len(_RULES[args.optimizer].states) * source.dim
        needs.append(Need(source.name, max(1, source.num_keys), source.dim, dtype, states))
    return needs


def _machines(args: argparse.Namespace) -> Machines:
    ranks = args.gpus or args.ranks
    of_host = args.ranks_per_host or min(ranks, _RANKS_OF_HOST)
    if args.gpus and args.gpu_gb is None:
        raise WrongUse("give --gpu-gb, the memory of a GPU")
    if args.ranks and (args.host_gb is None or args.gpu_gb is not None):
        raise WrongUse("with --ranks give --host-gb and no --gpu-gb: tables are in RAM")
    if not 0 <= args.reserve < 1:
        raise WrongUse(f"--reserve must be from 0 to below 1, and is {args.reserve}")
    usable = (1 - args.reserve) * GIB
    host = int((args.host_gb or 0) * usable / min(ranks, of_host))
    if args.ranks:
        return Machines(ranks, of_host, host, 0)
    return Machines(ranks, of_host, int(args.gpu_gb * usable), host)


# ---- what is answered ----------------------------------------------------------------------------


def _describe(found: Plan, args: argparse.Namespace) -> dict[str, Any]:
    needs, machines = [table.need for table in found.tables], found.machines
    factor = room(needs, machines)
    num_keys = sum(need.num_keys for need in needs)
    days = None
    if args.new_keys_per_day and found.fits:
        days = (factor - 1) * num_keys / args.new_keys_per_day
    trips = sent(needs, machines.ranks, args.batch)
    return {
        "fits": found.fits,
        "has_gpus": bool(args.gpus),
        "room": factor,
        "days": days,
        "too_many_keys": found.too_many,
        "ranks": machines.ranks,
        "ranks_per_host": machines.ranks_of_host,
        "reserve": args.reserve,
        "near_limit_bytes": machines.near,
        "far_limit_bytes": machines.far,
        "near_bytes": found.near,
        "far_bytes": found.far,
        "tables": [
            {
                **{name: getattr(table.need, name) for name in ("name", "dim", "dtype", "ids")},
                "keys": table.need.num_keys,
                "keys_of_rank": table.num_keys,
                "state_elements": table.need.state_size,
                "row_bytes": table.need.row.row,
                "state_bytes": table.need.row.states,
                "var_type": "hbm" if table.max_capacity is None else "hybrid",
                "max_capacity": table.max_capacity,
                "max_hbm_for_vectors": table.max_hbm_for_vectors,
                **{f"{part}_bytes": size for part, size in table.bytes._asdict().items()},
            }
            for table in found.tables
        ],
        "batch": args.batch,
        "sent_bytes": {**trips._asdict(), "total": trips.total},
        "would_help": _would_help(needs, found),
        "launch": _launch(machines),
    }


def _would_help(needs: Sequence[Need], found: Plan) -> list[dict[str, Any]]:
    """Returns changes and the bytes that each saves on a rank, the most first."""
    halves = [need._replace(dtype="bfloat16") for need in needs]
    changes = [("rows of bfloat16", halves, found.machines)]
    for name in ("adagrad", "sgd"):
        count = len(_RULES[name].states)
        fewer = [n._replace(state_size=min(n.state_size, count * n.dim)) for n in needs]
        changes.append((f"the optimizer {name}", fewer, found.machines))
    twice = found.machines._replace(ranks=2 * found.machines.ranks)
    changes.append((f"{twice.ranks} ranks", list(needs), twice))
    helping = []
    for what, changed, machines in changes:
        after = plan(changed, machines)
        saved = found.near + found.far - after.near - after.far
        if saved > 0:
            helping.append({"what": what, "saved_bytes": saved, "fits": after.fits})
    return sorted(helping, key=lambda each: -each["saved_bytes"])


def _launch(machines: Machines) -> str:
    ranks, of_host = machines.ranks, machines.ranks_of_host
    if ranks == 1:
        return "python train.py"
    hosts, rest = divmod(ranks, of_host)
    slots = [of_host] * hosts + [rest] * (rest > 0)
    named = ",".join(f"host{i + 1}:{count}" for i, count in enumerate(slots))
    where = f" -H {named}" if len(slots) > 1 else ""
    return f"horovodrun -np {ranks}{where} python train.py"
