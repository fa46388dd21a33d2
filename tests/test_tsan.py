"""The CPU kernels under ThreadSanitizer, with real threads, and a planted race to find."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sok_lite.backend import build, sources

ROOT = Path(__file__).resolve().parent.parent
TSAN_FLAGS = ["-O1", "-g", "-fsanitize=thread", "-DSOK_START_TOGETHER"]


def tsan_runtime():
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to build the kernels with ThreadSanitizer")
    name = subprocess.run(
        [compiler, "-print-file-name=libtsan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not Path(name).is_absolute():
        pytest.skip(f"{compiler} has no ThreadSanitizer runtime")
    return str(Path(name).resolve())


def run_job(job, library):
    command = [sys.executable, "-m", "tests.tsan.job", job]
    if shutil.which("setarch"):
        # This runtime needs memory where address randomisation may put something else.
        command = ["setarch", platform.machine(), "-R", *command]
    env = {
        **os.environ,
        "LD_PRELOAD": tsan_runtime(),
        "SOK_LITE_CPU_LIBRARY": str(library),
        "TSAN_OPTIONS": "halt_on_error=0 exitcode=66",
        "OPENBLAS_NUM_THREADS": "1",
    }
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)


def test_no_data_race_in_any_kernel():
    done = run_job("engine", build.compile_library(TSAN_FLAGS))
    assert done.returncode == 0, done.stderr[-6000:]
    assert done.stdout.endswith("done\n")
    assert "ThreadSanitizer" not in done.stderr


def test_a_planted_race_is_found(tmp_path):
    runtime = tsan_runtime()
    library = tmp_path / "racy.so"
    folder = sources.kernel_folder()
    subprocess.run(
        [
            *("g++", *build.FLAGS, *TSAN_FLAGS, "-I", str(folder)),
            *("-x", "c++", str(ROOT / "tests" / "tsan" / "racy.cu")),
            *(str(folder / "cpu_runtime.cpp"), "-o", str(library)),
        ],
        check=True,
    )
    assert Path(runtime).is_file()
    done = run_job("racy", library)
    assert done.returncode == 66
    assert "data race" in done.stderr
    assert "racy.cu" in done.stderr
