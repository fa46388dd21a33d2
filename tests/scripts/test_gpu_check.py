"""scripts/gpu_check.sh without a GPU: stages, files, and what happens to a test that hangs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

HANGS = """
import time
def test_hangs_on_cpu():
    time.sleep(3600)
def test_after_it_on_cpu():
    pass
"""
PASSES = """
def test_passes_on_cpu():
    pass
def test_is_for_another_backend():
    raise AssertionError("not chosen")
"""


def check(*arguments, **variables):
    env = {**os.environ, "SOK_LITE_BACKEND": "cpu", "SOK_LITE_PYTHON": sys.executable, **variables}
    command = ["bash", ROOT / "scripts" / "gpu_check.sh", *arguments]
    # Ended long before a test wakes that nobody ends.
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)


@pytest.fixture
def files(tmp_path):
    """Two files of tests: the first one hangs."""
    paths = [tmp_path / "test_hangs.py", tmp_path / "test_passes.py"]
    for path, text in zip(paths, (HANGS, PASSES), strict=True):
        path.write_text(text)
    return [*map(str, paths)]


def test_a_stage_that_there_is_not_is_refused():
    done = check("tests", "test")
    assert done.returncode == 2
    assert "unknown argument 'test'. Expected: files of tests, or of compile tests" in done.stderr


@pytest.mark.parametrize("name", ["SOK_LITE_STAGE_S", "SOK_LITE_TEST_S"])
@pytest.mark.parametrize("value", ["abc", "0", "-5", "1.5", "010", "5 6", "[$(exit)]"])
def test_a_limit_that_is_no_number_of_seconds_is_refused(files, name, value):
    done = check("tests", files[1], **{name: value})
    assert done.returncode == 2 and not done.stdout
    text = f"error: {name} must be a whole number of seconds, 1 or more. Received: '{value}'. "
    assert done.stderr == f"{text}Unset it for its default.\n"


def test_a_stage_runs_the_tests_of_its_backend_in_the_files_it_is_given(files):
    done = check("tests", files[1], SOK_LITE_STAGE_S="", SOK_LITE_TEST_S="")  # the defaults
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed, 1 deselected" in done.stdout
    assert "=== tests" in done.stdout and "=== memcheck" not in done.stdout
    assert "1 stages, failed: none" in done.stdout


@pytest.mark.full_only("waits for a test that hangs; the next is the smoke")
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_test_that_hangs_ends_with_its_place_and_costs_no_other_file(files, jobs):
    if int(pytest.__version__.split(".")[0]) < 9:
        pytest.skip("pytest ends a test that hangs from version 9 on")
    done = check("tests", *files, SOK_LITE_TEST_S="5", SOK_LITE_JOBS=jobs)
    assert done.returncode == 1
    assert "in test_hangs_on_cpu" in done.stdout + done.stderr
    assert f"not passed: {files[0]}\n" in done.stdout
    assert "1 passed" in done.stdout


@pytest.mark.full_only("waits for a limit of time")
def test_a_stage_ends_after_its_time_and_names_what_it_left_out(files):
    limits = {"SOK_LITE_TEST_S": "500", "SOK_LITE_STAGE_S": "6", "SOK_LITE_JOBS": "1"}
    done = check("tests", *files, **limits)
    assert done.returncode == 1
    assert f"{files[0]}: stopped, the 6 s of the stage are over" in done.stdout
    assert f"{files[1]}: left out, no time left" in done.stdout
    assert "1 stages, failed: tests" in done.stdout
