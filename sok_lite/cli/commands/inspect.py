"""`sok-lite inspect`: shows the contents of a checkpoint, or another file of tables."""

import argparse
import json
import re
from typing import Any

from sok_lite.cli.arguments import add_reading
from sok_lite.cli.errors import FINE
from sok_lite.cli.reading import KERAS_EXTRA, OWN, chosen, format_of, num_texts, open_sources
from sok_lite.engine.files import manifest
from sok_lite.engine.files.manifest import Manifest, TableFacts
from sok_lite.engine.files.source import Source, columns_of
from sok_lite.engine.files.store import Store
from sok_lite.reports.text import at_time, counted

HELP = "list the tables of a checkpoint: keys, row format, bytes, ranks, optimizer states"
EXAMPLES = "sok-lite inspect runs/model\nsok-lite inspect runs/model --table user --json"

# As a dump names them, and as Keras does.
_OF_KERAS = {
    "constant": "Constant",
    "uniform": "RandomUniform",
    "normal": "RandomNormal",
    "truncated_normal": "TruncatedNormal",
}
_INITIALIZER = re.compile(
    rf"Initializer\(kind='({'|'.join(_OF_KERAS)})', a=([-+.e\d]+), b=([-+.e\d]+), seed=(None|\d+)\)"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_reading(parser)


def run(args: argparse.Namespace) -> int:
    name = format_of(args.path, args.from_format)
    sources = open_sources(args.path, name, args.from_option)
    store: Store | None = args.stores.get(args.path)
    path = args.path if store is None else store.address_of_copy(args.path)
    described: dict[str, Any] = {"path": path, "format": name}
    found = manifest.read(args.path) if name == OWN else None
    if found is not None:
        described |= {"ranks": found.ranks, "extra": found.extra}
        saves = manifest.saves_beside(args.path) if store is None else _saves_in(store)
        described |= {"saves": saves} if saves else {}
    shown = chosen(sources, args.table, args.path)
    described["tables"] = [_describe(source, found) for source in shown]
    described["bytes"] = sum(table["bytes"] for table in described["tables"])
    print(json.dumps(described, indent=1) if args.json else _text(described))
    return FINE


def _saves_in(store: Store) -> dict[str, str]:
    return {name: "whole" if is_whole else "unfinished" for name, is_whole in store.saves().items()}


def _describe(source: Source, found: Manifest | None) -> dict[str, Any]:
    own = {"name", "dim", "dtype", "key_type"}
    described: dict[str, Any] = {name: getattr(source, name) for name in sorted(own)}
    described |= {
        "keys": source.num_keys,
        "bytes": sum(source.num_keys * column.row_bytes for column in columns_of(source)),
        "columns": list(source.columns),
        "states": [
            {"name": s.name, "dim": s.dim, "initial": s.initial, "group": s.group}
            for s in source.states
        ],
    }
    if found is not None:
        described |= _facts_of_manifest(found.tables[source.name])
    return described | {"texts": num_texts(source, found)}


def _facts_of_manifest(facts: TableFacts) -> dict[str, Any]:
    """Returns a manifest's facts besides columns; bytes are those of the files."""
    spans = [shard.facts.get("spans", {}) for shard in facts.shards]
    times = [time for span in spans for time in span.get("ends", [])]
    return {
        "var_type": facts.var_type,
        "owner": facts.owner,
        "options": facts.options,
        "keys_of_ranks": [shard.rows for shard in facts.shards],
        "sighted": sum(shard.sighted for shard in facts.shards),
        "lookups": max(shard.facts["num_lookups"] for shard in facts.shards),
        "last_lookup": max(times, default=None),
        "bytes": sum(file.num_bytes for shard in facts.shards for file in shard.written_files),
        "increments": max(len(shard.before) for shard in facts.shards),
    }


def _text(described: dict[str, Any]) -> str:
    tables = described["tables"]
    counts = [counted(len(tables), "table"), counted(described["bytes"], "byte")]
    if "ranks" in described:
        counts.insert(0, counted(described["ranks"], "rank"))
    lines = [f"{described['path']} is of format {described['format']}: {', '.join(counts)}"]
    if "saves" in described:
        saves = [f"{name} {what}" for name, what in described["saves"].items()]
        lines.append(f"saves: {', '.join(saves)}")
    lines += _extra_lines(described.get("extra", {}))
    # A state's optimizer is shown only if there are several.
    groups = {state["group"] for table in tables for state in table["states"]}
    for table in tables:
        lines += ["", f"table {table['name']!r}"]
        lines += [f"  {name:<9} {text}" for name, text in _rows_of(table, len(groups) > 1) if text]
    return "\n".join(lines)


def _extra_lines(extra: dict[str, Any]) -> list[str]:
    """Returns what the caller of the dump added, described for callers that are ours."""
    others, lines = dict(extra), []
    place, steps = others.get(KERAS_EXTRA), others.get("iterations")
    if isinstance(place, dict) and {"steps", "epoch"} <= place.keys():
        lines.append(f"training: step {place['steps']}, {place['epoch']} complete epochs")
        del others[KERAS_EXTRA]
    if isinstance(steps, list) and steps and all(type(count) is int for count in steps):
        # The wrapper's, and that of its optimizer, which counts only steps with dense variables.
        lines.append(f"optimizer steps: {max(steps)}")
        del others["iterations"]
    return [*lines, f"extra: {json.dumps(others)}"] if others else lines


def _state(state: dict[str, Any], has_groups: bool) -> str:
    facts = [f"{state['initial']:g} in new rows"] * (state["initial"] != 0)
    facts += [f"optimizer {state['group']}"] * (has_groups and state["group"] is not None)
    return f"{state['name']} of {state['dim']}" + (f" ({', '.join(facts)})" if facts else "")


def _option(name: str, value: Any) -> str:
    """Returns an option of a table as its constructor takes it."""
    match = _INITIALIZER.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return f"{name}={value!r}"
    kind, *numbers, seed = match.groups()
    numbers = [f"{float(number):g}" for number in numbers[: 1 if kind == "constant" else 2]]
    numbers += [f"seed={seed}"] * (seed != "None")
    return f"{name}={_OF_KERAS[kind]}({', '.join(numbers)})"


def _rows_of(table: dict[str, Any], has_groups: bool) -> list[tuple[str, str]]:
    counts = table.get("keys_of_ranks", [])
    by_rank = f", {min(counts):,} to {max(counts):,} on a rank" if len(counts) > 1 else ""
    sighted = f", {table['sighted']:,} more seen, without a row yet" if table.get("sighted") else ""
    states = [_state(state, has_groups) for state in table["states"]]
    options = [_option(*each) for each in table.get("options", {}).items()]
    has_increments = table.get("increments", 0)
    increments = f", with {counted(has_increments, 'increment')}" if has_increments else ""
    texts = f", with the texts of {table['texts']:,}" if table.get("texts") else ""
    rows = [
        ("keys", f"{table['keys']:,} of {table['key_type']}{by_rank}{sighted}{texts}"),
        ("rows", f"{table['dim']} of {table['dtype']}"),
        ("bytes", f"{table['bytes']:,}{increments}"),
        ("states", ", ".join(states)),
        ("columns", ", ".join(table["columns"])),
    ]
    if "var_type" in table:
        rows += [
            ("kind", f"{table['var_type']}, owner of a key: {table['owner']}"),
            ("lookups", f"{table['lookups']:,}{_time(table['last_lookup'])}"),
            ("options", ", ".join(options)),
        ]
    return rows


def _time(seconds: float | None) -> str:
    return "" if seconds is None else f", the last one at {at_time(seconds)}"
