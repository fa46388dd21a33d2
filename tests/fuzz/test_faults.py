"""tests/fuzz/faults.py runs, finds nothing in a few seconds, and repeats a round by its seed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def fuzz(*args):
    """Returns the exit status, the fields of the last line and all lines."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.faults", *map(str, args)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
    )
    lines = done.stdout.splitlines()
    assert lines and lines[-1].startswith("RESULT "), done.stdout + done.stderr
    return done.returncode, json.loads(lines[-1].removeprefix("RESULT ")), lines


@pytest.mark.full_only("many rounds of faults")
@pytest.mark.parametrize("seed", [1, 1000])
def test_random_faults_find_nothing(seed):
    status, counts, lines = fuzz("--seed", seed, "--rounds", 60)
    assert status == 0 and counts["failures"] == 0, "\n".join(lines)
    assert lines[:2] == [f"round 1, seed {seed}", f"round 2, seed {seed + 1}"]
    for name in ("steps", "ctrl_c", "memory", "signal", "undone"):
        assert counts[name] > 0


@pytest.mark.full_only("many rounds of faults")
def test_a_seed_repeats_its_round():
    """Signals come at times of their own; all else is the seed's."""
    faults = ("--faults", "none", "ctrl-c", "memory")
    runs = [fuzz("--seed", 7, "--rounds", 5, *faults)[1] for _ in range(2)]
    for counts in runs:
        del counts["seconds"]
    assert runs[0] == runs[1]


def test_it_ends_in_time():
    _, counts, _ = fuzz("--minutes", 0.02, "--faults", "none")
    assert counts["rounds"] > 0 and counts["seconds"] < 60
