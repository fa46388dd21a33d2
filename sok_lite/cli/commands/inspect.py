"""`sok-lite inspect`: what a checkpoint, or another file of tables, has."""

import argparse
import json
from typing import Any

from sok_lite.cli.arguments import add_reading
from sok_lite.cli.errors import FINE
from sok_lite.cli.reading import OWN, chosen, format_of, open_sources
from sok_lite.engine.files import manifest
from sok_lite.engine.files.manifest import Manifest, TableFacts
from sok_lite.engine.files.source import Source, columns_of
from sok_lite.reports.text import at_time, counted

HELP = "list the tables of a checkpoint: keys, row format, bytes, ranks, optimizer states"
EXAMPLES = "sok-lite inspect runs/model\nsok-lite inspect runs/model --table user --json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_reading(parser)


def run(args: argparse.Namespace) -> int:
    name = format_of(args.path, args.from_format)
    sources = open_sources(args.path, name, args.from_option)
    described: dict[str, Any] = {"path": args.path, "format": name}
    found = manifest.read(args.path) if name == OWN else None
    if found is not None:
        described |= {"ranks": found.ranks, "extra": found.extra}
        saves = manifest.saves_beside(args.path)
        described |= {"saves": saves} if saves else {}
    described["tables"] = [
        _describe(source, found) for source in chosen(sources, args.table, args.path)
    ]
    described["bytes"] = sum(table["bytes"] for table in described["tables"])
    print(json.dumps(described, indent=1) if args.json else _text(described))
    return FINE


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
    return described | (_facts_of_manifest(found.tables[source.name]) if found is not None else {})


def _facts_of_manifest(facts: TableFacts) -> dict[str, Any]:
    """Returns what a manifest of ours says beside the columns; the bytes are those of the files."""
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
        "texts": sum(shard.texts.keys for shard in facts.shards if shard.texts is not None),
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
    if described.get("extra"):
        lines.append(f"extra: {json.dumps(described['extra'])}")
    for table in tables:
        lines += ["", f"table {table['name']!r}"]
        lines += [f"  {name:<9} {text}" for name, text in _rows_of(table) if text]
    return "\n".join(lines)


def _rows_of(table: dict[str, Any]) -> list[tuple[str, str]]:
    counts = table.get("keys_of_ranks", [])
    by_rank = f", {min(counts):,} to {max(counts):,} on a rank" if len(counts) > 1 else ""
    sighted = f", {table['sighted']:,} more seen, without a row yet" if table.get("sighted") else ""
    states = [
        f"{state['name']} of {state['dim']} from {state['initial']:g}"
        + ("" if state["group"] is None else f" (optimizer {state['group']})")
        for state in table["states"]
    ]
    options = [f"{name}={value!r}" for name, value in table.get("options", {}).items()]
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
