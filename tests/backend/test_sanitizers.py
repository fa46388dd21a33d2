"""The CPU kernels under ThreadSanitizer, AddressSanitizer and UBSan, with real threads.

Kernels with a fault planted in them prove that each sanitizer would find one, and that the facts of
tests/support/eviction_facts.py find what no sanitizer could: a protocol that is wrong without a
race.
"""

import functools
import os
import platform
import shutil
import signal
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
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)


def run_until_a_race(job, library):
    """Runs a job with a planted race, whose first report ends it."""
    options = "halt_on_error=1 exitcode=66"
    return run_job(job, library, SANITIZERS["thread"], TSAN_OPTIONS=options)


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


def assert_faultless(done):
    assert done.returncode == 0, done.stderr[-6000:]
    assert done.stdout.endswith("done\n")
    assert "Sanitizer" not in done.stderr
    assert "runtime error" not in done.stderr


@pytest.mark.full_only("compiles the kernels with a sanitizer: minutes")
@pytest.mark.parametrize("kind", SANITIZERS)
def test_no_fault_in_any_kernel(kind):
    sanitizer = SANITIZERS[kind]
    compiler()
    assert_faultless(run_job("engine", build.compile_library(sanitizer.flags), sanitizer))


@pytest.mark.full_only("compiles the kernels with a sanitizer: minutes")
@pytest.mark.parametrize("kind", SANITIZERS)
def test_no_fault_in_the_tables(kind):
    """With searches by one lane, as CPUs have them; those of a tile are the simulated GPU's."""
    sanitizer = SANITIZERS[kind]
    compiler()
    assert_faultless(run_job("tables", build.compile_library(sanitizer.flags), sanitizer))


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
            *("-x", "c++", str(ROOT / "tests" / "support" / "sanitizers" / "faulty.cu")),
            *(*map(str, sources.runtime_files()), "-o", str(library)),
        ],
        check=True,
    )
    done = run_job(job, library, sanitizer)
    assert done.returncode == 66, done.stderr[-3000:]
    assert text in done.stderr
    assert "faulty.cu" in done.stderr


def pool_library(folder, sanitizer, old="", new=""):
    """Compiles a few kernels as they are without a sanitizer: workers come when they come.

    Args:
      old, new: a change of the worker threads.
    """
    kernels, library = sources.kernel_folder(), folder / "pool.so"
    runtime_source = folder / "changed_runtime.cpp"
    text = (kernels / "cpu_runtime.cpp").read_text()
    assert old in text
    runtime_source.write_text(text.replace(old, new))
    flags = [flag for flag in sanitizer.flags if flag != "-DSOK_START_TOGETHER"]
    others = [path for path in sources.runtime_files() if path.name != "cpu_runtime.cpp"]
    inputs = [kernels / "rows.cu", *others, runtime_source]
    subprocess.run(
        [
            *(compiler(), *build.FLAGS, *flags, "-I", str(kernels)),
            *(word for path in inputs for word in ("-x", "c++", str(path))),
            *("-o", str(library)),
        ],
        check=True,
    )
    return library


@pytest.mark.parametrize("kind", SANITIZERS)
def test_no_fault_in_the_worker_threads(kind, tmp_path):
    sanitizer = SANITIZERS[kind]
    assert_faultless(run_job("pool", pool_library(tmp_path, sanitizer), sanitizer))


@pytest.mark.full_only("runs kernels with a sanitizer until a race is seen")
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("round_.fetch_add(1);", "round_.fetch_add(1), from_ = from;"),
        ("(done, std::memory_order_acq_rel)", "(done, std::memory_order_relaxed)"),
    ],
    ids=["written after the workers were told", "told before it is done"],
)
def test_a_race_of_the_worker_threads_is_found(old, new, tmp_path):
    sanitizer = SANITIZERS["thread"]
    done = run_until_a_race("pool", pool_library(tmp_path, sanitizer, old, new))
    assert done.returncode == 66
    assert "data race" in done.stderr, done.stderr[-3000:]


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
RELEASE = "sok_store_release(&slot->key, key);"
CLAIM = "sok_cas(&taken->key, victim.key, reclaim_key);"
OF_THIS_BATCH = " || sok_load(&slot->stamp) == stamp"
CAME_SINCE = "sok_load(&taken->stamp) == (u32)stamp"
# What each fault changes in kernels/hkv/hkv.cu.
PLAIN_KEY = {RELEASE: "slot->key = key;"}
KEY_FIRST = {
    "    slot->row = SOK_NO_ROW;\n    sok_store(&slot->stamp": (
        "    if (!is_reserved) sok_store(&slot->key, key);\n    usleep(50);\n"
        "    slot->row = SOK_NO_ROW;\n    sok_store(&slot->stamp"
    ),
}
CLAIM_IN_TWO_STEPS = {
    CLAIM: (
        "sok_load(&taken->key);\n          usleep(50);\n"
        "          if (seen == victim.key) sok_store(&taken->key, reclaim_key);"
    )
}
NO_STAMP_CHECK = {OF_THIS_BATCH: " || stamp == 0", CAME_SINCE: "false"}
NO_SECOND_CHECK = {
    CAME_SINCE: "false",
    "  u64 best = sok_tile_min(lowest);": "  usleep(50);\n  u64 best = sok_tile_min(lowest);",
}


def compile_objects(folder, flags, sources_):
    """Compiles kernels without linking them; returns the object files."""
    defines = [f"-D{name}={value}" for name, value in tunables.kernel_defines().items()]
    words = [compiler(), *build.FLAGS, *flags, *defines, "-I", str(sources.kernel_folder()), "-c"]
    objects = [folder / f"{path.stem}.o" for path in sources_]
    for path, result in zip(sources_, objects, strict=True):
        subprocess.run([*words, "-x", "c++", str(path), "-o", str(result)], check=True)
    return objects


@pytest.fixture(scope="module")
def what_stays(tmp_path_factory):
    """Returns the object files, by flags, of what evictions need beside kernels/hkv/hkv.cu."""

    @functools.cache
    def objects(flags):
        kernels = sources.kernel_folder()
        names = ("rows.cu", "segments.cu", "combine.cu", "lookup.cu", "slots.cu", "initializer.cu")
        others = [*(kernels / name for name in names), *sources.runtime_files()]
        return compile_objects(tmp_path_factory.mktemp("objects"), flags, others)

    return objects


def eviction_library(folder, changes, flags, what_stays):
    """Compiles what evictions need, slow and with changes of the real kernels/hkv/hkv.cu."""
    source = sources.kernel_folder() / "hkv" / "hkv.cu"
    text = source.read_text()
    for old, new in {**SLOW, **changes}.items():
        assert text.count(old) == 1, f"no such text, or not once: {old}"
        text = text.replace(old, new)
    changed = folder / "changed_hkv.cu"
    changed.write_text(text)
    library = folder / "changed.so"
    objects = [*compile_objects(folder, flags, [changed]), *what_stays(tuple(flags))]
    words = [compiler(), *build.FLAGS, *flags, *map(str, objects), "-o", str(library)]
    subprocess.run(words, check=True)
    return library


@pytest.mark.full_only("compiles the kernels with a sanitizer: minutes")
def test_evictions_hold_when_threads_are_slow(tmp_path, what_stays):
    sanitizer = SANITIZERS["thread"]
    library = eviction_library(tmp_path, {}, sanitizer.flags, what_stays)
    assert_faultless(run_job("evictions", library, sanitizer))


@pytest.mark.full_only("compiles the kernels with a sanitizer: minutes")
@pytest.mark.parametrize("changes", [PLAIN_KEY, CLAIM_IN_TWO_STEPS], ids=["plain key", "claim"])
def test_a_race_in_the_eviction_protocol_is_found(changes, tmp_path, what_stays):
    library = eviction_library(tmp_path, changes, SANITIZERS["thread"].flags, what_stays)
    done = run_until_a_race("evictions", library)
    assert done.returncode == 66
    assert "data race" in done.stderr and "changed_hkv.cu" in done.stderr, done.stderr[-3000:]


@pytest.mark.full_only("compiles the kernels with a sanitizer: minutes")
@pytest.mark.parametrize(
    "changes",
    [NO_STAMP_CHECK, NO_SECOND_CHECK, CLAIM_IN_TWO_STEPS, KEY_FIRST],
    ids=["no stamp", "no second look", "claim", "key first"],
)
def test_a_wrong_eviction_protocol_is_found_by_its_facts(changes, tmp_path, what_stays):
    """Without a sanitizer: the facts must tell, or a table that they use fails: it counts more keys
    than there are, or has a row number that no kernel survives."""
    library = eviction_library(tmp_path, changes, ["-O1", *COMMON], what_stays)
    for _ in range(5):  # threads may happen to keep out of each other's way
        done = run_job("evictions", library, Sanitizer([], [], {}))
        if done.returncode:
            break
    if done.returncode != -signal.SIGSEGV:
        assert done.returncode == 1, done.stderr[-3000:]
        assert "eviction_facts.py" in done.stderr, done.stderr[-3000:]
