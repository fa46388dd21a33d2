"""The communicator of `horovodrun`: NumPy rows through Horovod's TensorFlow operations.

Horovod wakes once per HOROVOD_CYCLE_TIME (milliseconds, 1 unless set) and starts what all ranks
have asked for by then, so a collective takes at least about that long, however small. Set it before
`hvd.init()`, or give `horovodrun --cycle-time-ms`; a shorter cycle costs idle processor time.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np

from sok_lite.comm.protocol import Communicator, CommunicatorError, Gathered

# Horovod has no uint32, uint64 or bfloat16 here; a copy needs no more than the width.
_WIRE_DTYPE = {1: np.uint8, 2: np.uint16, 4: np.int32, 8: np.int64}

# With MPI below it Horovod counts elements, not rows, and keeps their offsets in int32.
_MAX_MPI_ELEMENTS = 2**31 - 1


class HorovodCommunicator(Communicator):
    """All processes of a Horovod job. Calls `hvd.init()` unless the program has done so.

    Raises:
      CommunicatorError: Horovod cannot be imported, or it cannot start.
    """

    def __init__(self) -> None:
        try:
            import horovod.tensorflow as hvd
            import tensorflow as tf
        except Exception as error:  # also a library built against another TensorFlow
            raise CommunicatorError(
                "Horovod cannot be imported. Build it against the installed TensorFlow (see "
                f"`scripts/build_horovod.py`). It says: {type(error).__name__}: {error}"
            ) from error
        self._hvd: Any = hvd
        self._tf: Any = tf
        try:
            if not hvd.is_initialized():
                hvd.init()
        except Exception as error:
            raise CommunicatorError(f"Horovod cannot start: {error}") from error
        super().__init__(hvd.rank(), hvd.size(), hvd.local_rank())
        self._counts_in_int32 = hvd.mpi_enabled()

    def abort(self, message: str) -> NoReturn:
        """Ends this process with status 1; the launcher, or Horovod's error, ends the others."""
        print(f"sok_lite: rank {self.rank} aborts: {message}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        # No clean exit: Horovod's shutdown would wait for ranks that wait for this one.
        os._exit(1)

    def _alltoallv(
        self, rows: np.ndarray, send_splits: np.ndarray, recv_splits: np.ndarray | None
    ) -> Gathered:
        wire = self._wire(rows)
        with self._running("alltoallv"):
            received, splits = self._hvd.alltoall(wire, splits=send_splits, name="sok_alltoallv")
        return Gathered(received._numpy().view(rows.dtype), splits._numpy())

    def _allgatherv(self, rows: np.ndarray, recv_splits: np.ndarray | None) -> Gathered:
        if recv_splits is None:
            # Horovod's allgather does not tell who gave how much.
            counts = np.full((self.size, 1), len(rows), np.int32)
            recv_splits = self._alltoallv(counts, np.ones(self.size, np.int32), None).rows[:, 0]
        wire = self._wire(rows)
        with self._running("allgatherv"):
            received = self._hvd.allgather(wire, name="sok_allgatherv")
        return Gathered(received._numpy().view(rows.dtype), recv_splits)

    def _wire(self, rows: np.ndarray) -> np.ndarray:
        if self._counts_in_int32 and rows.size > _MAX_MPI_ELEMENTS:
            raise ValueError(
                f"Horovod over MPI sends at most {_MAX_MPI_ELEMENTS} elements at once. Received: "
                f"rows of shape {rows.shape}. Use smaller batches, or `horovodrun --gloo`."
            )
        return rows.view(_WIRE_DTYPE[rows.dtype.itemsize])

    @contextlib.contextmanager
    def _running(self, name: str) -> Iterator[None]:
        """Makes TensorFlow run operations now, on the CPU, and puts its errors in our words."""
        try:
            with self._eagerly(), self._tf.device("/CPU:0"):
                yield
        except (self._tf.errors.OpError, ValueError) as error:
            raise CommunicatorError(
                f"`{name}` failed on rank {self.rank} of {self.size}: another rank has died, the "
                "ranks make different calls, or Horovod was shut down. Look at the first error of "
                f"the other ranks. Horovod says: {error}"
            ) from error

    def _eagerly(self) -> contextlib.AbstractContextManager[Any]:
        if self._tf.executing_eagerly():
            return contextlib.nullcontext()
        # While a function is traced, or in a TensorFlow 1 program, calls would build a graph.
        from tensorflow.python.eager import context

        return context.eager_mode()
