"""The communicator of `horovodrun`: NumPy rows through Horovod's TensorFlow operations.

Horovod wakes once per HOROVOD_CYCLE_TIME (milliseconds, 1 unless set) and starts the operations
that all ranks have requested by then, so a collective takes at least about that long, however
small. Set it before `hvd.init()`, or pass `horovodrun --cycle-time-ms`; a shorter cycle costs idle
processor time.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import numpy as np

from sok_lite.backend.ragged import split
from sok_lite.comm.header import (
    BROKEN_OFF,
    FAREWELL,
    HEADER_BYTES,
    Header,
    disagreement,
    notes_of,
    num_rows_of,
)
from sok_lite.comm.protocol import Communicator, CommunicatorError, Gathered

# Horovod lacks uint32, uint64 and bfloat16; copying only needs the width.
_WIRE_DTYPE = {1: np.uint8, 2: np.uint16, 4: np.int32, 8: np.int64}

# Over MPI Horovod counts elements, not rows, with int32 offsets.
_MAX_MPI_ELEMENTS = 2**31 - 1

# Every collective is a Horovod all-to-all of one name: ranks that request different operations or
# names would wait for each other.
_NAME = "sok_alltoallv"
# How long a rank whose program has ended waits for the others to end.
_LEAVE_TIMEOUT_S = 10.0


class HorovodCommunicator(Communicator):
    """All processes of a Horovod job. Calls `hvd.init()` if the program has not.

    A part is its header, as rows of the same length, and then the rows. CommunicatorError: Horovod
    cannot be imported or started.
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
        self._last_call, self._farewell = FAREWELL, ""
        self._leaves, self._has_left = threading.Event(), threading.Event()
        # Started now: no thread can be started during interpreter shutdown.
        threading.Thread(target=self._say_farewell, name="sok_lite-farewell", daemon=True).start()

    def abort(self, message: str) -> NoReturn:
        """Exits this process with status 1; the launcher, or Horovod's error, ends the others."""
        print(f"sok_lite: rank {self.rank} aborts: {message}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        # No clean exit: Horovod's shutdown would wait for ranks that wait for this one.
        os._exit(1)

    def leave(self) -> None:
        """Waits up to 10 s for all ranks to leave; aborts if another waits for this one."""
        if self._failure is not None:
            return
        self._leaves.set()
        # With a timeout: another rank may wait for Horovod's shutdown in this process.
        if not self._has_left.wait(_LEAVE_TIMEOUT_S):
            print(
                f"sok_lite: rank {self.rank} has ended, other ranks have not. What they still ask "
                "of it fails.",
                file=sys.stderr,
                flush=True,
            )
        elif self._farewell:
            self.abort(self._farewell)

    def disconnect(self) -> None:
        super().disconnect()
        self._last_call = ""
        self._leaves.set()

    def _say_farewell(self) -> None:
        """Joins one last collective, when told to: the other ranks end too, or raise an error."""
        self._leaves.wait()
        if not self._last_call:
            return
        try:
            self._allgatherv(self._last_call, np.empty((0, 1), np.uint8))
        except CommunicatorError as error:
            # Other errors mean that Horovod was shut down first: no rank needed this one.
            if "has ended" in str(error):
                self._farewell = str(error)
        self._has_left.set()

    def _break_off(self, reason: str) -> None:
        self._last_call = BROKEN_OFF
        self._leaves.set()

    def _alltoallv(self, call: str, rows: np.ndarray, send_splits: np.ndarray) -> Gathered:
        return self._exchange("alltoallv", call, rows, split(rows, send_splits))

    def _allgatherv(self, call: str, rows: np.ndarray) -> Gathered:
        return self._exchange("allgatherv", call, rows, [rows] * self.size)

    def _exchange(
        self, name: str, call: str, rows: np.ndarray, parts: Sequence[np.ndarray]
    ) -> Gathered:
        """Sends parts[rank] to each rank and gathers their parts for this one."""
        header = self._next_header(call, rows)
        message = self._message(header, parts)
        splits = np.array([_num_header_rows(header) + len(part) for part in parts], np.int32)
        with self._running(name, header):
            received, _ = self._hvd.alltoall(message, splits=splits, name=_NAME)
        return self._unpack(header, received._numpy(), rows)

    def _message(self, header: Header, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the parts, each after its header, as Horovod's (m, k)."""
        num_header_rows = _num_header_rows(header)
        num_rows = sum(num_header_rows + len(part) for part in parts)
        like = parts[0]
        if self._counts_in_int32 and num_rows * like.shape[1] > _MAX_MPI_ELEMENTS:
            raise ValueError(
                f"Horovod over MPI sends at most {_MAX_MPI_ELEMENTS} elements at once. Received: "
                f"{num_rows} rows of {like.shape[1]}. Use smaller batches, or `horovodrun --gloo`."
            )
        message = np.zeros((num_rows, header.row_bytes), np.uint8)
        start = 0
        for part, packed in zip(parts, header.pack(len(part) for part in parts), strict=True):
            head = message[start : start + num_header_rows].reshape(-1)
            head[:HEADER_BYTES] = np.frombuffer(packed, np.uint8)
            start += num_header_rows
            message[start : start + len(part)] = _bytes(part)
            start += len(part)
        return message.view(_WIRE_DTYPE[like.dtype.itemsize])

    def _unpack(self, mine: Header, message: np.ndarray, like: np.ndarray) -> Gathered:
        """Returns the rows of all ranks without headers, or raises if one does not match."""
        num_header_rows = _num_header_rows(mine)
        packed = _bytes(message)
        parts, heads, start = [], list[bytes](), 0
        for rank in range(self.size):
            head = packed[start : start + num_header_rows].reshape(-1)[:HEADER_BYTES]
            theirs = head.tobytes()
            num_rows = num_rows_of(theirs)
            reason = disagreement(self.rank, mine, {rank: theirs})
            if reason is not None:
                raise CommunicatorError(reason)
            heads.append(theirs)
            start += num_header_rows
            parts.append(packed[start : start + num_rows])
            start += num_rows
        self.notes.of_all = notes_of(heads)
        rows = np.concatenate(parts).view(like.dtype)
        return Gathered(rows, np.array([len(part) for part in parts], np.int32))

    @contextlib.contextmanager
    def _running(self, name: str, header: Header) -> Iterator[None]:
        """Runs TensorFlow operations eagerly on the CPU, and translates errors."""
        try:
            with self._eagerly(), self._tf.device("/CPU:0"):
                yield
        except (self._tf.errors.OpError, ValueError) as error:
            raise CommunicatorError(
                f"`{name}` failed on rank {self.rank} of {self.size}: another rank has died, the "
                "ranks make different calls, or Horovod was shut down. Look at the first error of "
                f"the other ranks. {self._who_differs(header, error)}Horovod says: {error}"
            ) from error

    def _who_differs(self, header: Header, error: Exception) -> str:
        """Returns which rank is in which call. All ranks call it: Horovod's error is on all."""
        if "Mismatched" not in str(error):
            return ""
        mine = np.frombuffer(header.pack([0])[0] * self.size, np.uint8).reshape(self.size, -1)
        one_each = np.ones(self.size, np.int32)
        try:
            with self._eagerly(), self._tf.device("/CPU:0"):
                rows, _ = self._hvd.alltoall(mine, splits=one_each, name=_NAME)
        except (self._tf.errors.OpError, ValueError):
            return ""
        theirs = {rank: row.tobytes() for rank, row in enumerate(rows._numpy())}
        reason = disagreement(self.rank, header, theirs)
        return "" if reason is None else f"{reason} "

    def _eagerly(self) -> contextlib.AbstractContextManager[Any]:
        if self._tf.executing_eagerly():
            return contextlib.nullcontext()
        # Inside a traced function or a TensorFlow 1 graph, calls would build a graph.
        from tensorflow.python.eager import context

        return context.eager_mode()


def _num_header_rows(header: Header) -> int:
    return -(-HEADER_BYTES // header.row_bytes)


def _bytes(rows: np.ndarray) -> np.ndarray:
    """Returns contiguous rows as (n, row bytes) uint8."""
    return rows.reshape(-1).view(np.uint8).reshape(len(rows), rows.shape[1] * rows.itemsize)
