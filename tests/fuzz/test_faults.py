"""tests/fuzz/faults.py finds nothing in some rounds, and its last line has the counts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.full_only("many rounds of faults")
def test_random_faults_find_nothing():
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.faults", "--seed", "1", "--rounds", "60"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=500,
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert lines[:2] == ["round 1 on cpu, seed 1", "round 2 on cpu, seed 2"]
    counts = json.loads(lines[-1].removeprefix("RESULT "))
    assert counts["failures"] == 0 and counts["rounds"] == 60
    for name in ("operations", "CtrlC", "Shortage", "Alarm"):
        assert counts[name] > 0
