"""The GPU image: what its environment is made of can still be installed.

The image itself is not built here. pip is asked for the Python and the C library of its system; it
reads the conditions of a requirement (such as `python_version < "3.11"`) by the Python that runs.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Python and glibc 2.x of the systems that the base image may have.
SYSTEMS = {"ubuntu22.04": ("3.10", 35), "ubuntu24.04": ("3.12", 39)}


def base_image():
    """(CUDA's major version, Python, x of glibc 2.x) of the Dockerfile."""
    (tag,) = re.findall(r"^ARG BASE=nvidia/cuda:(\S+)$", (ROOT / "Dockerfile").read_text(), re.M)
    assert "cudnn" not in tag, "a second cuDNN, beside the one of TensorFlow's wheels"
    version, kind, system = tag.split("-")
    assert kind == "devel", "Horovod needs nvcc and NCCL's headers"
    return version.split(".")[0], *SYSTEMS[system]


def pip(*words):
    command = [sys.executable, "-m", "pip", words[0], "--quiet", *words[1:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]


def project():
    if sys.version_info < (3, 11):
        pytest.skip("tomllib comes with Python 3.11")
    import tomllib

    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_image_and_the_wheels_are_of_one_cuda():
    cuda, python, _ = base_image()
    extras = project()["optional-dependencies"]
    assert any(text.startswith(f"cupy-cuda{cuda}x") for text in extras["gpu"])
    assert f"Programming Language :: Python :: {python}" in project()["classifiers"]
    # The wheels' own libraries are found first only where no others are on this path.
    path = "LD_LIBRARY_PATH=/usr/local/nvidia/lib:/usr/local/nvidia/lib64 \\\n"
    assert path in (ROOT / "Dockerfile").read_text()


@pytest.mark.full_only("asks the package index for 150 packages")
def test_the_packages_of_the_image_resolve_today(tmp_path):
    cuda, python, glibc = base_image()
    extras = project()["optional-dependencies"]
    wanted = [*project()["dependencies"], *extras["gpu"], *extras["test"]]
    platforms = [f"manylinux_2_{x}_x86_64" for x in range(glibc, 4, -1)]
    platforms += [f"manylinux{name}_x86_64" for name in ("2014", "2010", "1")]
    report = tmp_path / "report.json"
    pip(
        *("install", "--dry-run", "--ignore-installed", "--target", str(tmp_path / "target")),
        *("--report", str(report), "--only-binary=:all:", "--python-version", python),
        *(word for platform in platforms for word in ("--platform", platform)),
        *wanted,
    )
    versions = {
        item["metadata"]["name"].lower(): item["metadata"]["version"]
        for item in json.loads(report.read_text())["install"]
    }
    assert {"tensorflow", "keras", f"cupy-cuda{cuda}x", "numpy", "mpi4py"} <= set(versions)
    # One CUDA for TensorFlow and CuPy: two would meet in one process.
    assert {name for name in versions if re.search(rf"-cu(?!{cuda}$)\d+$", name)} == set()
    assert versions[f"nvidia-cuda-nvrtc-cu{cuda}"].startswith(f"{cuda}.")
    # Released with TensorFlow, and installed without its dependencies; see scripts/setup.sh.
    release = ".".join(versions["tensorflow"].split(".")[:2])
    pip("download", "--no-deps", "--dest", str(tmp_path), f"tf_keras=={release}.*")
