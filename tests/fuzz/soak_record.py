"""Digests of what the ranks of a soak hold, and the kept records of them."""

import hashlib
import importlib.metadata
import json
import platform
import subprocess
from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from tests.fuzz import soak_plan as plan

Digests = dict[str, str]  # of a round: table -> SHA-256
_SHORT = 12  # digits of a digest that a record keeps of each round


def digests_of(parts: list[dict[str, np.ndarray]]) -> Digests:
    """Returns the SHA-256 of each table's keys, rows and states of all ranks, in key order.

    What was read, which has no key, is of one rank after the other.

    Args:
      parts: of each rank what `Model.contents` gave.
    """
    found = {}
    for table in plan.DIMS:
        keys = np.concatenate([part[f"{table}/keys"] for part in parts])
        order = np.argsort(keys, kind="stable")
        if len(np.unique(keys)) != len(keys):
            raise AssertionError(f"Both ranks have keys of table {table!r}.")
        names = [_names(part, table) for part in parts]
        if names[0] != names[1]:
            raise AssertionError(f"Ranks differ in what table {table!r} has: {names}")
        digest = hashlib.sha256()
        _add(digest, "keys", keys[order])
        for name in names[0]:
            all_rows = np.concatenate([part[f"{table}/{name}"] for part in parts])
            _add(digest, name, all_rows if name.startswith("read") else all_rows[order])
        found[table] = digest.hexdigest()
    return found


def _names(part: dict[str, np.ndarray], table: str) -> list[str]:
    names = (name.partition("/") for name in part)
    return sorted(name for of, _, name in names if of == table and name != "keys")


def _add(digest: Any, name: str, array: np.ndarray) -> None:
    digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
    digest.update(np.ascontiguousarray(array).tobytes())


def joined(digests: Digests) -> str:
    """Returns one digest of those of all tables."""
    text = "".join(f"{table} {digests[table]}\n" for table in plan.DIMS)
    return hashlib.sha256(text.encode()).hexdigest()


def record_of(seed: int, by_round: list[Digests]) -> dict[str, Any]:
    """Returns what is kept of a soak: its digests and what it was made by."""
    return {
        "seed": seed,
        "rounds": len(by_round),
        "made": {
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
            "commit": _commit(),
            "python": platform.python_version(),
            "machine": platform.machine(),
            "processor": _processor(),
            **{name: _version(name) for name in ("numpy", "tensorflow", "keras", "horovod")},
        },
        "digest": joined(by_round[-1]),
        "tables": by_round[-1],
        "by_round": [[digests[table][:_SHORT] for table in plan.DIMS] for digests in by_round],
    }


def text_of(record: dict[str, Any]) -> str:
    """Returns a record as JSON, a round in each line, so that a difference shows its round."""
    rows = record["by_round"]
    head = json.dumps({k: v for k, v in record.items() if k != "by_round"}, indent=1)
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    return head.removesuffix("\n}") + ',\n "by_round": [\n' + lines + "\n ]\n}\n"


def first_difference(
    record: dict[str, Any], by_round: list[Digests], leaves_out: Iterable[str] = ()
) -> str | None:
    """Says in which round which tables first differ from a record; None where none does."""
    tables = [(place, table) for place, table in enumerate(plan.DIMS) if table not in leaves_out]
    if list(record["tables"]) != list(plan.DIMS):
        return f"The record has other tables: {', '.join(record['tables'])}."
    if len(by_round) > record["rounds"]:
        return f"The record has {record['rounds']} rounds, there are {len(by_round)}."
    for number, (kept, found) in enumerate(zip(record["by_round"], by_round, strict=False)):
        wrong = [table for place, table in tables if kept[place] != found[table][:_SHORT]]
        if wrong:
            return f"Round {number} is the first that differs, in: {', '.join(wrong)}."
    if len(by_round) == record["rounds"]:
        wrong = [table for _, table in tables if record["tables"][table] != by_round[-1][table]]
        if wrong:
            return f"The last round differs, in: {', '.join(wrong)}."
    return None


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    folder = Path(__file__).parent
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _version(name: str) -> str:
    names = (name, f"{name}-cpu")
    for each in names:
        try:
            return f"{each} {importlib.metadata.version(each)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return "none"


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else "unknown"
