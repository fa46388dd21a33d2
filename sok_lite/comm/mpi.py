"""The communicator for `mpirun` without Horovod: NumPy rows through mpi4py."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from sok_lite.backend.ragged import split_offsets
from sok_lite.comm.header import FAREWELL, HEADER_BYTES, disagreement, notes_of, num_rows_of
from sok_lite.comm.protocol import Communicator, CommunicatorError, Gathered

_MAX_MPI_COUNT = 2**31 - 1
_NO_ROWS = np.empty((0, 1), np.uint8)


class MpiCommunicator(Communicator):
    """All processes of MPI.COMM_WORLD, on their own channel.

    Every collective begins with the same all-to-all of headers, where ranks in different calls
    meet. MPI cannot cancel what follows: a rank that breaks off inside a collective ends the job.

    Rows are sent with a derived datatype per row, so MPI's int32 counts and offsets count rows: the
    limit is 2^31 - 1 rows per call, of any length. CommunicatorError: mpi4py or the MPI library is
    missing, or MPI allows no second thread.
    """

    shares_memory = True

    def __init__(self) -> None:
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:  # RuntimeError: no MPI library to load
            raise CommunicatorError(
                "mpi4py cannot be imported. Install `sok_lite[mpi]` and an MPI library. "
                f"It says: {type(error).__name__}: {error}"
            ) from error
        self._mpi: Any = MPI
        if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
            raise CommunicatorError(
                "MPI was started for one thread only, but TensorFlow calls from its own threads. "
                "Let mpi4py start MPI with its default, THREAD_MULTIPLE."
            )
        # A duplicate: our messages never match those of the program's own MPI calls.
        self._comm: Any = MPI.COMM_WORLD.Dup()
        machine = self._comm.Split_type(MPI.COMM_TYPE_SHARED)
        super().__init__(self._comm.Get_rank(), self._comm.Get_size(), machine.Get_rank())
        machine.Free()
        self._row_types: dict[int, Any] = {}

    def abort(self, message: str) -> None:
        """Writes the message and ends all processes of the job with status 1."""
        print(f"sok_lite: rank {self.rank} aborts: {message}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        self._mpi.COMM_WORLD.Abort(1)

    def leave(self) -> None:
        """Waits for all ranks to leave, as MPI does; aborts if another waits for this one."""
        if self._failure is not None:
            return
        try:
            self._run_collective(self._barrier, FAREWELL)
        except CommunicatorError as error:
            self.abort(str(error))

    def _alltoallv(self, call: str, rows: np.ndarray, send_splits: np.ndarray) -> Gathered:
        with self._running("alltoallv"):
            recv_splits = self._meet(call, rows, send_splits)
            received = _empty_rows(recv_splits, rows)
            self._comm.Alltoallv(
                self._message(rows, send_splits), self._message(received, recv_splits)
            )
        return Gathered(received, recv_splits)

    def _allgatherv(self, call: str, rows: np.ndarray) -> Gathered:
        with self._running("allgatherv"):
            recv_splits = self._meet(call, rows, np.full(self.size, len(rows), np.int32))
            received = _empty_rows(recv_splits, rows)
            row_type = self._row_type(rows)
            self._comm.Allgatherv(
                [_bytes(rows), len(rows), row_type], self._message(received, recv_splits)
            )
        return Gathered(received, recv_splits)

    def _barrier(self, call: str) -> None:
        with self._running("barrier"):
            self._meet(call, _NO_ROWS, np.zeros(self.size, np.int32))

    def _break_off(self, reason: str) -> None:
        self.abort(reason)

    def _meet(self, call: str, rows: np.ndarray, send_splits: np.ndarray) -> np.ndarray:
        """Exchanges headers; returns (size,) int32, the number of rows from each rank."""
        header = self._next_header(call, rows)
        mine = b"".join(header.pack(send_splits.tolist()))
        theirs = bytearray(len(mine))
        self._comm.Alltoall([mine, self._mpi.BYTE], [theirs, self._mpi.BYTE])
        starts = range(0, len(theirs), HEADER_BYTES)
        headers = [bytes(theirs[i : i + HEADER_BYTES]) for i in starts]
        reason = disagreement(self.rank, header, dict(enumerate(headers)))
        if reason is not None:
            raise CommunicatorError(reason)
        self.notes.of_all = notes_of(headers)
        return np.array([num_rows_of(packed) for packed in headers], np.int32)

    def _message(self, rows: np.ndarray, splits: np.ndarray) -> list[Any]:
        return [_bytes(rows), (splits, split_offsets(splits)[:-1]), self._row_type(rows)]

    def _row_type(self, rows: np.ndarray) -> Any:
        row_bytes = rows.shape[1] * rows.dtype.itemsize
        if row_bytes not in self._row_types:
            self._row_types[row_bytes] = self._mpi.BYTE.Create_contiguous(row_bytes).Commit()
        return self._row_types[row_bytes]

    @contextlib.contextmanager
    def _running(self, name: str) -> Iterator[None]:
        try:
            yield
        except self._mpi.Exception as error:
            raise CommunicatorError(
                f"`{name}` failed on rank {self.rank} of {self.size}: another rank has died, or "
                f"the ranks make different calls. MPI says: {error}"
            ) from error


def _empty_rows(splits: np.ndarray, like: np.ndarray) -> np.ndarray:
    num_rows = int(splits.sum(dtype=np.int64))
    if num_rows > _MAX_MPI_COUNT:
        raise ValueError(
            f"MPI receives at most {_MAX_MPI_COUNT} rows at once. The other ranks send {num_rows}. "
            "Use smaller batches."
        )
    return np.empty((num_rows, like.shape[1]), like.dtype)


def _bytes(rows: np.ndarray) -> np.ndarray:
    return rows.reshape(-1).view(np.uint8)
