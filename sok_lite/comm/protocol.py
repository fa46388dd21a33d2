"""The communicator: the interface of all transports between ranks.

Rows go in and rows come out, as NumPy arrays. A transport supplies two primitives, `_alltoallv` and
`_allgatherv`; argument checks, reductions and broadcasts are built on them here, once, so that a
result is the same, bit for bit, on every rank and over every transport.
"""

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np

from sok_lite.comm.header import LONGEST_CALL, Header
from sok_lite.comm.rows import (
    Gathered,
    checked_array,
    checked_operand,
    checked_rows,
    checked_splits,
    flat,
    reduced,
    trace,
)

if TYPE_CHECKING:
    from sok_lite.comm.gpu_transport import GpuTransport

T = TypeVar("T")

# Below this many bytes one allgather costs less than a reduce-scatter followed by an allgather.
_SMALL_REDUCE_BYTES = 64 * 1024


class CommunicatorError(RuntimeError):
    """Ranks cannot reach each other, disagree about a collective, or one of them has died."""


class RanksDifferError(ValueError):
    """Arguments that must be equal on all ranks differ. Raised on all, with the same text."""


class JobAborted(CommunicatorError):
    """A rank called `Communicator.abort`."""


class Communicator(ABC):
    """This process among all processes of the job.

    Every method below `local_rank` is a collective unless it says otherwise: every rank must call
    it, in the same order, and it blocks until all have. Any thread may call; while one is in a
    collective the others wait, so they must come in the same order on all ranks.

    Rows are NumPy arrays of bool, (u)int8 to (u)int64 or float16 to float64, of any strides; their
    dtype and trailing shape must be equal on all ranks. bfloat16 rows are sent as uint16, arrays of
    a GPU by the `gpu_transport`, or through the host (`Backend.to_host`). A returned array belongs
    to the caller, with one exception: with a single rank it may be the argument itself.

    Wrong arguments raise ValueError or TypeError before anything is sent. A dead or disagreeing
    rank raises CommunicatorError. So does every call after one that broke off in the middle (at a
    KeyboardInterrupt, at an allocation that failed), and every call in a forked child.

    Attributes:
      rank: number of this process, 0 to size - 1.
      size: number of processes.
      local_rank: number of this process among those of the same machine.
      turn: number of collectives so far; equal on all ranks whenever one has been completed.
      gpu_transport: sends arrays of a GPU without the host; None: they go through the host.
      shares_memory: whether ranks of one machine pass rows through memory, also where there are
        ranks on other machines.
    """

    shares_memory = False

    def __init__(self, rank: int, size: int, local_rank: int) -> None:
        self.rank = rank
        self.size = size
        self.local_rank = local_rank
        self.turn = 0
        self.gpu_transport: GpuTransport | None = None
        self._process = os.getpid()
        self._failure: str | None = None
        # Two collectives of one rank at once would take each other's messages.
        self._one_at_a_time = threading.Lock()

    # ---- the protocol ---------------------------------------------------------------------------

    def alltoallv(
        self,
        rows: Any,
        send_splits: Any,
        recv_splits: np.ndarray | None = None,
        call: str = "alltoallv",
    ) -> Gathered:
        """Sends a part of the rows to each rank. Every rank must call it.

        Args:
          rows: (n, ...), those for rank 0 first, then those for rank 1, and so on.
          send_splits: (size,) integers, number of rows for each rank; they sum to n.
          recv_splits: (size,) int32, number of rows that will be received from each rank, if the
            caller knows it (as by a route).
          call: name of the call, ASCII, equal on all ranks; if another rank is in another call, all
            raise.

        Returns:
          Gathered(rows (m, ...), recv_splits (size,) int32): what the others sent to this rank.

        Raises:
          ValueError: rows is a scalar, or send_splits has another length than size, is negative
            or does not sum to n.
          TypeError: a dtype that does not travel, or splits that are no integers.
          CommunicatorError: a rank has died, or ranks disagree.
        """
        array = checked_rows(rows, "alltoallv")
        splits = checked_splits(send_splits, self.size, "send_splits")
        if splits.sum() != len(array):
            raise ValueError(
                f"`send_splits` must sum to the number of rows. Received: rows of shape "
                f"{array.shape}, send_splits={splits.tolist()} with sum {splits.sum()}."
            )
        if recv_splits is not None:
            recv_splits = checked_splits(recv_splits, self.size, "recv_splits")
        trace(self.rank, "alltoallv", array, splits)
        received = self._together(self._alltoallv, call, flat(array), splits.astype(np.int32))
        if recv_splits is not None and not np.array_equal(received.recv_splits, recv_splits):
            raise CommunicatorError(
                f"Rank {self.rank} expected {recv_splits.tolist()} rows from ranks 0 to "
                f"{self.size - 1} and received {received.recv_splits.tolist()}: the ranks do not "
                "follow the same route. Call the collectives in the same order on every rank."
            )
        return received.like(array)

    def allgatherv(self, rows: Any, call: str = "allgatherv") -> Gathered:
        """Gathers the rows of all ranks on all ranks. Every rank must call it.

        Args:
          rows: (n, ...); n may differ between ranks.
          call: name of the call, ASCII, equal on all ranks; if another rank is in another call, all
            raise.

        Returns:
          Gathered(rows (m, ...), recv_splits (size,) int32): the rows of all ranks in rank order.

        Raises:
          ValueError: rows is a scalar (give `x[None]`).
          TypeError: a dtype that does not travel.
          CommunicatorError: a rank has died, or ranks disagree.
        """
        array = checked_rows(rows, "allgatherv")
        trace(self.rank, "allgatherv", array)
        return self._together(self._allgatherv, call, flat(array)).like(array)

    def allreduce(self, x: Any, op: str = "sum", call: str = "") -> np.ndarray:
        """Reduces arrays of one shape elementwise over ranks. Every rank must call it.

        The ranks are added in rank order, so the result repeats bit for bit and is equal on all
        ranks. Integer sums wrap around; float16 is summed in float16.

        Args:
          x: any shape, equal on all ranks; a Python number is taken as a 0-d array.
          op: "sum", "max" or "min".
          call: what it is for, in a few words, for the message where ranks make different calls.

        Returns:
          An array of the shape and dtype of x.

        Raises:
          ValueError: unknown op, or a sum of booleans.
          TypeError: a dtype that does not travel.
          CommunicatorError: a rank has died, or ranks disagree.
        """
        array = checked_operand(x, op)
        trace(self.rank, f"allreduce {op}", array)
        if self.size == 1 or array.size == 0:
            return array
        elements = np.ascontiguousarray(array).reshape(-1)
        call = call or f"allreduce {op} of {array.size}"
        return self._together(self._allreduce, call, elements, op).reshape(array.shape)

    def broadcast(self, x: Any, root: int = 0) -> np.ndarray:
        """Broadcasts the array of one rank to all ranks. Every rank must call it.

        Args:
          x: any shape; shape and dtype equal on all ranks, only the content of root's is used.
          root: the rank that sends, equal on all ranks.

        Returns:
          An array of the shape and dtype of x.

        Raises:
          ValueError: root is no rank.
          TypeError: a dtype that does not travel.
          CommunicatorError: a rank has died, or ranks disagree.
        """
        if not 0 <= root < self.size:
            raise ValueError(f"`root` must be a rank, 0 to {self.size - 1}. Received: root={root}.")
        array = checked_array(x, "broadcast")
        trace(self.rank, f"broadcast from {root}", array)
        if self.size == 1 or array.size == 0:
            return array
        row = np.ascontiguousarray(array).reshape(1, array.size)
        mine = row if self.rank == root else row[:0]
        received = self._together(self._allgatherv, f"broadcast from {root}", mine)
        return received.rows.reshape(array.shape)

    def submitted_by_all(self, tensor: Any, name: str) -> Any:
        """Returns a scalar tensor of a TF1 graph when all ranks have it, where that can be told.

        Args:
          tensor: int64, a scalar of the graph; the value of the result has no meaning.
          name: equal on all ranks, and of no other tensor that is waited for at the same time.
        """
        return tensor

    def barrier(self, call: str = "barrier") -> None:
        """Returns when every rank has called it. Every rank must call it.

        Args:
          call: name of the call, ASCII, equal on all ranks; if another rank is in another call, all
            raise.
        """
        trace(self.rank, call, None)
        self._together(self._barrier, call)

    @abstractmethod
    def abort(self, message: str) -> None:
        """Ends the job on all ranks; one rank alone may call it. Does not return.

        A real job writes the message to standard error and ends its processes with exit status 1.
        With one rank, and with ranks that are threads, JobAborted is raised instead.

        Args:
          message: why, for people.
        """

    @abstractmethod
    def leave(self) -> None:
        """Tells the other ranks that this one makes no more calls; one rank alone may call it.

        A rank that waits for this one then, or comes to wait, raises CommunicatorError. For the end
        of a program (`sok_lite.comm.ending`); where the ranks have not ended alike, it may abort.
        """

    def disconnect(self) -> None:
        """Makes no more calls, and waits for nobody; one rank alone may call it.

        For ranks that are connected anew. One that waits for this one, or comes to wait, raises
        CommunicatorError, now or when the transport is shut down.
        """
        self._failure = "The ranks were disconnected, to be connected anew."

    @property
    def connection(self) -> "Communicator":
        """The present connection, another object after ranks were connected again: agreements of
        ranks and unfinished work belong to a connection."""
        return self

    @property
    def is_alone(self) -> bool:
        """Whether there is one rank and never will be another, so that a graph may leave out its
        collectives."""
        return self.size == 1

    # ---- what a transport supplies --------------------------------------------------------------

    @abstractmethod
    def _alltoallv(self, call: str, rows: np.ndarray, send_splits: np.ndarray) -> Gathered:
        """Does `alltoallv` for checked arguments: rows (n, k) contiguous, k > 0, int32 splits.

        Raises:
          CommunicatorError: on every rank, and then either this communicator refuses further calls
            or all ranks may go on to the next collective.
        """

    @abstractmethod
    def _allgatherv(self, call: str, rows: np.ndarray) -> Gathered:
        """Does `allgatherv` for checked arguments, as above."""

    def _barrier(self, call: str) -> None:
        self._allgatherv(call, np.zeros((1, 1), np.uint8))

    @abstractmethod
    def _break_off(self, reason: str) -> None:
        """Makes ranks fail that wait for this one, which is out of step and makes no more calls."""

    # ---- helpers --------------------------------------------------------------------------------

    def _together(self, collective: Callable[..., T], call: str, *arguments: Any) -> T:
        """Runs one collective: no other thread is in one, and none was left in the middle."""
        if len(call) > LONGEST_CALL:
            raise ValueError(f"`call` has at most {LONGEST_CALL} characters. Received: {call!r}.")
        # Before the lock, which a fork may leave locked for ever in the child.
        if os.getpid() != self._process:
            raise CommunicatorError(
                f"Ranks talk from the process that connected them, {self._process}, not from a "
                f"forked child of it. Received: a call in process {os.getpid()}. Look keys up in "
                "the first process and give the child arrays."
            )
        with self._one_at_a_time:
            return self._alone(collective, call, *arguments)

    def _alone(self, collective: Callable[..., T], call: str, *arguments: Any) -> T:
        """Runs a collective, or refuses to after one that broke off."""
        if self._failure is not None:
            raise CommunicatorError(self._failure)
        try:
            result = collective(call, *arguments)
        except CommunicatorError:
            raise
        except BaseException as error:
            if self.size > 1:
                self._failure = (
                    f"Rank {self.rank} broke off in {call!r}: {type(error).__name__}: {error}. It "
                    "is out of step with the other ranks. End the program, on all ranks."
                )
                self._break_off(self._failure)
            raise
        return result

    def _fail(self, reason: str) -> NoReturn:
        """Refuses all further calls and raises."""
        self._failure = reason
        raise CommunicatorError(reason)

    def _next_header(self, call: str, rows: np.ndarray) -> Header:
        self.turn += 1
        return Header(self.turn, call, rows.dtype.str, rows.shape[1] * rows.dtype.itemsize)

    def _allreduce(self, call: str, flat: np.ndarray, op: str) -> np.ndarray:
        """Reduces (k,) over ranks, k > 0."""
        if flat.nbytes <= _SMALL_REDUCE_BYTES:
            stacked = self._allgatherv(call, flat.reshape(1, -1)).rows
            if len(stacked) != self.size:
                raise CommunicatorError(
                    f"`allreduce` got {len(stacked)} arrays for {self.size} ranks: their shapes "
                    "differ."
                )
            return reduced(stacked, op)
        # Reduce-scatter, then gather: each rank sends and receives its array twice, whatever size.
        splits = np.full(self.size, flat.size // self.size, np.int32)
        splits[: flat.size % self.size] += 1
        received = self._alltoallv(call, flat.reshape(-1, 1), splits).rows
        part = reduced(received.reshape(self.size, -1), op)
        return self._allgatherv(call, part.reshape(-1, 1)).rows.reshape(-1)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self.rank}, size={self.size})"
