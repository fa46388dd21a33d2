"""The text that `sok-lite plan` prints."""

from collections.abc import Mapping
from typing import Any

from sok_lite.cli.planned import GIB, MOST_ROOM
from sok_lite.engine.table.summary import as_bytes
from sok_lite.reports.text import counted

_PARTS = (
    ("rows", "near_rows_bytes", "far_rows_bytes"),
    ("states", "near_states_bytes", "far_states_bytes"),
    ("index", "slots_bytes", None),
    ("access counts", "access_counts_bytes", None),
    ("spare", "near_spare_bytes", "far_spare_bytes"),
)


def text(plan: Mapping[str, Any]) -> str:
    """Returns the text of a plan: the verdict first, then what follows from it."""
    lines = [_verdict(plan), *_now(plan), "", "make the tables, with sok_lite.keras as sk"]
    lines += [f"  {_constructor(table)}" for table in plan["tables"]]
    lines += ["", *_memory(plan), "", *_tables(plan), "", *_sent(plan)]
    if plan["would_help"]:
        lines += ["", "what would help most, on each rank"]
        lines += [
            f"  {each['what']:24} {_gib(each['saved_bytes']):>8} GiB less"
            f"{'' if each['fits'] == plan['fits'] else ', and it fits'}"
            for each in plan["would_help"]
            if each["fits"] or not plan["fits"]
        ]
    return "\n".join([*lines, "", "start it", f"  {plan['launch']}", "", *_assumptions(plan)])


def _verdict(plan: Mapping[str, Any]) -> str:
    near = "GPU" if plan["has_gpus"] else "RAM"
    sizes = f"{_gib(plan['near_bytes'])} of {_gib(plan['near_limit_bytes'])} GiB {near}"
    if plan["far_bytes"] or (plan["has_gpus"] and plan["far_limit_bytes"]):
        sizes += f" and {_gib(plan['far_bytes'])} of {_gib(plan['far_limit_bytes'])} GiB host"
    verdict = f"{'fits' if plan['fits'] else 'does not fit'}: {sizes} memory on the fullest rank"
    if plan["too_many_keys"]:
        verdict += f"; more keys than a rank can hold: {', '.join(plan['too_many_keys'])}"
    has_most = plan["room"] >= MOST_ROOM
    factor = f"over {MOST_ROOM}" if has_most else f"{plan['room']:.2f}"
    verdict += f"; room for {factor} times these keys"
    if plan["days"] is None:
        return verdict
    return f"{verdict}; full in {'over ' if has_most else ''}{plan['days']:,.0f} days"


def _now(plan: Mapping[str, Any]) -> list[str]:
    """Returns what the tables of a checkpoint have, and by how much there are to be more keys."""
    planned = f"planned for {plan['times']:,g} times as many keys"
    has_growth = plan["times"] != 1
    if not plan["now"]:
        return [planned] if has_growth else []
    width = max(len(table["name"]) for table in plan["now"])
    lines = ["", "in the checkpoint" + (f", {planned}" if has_growth else "")]
    for table in plan["now"]:
        states = "".join(
            f", {state['name']} of {state['dim']} {as_bytes(state['bytes'])}"
            for state in table["states"]
        )
        rows = f"rows of {table['dim']} x {table['dtype']} {as_bytes(table['rows_bytes'])}"
        keys = f"{table['keys']:,} keys, {as_bytes(table['bytes'])}"
        lines.append(f"  {table['name']:{width}}  {keys}: {rows}{states}")
    return lines


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
    return f"sk.Table({', '.join(arguments)})"


def _memory(plan: Mapping[str, Any]) -> list[str]:
    far = "host" if plan["has_gpus"] else ""
    lines = [f"memory of a rank, GiB  {'GPU' if plan['has_gpus'] else 'RAM':>8} {far:>8}".rstrip()]
    for name, *tiers in _PARTS:
        sizes = [sum(table[tier] for table in plan["tables"]) if tier else 0 for tier in tiers]
        lines.append(_row(name, sizes, far))
    lines.append(_row("all", [plan["near_bytes"], plan["far_bytes"]], far))
    return [*lines, _row("room", [plan["near_limit_bytes"], plan["far_limit_bytes"]], far)]


def _row(name: str, sizes: list[int], far: str) -> str:
    return f"  {name:20} {_gib(sizes[0]):>8} {_gib(sizes[1]) if far else '':>8}".rstrip()


def _tables(plan: Mapping[str, Any]) -> list[str]:
    """Returns what a key of each table takes, and its part of the memory."""
    width = max(len("on a rank"), *(len(table["name"]) for table in plan["tables"]))
    head = ("keys on a rank", "row", "states", "index", "GiB", "share", "near")
    lines = [f"bytes a key  {'':{max(0, width - 11)}}" + "".join(f"{each:>15}" for each in head)]
    everything = max(1, plan["near_bytes"] + plan["far_bytes"])
    for table in plan["tables"]:
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
            _gib(sum(parts)),
            f"{sum(parts) / everything:.0%}",
            f"{near / max(1, kept):.0%}",
        )
        name = f"  {table['name']:{width}}"
        lines.append(name + "".join(f"{number:>15}" for number in numbers))
    return lines


def _sent(plan: Mapping[str, Any]) -> list[str]:
    sizes = plan["sent_bytes"]
    if plan["ranks"] == 1:
        return ["a step sends nothing: there is one rank"]
    parts = ", ".join(f"{name} {_mib(sizes[name])}" for name in ("keys", "rows", "gradients"))
    step = f"a step of {counted(plan['batch'], 'row')}"
    return [f"{step} sends {_mib(sizes['total'])} MiB from each rank: {parts}"]


def _assumptions(plan: Mapping[str, Any]) -> list[str]:
    several = plan["ranks"] > 1
    known = [
        f"{plan['reserve']:.0%} of all memory is left to TensorFlow, the dense model and batches",
        "a hybrid table keeps every key: it is as large as that takes, and evicts none",
        "spare: rows are set aside for the next keys, by up to 1/32, far ones by up to 1/8",
    ]
    if several:
        known += [
            f"{counted(plan['ranks_per_host'], 'rank')} on a machine share its memory",
            "keys are spread over ranks as by chance: ids that share a factor with the number of "
            "ranks are not",
            "no id comes twice in a batch: frequent ids make a step send less",
        ]
    return ["assumed", *(f"  {each}" for each in known), "  nothing was measured"]


def _gib(num_bytes: float) -> str:
    size = num_bytes / GIB
    return f"{size:,.1f}" if size >= 10 or num_bytes == 0 else f"{size:.3f}"


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / (1 << 20):,.2f}"
