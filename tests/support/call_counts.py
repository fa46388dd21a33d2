"""What a call asks of a backend: numbers that no machine makes better or worse.

On a CPU launches are all there is to count; on the simulated GPU everything is.
"""

import threading
from collections import Counter
from contextlib import contextmanager
from typing import NamedTuple

from sok_lite.comm import run_ranks
from tests.support.simt import device
from tests.support.simt.backend import is_simulated


class Counts(NamedTuple):
    """Of one call.

    Attributes:
      launches: of our kernels.
      operations: of CuPy's, each at least one launch; 0 on a CPU.
      memsets: bytes that are set without a kernel of CuPy's; 0 on a CPU.
      waits: how often the host waits for the device; 0 on a CPU.
      to_device, to_host: bytes copied; 0 on a CPU.
    """

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
    with _launched(backend) as kernels:
        call()
    return Counts(len(kernels))


@contextmanager
def _launched(backend):
    """Gives the names of the kernels that are launched within."""
    kernels = []
    words_of = backend._launch_words

    def noting(kernel, num_items):
        kernels.append(kernel)
        return words_of(kernel, num_items)

    backend._launch_words = noting
    try:
        yield kernels
    finally:
        del backend._launch_words  # that of the class again


def on_launch(backend, monkeypatch, note):
    """Calls `note` with the kernel's name for each launch that a backend prepares."""
    if backend.name == "cpu":
        words_of = backend._launch_words

        def noting_words(kernel, num_items):
            note(kernel)
            return words_of(kernel, num_items)

        monkeypatch.setattr(backend, "_launch_words", noting_words)
        return
    packed = backend.packed

    def noting(kernel, parts):
        note(kernel)
        return packed(kernel, parts)

    monkeypatch.setattr(backend, "packed", noting)


def counts_of_ranks(backend, size, prepare, run=run_ranks):
    """Makes a call on all of `size` ranks, threads of this process.

    Args:
      prepare: communicator -> the call, which is counted; `prepare` itself is not.
      run: runs the ranks, as `run_ranks`.

    Returns:
      Counts of all ranks together, and of rank 0 how often it makes each collective.
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
