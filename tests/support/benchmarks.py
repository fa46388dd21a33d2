"""Runs benchmarks on tiny sizes, for the tests of what they print. No test asserts a time."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
# With TensorFlow and without it, one of them is in quick.
RUNS_A_BENCHMARK = pytest.mark.full_only("runs a whole benchmark")


def command_of(name):
    """Returns what runs a benchmark, such as "lookup", or a tool: "tools.count_launches"."""
    words = [name] if name.startswith("tools.") else ["scripts.bench", *name.split()]
    return [sys.executable, "-m", *words]


def results_of(text):
    """Returns the fields of each RESULT line."""
    lines = [line for line in text.splitlines() if line.startswith("RESULT ")]
    return [json.loads(line.removeprefix("RESULT ")) for line in lines]


def run(name, *args, are_positive=True):
    """Runs a benchmark; returns the fields of its results, which are checked, and its text."""
    done = subprocess.run(
        [*command_of(name), *map(str, args)],
        capture_output=True,
        text=True,
        env={**os.environ, "SOK_LITE_NUM_THREADS": "2"},
        cwd=ROOT,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = results_of(done.stdout)
    for fields in results:
        numbers = [value for value in fields.values() if isinstance(value, (int, float))]
        assert len(numbers) > 2
        assert all(np.isfinite(value) and (value > 0 or not are_positive) for value in numbers), (
            fields
        )
    return results, done.stdout
