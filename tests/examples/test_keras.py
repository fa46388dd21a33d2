"""The jobs that use Keras, run as their users run them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tensorflow")

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(command):
    """Returns what the last line of a job says."""
    env = os.environ | {"PYTHONPATH": str(EXAMPLES.parent), "TF_CPP_MIN_LOG_LEVEL": "3"}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    lines = [line for line in done.stdout.splitlines() if "RESULT " in line]
    return json.loads(lines[-1].split("RESULT ")[1])


def two_tower(*launcher):
    script = str(EXAMPLES / "two_tower.py")
    return run([*launcher, sys.executable, script, "--rows", "6000", "--epochs", "5"])


@pytest.mark.full_only("trains for 8 s")
def test_two_towers_find_the_items_of_a_genre():
    result = two_tower()
    assert result["auc"] > 0.95
    assert result["users"] == result["items"] == 200


@pytest.mark.full_only("starts ranks with Keras")
def test_two_towers_on_two_ranks():
    horovodrun = shutil.which("horovodrun", path=str(Path(sys.executable).parent))
    if horovodrun is None:
        pytest.skip("no horovodrun beside this Python: scripts/setup.sh installs Horovod")
    result = two_tower(horovodrun, "--gloo", "-np", "2")
    assert result["auc"] > 0.95
    assert result["users"] == result["items"] == 200  # of both ranks


@pytest.mark.full_only("trains for 13 s; two towers are the smoke")
def test_a_deep_and_cross_network_is_loaded_and_served(tmp_path):
    options = ["--rows", "8000", "--epochs", "3", "--workdir", str(tmp_path)]
    result = run([sys.executable, str(EXAMPLES / "dcn.py"), *options])
    assert result["auc"] > 0.65
    assert result["served_differs_by"] < 1e-5
