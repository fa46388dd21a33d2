"""Tables small enough that a fault can be tried at every step of every operation."""

import os
import tempfile

import pytest

from sok_lite.comm import run_ranks
from sok_lite.engine.table import clock as clock_module
from tests.support.fault_bench import FULL, Bench
from tests.support.meeting_transport import run_ranks_by_transport

_IN_MEMORY = "/dev/shm"


class Time:
    """Stands in for the module `time`: it goes on when it is told to."""

    def __init__(self):
        self.now = 1000.0

    def time(self):
        return self.now


@pytest.fixture
def time(monkeypatch):
    """The time of clock.py."""
    stub = Time()
    monkeypatch.setattr(clock_module, "time", stub)
    return stub


@pytest.fixture(params=["by the host", "by a transport"])
def ranks(request):
    """Runs ranks as `run_ranks` does; takes the backend of their arrays too. Each way in turn."""

    def run(size, program, backend=None):
        if request.param == "by the host":
            return run_ranks(size, program)
        return run_ranks_by_transport(size, program, backend)

    run.by_transport = request.param != "by the host"
    return run


@pytest.fixture
def new_bench(backend, monkeypatch):
    """Returns a function that makes the Bench of a kind of tables."""
    # Rows grow every few keys, and what is set aside costs nothing.
    monkeypatch.setattr(backend, "chunk_bytes", 256)
    monkeypatch.setattr(backend, "far_chunk_bytes", 256)
    monkeypatch.setattr(backend, "segment_slots", 128)
    if backend.name == "cpu":
        # Which of several keys evicts which is then a function of the input.
        monkeypatch.setattr(backend, "num_threads", 1)
    # Thousands of far files: on a disk they would take most of the time.
    where = _IN_MEMORY if os.access(_IN_MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=where) as folder:
        yield lambda kind: _bench(backend, kind, folder)


def _bench(backend, kind, folder):
    if backend.name == "cuda" and kind in FULL:
        pytest.skip("which of several keys evicts which is up to the threads of a GPU")
    return Bench(backend, kind, folder=folder)
