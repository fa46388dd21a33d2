"""A run of tests that somebody ends says where it was (tests/conftest.py)."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WAITS = """
import pathlib, time

def test_that_waits():
    print("nobody sees this")
    pathlib.Path(__file__).with_name("begun").write_text("")
    time.sleep(600)
"""


def test_who_ends_a_run_is_told_where_it_was(tmp_path):
    test = tmp_path / "test_one.py"
    test.write_text(WAITS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-c", os.devnull]
    run = subprocess.Popen(
        [*command, "--rootdir", str(tmp_path), "-p", "no:cacheprovider", str(test)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
    )
    for _ in range(3000):
        if (tmp_path / "begun").exists() or run.poll() is not None:
            break
        time.sleep(0.1)
    run.send_signal(signal.SIGTERM)
    log = run.communicate(timeout=300)[0]
    assert run.returncode == -signal.SIGTERM, log
    assert "test_one.py" in log and "in test_that_waits" in log, log
