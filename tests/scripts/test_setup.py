"""The set-up of an environment, as far as it goes without a package index."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.full_only("pip's pauses: 20 s")
def test_an_environment_whose_making_was_killed_is_made_again(tmp_path):
    venv, base = tmp_path / "venv", os.path.realpath(sys.executable)
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(base)  # without pyvenv.cfg it is no environment
    (venv / "sok_lite-setup.running").touch()
    # pip is the first that fails, three times.
    without_index = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    others = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    done = subprocess.run(
        ["bash", ROOT / "scripts" / "setup.sh"],
        env={**others, **without_index, "SOK_LITE_VENV": str(venv)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 1 and "pip could not install" in done.stderr, done.stderr
    assert "killed midway: starting over" in done.stdout
    asked = "import os, sys; print(sys.prefix, os.path.realpath(sys.executable))"
    answer = subprocess.run(
        [venv / "bin" / "python", "-c", asked], capture_output=True, text=True, check=True
    )
    assert answer.stdout.split() == [str(venv), base]
