"""What a call asks of a backend: numbers that no machine makes better or worse.

On a CPU launches are all there is to count; on the simulated GPU everything is.
"""

import threading
from collections import Counter
from typing import NamedTuple

import pytest

from sok_lite.comm import run_ranks
from tests.support.simt import device
from tests.support.simt.backend import is_simulated


class Counts(NamedTuple):
    """Of one call: launches of our kernels, operations of CuPy's, each at least one launch,
    memsets, waits of the host, and bytes copied. On a CPU all but the first are 0."""

    launches: int
    operations: int = 0
    memsets: int = 0
    waits: int = 0
    to_device: int = 0
    to_host: int = 0


def can_count(backend):
    """Nobody counts what is asked of a GPU that is none of ours."""
    return backend.name == "cpu" or is_simulated(backend)


def counts_of(backend, call):
    """Makes a call and returns its Counts."""
    assert can_count(backend)
    if is_simulated(backend):
        with device.counted() as seen:
            call()
        names = ("kernels", "array operations", "memsets", "waits")
        copied = ("bytes to the device", "bytes to the host")
        return Counts(*(seen[name] for name in (*names, *copied)))
    kernels = []
    with pytest.MonkeyPatch.context() as patch:
        on_launch(backend, patch, kernels.append)
        call()
    return Counts(len(kernels))


def on_launch(backend, monkeypatch, note):
    """Calls `note` with the kernel's name for each launch that a backend prepares."""
    name = "_launch_words" if backend.name == "cpu" else "packed"
    prepare = getattr(backend, name)

    def noting(kernel, what):
        note(kernel)
        return prepare(kernel, what)

    monkeypatch.setattr(backend, name, noting)


def counts_of_ranks(backend, size, prepare, run=run_ranks):
    """Makes the call that `prepare(comm)` returns on all of `size` ranks, threads of this process.

    Returns Counts of all ranks together, and of rank 0 how often it makes each collective.
    """
    counts, collectives = [], Counter()
    ranks = threading.Barrier(size, timeout=300)

    def program(comm):
        call = prepare(comm)

        def together():
            ranks.wait()
            call()
            ranks.wait()

        ranks.wait()
        if comm.rank > 0:
            together()
            return
        for name in ("_alltoallv", "_allgatherv"):
            setattr(comm, name, _counted(getattr(comm, name), name.strip("_"), collectives))
        counts.append(counts_of(backend, together))

    run(size, program)
    return counts[0], collectives


def _counted(function, name, counts):
    def call(*args):
        counts[name] += 1
        return function(*args)

    return call
