"""The CPU kernels under ThreadSanitizer, AddressSanitizer and UBSan, with real threads.

Kernels with a fault planted in them prove that each sanitizer would find one.
"""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from sok_lite.backend import build, sources

ROOT = Path(__file__).resolve().parent.parent


class Sanitizer(NamedTuple):
    """Flags of a build, and what a process needs to load it."""

    flags: list[str]
    runtimes: list[str]
    env: dict[str, str]


COMMON = ["-O1", "-g", "-DSOK_START_TOGETHER"]
SANITIZERS = {
    "thread": Sanitizer(
        [*COMMON, "-fsanitize=thread"],
        ["libtsan.so"],
        {"TSAN_OPTIONS": "halt_on_error=0 exitcode=66"},
    ),
    "memory": Sanitizer(
        [*COMMON, "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"],
        ["libasan.so", "libubsan.so"],
        # Python itself keeps memory to its end.
        {
            "ASAN_OPTIONS": "detect_leaks=0 exitcode=66",
            "UBSAN_OPTIONS": "exitcode=66 print_stacktrace=1",
        },
    ),
}


def compiler():
    found = os.environ.get("CXX") or shutil.which("g++")
    if found is None:
        pytest.skip("no g++ to build the kernels with a sanitizer")
    return found


def runtime(name):
    path = subprocess.run(
        [compiler(), f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not Path(path).is_absolute():
        pytest.skip(f"{compiler()} has no {name}")
    return str(Path(path).resolve())


def run_job(job, library, sanitizer):
    command = [sys.executable, "-m", "tests.sanitizers.job", job]
    if shutil.which("setarch"):
        # The runtimes need memory where address randomisation may put something else.
        command = ["setarch", platform.machine(), "-R", *command]
    env = {
        **os.environ,
        **sanitizer.env,
        "LD_PRELOAD": " ".join(runtime(name) for name in sanitizer.runtimes),
        "SOK_LITE_CPU_LIBRARY": str(library),
        "OPENBLAS_NUM_THREADS": "1",
        # Python's own allocator would hide overruns between small pieces of memory.
        "PYTHONMALLOC": "malloc",
    }
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("kind", SANITIZERS)
def test_no_fault_in_any_kernel(kind):
    sanitizer = SANITIZERS[kind]
    compiler()
    done = run_job("engine", build.compile_library(sanitizer.flags), sanitizer)
    assert done.returncode == 0, done.stderr[-6000:]
    assert done.stdout.endswith("done\n")
    assert "Sanitizer" not in done.stderr
    assert "runtime error" not in done.stderr


@pytest.mark.parametrize(
    ("kind", "job", "text"),
    [
        ("thread", "faulty_count", "data race"),
        ("memory", "faulty_end", "heap-buffer-overflow"),
        ("memory", "faulty_shift", "runtime error: shift exponent 64"),
    ],
)
def test_a_planted_fault_is_found(kind, job, text, tmp_path):
    sanitizer = SANITIZERS[kind]
    library = tmp_path / "faulty.so"
    folder = sources.kernel_folder()
    subprocess.run(
        [
            *(compiler(), *build.FLAGS, *sanitizer.flags, "-I", str(folder)),
            *("-x", "c++", str(ROOT / "tests" / "sanitizers" / "faulty.cu")),
            *(str(folder / "cpu_runtime.cpp"), "-o", str(library)),
        ],
        check=True,
    )
    done = run_job(job, library, sanitizer)
    assert done.returncode == 66, done.stderr[-3000:]
    assert text in done.stderr
    assert "faulty.cu" in done.stderr
