"""Measures the memory and sweeps the table kernels over their tunables, within a time limit.

First limits.py: random reads by width and footprint, rows gathered from device and from pinned host
memory, copies. Then operations.py once for each choice of tunables, in a process of its own, since
they are compiled in (SOK_LITE_KERNEL_DEFINES) and a choice that crashes must not take the others
along. What matters most comes first; what there is no time for is named.
Every RESULT line of the scripts is passed on with its `defines` and `table_options`. At the end one
line `RESULT {"case": "best", ...}` for each case says which choice was fastest and by how much.

  bash scripts/gpu_check.sh --sweep
  SOK_LITE_BACKEND=cpu bash scripts/gpu_check.sh --sweep --quick     (the same on a CPU, to try it)

| tunable | what it is |
|---|---|
| SOK_LINE | slots that a search reads at a time (16 bytes each) |
| SOK_TILE | threads that search for one key together; on a CPU 1 |
| SOK_ROW_LANES | threads that copy one row together |
| SOK_THREADS_PER_BLOCK | of every launch |
| HKV_CROWDED_QUARTERS | quarters of a bucket in use from which on a key may go to its second one |
| max_bucket_size | slots of a bucket, an option of the hybrid table |
| SOK_BLOCK, SOK_AHEAD | items and rows ahead that a CPU thread asks the memory for |
"""

import argparse
import json
import os
import subprocess
import sys
import time
from typing import Any, NamedTuple

from scripts.bench.common.measuring import note, result

TABLES = [sys.executable, "-m", "scripts.bench", "tables"]


class Choice(NamedTuple):
    """Tunables of one process.

    Attributes:
      defines: macros of the kernels; empty: the defaults.
      tables: the tables that they matter to.
      options: of a hybrid table.
    """

    defines: dict[str, int]
    tables: tuple[str, ...] = ("hbm", "hybrid")
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        defines = [f"{name}={value}" for name, value in self.defines.items()]
        return " ".join([*defines, *self.options]) or "default"


def gpu_choices() -> list[Choice]:
    """Returns the choices for a GPU, the most telling first."""
    return [
        Choice({}),
        *(
            Choice({"SOK_LINE": line, "SOK_TILE": tile})
            for line, tile in ((8, 8), (4, 1), (8, 4), (4, 2), (8, 1), (4, 8))
        ),
        Choice({"SOK_ROW_LANES": 8}),
        Choice({"SOK_ROW_LANES": 16}),
        Choice({}, ("hybrid",), ("max_bucket_size=32",)),
        Choice({"SOK_THREADS_PER_BLOCK": 128}),
        Choice({"SOK_THREADS_PER_BLOCK": 512}),
        Choice({}, ("hybrid",), ("max_bucket_size=128",)),
        Choice({"HKV_CROWDED_QUARTERS": 2}, ("hybrid",)),
        Choice({"SOK_LINE": 8}, ("hybrid",), ("max_bucket_size=32",)),
    ]


def cpu_choices() -> list[Choice]:
    """Returns the choices for a CPU."""
    return [
        Choice({}),
        Choice({"SOK_AHEAD": 32}),
        Choice({"SOK_AHEAD": 64}),
        Choice({"SOK_AHEAD": 8}),
        Choice({"SOK_BLOCK": 128}),
        Choice({"SOK_BLOCK": 32}),
        Choice({"SOK_LINE": 8}),
        Choice({}, ("hybrid",), ("max_bucket_size=32",)),
        Choice({"HKV_CROWDED_QUARTERS": 2}, ("hybrid",)),
    ]


def run(name: str, command: list[str], env: dict[str, str], seconds: float) -> list[dict[str, Any]]:
    """Runs a script, passes its lines on and returns its RESULT fields."""
    start = time.monotonic()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
    )
    try:
        text, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        text, _ = process.communicate()
        note(f"{name} was stopped after {seconds:.0f} s.")
    print(text, end="", flush=True)
    if process.returncode not in (0, -9):
        note(f"{name} ended with {process.returncode}.")
    print(f"--- {name}: {time.monotonic() - start:.1f} s", flush=True)
    lines = [line for line in text.splitlines() if line.startswith("RESULT ")]
    return [json.loads(line.removeprefix("RESULT ")) for line in lines]


def print_best(found: list[tuple[str, dict[str, Any]]]) -> None:
    """Prints for each case the choice with the most keys a second."""
    by_case: dict[tuple[Any, ...], list[tuple[str, dict[str, Any]]]] = {}
    for name, fields in found:
        if "load_factor" in fields:
            case = tuple(fields[part] for part in ("table", "dim", "load_factor", "case"))
            by_case.setdefault(case, []).append((name, fields))
    for (table, dim, load, op), measured in sorted(by_case.items()):
        name, best = max(measured, key=lambda pair: pair[1]["keys_per_second"])
        default = [fields for choice, fields in measured if choice == "default"]
        result(
            case="best",
            op=op,
            table=table,
            dim=dim,
            load_factor=load,
            choice=name,
            choices=len(measured),
            keys_per_second=best["keys_per_second"],
            over_default=(
                best["keys_per_second"] / default[0]["keys_per_second"] if default else None
            ),
        )


def main(parser: argparse.ArgumentParser) -> None:
    backend_name = os.environ.get("SOK_LITE_BACKEND") or "cuda"
    parser.add_argument("--backend", choices=["cpu", "cuda"], default=backend_name)
    parser.add_argument("--choices", nargs="+", metavar="NAME", help="as `choice` names them")
    parser.add_argument("--limit-s", type=float, default=560, help="of the whole")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: only that it runs")
    args = parser.parse_args()
    end = time.monotonic() + args.limit_s
    on_gpu = args.backend == "cuda"
    env = dict(os.environ)
    env.pop("SOK_LITE_KERNEL_DEFINES", None)

    limits = [*TABLES, "limits", "--backends", args.backend]
    limits += ["--host-footprints-gb", "1", "16", "--rounds", "3"]
    # A third of the time at most: each page of host memory has to be touched and pinned.
    limits += ["--limit-s", str(args.limit_s / 4)]
    if args.quick:
        limits += "--footprints-gb 0.001 0.002 --host-footprints-gb 0.001 --reads 1000".split()
    run("limits", limits, env, args.limit_s / 2)

    tables = [*TABLES, "operations", "--backends", args.backend]
    tables += "--ops find find_or_insert find_or_insert_new lookup --dims 8 64".split()
    tables += ["--loads", "0.5", "1.0", "--rounds", "5"]
    if args.quick:
        tables += "--capacity 4096 --batch 200 --rounds 1".split()
    elif on_gpu:
        # The slots take 256 MB and so are not in a cache of 50 or 60.
        tables += ["--capacity", str(1 << 24)]
    found = []
    slowest = 5.0
    for choice in gpu_choices() if on_gpu else cpu_choices():
        if args.choices and choice.name not in args.choices:
            continue
        left = end - time.monotonic()
        if left < slowest:
            note(f"{choice.name} is left out: no time left.")
        else:
            start = time.monotonic()
            command = [*tables, "--tables", *choice.tables]
            if choice.options:
                command += ["--table-options", *choice.options]
            text = " ".join(f"{name}={value}" for name, value in choice.defines.items())
            lines = run(choice.name, command, {**env, "SOK_LITE_KERNEL_DEFINES": text}, left)
            found += [(choice.name, fields) for fields in lines]
            slowest = max(slowest, time.monotonic() - start)
    print_best(found)
