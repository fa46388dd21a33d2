"""Arrays of GPUs by an MPI library that reads and writes their memory: a CUDA-aware one."""

import ctypes
from contextlib import suppress
from typing import Any

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.comm.host_controlled import HostControlledCarrier
from sok_lite.comm.protocol import Communicator, CommunicatorError, split_offsets

_CUDA = 0  # MPIX_GPU_SUPPORT_CUDA of MPICH


class MpiCarrier(HostControlledCarrier):
    """MPI's all-to-all of arrays on the device.

    Raises:
      CommunicatorError: mpi4py or the MPI library is missing.
    """

    name = "mpi"
    what = "CUDA-aware MPI"

    def __init__(self, comm: Communicator, backend: Backend) -> None:
        super().__init__(comm, backend)
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:  # RuntimeError: no MPI library to load
            raise CommunicatorError(
                f"mpi4py cannot be imported: {type(error).__name__}: {error}"
            ) from error
        self._mpi: Any = MPI
        # A duplicate: our messages never meet those of others.
        self._world: Any = MPI.COMM_WORLD.Dup()
        self._row_type = MPI.INT64_T.Create_contiguous(2).Commit()

    def _carried(self, message: Array, send_splits: np.ndarray, recv_splits: np.ndarray) -> Array:
        received = self._backend.xp.empty((int(recv_splits.sum()), 2), np.int64)
        # MPI knows nothing of streams: what it reads must be there, what it writes be free.
        self._backend.synchronize()
        try:
            self._world.Alltoallv(
                self._buffer(message, send_splits), self._buffer(received, recv_splits)
            )
        except self._mpi.Exception as error:
            raise CommunicatorError(f"MPI cannot carry arrays of the device: {error}") from error
        return received

    def _buffer(self, message: Array, splits: np.ndarray) -> list[Any]:
        counts = np.asarray(splits, np.int64)
        return [message, (counts.tolist(), split_offsets(counts)[:-1].tolist()), self._row_type]


def cuda_unaware(comm: Communicator) -> str | None:
    """Returns why MPI cannot carry arrays between the GPUs of these ranks, or None if it can.

    Open MPI says so by `MPIX_Query_cuda_support`, MPICH by `MPIX_GPU_query_support`; MPI must have
    been started.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        return f"mpi4py cannot be imported ({error})"
    if MPI.COMM_WORLD.Get_size() != comm.size:
        return "MPI does not connect these ranks: start them with mpirun"
    for library in _mpi_libraries():
        if hasattr(library, "MPIX_Query_cuda_support"):
            if library.MPIX_Query_cuda_support() == 1:
                return None
            break
        if hasattr(library, "MPIX_GPU_query_support"):
            answer = ctypes.c_int(0)
            library.MPIX_GPU_query_support(_CUDA, ctypes.byref(answer))
            if answer.value:
                return None
            break
    name = MPI.Get_library_version().splitlines()[0].split(",")[0]
    return f"{name} does not say that it is CUDA-aware"


def _mpi_libraries() -> list[ctypes.CDLL]:
    """Returns the MPI libraries that this process has loaded."""
    with open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[5].strip() for line in maps if "libmpi" in line}
    libraries = []
    for path in sorted(paths):
        with suppress(OSError):
            libraries.append(ctypes.CDLL(path))
    return libraries
