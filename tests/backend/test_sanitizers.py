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

from sok_lite.backend import build, sources, tunables
from sok_lite.native import library

ROOT = Path(__file__).resolve().parents[2]


class Sanitizer(NamedTuple):
    """Flags of a build, and what a process needs to load it."""

    flags: list[str]
    runtimes: list[str]
    env: dict[str, str]


# Lines, and no names of variables, whose place takes the compiler as long as all else.
COMMON = ["-g1", "-DSOK_START_TOGETHER"]
SANITIZERS = {
    "thread": Sanitizer(
        ["-O1", *COMMON, "-fsanitize=thread"],
        ["libtsan.so"],
        {"TSAN_OPTIONS": "halt_on_error=0 exitcode=66"},
    ),
    "memory": Sanitizer(
        ["-O0", *COMMON, "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"],
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


def run_job(job, library, sanitizer, **variables):
    command = [sys.executable, "-m", "tests.support.sanitizers.job", job]
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
        **variables,
    }
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1800)


def assert_faultless(done):
    assert done.returncode == 0, done.stderr[-6000:]
    assert done.stdout.endswith("done\n"), done.stdout[-3000:]
    assert "Sanitizer" not in done.stderr
    assert "runtime error" not in done.stderr


@pytest.mark.full_only("runs TensorFlow under AddressSanitizer")
def test_no_fault_in_the_operations_of_tensorflow():
    """TensorFlow is not instrumented: ThreadSanitizer would see no order of its threads."""
    pytest.importorskip("tensorflow")
    sanitizer = SANITIZERS["memory"]
    compiler()
    operations = library.compile_library(["-O1", "-g1", *sanitizer.flags[-2:]])
    done = run_job("operations", build.find_library(), sanitizer, OPERATIONS=str(operations))
    assert_faultless(done)


@pytest.mark.full_only("compiles the kernels with a sanitizer: minutes")
@pytest.mark.parametrize("kind", SANITIZERS)
def test_no_fault_in_native_calls(kind, tmp_path):
    """Without TensorFlow: all that runs in them is compiled with the sanitizer."""
    sanitizer, target = SANITIZERS[kind], tmp_path / "native_calls.so"
    folder = sources.kernel_folder()
    names = ("lookup", "insertion", "gradient", "update", "write", "plan", "gpu")
    files = [folder / "ops" / f"{name}.cpp" for name in names]
    own = ROOT / "tests" / "support" / "sanitizers" / "native_calls.cpp"
    flags = ["-std=c++17", "-fPIC", "-shared", "-pthread", "-I", str(folder), *sanitizer.flags]
    words = [compiler(), *flags, *map(str, [*files, own]), "-o", str(target)]
    subprocess.run(words, check=True)
    library = build.compile_library(sanitizer.flags)
    assert_faultless(run_job("native", library, sanitizer, NATIVE=str(target)))


@pytest.mark.full_only("compiles the kernels with a sanitizer: minutes")
@pytest.mark.parametrize("kind", SANITIZERS)
def test_no_fault_in_any_kernel(kind):
    """With searches by one lane, as CPUs have them; those of a tile are the simulated GPU's."""
    sanitizer = SANITIZERS[kind]
    compiler()
    assert_faultless(run_job("kernels", build.compile_library(sanitizer.flags), sanitizer))


def changed_library(folder, flags, names, changes=()):
    """Compiles some kernels and the runtime, with texts of the sources replaced: (old, new)."""
    kernels, left = sources.kernel_folder(), dict(changes)
    inputs = []
    for path in [*(kernels / name for name in names), *sources.runtime_files()]:
        text = path.read_text()
        for old in [old for old in left if old in text]:
            assert text.count(old) == 1, f"not once: {old}"
            text = text.replace(old, left.pop(old))
        inputs.append(folder / f"changed_{path.name}")
        inputs[-1].write_text(text)
    assert not left, f"no such text: {left}"
    defines = [f"-D{name}={value}" for name, value in tunables.kernel_defines().items()]
    words = [compiler(), *build.FLAGS, *flags, *defines, "-I", str(kernels)]
    words += [word for path in inputs for word in ("-x", "c++", str(path))]
    subprocess.run([*words, "-o", str(folder / "changed.so")], check=True)
    return folder / "changed.so"


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
    faulty = ROOT / "tests" / "support" / "sanitizers" / "faulty.cu"
    done = run_job(job, changed_library(tmp_path, sanitizer.flags, [faulty]), sanitizer)
    assert done.returncode == 66, done.stderr[-3000:]
    assert text in done.stderr and "faulty.cu" in done.stderr


def late(sanitizer):
    """Flags with which workers come when they come, as they do without a sanitizer."""
    return [flag for flag in sanitizer.flags if flag != "-DSOK_START_TOGETHER"]


@pytest.mark.parametrize("kind", SANITIZERS)
def test_no_fault_in_the_worker_threads(kind, tmp_path):
    sanitizer = SANITIZERS[kind]
    library = changed_library(tmp_path, late(sanitizer), ["rows.cu"])
    assert_faultless(run_job("pool", library, sanitizer))


# Between looking for a victim and taking it other threads have their turn, and between two steps of
# filling a slot: what may go wrong then does. By itself that must do no harm.
SLOW = {
    '#include "hkv/hkv.cuh"\n': (
        '#include <sched.h>\n#include <unistd.h>\n#include "hkv/hkv.cuh"\n'
    ),
    "  u64 best = sok_tile_min(lowest);": "  sched_yield();\n  u64 best = sok_tile_min(lowest);",
    "        i64 seen = 0;\n": "        i64 seen = 0;\n        sched_yield();\n",
    "    slot->row = SOK_NO_ROW;\n    sok_store(&slot->stamp": (
        "    slot->row = SOK_NO_ROW;\n    sched_yield();\n    sok_store(&slot->stamp"
    ),
}
EVICTING = ["hkv/hkv.cu", "rows.cu", "segments.cu", "combine.cu", "lookup.cu", "slots.cu"]
EVICTING += ["initializer.cu"]


@pytest.mark.full_only("compiles the kernels with a sanitizer: minutes")
def test_evictions_hold_when_threads_are_slow(tmp_path):
    sanitizer = SANITIZERS["thread"]
    library = changed_library(tmp_path, sanitizer.flags, EVICTING, SLOW)
    assert_faultless(run_job("evictions", library, sanitizer))
