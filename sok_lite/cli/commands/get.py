"""`sok-lite get`: prints the rows of a few keys, or of strings by their hashes."""

import argparse
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from sok_lite.cli.arguments import add_from_format, add_json, add_path
from sok_lite.cli.errors import FINDINGS, FINE, WrongUse
from sok_lite.cli.reading import chosen, open_sources
from sok_lite.cli.wrapped import PendingKeys, plain
from sok_lite.engine.dtypes import key_dtype
from sok_lite.engine.files.manifest import StateFacts
from sok_lite.engine.files.source import PENDING_COLUMNS, Source
from sok_lite.engine.fingerprint import fingerprints
from sok_lite.reports.tables import clock_of
from sok_lite.reports.text import at_time, counted, named, readable

HELP = "show the rows of single keys, given as integers or texts"
EXAMPLES = "sok-lite get runs/model user 7 42\nsok-lite get runs/model user 7 --states --json"

_NUMBER = re.compile(r"[+-]?[0-9]+")
_A_LINE = 8  # elements of a row


class _Key(NamedTuple):
    """A key of the command line; `text` is the string it is the hash of, or None for a number."""

    key: int
    text: bytes | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_path(parser)
    parser.add_argument("table", metavar="TABLE", help="name of a table")
    parser.add_argument(
        "keys",
        nargs="+",
        metavar="KEY",
        help="an integer, or a text whose hash is the key",
    )
    parser.add_argument(
        "--text", action="store_true", help="take every KEY as a text, even if it is an integer"
    )
    parser.add_argument("--states", action="store_true", help="show optimizer states as well")
    add_json(parser)
    add_from_format(parser, "PATH")


def run(args: argparse.Namespace) -> int:
    sources = open_sources(args.path, args.from_format, args.from_option)
    (source,) = chosen(sources, [args.table], args.path)
    asked = [_parse_key(key, source, args.text) for key in args.keys]
    found = _look_up(source, asked, args.states)
    described = {"path": args.path, "table": source.name}
    described |= {name: getattr(source, name) for name in ("dim", "dtype", "key_type")}
    described["lookups"] = source.about.facts["num_lookups"]
    if args.json:
        print(json.dumps(described | {"keys": [_for_json(each) for each in found]}, indent=1))
    else:
        kinds = f"{counted(source.num_keys, 'key')} of {source.key_type}"
        print(f"table {source.name!r}: {kinds}, rows of {source.dim} x {source.dtype}")
        for each in found:
            print("\n".join(_lines(each, described["lookups"])))
    return FINE if all(each["found"] for each in found) else FINDINGS


def _parse_key(given: str, source: Source, is_text: bool) -> _Key:
    """Parses a key argument."""
    if not is_text and _NUMBER.fullmatch(given):
        key, limits = int(given), np.iinfo(key_dtype(source.key_type).dtype)
        if not limits.min <= key <= limits.max:
            raise WrongUse(
                f"keys of table {source.name!r} are {source.key_type}, from {limits.min} to "
                f"{limits.max}. Received: {given}"
            )
        return _Key(key, None)
    if source.key_type != "int64":
        raise WrongUse(
            f"keys of table {source.name!r} are {source.key_type}, and a hash of a text is int64: "
            f"give an integer. Received: {given!r}"
        )
    text = given.encode("utf-8", "surrogateescape")  # its bytes, whatever they are
    return _Key(int(fingerprints([text])[0]), text)


def _look_up(source: Source, asked: Sequence[_Key], with_states: bool) -> list[dict[str, Any]]:
    """Returns what the table has of each key, as printed in JSON.

    Always "key" and "found"; "text" if known; "row", "states" and "score" if present;
    "last_seen_lookup" and "last_seen", in seconds since 1970; for a key without a row yet "seen",
    its count.
    """
    states = source.states if with_states else ()
    keys = dict.fromkeys(each.key for each in asked)
    columns = ["values", *source.columns, *(state.tensor for state in states)]
    entries = source.find(keys, columns)
    missing = keys.keys() - entries
    pending = PendingKeys(source).find(missing, PENDING_COLUMNS[1:]) if missing else {}
    texts = {each.key: each.text for each in asked if each.text is not None}
    texts |= source.texts_of(keys)
    clock = clock_of(source)
    found = []
    for key, _ in asked:
        described: dict[str, Any] = {"key": key, "found": key in entries}
        if key in texts:
            described["text"] = texts[key]
        has, last_seen = entries.get(key, {}), None
        if has:
            described["row"] = plain(source, "values", has["values"])
            if with_states:
                described["states"] = _states(states, has)
            if "scores" in has:
                described["score"] = int(has["scores"])
            last_seen = has.get("stamps")
        elif key in pending:
            described["seen"] = int(pending[key]["sightings"])
            last_seen = pending[key]["sighting_stamps"]
        if last_seen is not None:
            described["last_seen_lookup"] = int(last_seen)
            if clock is not None and last_seen:
                described["last_seen"] = float(clock.times_of(np.reshape(last_seen, 1))[0])
        found.append(described)
    return found


def _states(states: Sequence[StateFacts], has: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    return [
        {"name": state.name, "group": state.group, "row": has[state.tensor]} for state in states
    ]


# ---- JSON output ---------------------------------------------------------------------------------


def _for_json(described: Mapping[str, Any]) -> dict[str, Any]:
    """Converts rows to lists, and bytes to strings."""
    made = dict(described)
    if "text" in made:
        made["text"] = readable(made["text"])
    if "row" in made:
        made["row"] = _numbers(made["row"])
    if "states" in made:
        made["states"] = [state | {"row": _numbers(state["row"])} for state in made["states"]]
    return made


def _numbers(row: np.ndarray) -> list[int | float | None]:
    """Returns the shortest numbers that read back as the same; None for NaN and infinities."""
    if row.dtype.kind == "i":
        return list(row.tolist())
    numbers = [float(str(number)) for number in row]
    return [number if math.isfinite(number) else None for number in numbers]


# ---- text output ---------------------------------------------------------------------------------


def _lines(described: Mapping[str, Any], num_lookups: int) -> list[str]:
    texts = {described["key"]: described["text"]} if "text" in described else {}
    title = f"key {named(described['key'], texts)}"
    seen = _last_seen(described, num_lookups)
    if not described["found"]:
        if "seen" not in described:
            return ["", f"{title}: missing"]
        return ["", f"{title}: no row yet, seen {counted(described['seen'], 'time')}, last {seen}"]
    rows = [("row", described["row"])]
    names = [state["name"] for state in described.get("states", ())]
    for state in described.get("states", ()):
        is_one_of_several = names.count(state["name"]) > 1
        label = f"{state['name']} (optimizer {state['group']})"
        rows.append((label if is_one_of_several else state["name"], state["row"]))
    parts = [(name, _row_lines(row)) for name, row in rows]
    if "score" in described:
        parts.append(("score", [f"{described['score']:,}"]))
    if seen:
        parts.append(("last seen", [seen]))
    width = max(len("last seen"), *(len(name) for name, _ in parts))
    lines = ["", title]
    for name, its in parts:
        for i, line in enumerate(its):
            lines.append(f"  {name if i == 0 else '':{width}}  {line}")
    return lines


def _row_lines(row: np.ndarray) -> list[str]:
    """Formats a row in columns."""
    is_short, is_integer = row.size <= _A_LINE, row.dtype.kind == "i"
    digits = 6 if is_short else 4  # for lines of about 100 columns
    numbers = [str(number) if is_integer else f"{number:.{digits}g}" for number in row.tolist()]
    if is_short:
        return [" ".join(numbers)]
    width = max(map(len, numbers))
    padded = [f"{number:>{width}}" for number in numbers]
    return [" ".join(padded[at : at + _A_LINE]) for at in range(0, len(padded), _A_LINE)]


def _last_seen(described: Mapping[str, Any], num_lookups: int) -> str:
    if "last_seen_lookup" not in described:
        return ""
    if described["last_seen_lookup"] == 0:
        return "in no lookup"
    when = f", at {at_time(described['last_seen'])}" if "last_seen" in described else ""
    return f"in lookup {described['last_seen_lookup']:,} of {num_lookups:,}{when}"
