"""Tables small enough that a fault can be tried at every step of every operation."""

import os
import tempfile

import pytest

from tests.fault_bench import FULL, Bench

_IN_MEMORY = "/dev/shm"


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
