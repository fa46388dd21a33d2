"""NCCL itself: one rank, which sends to itself. tests/ranks/test_gpu_transports.py has several."""

import numpy as np
import pytest

from sok_lite.backend.nccl import load_nccl, nccl_unavailable
from sok_lite.comm import run_ranks
from sok_lite.comm.gpu_transport import Check
from sok_lite.comm.nccl import NcclTransport
from tests.support.simt.backend import is_simulated


@pytest.fixture
def gpu(backend):
    if backend.name != "cuda" or is_simulated(backend):
        pytest.skip("NCCL needs a GPU that there is")
    if nccl_unavailable() is not None:
        pytest.skip(nccl_unavailable())
    return backend


def test_a_rank_sends_to_itself(gpu):
    xp = gpu.xp

    def program(comm):
        comm.gpu_transport = NcclTransport(comm, gpu, xp.cuda, load_nccl())
        for num_tables in (3, 100, 2):
            offsets = xp.arange(num_tables + 1) * 5
            may = Check(xp.zeros(1, np.int64), lambda: None)
            counts = comm.gpu_transport.counts("keys", offsets, num_tables, 7, may)
            assert (counts.sent == 5).all() and (counts.received == 5).all()
            for num_rows in (0, 1, 100_003):
                message = xp.arange(2 * num_rows).reshape(num_rows, 2)
                splits = np.array([num_rows])
                assert (comm.gpu_transport.keys(message, splits, splits) == message).all()
                assert (comm.gpu_transport.rows("rows", message, splits, splits) == message).all()
        with pytest.raises(TypeError, match="numpy.ndarray"):
            comm.gpu_transport.rows("rows", np.zeros((1, 2), np.int64), np.ones(1), np.ones(1))
        comm.gpu_transport.leave()

    run_ranks(1, program)
