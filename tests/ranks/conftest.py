"""Real ranks: `horovodrun -np 2 python -m pytest tests/ranks`, or the same with mpirun.

Every rank runs the same tests in the same order. Run alone, they hold for the one rank there is.
Tests of whole jobs, which start ranks themselves, are skipped on a rank: test_elastic, test_hosts,
test_launch and test_rank_failures.
"""

import os
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

from sok_lite.comm import Communicator, CommunicatorError, launched_ranks, make_communicator
from sok_lite.comm.local import SWITCH_VARIABLE, connect_local

# A rank that waits in vain ends the job instead of the patience of who started it. On a busy
# machine one may wait long for another. Jobs that tests of this folder start themselves keep their
# own limits: those tests run on no rank.
if launched_ranks() > 1:
    os.environ.setdefault("HOROVOD_STALL_CHECK_TIME_SECONDS", "30")
    os.environ.setdefault("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "240")

_connected: dict[str, Communicator] = {}
_missing: dict[str, str] = {}


def connect() -> dict[str, Communicator]:
    """Makes each communicator that connects the ranks once, in the same order on all ranks."""
    if not _connected:
        for tool in ("horovod", "mpi") if launched_ranks() > 1 else ("single",):
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv(SWITCH_VARIABLE, "0")
                try:
                    _connected[tool] = make_communicator(tool)
                except CommunicatorError as error:
                    _missing[tool] = str(error).splitlines()[0]
                    continue
            local = connect_local(_connected[tool])
            if local is not _connected[tool]:
                _connected[f"{tool}, local"] = local
        if not _connected:
            # Skipped tests would look like a run that went well.
            pytest.exit(f"Nothing connects the {launched_ranks()} ranks: {_missing}", returncode=3)
    return _connected


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with the argument `comm` runs over each transport that connects the ranks.

    Over one alone where it takes the fixture `once`, and over those of one class where its module
    names it as TRANSPORT: what would be skipped is not made, since quick takes one variant.
    """
    if "comm" in metafunc.fixturenames:
        connected = connect()
        kind = getattr(metafunc.module, "TRANSPORT", Communicator)
        connected = {name: comm for name, comm in connected.items() if isinstance(comm, kind)}
        if "once" in metafunc.fixturenames:
            connected = dict([*connected.items()][-1:])
        metafunc.parametrize("comm", connected.values(), ids=connected.keys())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Runs each variant of a test with one value of the parameter that its module names IN_TURN.

    Whether ranks are connected this way or that is a fact of lookups and of communicators. What a
    program does with Keras over them takes seconds: over all its variants each transport comes up.
    """
    names = {id(comm): name for name, comm in connect().items()}
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        name = getattr(getattr(item, "module", None), "IN_TURN", None)
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if name in params:
            value = names.get(id(params[name]), params[name])
            others = item.nodeid.replace(f"[{value}", "[", 1).replace(f"-{value}", "", 1)
            groups.setdefault(others, []).append(item)
    left_out = set()
    for others, group in groups.items():
        chosen = group[zlib.crc32(others.encode()) % len(group)]
        left_out |= {item for item in group if item is not chosen}
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture
def folder(comm, tmp_path):
    """One folder for all ranks: that of rank 0."""
    path = np.frombuffer(str(tmp_path).encode().ljust(500), np.uint8)
    return Path(bytes(comm.broadcast(path)).decode().rstrip())


@pytest.fixture
def once():
    """Has a test run over one transport: it has no collective of its own."""


@pytest.fixture(autouse=True)
def over(request, monkeypatch):
    """As if `sok.init` had chosen the transport of a test."""
    # Facts of communicators need no TensorFlow, which takes seconds to import.
    if "comm" in request.fixturenames and "tensorflow" in sys.modules:
        from sok_lite.bridge import job

        monkeypatch.setattr(job, "_communicator", request.getfixturevalue("comm"))


@pytest.fixture(params=["keras", "tf_keras"])
def keras(request):
    return pytest.importorskip(request.param)


@pytest.fixture
def sk(keras):
    import sok_lite.keras

    return sok_lite.keras.classes_for(keras)


@pytest.fixture(params=["eager", "tf.function"])
def run(request):
    """Returns what calls a function at once, or traced."""
    import tensorflow as tf

    return tf.function if request.param == "tf.function" else lambda function: function


def pytest_report_header() -> list[str]:
    return [f"{tool}: {comm}" for tool, comm in connect().items()] + [
        f"no {tool}: {reason}" for tool, reason in _missing.items()
    ]


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Ends all ranks when a test fails on one: the others would wait in its next collective."""
    if report.failed and launched_ranks() > 1:
        print(f"\n{report.nodeid} failed:\n{report.longreprtext}", flush=True)
        next(iter(_connected.values())).abort(f"{report.nodeid} failed")
