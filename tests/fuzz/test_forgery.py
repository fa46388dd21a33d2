"""tests/fuzz/forgery.py finds nothing in some rounds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tensorflow")


@pytest.mark.full_only("loads forged files with TensorFlow: 20 s")
def test_forged_files_do_no_harm():
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.forgery", "--seed", "1", "--rounds", "15"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    counts = json.loads(done.stdout.splitlines()[-1].removeprefix("RESULT "))
    assert counts["operations"] == 60 and counts["failures"] == 0 < counts["loaded"]
