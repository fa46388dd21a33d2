"""Changes of checkpoints, for forgery.py.

The checksums are changed as well, so that they fit: who reads the file gets to what lies behind
them. What does not fit is for tests/engine/files.
"""

import contextlib
import copy
import hashlib
import io
import json
import random
import resource
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from sok_lite.cli.main import main

_NAME = "manifest.json"
_NO_SUM = "0" * 64
# What nobody expects in a place of a JSON text.
_ODD: list[Any] = [
    *(None, True, False, -1, 0, 1, 2, 33, 2**31, 2**32 - 1, 2**32, 2**53, 2**62, 2**63, 2**64),
    *(10**400, 0.5, 1e308, float("nan"), float("-inf"), [], {}, [[]], [0], {"a": 0}),
    *("", "x", _NO_SUM, "../x", "data-0123456789abcdef/x.safetensors", "\0", "\ud800"),
    *("F64", "I8", "BF16", "int32", "float16", "bfloat16", "kLfu", "hybrid", "key mod ranks"),
]
_EXTREME = [b"\0", b"\xff", b"\x7f", b"\x80"]


@contextlib.contextmanager
def little_memory(num_bytes: int = 1 << 30) -> Iterator[None]:
    """Lets this process have only so much more memory: no length in a file is to be believed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def command(*arguments: object) -> int:
    """Runs a command of the command line; raises AssertionError unless it ends as documented."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), little_memory():
        status = main([str(argument) for argument in arguments])
    said = f"{arguments[0]} ended with {status}: {out.getvalue()[-500:]}{err.getvalue()}"
    assert status in range(4), said
    assert err.getvalue().count("\n") == (status > 1) or not status, said
    assert "--debug shows where" not in said and "no memory" not in said, said
    # A finding has a reason.
    assert not any(line.endswith("': ") for line in out.getvalue().splitlines()), said
    return status


# -------------------------------------------------------------------- reading


def _parts(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns what a manifest says of each file."""
    shards = [shard for table in manifest["tables"] for shard in table["shards"]]
    return [part for shard in shards for part in (*shard.get("before", ()), shard)]


def _tensors(data: bytes) -> tuple[dict[str, Any], bytes]:
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def rows_in(folder: Path, name: str) -> dict[int, list[bytes]]:
    """Returns of each key of a table the bits of its newest rows: several of a key that repeats."""
    (table,) = (t for t in json.loads((folder / _NAME).read_text())["tables"] if t["name"] == name)
    (shard,) = table["shards"]
    key_dtype = {"int64": "<i8", "int32": "<i4", "uint64": "<u8"}[table["key_type"]]
    found: dict[int, list[bytes]] = {}
    held: set[int] = set()
    for part in (*shard.get("before", ()), shard):
        header, data = _tensors((folder / part["file"]).read_bytes())
        begin, end = header["keys"]["data_offsets"]
        keys = np.frombuffer(data[begin:end], key_dtype).tolist()
        begin, end = header["values"]["data_offsets"]
        count = header["values"]["shape"][0]
        width = (end - begin) // max(1, count)
        rows = [data[begin + i * width : begin + (i + 1) * width] for i in range(count)]
        newest: dict[int, list[bytes]] = {}
        for key, row in zip(keys, rows, strict=False):
            newest.setdefault(key, []).append(row)
        found |= newest
        held = set(keys)
    return {key: rows for key, rows in found.items() if key in held}


# -------------------------------------------------------------------- changes


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    items = node.items() if isinstance(node, dict) else enumerate(node)
    for name, value in list(items):
        yield node, name
        if isinstance(value, (dict, list)):
            yield from _places(value)


def _change(dice: random.Random, tree: dict[str, Any]) -> str:
    """Changes one thing in a tree of JSON."""
    places = list(_places(tree))
    node, name = dice.choice(places)
    kind, value = dice.choice(["odd", "odd", "near", "delete", "swap", "repeat"]), node[name]
    if kind == "near" and isinstance(value, (int, float)):
        node[name] = value + dice.choice([-1, 1, 8, -value, value, 1 << 32])
    elif kind == "swap":
        other, its_name = dice.choice(places)
        node[name], other[its_name] = copy.deepcopy(other[its_name]), copy.deepcopy(value)
    elif kind == "repeat" and isinstance(value, list):
        value += copy.deepcopy(value[-1:])
    elif kind == "delete":
        del node[name]
    else:
        kind, node[name] = "odd", copy.deepcopy(dice.choice(_ODD))
    return f"{kind} of {name!r}, {str(value)[:40]}"


def _write_manifest(folder: Path, tree: dict[str, Any]) -> None:
    """Writes a manifest, with its own checksum and those of the files."""
    with contextlib.suppress(AttributeError, KeyError, OSError, TypeError, ValueError):
        for part in _parts(tree):
            data, size = (folder / part["file"]).read_bytes(), part["written"]["chunk_bytes"]
            if size > 0:
                crcs = [zlib.crc32(data[i : i + size]) for i in range(0, len(data), size)]
                part["written"] |= {"num_bytes": len(data), "crcs": crcs}
    tree["sha256"] = _NO_SUM
    text = json.dumps(tree, indent=1)
    before, _, after = text.rpartition(_NO_SUM)
    digest = hashlib.sha256(text.encode()).hexdigest()
    (folder / _NAME).write_text(before + digest + after)


def _cut(dice: random.Random, data: bytes) -> bytes:
    more = bytes(dice.choice([1, 8, 5000]))
    return data[: dice.randrange(len(data))] if dice.random() < 0.7 else data + more


def _header(dice: random.Random, data: bytes) -> bytes:
    header, rest = _tensors(data)
    for _ in range(dice.choice([1, 1, 2])):
        _change(dice, header)
    text = json.dumps(header).encode()
    length = len(text) if dice.random() < 0.9 else dice.choice([0, 2**31, 2**63, 2**64 - 1])
    return length.to_bytes(8, "little") + text + rest


def _numbers(dice: random.Random, data: bytes) -> bytes:
    """Some elements of a tensor, keys or slots say, are extreme or those of others."""
    header, rest = _tensors(data)
    spans = {n: f["data_offsets"] for n, f in header.items() if n != "__metadata__"}
    begin, end = dice.choice([span for span in spans.values() if span[0] < span[1]] or [(0, 0)])
    changed = bytearray(rest)
    for _ in range(dice.choice([1, 2, 10]) if begin < end else 0):
        width = min(dice.choice([1, 4, 8]), end - begin)
        at = begin + dice.randrange((end - begin) // width) * width
        other = begin + dice.randrange((end - begin) // width) * width
        extreme = dice.choice(_EXTREME) * width
        changed[at : at + width] = (
            changed[other : other + width] if dice.random() < 0.5 else extreme
        )
    return data[: len(data) - len(rest)] + bytes(changed)


def forge(dice: random.Random, folder: Path) -> str:
    """Changes a checkpoint; returns what was done."""
    tree = json.loads((folder / _NAME).read_text())
    if dice.random() < 0.5:
        told = "; ".join(_change(dice, tree) for _ in range(dice.choice([1, 1, 1, 2, 3])))
    else:
        change = dice.choice([_cut, _header, _header, _header, _numbers, _numbers])
        path = folder / dice.choice(_parts(tree))["file"]
        path.write_bytes(change(dice, path.read_bytes()))
        told = f"{change.__name__} in {path.name}"
    _write_manifest(folder, tree)
    return told
