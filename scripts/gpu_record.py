"""What scripts/gpu_check.sh leaves: the machine, and the numbers of every stage, in one JSON file.

It is whole after each stage: a run that is cut short leaves what it had.

  python -m scripts.gpu_record start FILE COMMAND...     checks what is here, begins the file
  python -m scripts.gpu_record stage FILE NAME CODE SECONDS LOG FIRST_BYTE     adds a stage

Of a stage it keeps what its benchmarks printed as `RESULT {json}` and `NOTE`, the counts of tests,
the files of tests that did not pass, and those that there was no time for.
"""

import importlib
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

# What names of numbers end in, and what they count.
UNITS = {
    "ms": "milliseconds, medians",
    "seconds": "seconds",
    "keys_per_second": "keys per second",
    "bytes": "bytes",
}
_NEEDED = ("numpy", "cupy", "pytest", "hypothesis")
_PACKAGES = (
    *("numpy", "cupy-cuda12x", "cupy-cuda13x", "pytest"),
    *("tensorflow", "tensorflow-cpu", "keras"),
)
_SUMMARY = re.compile(r"^(?:=+ )?(\d+ \w+(?:, \d+ \w+)*) in [\d.]+s", re.MULTILINE)


def start(path: Path, command: list[str]) -> None:
    """Begins the file of a run, and prints what the machine is.

    Raises:
      SystemExit: there is no GPU, or a package is missing. On the cpu backend none is needed.
    """
    machine: dict[str, Any] = {"cores": os.cpu_count(), "system": platform.platform()}
    if os.environ.get("SOK_LITE_BACKEND") != "cpu":
        _check_packages()
        machine |= _gpu()
    versions = {"python": platform.python_version(), **_versions()}
    _write(
        path,
        {
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "command": command,
            "commit": os.environ.get("SOK_LITE_COMMIT") or _commit(),
            "machine": machine,
            "versions": versions,
            "units": UNITS,
            "stages": [],
        },
    )
    for name, found in {**machine, **versions}.items():
        print(f"{name}: {found}")


def stage(path: Path, name: str, code: int, seconds: int, text: str) -> None:
    """Adds a stage to the file of a run.

    Args:
      text: what the stage printed.
    """
    tests: Counter[str] = Counter()
    for summary in _SUMMARY.findall(text):
        for number, word in (each.split() for each in summary.split(", ")):
            tests[word] += int(number)
    without_time = re.findall(r"(?m)^(\S+): (?:left out, no time left|stopped, .* are over)$", text)
    not_passed = " ".join(re.findall(r"(?m)^not passed: (.*)$", text)).split()
    found = {
        "name": name,
        "exit_code": code,
        "seconds": seconds,
        "results": [json.loads(line) for line in re.findall(r"(?m)^RESULT (.*)$", text)],
        "notes": re.findall(r"(?m)^(?:NOTE |left out: )(.*)$", text),
        "tests": dict(tests),
        "not_passed": [file for file in not_passed if file not in without_time],
        "without_time": without_time,
    }
    run = json.loads(path.read_text())
    run["stages"].append({key: of for key, of in found.items() if of not in ([], {})})
    _write(path, run)


def _check_packages() -> None:
    missing = []
    for name in _NEEDED:
        try:
            importlib.import_module(name)
        except ImportError as error:
            missing.append(f"{name} ({error})")
    if missing:
        sys.exit(
            f"error: {sys.executable} lacks {', '.join(missing)}. "
            "pip install numpy cupy-cuda13x pytest hypothesis (cupy-cuda12x for CUDA 12)"
        )


def _gpu() -> dict[str, Any]:
    import cupy

    runtime = cupy.cuda.runtime
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        sys.exit(f"error: CuPy finds no GPU: {error}")
    if count == 0:
        sys.exit("error: CuPy finds no GPU.")
    device = runtime.getDeviceProperties(0)
    free, total = runtime.memGetInfo()
    return {
        "gpu": f"{count} x {device['name'].decode()}",
        "capability": cupy.cuda.Device(0).compute_capability,
        "memory_bytes": total,
        "free_bytes": free,
        "driver": runtime.driverGetVersion(),
        "cuda": runtime.runtimeGetVersion(),
        "nvrtc": ".".join(map(str, cupy.cuda.nvrtc.getVersion())),
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _commit() -> str | None:
    """Returns the commit, with "+" where files differ from it; None: no git knows it here."""
    try:
        command = ["git", "describe", "--always", "--abbrev=40", "--dirty=+"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _write(path: Path, run: dict[str, Any]) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(run, indent=1) + "\n")
    part.replace(path)


def main() -> None:
    what, path, *words = sys.argv[1:]
    if what == "start":
        start(Path(path), words)
        return
    name, code, seconds, log, first = words
    with open(log, errors="replace") as file:
        file.seek(int(first))
        stage(Path(path), name, int(code), int(seconds), file.read())


if __name__ == "__main__":
    main()
