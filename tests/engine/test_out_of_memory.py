"""Whatever cannot be allocated, once or for good: the table is as it was, or as it was to be.

The facts are those of test_interrupts.py: content as before or as after, nothing inside contradicts
anything else, the lock is free, and the table goes on once there is memory again. That includes
failures that last through everything that undoes what was begun: it may allocate nothing.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fault_cases import CASES, variants
from tests.support.fault_facts import every_shortage
from tests.support.own_process import run_limited
from tests.support.shortage import Shortage


@pytest.mark.parametrize(("name", "kind"), variants())
def test_any_allocation_of_the_backend_may_fail(backend, new_bench, name, kind):
    every_shortage(new_bench(kind), name, lambda *when: Shortage(backend, *when))


@pytest.fixture(scope="module")
def failing_memory(tmp_path_factory):
    """The library to preload."""
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("no g++ to build a malloc that fails, or no Linux to load it")
    library = tmp_path_factory.mktemp("failing") / "failing_memory.so"
    source = Path(__file__).parents[1] / "support" / "failing_memory.cpp"
    flags = ["-shared", "-fPIC", "-O1", "-std=c++17", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([compiler, *flags, source, "-o", library, "-ldl"], check=True)
    return library


MALLOC = """
    import sys
    from sok_lite.backend import get_backend
    from tests.support.fault_bench import Bench
    from tests.support.fault_facts import every_shortage
    from tests.support.shortage import Preloaded

    kind, folder, *names = sys.argv[1:]
    backend = get_backend("cpu")
    backend.chunk_bytes = backend.far_chunk_bytes = 1 << 13
    bench = Bench(backend, kind, 150, folder)  # arrays of at least a kilobyte
    for name in names:
        print(name, file=sys.stderr, flush=True)
        assert every_shortage(bench, name, Preloaded) > 0
"""


# Where all that is allocated is smaller than what fails here, or segments have their usual size.
_NOT_HERE = (("clear", "roomy"), ("reseed", "hbm"), ("reseed", "wide"))
_OF_KIND = {}
for name, case in CASES.items():
    for kind in set(case.of_each_index) - {kind for each, kind in _NOT_HERE if each == name}:
        _OF_KIND.setdefault(kind, []).append(name)


@pytest.mark.parametrize(
    ("kind", "part"), [(k, p) for k in sorted(_OF_KIND) for p in range(min(5, len(_OF_KIND[k])))]
)
def test_any_malloc_may_fail(failing_memory, tmp_path, kind, part):
    """In a process of its own: NumPy itself may crash where it does not ask whether it got any."""
    run_limited(
        *(MALLOC, kind, tmp_path, *_OF_KIND[kind][part::5]),
        timeout=900,
        LD_PRELOAD=str(failing_memory),
        PYTHONFAULTHANDLER="1",
        SOK_LITE_NUM_THREADS="1",
    )
