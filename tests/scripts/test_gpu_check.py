"""scripts/gpu_check.sh without a GPU: stages, files, a test that hangs, and what a run leaves."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from scripts.gpu_tensorflow import differences
from tools.slim_tensorflow import write_pieces

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


@pytest.fixture
def check(tmp_path):
    """Runs the script without a GPU; `check.left()` is the file that the run left."""

    def check(*arguments, **variables):
        env = {**os.environ, "SOK_LITE_BACKEND": "cpu", "SOK_LITE_PYTHON": sys.executable}
        env |= {"OUT": str(tmp_path / "out"), **variables}
        command = ["bash", ROOT / "scripts" / "gpu_check.sh", *arguments]
        # Ended long before a test wakes that nobody ends.
        return subprocess.run(command, capture_output=True, text=True, env=env, timeout=900)

    check.left = lambda: json.loads((tmp_path / "out" / "gpu_check.json").read_text())
    return check


@pytest.fixture
def files(tmp_path):
    """Two files of tests: the first one hangs."""
    paths = [tmp_path / "test_hangs.py", tmp_path / "test_passes.py"]
    for path, text in zip(paths, (HANGS, PASSES), strict=True):
        path.write_text(text)
    return [*map(str, paths)]


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["tests", "test"], "unknown argument 'test'. Expected: files of tests, or of all compile"),
        (["tensorflow"], "expected a folder of pieces, by tools/slim_tensorflow.py"),
        (["tensorflow", "."], "with a pieces.json. Received: '.'."),
    ],
)
def test_a_stage_that_there_is_not_is_refused(check, arguments, expected):
    done = check(*arguments)
    assert done.returncode == 2 and not done.stdout
    assert expected in done.stderr


@pytest.mark.cases("name")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("SOK_LITE_STAGE_S", value) for value in ("abc", "0", "-5", "010", "[$(exit)]")),
        *(("SOK_LITE_TEST_S", value) for value in ("1.5", "5 6")),
    ],
)
def test_a_limit_that_is_no_number_of_seconds_is_refused(check, files, name, value):
    done = check("tests", files[1], **{name: value})
    assert done.returncode == 2 and not done.stdout
    text = f"error: {name} must be a whole number of seconds, 1 or more. Received: '{value}'. "
    assert done.stderr == f"{text}Unset it for its default.\n"


def test_each_stage_leaves_its_numbers(check, files, tmp_path):
    """Those of tests, of benchmarks, and what did not pass; of the machine what it has."""
    failing = tmp_path / "test_fails.py"
    failing.write_text(
        'def test_on_cpu():\n    print(\'RESULT {"case": "find", "ms": 1.5}\')\n    assert 0\n'
    )
    assert check("tests", files[1], str(failing), SOK_LITE_COMMIT="abc").returncode == 1
    left = check.left()
    assert left["command"] == ["tests", files[1], str(failing)]
    assert left["commit"] == "abc" and left["machine"]["cores"] == os.cpu_count()
    assert left["versions"]["numpy"] == np.__version__
    (stage,) = left["stages"]
    assert stage.pop("seconds") >= 0
    assert stage == {
        "name": "tests",
        "exit_code": 1,
        "results": [{"case": "find", "ms": 1.5}],
        "tests": {"passed": 1, "failed": 1, "deselected": 1},
        "not_passed": [str(failing)],
    }


@pytest.mark.full_only("waits for a test that hangs")
def test_a_test_that_hangs_ends_with_its_place_and_costs_no_other_file(check, files):
    if int(pytest.__version__.split(".")[0]) < 9:
        pytest.skip("pytest ends a test that hangs from version 9 on")
    done = check("tests", *files, SOK_LITE_TEST_S="5", SOK_LITE_JOBS="2")
    assert done.returncode == 1
    assert "in test_hangs_on_cpu" in done.stdout + done.stderr
    assert f"not passed: {files[0]}\n" in done.stdout
    assert "1 passed" in done.stdout


@pytest.mark.full_only("waits for a limit of time")
def test_a_stage_ends_after_its_time_and_names_what_it_left_out(check, files):
    limits = {"SOK_LITE_TEST_S": "500", "SOK_LITE_STAGE_S": "6", "SOK_LITE_JOBS": "1"}
    done = check("tests", *files, **limits)
    assert done.returncode == 1
    assert f"{files[0]}: stopped, the 6 s of the stage are over" in done.stdout
    assert f"{files[1]}: left out, no time left" in done.stdout
    (stage,) = check.left()["stages"]
    assert stage["without_time"] == files and "not_passed" not in stage


@pytest.mark.full_only("starts TensorFlow in six processes")
def test_the_stages_through_tensorflow_run_on_a_cpu(check, tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "of_the_pieces.py").write_text("")
    python = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    write_pieces(tmp_path / "package", tmp_path / "pieces", 1 << 20, python=python)
    names = ["unpack", "device", "stream", "step", "times"]
    done = check("tensorflow", str(tmp_path / "pieces"), *names)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "pieces" / "unpacked" / "of_the_pieces.py").exists()
    results = {each["name"]: each["results"] for each in check.left()["stages"]}
    assert [*results] == names
    assert results["device"][0]["doctor"][-1].startswith(("Nothing is broken", "Broken: "))
    assert results["stream"][0]["streams"] == ["None"]
    assert results["step"][0]["compared"] == ["keys", "m", "rows", "v"]
    assert [each["case"] for each in results["times"]] == 3 * ["lookup", "step"]


def test_what_two_trainings_have_not_in_common_is_named():
    rows = np.arange(6, dtype=np.float32).reshape(3, 2)
    other = rows.copy()
    other[1, 1] += 0.5
    one = {"a/rows": rows, "b/rows": rows, "c/keys": np.arange(3), "ms": np.array(1.0)}
    two = {"a/rows": rows.copy(), "b/rows": other, "c/keys": np.arange(4), "ms": np.array(2.0)}
    assert differences(one, two) == {
        "b/rows": "1 of 6, first at [[1, 1]], by 0.5 at most",
        "c/keys": "shapes (3,) and (4,)",
    }
    # 0.0 and -0.0 are equal numbers of other bits.
    assert differences({"z": np.zeros(1)}, {"z": -np.zeros(1)}) == {
        "z": "0 of 1, first at [], by 0 at most"
    }
