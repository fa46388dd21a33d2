"""A transport of arrays of a GPU for ranks that are threads: they hand messages to each other.

It stands where Horovod's all-to-all does, and knows nothing of calls, as that.
"""

import threading

from sok_lite.backend import get_backend
from sok_lite.backend.ragged import split_offsets
from sok_lite.comm import run_ranks
from sok_lite.comm.gpu_transport import GpuTransport

_LONGEST_WAIT_S = 60


class _Meeting:
    def __init__(self, size):
        self.all_came, self.messages = threading.Barrier(size), [None] * size


class MeetingTransport(GpuTransport):
    """Threads hand messages to each other where all meet."""

    name, what = "meeting", "threads that meet"

    def __init__(self, comm, backend, meeting):
        super().__init__(comm, backend)
        self._meeting = meeting

    def _send_rows(self, message, send_splits, recv_splits):
        rank, meeting = self._comm.rank, self._meeting
        self._backend.synchronize()  # as Horovod, whose stream is another
        meeting.messages[rank] = message, split_offsets(send_splits)
        meeting.all_came.wait(_LONGEST_WAIT_S)
        pieces = [sent[at[rank] : at[rank + 1]] for sent, at in meeting.messages]
        came = self._backend.xp.concatenate(pieces)
        meeting.all_came.wait(_LONGEST_WAIT_S)
        return came


def run_ranks_by_transport(size, program, backend=None, timeout=60.0):
    """Does what `run_ranks` does; arrays of the backend travel without the host."""
    backend, meeting = backend or get_backend("cpu"), _Meeting(size)

    def of_rank(comm):
        comm.gpu_transport = MeetingTransport(comm, backend, meeting)
        return program(comm)

    return run_ranks(size, of_rank, timeout)
