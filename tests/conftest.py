"""What every test module shares: the two levels of the check, and the backends.

Full runs every test in every variant, and the long ones at their full length: that is what `pytest`
does, and `bash scripts/test.sh --full`. But of a costly test with the mark `pairs` it runs on each
backend only so many variants that every two values of two parameters meet in one of them. Quick
(`pytest --quick`, `bash scripts/test.sh`) has ten minutes, so it chooses:

* Every test function runs at least once, but for those that are marked; see below. Of its variants
  the one runs whose name has the lowest hash, so that over the whole all backends, modes and
  frameworks come up, and a run repeats. Where that one is skipped, the next runs.
* Each row of a table of cases counts as a function: `cases("name")` says that the parameter `name`
  is a row.
* Kernels run once on each backend that is here: tests of files that a kernel is named for
  (`test_admission.py`: `admission.cu`), of optimizer rules, the backends and the communicators.
* Where a test file changed since the last full run, or the file that it tests (`test_update.py`
  tests each `update.py` and `update.cu`), all its variants run, marked ones too. The commit of that
  run is in tests/last_full.json; a file that only moved has not changed. Where more than
  MOST_CHANGED names changed that would be nearly full itself: then quick runs its usual choice, and
  a full run is due before the change counts as tested.
* Any other test marked `full_only("starts 40 processes")` is left out; the mark gives the reason. A
  function that is costly in some variants has the mark on these.
* What a test repeats by a number of its own (`40 if QUICK else 200`) is repeated less often, and
  hypothesis draws the same examples every time: whatever fails in quick fails again.
"""

import faulthandler
import functools
import gc
import json
import os
import signal
import subprocess
import zlib
from importlib import metadata
from pathlib import Path

import hypothesis
import numpy as np
import pytest
from _pytest.runner import runtestprotocol

from sok_lite.backend import cuda_unavailable, get_backend
from sok_lite.comm import launched_ranks
from tests.support.pairs import covering
from tests.support.simt import backend as simt
from tests.support.simt import runtime

ROOT = Path(__file__).resolve().parent.parent
LAST_FULL = ROOT / "tests" / "last_full.json"
# So many names of changed files are the most of which quick runs all variants: 260 took 45 minutes,
# and quick is to take ten.
MOST_CHANGED = 100
# Tests of kernels: one variant on each backend.
KERNEL_ROOMS = ("tests/backend/", "tests/comm/", "tests/engine/optimizers/")

# The same places of keys in every run, for tests that count slots; processes that tests start
# inherit it. Not 0, by which a key would be hashed as it is.
os.environ.setdefault("SOK_LITE_HASH_SEED", "20241124")

# What a run depends on: the line above the tests says the versions.
_PACKAGES = (
    *("numpy", "tensorflow", "tensorflow-cpu", "keras", "tf-keras", "horovod", "mpi4py"),
    *("cupy-cuda12x", "cupy-cuda13x"),
)

# Whether this run is the quick one. Set before any test module is imported.
QUICK = False
# Another number: all tests in other orders of the simulated GPU's lanes.
try:
    SIMT_SEED = int(os.environ.get("SOK_LITE_SIMT_SEED") or 0)
except ValueError as error:
    raise pytest.UsageError(
        "SOK_LITE_SIMT_SEED must be a whole number. Received: "
        f"{os.environ['SOK_LITE_SIMT_SEED']!r}. Unset it for the usual orders."
    ) from error


def pytest_addoption(parser):
    parser.addoption(
        "--quick", action="store_true", help="run the variants that tests/conftest.py chooses"
    )
    parser.addoption(
        "--unchanged", action="store_true", help="with --quick: as if no file had changed"
    )


def pytest_configure(config):
    """Sets the level, and lets a run that is told to end say first where each of its threads is.

    Whoever stops a run that takes too long sends SIGTERM: `timeout`, scripts/check.py, horovodrun,
    CI. The log then shows whether it hung, and where. (mpirun shows nothing of it.) One test alone
    that takes longer than `faulthandler_timeout` of pyproject.toml says so while it goes on.
    """
    # A shell has what it starts in the background ignore Ctrl-C, and the processes that tests start
    # and interrupt would do so too.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    global QUICK
    QUICK = config.getoption("--quick")
    # Its own time limits would fail tests on a busy machine.
    for name, is_fixed, count in (("quick", True, 15), ("full", False, 50)):
        hypothesis.settings.register_profile(
            name,
            max_examples=count,
            deadline=None,
            derandomize=is_fixed,
            print_blob=True,
            suppress_health_check=[hypothesis.HealthCheck.too_slow],
        )
    hypothesis.settings.load_profile("quick" if QUICK else "full")
    # Not file descriptor 2: while a test runs pytest keeps what is written there to itself.
    log = open(os.dup(2), "w")  # noqa: SIM115
    faulthandler.register(signal.SIGTERM, file=log, all_threads=True, chain=True)
    config.add_cleanup(lambda: (faulthandler.unregister(signal.SIGTERM), log.close()))


def pytest_report_header(config):
    lines = [machine()]
    if QUICK and not config.getoption("--unchanged"):
        changed = changed_stems()
        said = "no commit of a full run is known here, so no file counts as changed"
        if changed is not None:
            said = f"all variants of the tests of {', '.join(sorted(changed)) or 'no file'}"
        lines.append(f"quick: {said}")
    return lines


def machine():
    """Returns what the tests run with here: a log that fails elsewhere begins with what differs."""
    versions = {name: version(name) for name in _PACKAGES}
    found = [f"{name} {number}" for name, number in versions.items() if number]
    gpu = cuda_unavailable()
    where = "the GPU" if gpu is None else f"no GPU ({gpu})"
    return f"{os.cpu_count()} cores, {where}, {launched_ranks()} ranks: {', '.join(found)}"


def version(name):
    """Returns the version of an installed package; "" without it."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    for item in items:
        if " at 0x" in item.nodeid:
            raise pytest.UsageError(
                f"A test must have the same name in every run. Received: {item.nodeid}, with an "
                "address in it. Give `parametrize` ids."
            )
    keep(with_pairs(items), items, config)
    if not QUICK:
        return
    changed = not config.getoption("--unchanged") and changed_stems()
    chosen = choose(items, changed or set())
    keep(chosen, items, config)
    # All ranks of a job must run the same tests, even where only one of them skips.
    if launched_ranks() == 1:
        _others.update({item.nodeid: others for item, others in chosen.items() if others})


def keep(chosen, items, config):
    """Leaves the chosen items in a list and tells pytest of the others."""
    left_out = [item for item in items if item not in chosen]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item in chosen]


def pytest_collection_finish(session):
    """Leaves what is imported and collected out of every walk of the garbage collector.

    With TensorFlow that is half a million objects, and a table looks for dropped optimizers by a
    walk: those of bridge/test_optimizer_states.py took 25 of 44 seconds, and take 3 of 21.
    """
    gc.collect()
    gc.freeze()


_others = {}


def pytest_runtest_protocol(item, nextitem):
    """Runs a variant that quick has chosen, and others of its function while they are skipped."""
    if item.nodeid not in _others:
        return None
    for variant in (item, *_others[item.nodeid]):
        place = {"nodeid": variant.nodeid, "location": variant.location}
        item.ihook.pytest_runtest_logstart(**place)
        reports = runtestprotocol(variant, nextitem=nextitem)
        item.ihook.pytest_runtest_logfinish(**place)
        if not any(report.skipped for report in reports):
            break
    return True


_ran = {}  # whether a variant of a function ran in this process


def pytest_runtest_logreport(report):
    function = report.nodeid.partition("[")[0]
    _ran[function] = _ran.get(function, False) or (report.when == "call" and not report.skipped)


def pytest_terminal_summary(terminalreporter):
    never = [function for function, ran in _ran.items() if not ran]
    if QUICK and never:
        terminalreporter.write_line("quick: skipped here in every variant: " + ", ".join(never))


def with_pairs(items):
    """Returns the set of all items but those that `pairs` leaves out."""
    variants = {}
    for item in items:
        if item.get_closest_marker("pairs") is not None:
            key = item.nodeid.partition("[")[0], backend_of(item)
            variants.setdefault(key, []).append(item)
    left_out = set()
    for items_of_one in variants.values():
        # By identity: a value that parametrize repeats need not have a hash.
        values = [{n: id(v) for n, v in item.callspec.params.items()} for item in items_of_one]
        chosen = covering(values)
        left_out.update(item for i, item in enumerate(items_of_one) if i not in chosen)
    return set(items) - left_out


def choose(items, changed):
    """Returns what quick runs: a dict of items, each with those to run where it is skipped."""
    variants = {}
    chosen = {}
    for item in items:
        if stem(item.path.name) in changed:
            chosen[item] = []
        elif item.get_closest_marker("full_only") is None and backend_of(item) not in _missing():
            function = item.nodeid.partition("[")[0]
            is_of_kernels = function.startswith(KERNEL_ROOMS) or stem(item.path.name) in _kernels()
            key = function, backend_of(item) if is_of_kernels else None, case_of(item)
            variants.setdefault(key, []).append(item)
    for items_of_one in variants.values():
        first, *others = sorted(items_of_one, key=lambda item: zlib.crc32(item.nodeid.encode()))
        chosen[first] = others
    return chosen


def backend_of(item):
    """Returns the name of the backend that a test runs on, None where it has no such parameter."""
    return item.callspec.params.get("backend") if hasattr(item, "callspec") else None


def case_of(item):
    """Returns which rows of tables of cases a test is of, by `cases`."""
    names = [name for mark in item.iter_markers("cases") for name in mark.args]
    # By identity: see `with_pairs`.
    return tuple(id(item.callspec.params[name]) for name in names)


def stem(name):
    """Returns what a test file and the file that it tests have in common: their name's middle."""
    return name.partition(".")[0].removeprefix("test_")


@functools.cache
def changed_stems():
    """Returns the stems of what changed since the last full run, None where none is known.

    None of them where there are more than MOST_CHANGED.
    """
    try:
        commit = json.loads(LAST_FULL.read_text())["commit"]
        # -M100%: a file that only moved is no change. Then those that git does not know yet.
        changed = _git("diff", "--name-status", "-M100%", commit).splitlines()
        new = _git("ls-files", "--others", "--exclude-standard").splitlines()
    except (OSError, KeyError, ValueError, subprocess.CalledProcessError):
        return None
    paths = [line.split("\t")[-1] for line in changed if not line.startswith("R100")] + new
    ends = (".py", ".cu", ".cuh", ".sh", ".cpp")
    found = {stem(Path(path).name) for path in paths if path.endswith(ends)} - {"__init__"}
    return found if len(found) <= MOST_CHANGED else set()


def _git(*arguments):
    command = ["git", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


@functools.cache
def _kernels():
    """Returns the stems of all kernel files."""
    return {stem(path.name) for path in (ROOT / "kernels").rglob("*.cu*")}


@functools.cache
def _missing():
    """Returns the backends that cannot run here: their variants would be skipped."""
    reasons = {"cuda": cuda_unavailable(), "simt": simt.unavailable()}
    return {name for name, reason in reasons.items() if reason is not None}


@pytest.fixture(autouse=True)
def same_draws(request):
    """A test draws from the RNG of its module what it draws alone, whichever ran before it."""
    rng = getattr(request.module, "RNG", None)
    if rng is not None:
        seed = zlib.crc32(request.node.nodeid.encode())
        rng.bit_generator.state = np.random.default_rng(seed).bit_generator.state


@pytest.fixture
def stores_here(tmp_path, monkeypatch):
    """What this machine keeps of object stores is in a folder of the test, which this returns."""
    monkeypatch.setenv("SOK_LITE_STORES", str(tmp_path / "of_stores"))
    return tmp_path / "of_stores"


@pytest.fixture(params=["cpu", "simt", "cuda"])
def backend(request):
    """Each backend in turn; simt is the cuda backend on a simulated GPU. One that cannot run here
    is skipped, with the reason."""
    if request.param == "simt":
        reason = simt.unavailable()
        if reason is not None:
            pytest.skip(f"no simulated GPU: {reason}")
        # A test has an order of its own, the same in every run: what fails fails again alone.
        runtime.set_seed(zlib.crc32(request.node.nodeid.encode()) + SIMT_SEED)
        return simt.simt_backend()
    if request.param == "cuda":
        reason = cuda_unavailable()
        if reason is not None:
            pytest.skip(f"no cuda backend: {reason}")
    return get_backend(request.param)
