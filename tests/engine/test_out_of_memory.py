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

from tests.conftest import QUICK
from tests.support.fault_cases import CASES
from tests.support.own_process import run_limited
from tests.support.shortage import Shortage, every_shortage
from tests.support.simt.backend import is_simulated


def test_some_allocations_of_every_operation_may_fail(backend, new_bench):
    """What quick has of the next test."""
    if backend.name != "cpu" or not QUICK:
        pytest.skip("the next test has all of them")
    for name, case in CASES.items():
        for kind in case.of_each_index:
            every_shortage(
                new_bench(kind), name, lambda at, for_good: Shortage(backend, at, for_good), 11
            )


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for name, case in CASES.items() for kind in case.kinds],
)
def test_any_allocation_of_the_backend_may_fail(backend, new_bench, name, kind):
    if is_simulated(backend) and kind not in CASES[name].of_each_index:
        pytest.skip("the allocations that differ are those of other kinds too")
    # Most allocations of other kinds of tables are those of these as well.
    step = 1 if kind in CASES[name].of_each_index else 6
    every_shortage(
        new_bench(kind), name, lambda at, for_good: Shortage(backend, at, for_good), step
    )


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
    from tests.support.shortage import every_malloc

    kind, folder, *names = sys.argv[1:]
    for name in names:
        every_malloc(name, kind, 150, folder)  # arrays of at least a kilobyte
"""


# Where all that is allocated is smaller than what fails here, or segments have their usual size.
_NOT_HERE = (("clear", "roomy"), ("reseed", "hbm"), ("reseed", "wide"))


@pytest.mark.parametrize(
    "kind", sorted({kind for case in CASES.values() for kind in case.of_each_index})
)
def test_any_malloc_may_fail(failing_memory, tmp_path, kind):
    """In a process of its own: NumPy itself may crash where it does not ask whether it got any."""
    names = [name for name, case in CASES.items() if kind in case.of_each_index]
    names = [name for name in names if (name, kind) not in _NOT_HERE]
    if not names:
        pytest.skip("nothing that is allocated here is large enough")
    counts = run_limited(
        *(MALLOC, kind, tmp_path, *names),
        timeout=900,
        LD_PRELOAD=str(failing_memory),
        PYTHONFAULTHANDLER="1",
        SOK_LITE_NUM_THREADS="1",
    )
    assert len(counts) == len(names) and min(map(int, counts)) > 0


LIMIT = """
    import sys
    from tests.support.shortage import until_it_is_full

    until_it_is_full(sys.argv[1], sys.argv[2], int(sys.argv[3]))
"""


@pytest.mark.parametrize(("kind", "limit"), [("hbm", "RLIMIT_AS"), ("hybrid", "RLIMIT_DATA")])
def test_a_table_that_met_a_limit_goes_on(kind, limit):
    if not sys.platform.startswith("linux"):
        pytest.skip("/proc says how much memory a process has")
    counts = run_limited(LIMIT, kind, limit, 100 << 20, SOK_LITE_NUM_THREADS="1")
    successes, failures = map(int, counts)
    assert successes > 3 and failures == 30
