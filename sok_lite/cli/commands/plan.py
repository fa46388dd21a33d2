"""`sok-lite plan`: computes whether tables fit on machines, and how to make them."""

import argparse
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sok_lite.cli.arguments import add_json, rank_count, readable
from sok_lite.cli.errors import FINDINGS, FINE, WrongUse
from sok_lite.cli.reading import num_texts, open_sources, own_manifest
from sok_lite.engine import optimizers
from sok_lite.engine.dtypes import row_dtype
from sok_lite.engine.files.source import Source, columns_of
from sok_lite.engine.optimizers import Adam, UpdateRule
from sok_lite.engine.owner import HASH
from sok_lite.engine.table.base import MAX_KEYS
from sok_lite.engine.table.sizing import (
    RowBytes,
    TableBytes,
    hbm_bytes,
    hybrid_bytes,
    max_capacity_for,
)
from sok_lite.engine.table.summary import format_bytes
from sok_lite.reports.text import counted

GIB = 1 << 30
# Stop looking for room beyond this many times the planned keys.
MOST_ROOM = 64
_DIGITS = 12  # precision, in bits, of the factor of keys that fit

HELP = "estimate whether tables fit on machines, and print how to create them"
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
# Optimizers that `sk.Table(optimizer=...)` takes by name, and those of sok_lite.optimizers.
_OF_KERAS = (
    *("sgd", "adadelta", "adagrad", "adam", "adamw", "adamax"),
    *("ftrl", "lion", "nadam", "rmsprop"),
)
_OF_OURS = {
    name.lower(): name
    for name in (
        *("GroupAMSGrad", "GroupAdam", "GroupLamb", "GroupMomentum"),
        *("RowWiseAdagrad", "SparseGroupFtrl"),
    )
}
_RANKS_OF_HOST = 8
_ROW_TYPES = ("float32", "float16", "bfloat16")

_PARTS = (
    ("rows", "near_rows_bytes", "far_rows_bytes"),
    ("states", "near_states_bytes", "far_states_bytes"),
    ("index", "slots_bytes", None),
    ("access counts", "access_counts_bytes", None),
    ("spare", "near_spare_bytes", "far_spare_bytes"),
)


# ---- placement of tables on machines of known sizes ----------------------------------------------


class Need(NamedTuple):
    """A table to plan for."""

    name: str
    num_keys: int  # on all ranks together
    dim: int
    dtype: str
    state_size: int  # elements of all optimizer states of a row
    ids: float = 1.0  # per batch row
    optimizer: str | None = None  # that has such states, if known
    arguments: tuple[str, ...] = ()  # further ones of the table's constructor

    @property
    def row(self) -> RowBytes:
        """Memory of one row."""
        return RowBytes.of(self.dim, self.dtype, self.state_size)


class Machines(NamedTuple):
    """The machines that hold the tables."""

    ranks: int  # processes, one for each GPU
    ranks_of_host: int  # per machine
    near: int  # bytes for a rank's tables in GPU memory; in host memory without GPUs
    far: int  # bytes for a rank's tables in host memory, besides near


class TablePlan(NamedTuple):
    """A table as planned."""

    need: Need
    num_keys: int  # on the fullest rank
    max_capacity: int | None  # of a "hybrid" table; None: an "hbm" table
    max_hbm_for_vectors: float | None  # of a "hybrid" table, in GiB
    bytes: TableBytes  # on that rank


class Plan(NamedTuple):
    """All tables on the machines; `too_many` names tables with more keys than a rank can hold."""

    machines: Machines
    tables: list[TablePlan]
    too_many: list[str]

    @property
    def near(self) -> int:
        """Near memory per rank."""
        return sum(table.bytes.near for table in self.tables)

    @property
    def far(self) -> int:
        """Far memory per rank."""
        return sum(table.bytes.far for table in self.tables)

    @property
    def fits(self) -> bool:
        has_room = self.near <= self.machines.near and self.far <= self.machines.far
        return has_room and not self.too_many


def plan(needs: Sequence[Need], machines: Machines) -> Plan:
    """Places tables near, the largest in two tiers if needed; at worst returns what lacks least."""
    order = sorted(range(len(needs)), key=lambda i: -needs[i].num_keys * needs[i].row.total)
    counts = range(len(needs) + 1) if machines.far else range(1)
    for num_hybrid in counts:
        found = _with_tiers(needs, set(order[:num_hybrid]), machines)
        if found.fits:
            break
    return found


def room(needs: Sequence[Need], machines: Machines) -> float:
    """Returns by what factor keys could grow, up to `MOST_ROOM`; rounded down."""

    def fits(factor: float) -> bool:
        more = [need._replace(num_keys=math.ceil(need.num_keys * factor)) for need in needs]
        return plan(more, machines).fits

    if fits(MOST_ROOM):
        return MOST_ROOM
    low, high = 0.0, float(MOST_ROOM)
    for _ in range(_DIGITS + MOST_ROOM.bit_length()):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def keys_of_rank(num_keys: int, ranks: int) -> int:
    """Returns the number of keys on the fullest rank: four standard deviations above the mean."""
    mean = num_keys / ranks
    return math.ceil(mean + (4 * math.sqrt(mean) if ranks > 1 else 0))


def _with_tiers(needs: Sequence[Need], in_tiers: set[int], machines: Machines) -> Plan:
    """Returns a plan with the given tables in two tiers and the others near."""
    counts = [keys_of_rank(need.num_keys, machines.ranks) for need in needs]
    pairs = list(zip(needs, counts, strict=True))
    capacities = [
        max_capacity_for(count) if i in in_tiers else None for i, count in enumerate(counts)
    ]
    too_many = [need.name for need, count in pairs if count > MAX_KEYS]
    too_many += [needs[i].name for i in in_tiers if capacities[i] is None]
    least = [
        hbm_bytes(count, need.row)
        if capacity is None
        else hybrid_bytes(count, need.row, capacity, 0)
        for (need, count), capacity in zip(pairs, capacities, strict=True)
    ]
    # The remaining near memory is split among two-tier tables by size.
    left = machines.near - sum(size.near for size in least)
    all_near = [
        0 if capacity is None else hybrid_bytes(count, need.row, capacity, count).near - size.near
        for (need, count), capacity, size in zip(pairs, capacities, least, strict=True)
    ]
    share = min(1.0, max(0.0, left / max(1, sum(all_near))))
    tables = []
    for (need, count), capacity, size in zip(pairs, capacities, least, strict=True):
        if capacity is None:
            tables.append(TablePlan(need, count, None, None, size))
            continue
        gigabytes = _rounded_down(share * count * need.row.row / GIB)
        near_rows = int(gigabytes * GIB / need.row.row)
        size = hybrid_bytes(count, need.row, capacity, near_rows)
        tables.append(TablePlan(need, count, capacity, gigabytes, size))
    return Plan(machines, tables, sorted(set(too_many)))


def _rounded_down(number: float) -> float:
    """Rounds down to three digits."""
    if number <= 0:
        return 0.0
    places = 2 - math.floor(math.log10(number))
    return round(math.floor(number * 10**places) / 10**places, max(0, places))


class Sent(NamedTuple):
    """Upper bounds of the bytes that a rank sends to others per training step."""

    keys: int
    rows: int
    gradients: int

    @property
    def total(self) -> int:
        return sum(self)


def sent(needs: Sequence[Need], ranks: int, batch: int) -> Sent:
    """Returns what a rank sends per step if no id repeats; `batch` is of all ranks together."""
    keys = rows = gradients = 0.0
    for need in needs:
        others = batch * need.ids / ranks * (ranks - 1) / ranks
        keys += others * 8
        rows += others * need.row.row
        gradients += others * need.dim * 4
    return Sent(*map(math.ceil, (keys, rows, gradients)))


# ---- the command ---------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path",
        metavar="PATH",
        nargs="?",
        type=readable,
        help="plan for the tables of this checkpoint, in a folder or at an address",
    )
    parser.add_argument(
        "--times",
        type=_factor,
        default=1.0,
        metavar="X",
        help="plan for X times as many keys (default: 1)",
    )
    parser.add_argument(
        "--keys", type=_count, metavar="N", help="keys of one table, over all ranks, such as 2e9"
    )
    parser.add_argument("--dim", type=_count, metavar="N", help="elements per row of that table")
    parser.add_argument(
        "--table",
        action="append",
        default=[],
        metavar="name=N,keys=K,dim=D",
        help="one of several tables; also takes dtype=, optimizer= and ids= (per row of the batch)",
    )
    parser.add_argument("--dtype", choices=_ROW_TYPES, help="row format (default: float32)")
    parser.add_argument(
        "--optimizer",
        choices=sorted(_RULES),
        metavar="NAME",
        help=f"{', '.join(sorted(_RULES))} (default: {_DEFAULT}, or states as in PATH)",
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--gpus", type=rank_count, metavar="N", help="number of GPUs, one rank each")
    where.add_argument(
        "--ranks", type=rank_count, metavar="N", help="number of ranks, on machines without GPUs"
    )
    parser.add_argument("--gpu-gb", type=_size, metavar="GIB", help="memory of a GPU")
    parser.add_argument("--host-gb", type=_size, metavar="GIB", help="memory of a machine")
    parser.add_argument(
        "--ranks-per-host",
        type=rank_count,
        metavar="N",
        help=f"ranks per machine (default: all, up to {_RANKS_OF_HOST})",
    )
    parser.add_argument(
        "--reserve",
        type=float,
        default=0.1,
        metavar="SHARE",
        help="share of all memory to leave for everything but tables (default: 0.1)",
    )
    parser.add_argument(
        "--batch",
        type=_count,
        default=65536,
        metavar="N",
        help="rows per step, over all ranks (default: 65536)",
    )
    parser.add_argument(
        "--new-keys-per-day",
        type=_count,
        default=0,
        metavar="N",
        help="estimate when memory runs out",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    now, needs, machines = _current_tables(args), _needs(args), _machines(args)
    grown = [need._replace(num_keys=math.ceil(need.num_keys * args.times)) for need in needs]
    found = plan(grown, machines)
    described = {"now": now, "times": args.times} | _describe(found, args)
    print(json.dumps(described, indent=1) if args.json else _text(described))
    return FINE if found.fits else FINDINGS


# ---- the request ---------------------------------------------------------------------------------


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
    optimizer = optimizer or _DEFAULT
    size = _state_size(optimizer, dim)
    return Need(name, keys, dim, dtype or "float32", size, ids, optimizer)


def _state_size(optimizer: str, dim: int) -> int:
    return sum(size for size, _ in _RULES[optimizer].kinds(dim).values())


def _parse_table(given: str, args: argparse.Namespace) -> Need:
    """Parses --table."""
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


def _current_tables(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns facts of each table of PATH; [] without PATH."""
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
    found = own_manifest(args.path)
    for source in open_sources(args.path):
        dtype = args.dtype or row_dtype(source.dtype).name
        states, optimizer = sum(state.dim for state in source.states), _optimizer_of(source)
        if args.optimizer is not None:
            states, optimizer = _state_size(args.optimizer, source.dim), args.optimizer
        arguments = [f'key_type="{source.key_type}"'] * (source.key_type != "int64")
        arguments += ["key_type=str, keep_texts=True"] * (num_texts(source, found) > 0)
        arguments += ['partitioner="hash"'] * (source.about.owner == HASH.name)
        need = Need(source.name, max(1, source.num_keys), source.dim, dtype, states)
        needs.append(need._replace(optimizer=optimizer, arguments=tuple(arguments)))
    return needs


def _optimizer_of(source: Source) -> str | None:
    """Returns the first optimizer with the states of a table, or None."""
    states = {state.name: state.dim for state in source.states}
    for name, rule in _RULES.items() if states else ():
        if {each: size for each, (size, _) in rule.kinds(source.dim).items()} == states:
            return name
    return None


def _own_optimizers(needs: Sequence[Need]) -> list[str | None]:
    """Returns each `sk.Table(optimizer=...)`; None: the most frequent one, passed to compile()."""
    known = Counter(need.optimizer for need in needs if need.optimizer in _OF_KERAS)
    (common, _), *_ = [*known.most_common(1), (None, 0)]
    own: list[str | None] = []
    for need in needs:
        name = need.optimizer
        is_by_name = name in _OF_KERAS and name != common
        own.append(f'"{name}"' if is_by_name else None)
        if name in _OF_OURS:
            own[-1] = f"{_OF_OURS[name]}()"
    return own


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


# ---- the answer ----------------------------------------------------------------------------------


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
                "optimizer": own,
                "arguments": list(table.need.arguments),
                **{f"{part}_bytes": size for part, size in table.bytes._asdict().items()},
            }
            for table, own in zip(found.tables, _own_optimizers(needs), strict=True)
        ],
        "batch": args.batch,
        "sent_bytes": {**trips._asdict(), "total": trips.total},
        "would_help": _would_help(needs, found, bool(args.gpus)),
        "launch": _launch(machines),
    }


def _would_help(needs: Sequence[Need], found: Plan, has_gpus: bool) -> list[dict[str, Any]]:
    """Returns changes with the bytes that each saves per rank, largest first."""
    halves = [need._replace(dtype="bfloat16") for need in needs]
    changes = [("rows of bfloat16", halves, found.machines)]
    for name in ("adagrad", "rowwiseadagrad", "sgd"):
        fewer = [
            need._replace(state_size=min(need.state_size, _state_size(name, need.dim)))
            for need in needs
        ]
        changes.append((f"the optimizer {name}", fewer, found.machines))
    # More ranks on as many machines would share the same memory.
    ranks, of_host = found.machines.ranks, found.machines.ranks_of_host
    twice = found.machines._replace(ranks=2 * ranks, ranks_of_host=min(ranks, of_host))
    changes.append((_as_ranks(twice, has_gpus), list(needs), twice))
    helping = []
    for what, changed, machines in changes:
        after = plan(changed, machines)
        saved = found.near + found.far - after.near - after.far
        if saved > 0:
            helping.append({"what": what, "saved_bytes": saved, "fits": after.fits})
    return sorted(helping, key=lambda each: -each["saved_bytes"])


def _as_ranks(machines: Machines, has_gpus: bool) -> str:
    """Describes the number of ranks and machines, and the arguments to plan for those."""
    ranks, of_host = machines.ranks, machines.ranks_of_host
    what = f"{ranks} ranks"
    if has_gpus and not machines.far:  # machines share nothing of what is in GPUs
        return what
    is_default = of_host == min(ranks, _RANKS_OF_HOST)
    option = "" if is_default else f" (--ranks-per-host {of_host})"
    return f"{what} on {math.ceil(ranks / of_host)} machines{option}"


def _launch(machines: Machines) -> str:
    ranks, of_host = machines.ranks, machines.ranks_of_host
    if ranks == 1:
        return "python train.py"
    hosts, rest = divmod(ranks, of_host)
    slots = [of_host] * hosts + [rest] * (rest > 0)
    named = ",".join(f"host{i + 1}:{count}" for i, count in enumerate(slots))
    where = f" -H {named}" if len(slots) > 1 else ""
    return f"horovodrun -np {ranks}{where} python train.py"


# ---- the printed text ----------------------------------------------------------------------------


def _text(answer: Mapping[str, Any]) -> str:
    """Formats a plan, the verdict first."""
    lines = [_verdict(answer), *_now_lines(answer)]
    if answer["fits"]:
        lines += ["", f"create the tables ({'; '.join(_imports(answer))})"]
        lines += [f"  {_constructor(table)}" for table in answer["tables"]]
    lines += ["", *_memory_lines(answer), "", *_table_lines(answer), "", *_sent_lines(answer)]
    if answer["would_help"]:
        lines += ["", "what would save most memory on each rank"]
        width = max(len(each["what"]) for each in answer["would_help"])
        lines += [
            f"  {each['what']:{width}} {format_bytes(each['saved_bytes']):>12} less"
            f"{'' if each['fits'] == answer['fits'] else ', and it fits'}"
            for each in answer["would_help"]
            if each["fits"] or not answer["fits"]
        ]
    if answer["fits"]:
        lines += ["", "launch", f"  {answer['launch']}"]
    return "\n".join([*lines, "", *_assumption_lines(answer)])


def _verdict(answer: Mapping[str, Any]) -> str:
    near = "GPU" if answer["has_gpus"] else "RAM"
    sizes = f"{_limit_text(answer, 'near')} {near}"
    if answer["far_bytes"] or (answer["has_gpus"] and answer["far_limit_bytes"]):
        sizes += f" and {_limit_text(answer, 'far')} host memory"
    verdict = f"{'fits' if answer['fits'] else 'does not fit'}: {sizes} on the fullest rank"
    if answer["too_many_keys"]:
        verdict += f"; more keys than a rank can hold: {', '.join(answer['too_many_keys'])}"
    has_most = answer["room"] >= MOST_ROOM
    factor = f"over {MOST_ROOM}" if has_most else f"{answer['room']:.2f}"
    verdict += f"; room for {factor} times these keys"
    if answer["days"] is None:
        return verdict
    return f"{verdict}; full in {'over ' if has_most else ''}{answer['days']:,.0f} days"


def _limit_text(answer: Mapping[str, Any], tier: str) -> str:
    """Formats the tables' share of a tier's memory."""
    used, limit = answer[f"{tier}_bytes"], answer[f"{tier}_limit_bytes"]
    unit = _unit(used)
    more = f" {unit[0]}" if unit != _unit(limit) else ""
    return f"{_in_unit(used, unit)}{more} of {_in_unit(limit, _unit(limit))} {_unit(limit)[0]}"


def _now_lines(answer: Mapping[str, Any]) -> list[str]:
    """Formats the tables of a checkpoint, and by how much keys will grow."""
    planned = f"planned for {answer['times']:,g} times as many keys"
    has_growth = answer["times"] != 1
    if not answer["now"]:
        return [planned] if has_growth else []
    width = max(len(table["name"]) for table in answer["now"])
    lines = ["", "in the checkpoint" + (f", {planned}" if has_growth else "")]
    for table in answer["now"]:
        states = "".join(
            f", {state['name']} of {state['dim']} {format_bytes(state['bytes'])}"
            for state in table["states"]
        )
        rows = f"rows of {table['dim']} x {table['dtype']} {format_bytes(table['rows_bytes'])}"
        keys = f"{counted(table['keys'], 'key')}, {format_bytes(table['bytes'])}"
        lines.append(f"  {table['name']:{width}}  {keys}: {rows}{states}")
    return lines


def _imports(answer: Mapping[str, Any]) -> list[str]:
    """Returns the imports for the constructors."""
    given = {table["optimizer"] for table in answer["tables"]} - {None}
    ours = sorted(each.removesuffix("()") for each in given if each.endswith("()"))
    of_ours = [f"from sok_lite.optimizers import {', '.join(ours)}"] if ours else []
    return ["import sok_lite.keras as sk", *of_ours]


def _constructor(table: Mapping[str, Any]) -> str:
    arguments = [repr(table["name"]).replace("'", '"'), str(table["dim"])]
    if table["var_type"] == "hybrid":
        arguments += [
            'var_type="hybrid"',
            f"max_capacity={table['max_capacity']}",
            f"max_hbm_for_vectors={table['max_hbm_for_vectors']}",
        ]
    if table["dtype"] != "float32":
        arguments.append(f'row_dtype="{table["dtype"]}"')
    arguments += table["arguments"]
    if table["optimizer"] is not None:
        arguments.append(f"optimizer={table['optimizer']}")
    return f"sk.Table({', '.join(arguments)})"


def _memory_lines(answer: Mapping[str, Any]) -> list[str]:
    far = "host" if answer["has_gpus"] else ""
    unit = _unit(max(answer["near_bytes"], answer["far_bytes"]))
    near = "GPU" if answer["has_gpus"] else "RAM"
    lines = [f"memory of a rank, {unit[0]:3}  {near:>8} {far:>8}".rstrip()]
    for name, *tiers in _PARTS:
        sizes = [sum(table[tier] for table in answer["tables"]) if tier else 0 for tier in tiers]
        lines.append(_memory_line(name, sizes, far, unit))
    for name, of in (("all", "bytes"), ("room", "limit_bytes")):
        sizes = [answer[f"{tier}_{of}"] for tier in ("near", "far")]
        lines.append(_memory_line(name, sizes, far, unit))
    return lines


def _memory_line(name: str, sizes: list[int], far: str, unit: tuple[str, int]) -> str:
    near, host = (_in_unit(size, unit) for size in sizes)
    return f"  {name:20} {near:>8} {host if far else '':>8}".rstrip()


def _table_lines(answer: Mapping[str, Any]) -> list[str]:
    """Formats the memory per key of each table, and its share."""
    title = "bytes per key"
    width = max(len(title) - 2, *(len(table["name"]) for table in answer["tables"]))
    everything = max(1, answer["near_bytes"] + answer["far_bytes"])
    unit = _unit(everything)
    head = ("keys on a rank", "row", "states", "index", unit[0], "share", "near")
    lines = [f"{title:{width + 2}}" + "".join(f"{each:>15}" for each in head)]
    for table in answer["tables"]:
        parts = [table[name] for each in _PARTS for name in each[1:] if name]
        kept, near = (
            sum(table[f"{tier}_{part}_bytes"] for part in ("rows", "states") for tier in tiers)
            for tiers in (("near", "far"), ("near",))
        )
        numbers = (
            f"{table['keys_of_rank']:,}",
            str(table["row_bytes"]),
            str(table["state_bytes"]),
            f"{(table['slots_bytes'] + table['access_counts_bytes']) / table['keys_of_rank']:.1f}",
            _in_unit(sum(parts), unit),
            f"{sum(parts) / everything:.0%}",
            f"{near / max(1, kept):.0%}",
        )
        name = f"  {table['name']:{width}}"
        lines.append(name + "".join(f"{number:>15}" for number in numbers))
    return lines


def _sent_lines(answer: Mapping[str, Any]) -> list[str]:
    sizes = answer["sent_bytes"]
    if answer["ranks"] == 1:
        return ["a step sends nothing: there is one rank"]
    parts = ", ".join(f"{name} {_mib(sizes[name])}" for name in ("keys", "rows", "gradients"))
    step = f"a step of {counted(answer['batch'], 'row')}"
    return [f"{step} sends {_mib(sizes['total'])} MiB from each rank: {parts}"]


def _assumption_lines(answer: Mapping[str, Any]) -> list[str]:
    several = answer["ranks"] > 1
    known = [
        f"{answer['reserve']:.0%} of all memory is left to TensorFlow, the dense model and batches",
        "a hybrid table keeps every key: it is as large as that takes, and evicts none",
        "spare: rows are set aside for the next keys, by up to 1/32, far ones by up to 1/8",
    ]
    if several:
        known += [
            f"{counted(answer['ranks_per_host'], 'rank')} on a machine share its memory",
            "keys are spread over ranks as by chance: ids that share a factor with the number of "
            "ranks are not",
            "no id comes twice in a batch: frequent ids make a step send less",
        ]
    return ["assumptions", *(f"  {each}" for each in known), "  nothing was measured"]


def _unit(num_bytes: float) -> tuple[str, int]:
    """Returns a unit for a number of bytes, and its bytes; GiB from a tenth of one."""
    if num_bytes >= GIB / 10:
        return "GiB", GIB
    return ("MiB", 1 << 20) if num_bytes >= (1 << 20) / 10 else ("KiB", 1 << 10)


def _in_unit(num_bytes: float, unit: tuple[str, int]) -> str:
    size = num_bytes / unit[1]
    return f"{size:,.1f}" if size >= 10 or num_bytes == 0 else f"{size:.3f}"


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / (1 << 20):,.2f}"
