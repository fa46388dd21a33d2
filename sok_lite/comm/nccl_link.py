"""One rank's end of an NCCL communicator: messages from GPU to GPU, on a stream of its own."""

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.comm.alarm import Alarm
from sok_lite.comm.protocol import Communicator, CommunicatorError
from sok_lite.comm.rows import split_offsets

# How long an abort waits for the rank's own call of NCCL. One that is stuck ends by the abort.
_ABORT_AFTER_S = 1.0
NUM_ID_BYTES = 129  # of an id, and whether it was of bytes


class Message(NamedTuple):
    """Arrays that are sent and received in one group.

    Attributes:
      sent, received: C-contiguous, rank by rank.
      to: bytes for each rank.
      came: bytes from each rank.
    """

    sent: Array
    received: Array
    to: np.ndarray
    came: np.ndarray

    @staticmethod
    def of(
        sent: Array, received: Array, send_splits: np.ndarray, recv_splits: np.ndarray
    ) -> "Message":
        """Returns what travels of rows (n, k) of int64."""
        row_bytes = 8 * sent.shape[1]
        return Message(
            sent,
            received,
            row_bytes * np.asarray(send_splits, np.int64),
            row_bytes * np.asarray(recv_splits, np.int64),
        )


class NcclLink:
    """The NCCL communicator of a rank, which is made anew after an alarm.

    Args:
      comm: the ranks.
      backend: of the arrays to send.
      cuda: `cupy.cuda`, or a stand-in with its streams and events.
      nccl: `cupy.cuda.nccl`, or a stand-in.

    Attributes:
      alarm: nothing travels while it has a reason. To be set before `open`.
      stream: on which messages travel.
      nccl: the communicator of NCCL; None: it is not connected, or was aborted.
    """

    alarm: Alarm

    def __init__(self, comm: Communicator, backend: Backend, cuda: Any, nccl: Any) -> None:
        self._size, self._rank, self._backend = comm.size, comm.rank, backend
        self._cuda, self._library = cuda, nccl
        self.nccl: Any = None
        self._issuing = threading.Lock()
        backend.activate()
        self.stream = cuda.Stream(non_blocking=True)
        self._before = cuda.Event(disable_timing=True)
        self._after = cuda.Event(disable_timing=True)

    def new_id(self) -> np.ndarray:
        """Returns what `open` takes, (NUM_ID_BYTES,) uint8; all ranks need that of one of them."""
        unique = self._library.get_unique_id()
        packed = np.empty(NUM_ID_BYTES, np.uint8)
        # A tuple of chars before CuPy 14.
        packed[0] = isinstance(unique, bytes)
        packed[1:] = np.array(list(unique), np.int64).astype(np.uint8)
        return packed

    def open(self, packed: np.ndarray) -> None:
        """Connects the ranks. Every rank must call it, in a collective, with the same id.

        Raises:
          CommunicatorError: a rank cannot; on all ranks.
        """
        unique: Any = packed[1:].tobytes()
        if not packed[0]:
            unique = tuple(packed[1:].view(np.int8).tolist())

        def make() -> None:
            try:
                self._backend.activate()
                self.nccl = self._library.NcclCommunicator(self._size, unique, self._rank)
                self._try_out()
            except Exception as error:
                self.alarm.ring(f"NCCL cannot connect rank {self._rank}: {error}")
            done.set()

        # In a thread: NCCL has no way out of it where another rank does not come.
        done = threading.Event()
        self.alarm.begin("connect by NCCL")  # a long wait is noted, and ends where that is asked
        threading.Thread(target=make, name="sok_lite-nccl", daemon=True).start()
        while not done.wait(0.05):
            if self.alarm.is_final:
                break
        self.alarm.end()
        if self.alarm.is_final:
            raise CommunicatorError(str(self.alarm.reason))

    def _try_out(self) -> None:
        """Sends each rank a word. It is then that NCCL connects one GPU with another."""
        xp, size = self._backend.xp, self._size
        came = self.blocks_of_all(xp.full((size, 1), self._rank, np.int64))
        found = self._backend.to_host(came).reshape(-1).tolist()
        if found != list(range(size)) and self.alarm.reason is None:
            raise ValueError(f"from ranks 0 to {size - 1} came {found}")

    def blocks_of_all(self, blocks: Array) -> Array:
        """Gives a row of blocks (size, k) int64 to each rank and returns theirs."""
        came = self._backend.xp.empty(blocks.shape, np.int64)
        one_each = np.ones(self._size, np.int64)
        self.travel([Message.of(blocks, came, one_each, one_each)])
        return came

    def travel(self, messages: Sequence[Message]) -> None:
        """Sends and receives in one group, after what was launched and before what will be."""
        with self._issuing:
            compute = self._cuda.get_current_stream()
            self._before.record(compute)
            self.stream.wait_event(self._before)
            if self.alarm.reason is None:
                self._library.groupStart()
                try:
                    for message in messages:
                        self._issue(message)
                finally:
                    self._library.groupEnd()
            self._after.record(self.stream)
        # What is launched from now on finds it arrived, and memory that is freed is used again by
        # nobody before.
        compute.wait_event(self._after)

    def _issue(self, message: Message) -> None:
        address = self._backend.address
        sent, received = address(message.sent), address(message.received)
        to, came = split_offsets(message.to).tolist(), split_offsets(message.came).tolist()
        char, stream = self._library.NCCL_INT8, self.stream.ptr
        for peer in range(self._size):
            num_sent, num_received = to[peer + 1] - to[peer], came[peer + 1] - came[peer]
            if num_sent:
                self.nccl.send(sent + to[peer], num_sent, char, peer, stream)
            if num_received:
                self.nccl.recv(received + came[peer], num_received, char, peer, stream)

    def abort(self) -> None:
        """Ends what NCCL is at on this rank: whoever waits for it goes on, with nothing to use."""
        taken = self._issuing.acquire(timeout=_ABORT_AFTER_S)
        aborted, self.nccl = self.nccl, None
        try:
            if aborted is not None:
                aborted.abort()
        finally:
            if taken:
                self._issuing.release()

    def error(self) -> str | None:
        """Returns what NCCL has met with while nobody asked; None: nothing, or it is in a call."""
        if self._issuing.acquire(blocking=False):
            try:
                if self.nccl is not None:  # one that was aborted says that it is invalid
                    self.nccl.check_async_error()
            except Exception as error:
                return f"NCCL failed on rank {self._rank}: {error}"
            finally:
                self._issuing.release()
        return None

    def is_own(self, error: BaseException) -> bool:
        """Returns whether an error is one of NCCL."""
        return isinstance(error, self._library.NcclError)
