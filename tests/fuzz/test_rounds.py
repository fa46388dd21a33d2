"""The fuzzers find nothing in some rounds, and their last line has the counts."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.full_only("many rounds of faults; loads forged files with TensorFlow: 20 s")
@pytest.mark.parametrize(
    ("name", "rounds", "counted"),
    [("faults", 60, ["CtrlC", "Shortage", "Alarm"]), ("forgery", 15, ["loaded"])],
)
def test_random_rounds_find_nothing(name, rounds, counted):
    if name == "forgery" and importlib.util.find_spec("tensorflow") is None:
        pytest.skip("no TensorFlow")
    command = [sys.executable, "-m", f"tests.fuzz.{name}", "--seed", "1", "--rounds", f"{rounds}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=500)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert lines[:2] == ["round 1 on cpu, seed 1", "round 2 on cpu, seed 2"]
    counts = json.loads(lines[-1].removeprefix("RESULT "))
    assert counts["failures"] == 0 and counts["rounds"] == rounds
    assert all(counts[each] > 0 for each in ("operations", *counted))
