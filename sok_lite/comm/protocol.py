"""The communicator: the interface of all transports between ranks.

It exchanges rows as NumPy arrays. A transport implements two primitives, `_alltoallv` and
`_allgatherv`; argument checks, reductions and broadcasts are built on them here, once, so results
are equal bit for bit on every rank and over every transport.
"""

import os
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np

from sok_lite.backend.ragged import split
from sok_lite.comm.header import LONGEST_CALL, Header, Notes

# Prints a line per collective to standard error, to see which rank is ahead in a deadlock.
TRACE_VARIABLE = "SOK_LITE_COMM_TRACE"
_REDUCE = {"sum": np.add, "max": np.maximum, "min": np.minimum}

_MAX_ROWS = 2**31 - 1
_SUPPORTED = frozenset(
    np.dtype(name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64"),
    )
)

T = TypeVar("T")

# Below this many bytes one allgather costs less than reduce-scatter and allgather.
_SMALL_REDUCE_BYTES = 64 * 1024


class Gathered(NamedTuple):
    """The rows received by this rank, and how many from each rank."""

    rows: np.ndarray  # (m, ...), ordered by rank
    recv_splits: np.ndarray  # (size,) int32, number of rows from each rank

    def by_rank(self) -> list[np.ndarray]:
        """Returns the rows of each rank, views of `rows`."""
        return split(self.rows, self.recv_splits)

    def like(self, array: np.ndarray) -> "Gathered":
        """Restores the trailing shape and dtype of an array after `_flat`."""
        shape = (self.rows.shape[0], *array.shape[1:])
        rows = np.empty(shape, array.dtype) if 0 in shape[1:] else self.rows.reshape(shape)
        return Gathered(rows, self.recv_splits)


class CommunicatorError(RuntimeError):
    """Ranks cannot reach each other, disagree about a collective, or one of them has died."""


class RanksDifferError(ValueError):
    """Arguments that must be equal on all ranks differ. Raised on all, with the same text."""


class JobAborted(CommunicatorError):
    """A rank called `Communicator.abort`."""


class Communicator(ABC):
    """This process among all processes of the job.

    Methods are collectives unless they say otherwise: every rank must call them, in the same order,
    and they block until all have. Any thread may call; while one is in a collective the others
    wait, so their order must also be the same on all ranks.

    Rows are NumPy arrays of bool, (u)int8 to (u)int64 or float16 to float64, of any strides; dtype
    and trailing shape must be equal on all ranks. bfloat16 rows are sent as uint16, GPU arrays by
    the `gpu_transport`, or through the host (`Backend.to_host`). A returned array belongs to the
    caller, except that with a single rank it may be the argument itself.

    The argument `call` names a call in a few ASCII words, equal on all ranks: ranks in different
    calls all raise. Invalid arguments raise ValueError or TypeError before anything is sent. A dead
    or disagreeing rank raises CommunicatorError. So does every call after one that broke off inside
    (by a KeyboardInterrupt or a failed allocation), and every call in a forked child.

    Attributes:
      rank: number of this process, 0 to size - 1.
      size: number of processes.
      local_rank: number of this process on its machine.
      turn: number of collectives so far; equal on all ranks after each collective.
      notes: bits shared with every collective; belong to a `connection`.
      gpu_transport: sends GPU arrays without the host; None: through the host.
      shares_memory: whether ranks of one machine pass rows through memory, even in a job of several
        machines.
    """

    shares_memory = False

    def __init__(self, rank: int, size: int, local_rank: int) -> None:
        self.rank = rank
        self.size = size
        self.local_rank = local_rank
        self.turn = 0
        self.notes = Notes()
        self.gpu_transport: Any = None  # a GpuTransport, which is made of a communicator
        self._process = os.getpid()
        self._failure: str | None = None
        # Concurrent collectives of a rank would take each other's messages.
        self._lock = threading.Lock()

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
          recv_splits: (size,) int32, number of rows to receive from each rank, if known (as by a
            route).
        """
        array = _checked_rows(rows, "alltoallv")
        splits = _checked_splits(send_splits, self.size, "send_splits")
        if splits.sum() != len(array):
            raise ValueError(
                f"`send_splits` must sum to the number of rows. Received: rows of shape "
                f"{array.shape}, send_splits={splits.tolist()} with sum {splits.sum()}."
            )
        if recv_splits is not None:
            recv_splits = _checked_splits(recv_splits, self.size, "recv_splits")
        _trace(self.rank, "alltoallv", array, splits)
        received = self._run_collective(
            self._alltoallv, call, _flat(array), splits.astype(np.int32)
        )
        if recv_splits is not None and not np.array_equal(received.recv_splits, recv_splits):
            raise CommunicatorError(
                f"Rank {self.rank} expected {recv_splits.tolist()} rows from ranks 0 to "
                f"{self.size - 1} and received {received.recv_splits.tolist()}: the ranks do not "
                "follow the same route. Call the collectives in the same order on every rank."
            )
        return received.like(array)

    def allgatherv(self, rows: Any, call: str = "allgatherv") -> Gathered:
        """Gathers the rows (n, ...) of all ranks, any n, on all ranks. Every rank must call it."""
        array = _checked_rows(rows, "allgatherv")
        _trace(self.rank, "allgatherv", array)
        return self._run_collective(self._allgatherv, call, _flat(array)).like(array)

    def allreduce(self, x: Any, op: str = "sum", call: str = "") -> np.ndarray:
        """Reduces arrays of one shape elementwise over ranks. Every rank must call it.

        Ranks are added in order, so the result is deterministic and equal on all ranks. Integer
        sums wrap around; float16 is summed in float16; booleans have no sum. A Python number is a
        0-d array.

        Args:
          op: "sum", "max" or "min".
        """
        array = _checked_operand(x, op)
        _trace(self.rank, f"allreduce {op}", array)
        if self.size == 1 or array.size == 0:
            return array
        elements = np.ascontiguousarray(array).reshape(-1)
        call = call or f"allreduce {op} of {array.size}"
        return self._run_collective(self._allreduce, call, elements, op).reshape(array.shape)

    def broadcast(self, x: Any, root: int = 0) -> np.ndarray:
        """Broadcasts the array of rank `root` to all ranks. Every rank must call it.

        Shape, dtype and root must be equal on all ranks.
        """
        if not 0 <= root < self.size:
            raise ValueError(f"`root` must be a rank, 0 to {self.size - 1}. Received: root={root}.")
        array = _checked_array(x, "broadcast")
        _trace(self.rank, f"broadcast from {root}", array)
        if self.size == 1 or array.size == 0:
            return array
        row = np.ascontiguousarray(array).reshape(1, array.size)
        mine = row if self.rank == root else row[:0]
        received = self._run_collective(self._allgatherv, f"broadcast from {root}", mine)
        return received.rows.reshape(array.shape)

    def barrier(self, call: str = "barrier") -> None:
        """Returns when every rank has called it. Every rank must call it."""
        _trace(self.rank, call, None)
        self._run_collective(self._barrier, call)

    @abstractmethod
    def abort(self, message: str) -> None:
        """Ends the job on all ranks; one rank alone may call it. Does not return.

        A real job writes the message to standard error and exits its processes with status 1. With
        one rank, or ranks that are threads, it raises JobAborted.
        """

    @abstractmethod
    def leave(self) -> None:
        """Tells the other ranks that this one makes no more calls; one rank alone may call it.

        A rank that waits for this one, then or later, raises CommunicatorError. For the end of a
        program (`sok_lite.comm.launch`); if the ranks have not ended alike, it may abort.
        """

    def disconnect(self) -> None:
        """Rejects further calls, without waiting; one rank alone may call it.

        For ranks about to reconnect. A rank that waits for this one, then or later, raises
        CommunicatorError, at once or when the transport is shut down.
        """
        self._failure = "The ranks were disconnected, to be connected anew."

    @property
    def connection(self) -> "Communicator":
        """The current connection, a new object after reconnecting. Agreements of ranks and pending
        work belong to a connection.
        """
        return self

    @property
    def is_alone(self) -> bool:
        """Whether there is always one rank only, so that graphs may omit collectives."""
        return self.size == 1

    # ---- implemented by transports -------------------------------------------------------------

    @abstractmethod
    def _alltoallv(self, call: str, rows: np.ndarray, send_splits: np.ndarray) -> Gathered:
        """Implements `alltoallv` for checked arguments: rows (n, k) contiguous, k > 0, int32
        splits.

        CommunicatorError: on every rank; then either this communicator rejects further calls or all
        ranks may go on to the next collective.
        """

    @abstractmethod
    def _allgatherv(self, call: str, rows: np.ndarray) -> Gathered:
        """Implements `allgatherv` for checked arguments, as above."""

    def _barrier(self, call: str) -> None:
        self._allgatherv(call, np.zeros((1, 1), np.uint8))

    @abstractmethod
    def _break_off(self, reason: str) -> None:
        """Makes the ranks that wait for this one fail, which is out of step and calls no more."""

    # ---- helpers --------------------------------------------------------------------------------

    def _run_collective(self, collective: Callable[..., T], call: str, *arguments: Any) -> T:
        """Runs a collective, one thread at a time; raises if an earlier one broke off."""
        if len(call) > LONGEST_CALL:
            raise ValueError(f"`call` has at most {LONGEST_CALL} characters. Received: {call!r}.")
        # Before the lock, which a fork may leave locked forever in the child.
        if os.getpid() != self._process:
            raise CommunicatorError(
                f"Ranks talk from the process that connected them, {self._process}, not from a "
                f"forked child of it. Received: a call in process {os.getpid()}. Look keys up in "
                "the first process and give the child arrays."
            )
        with self._lock:
            return self._run_unlocked(collective, call, *arguments)

    def _run_unlocked(self, collective: Callable[..., T], call: str, *arguments: Any) -> T:
        """Runs a collective, or raises after one that broke off."""
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
        """Rejects all further calls and raises."""
        self._failure = reason
        raise CommunicatorError(reason)

    def _next_header(self, call: str, rows: np.ndarray) -> Header:
        self.turn += 1
        row_bytes = rows.shape[1] * rows.dtype.itemsize
        return Header(self.turn, call, rows.dtype.str, row_bytes, self.notes.sent())

    def _allreduce(self, call: str, elements: np.ndarray, op: str) -> np.ndarray:
        """Reduces (k,) over ranks, k > 0."""
        if elements.nbytes <= _SMALL_REDUCE_BYTES:
            stacked = self._allgatherv(call, elements.reshape(1, -1)).rows
            if len(stacked) != self.size:
                raise CommunicatorError(
                    f"`allreduce` got {len(stacked)} arrays for {self.size} ranks: their shapes "
                    "differ."
                )
            return _reduce(stacked, op)
        # Reduce-scatter, then gather: each rank sends and receives its array twice, for any size.
        splits = np.full(self.size, elements.size // self.size, np.int32)
        splits[: elements.size % self.size] += 1
        received = self._alltoallv(call, elements.reshape(-1, 1), splits).rows
        part = _reduce(received.reshape(self.size, -1), op)
        return self._allgatherv(call, part.reshape(-1, 1)).rows.reshape(-1)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self.rank}, size={self.size})"


def allgather_texts(comm: Communicator, text: str, call: str) -> list[str]:
    """Returns the text of each rank. Every rank must call it."""
    gathered = comm.allgatherv(np.frombuffer(text.encode(), np.uint8), call=call)
    return [part.tobytes().decode() for part in gathered.by_rank()]


def broadcast_bytes(comm: Communicator, data: bytes, root: int) -> bytes:
    """Returns the bytes of one rank, root, on all. Every rank must call it.

    Args:
      data: of root; that of other ranks is ignored.
    """
    length = int(comm.broadcast(np.array([len(data)], np.int64), root)[0])
    mine = np.frombuffer(data, np.uint8) if comm.rank == root else np.zeros(length, np.uint8)
    return comm.broadcast(mine, root).tobytes()


def _checked_array(x: Any, caller: str) -> np.ndarray:
    """Returns a host array of a dtype that can be sent, or raises TypeError."""
    if hasattr(x, "__cuda_array_interface__"):
        raise TypeError(
            f"`{caller}` takes arrays in host memory. Received: {type(x).__module__}."
            f"{type(x).__name__}. Use the backend's `to_host` first."
        )
    array = np.asarray(x)
    if array.dtype not in _SUPPORTED:
        hint = " View it as uint16." if array.dtype.name == "bfloat16" else ""
        raise TypeError(
            f"`{caller}` takes booleans, integers of 8 to 64 bits and floats of 16 to 64 bits. "
            f"Received: dtype={array.dtype}.{hint}"
        )
    return array


def _checked_operand(x: Any, op: str) -> np.ndarray:
    """Returns an array for `allreduce`; raises as that does."""
    if op not in _REDUCE:
        raise ValueError(f"`op` must be one of {sorted(_REDUCE)}. Received: op={op!r}.")
    array = _checked_array(x, "allreduce")
    if op == "sum" and array.dtype == np.bool_:
        raise ValueError(
            "`allreduce` cannot sum booleans. Received: dtype=bool. Give integers to count, "
            "or use op='max' for any and op='min' for all."
        )
    return array


def _checked_rows(rows: Any, caller: str) -> np.ndarray:
    """Returns rows as `_checked_array` does. ValueError: a scalar, or too many rows."""
    array = _checked_array(rows, caller)
    if array.ndim == 0:
        raise ValueError(
            f"`{caller}` takes rows, an array of at least one dimension. Received: a scalar of "
            f"dtype {array.dtype}. Give `x[None]` to send it as one row."
        )
    if len(array) > _MAX_ROWS:
        raise ValueError(f"`{caller}` takes at most {_MAX_ROWS} rows. Received: {len(array)}.")
    return array


def _checked_splits(splits: Any, size: int, name: str) -> np.ndarray:
    """Returns splits as (size,) int64, so that their sum cannot wrap.

    ValueError: another length, or a value out of range. TypeError: not integers.
    """
    array = np.asarray(splits)
    if array.ndim != 1 or array.shape[0] != size:
        raise ValueError(
            f"`{name}` must have one entry per rank, shape ({size},). "
            f"Received: shape {array.shape}."
        )
    if array.dtype.kind not in "iu":
        raise TypeError(f"`{name}` must be integers. Received: dtype={array.dtype}.")
    if (array < 0).any() or (array > _MAX_ROWS).any():
        raise ValueError(
            f"`{name}` must be 0 to {_MAX_ROWS} rows a rank. Received: {name}={array.tolist()}."
        )
    return array.astype(np.int64)


def _flat(rows: np.ndarray) -> np.ndarray:
    """Returns rows as contiguous (n, k), k > 0; rows without content become one byte each."""
    num_rows = rows.shape[0]
    if int(np.prod(rows.shape[1:], dtype=np.int64)) == 0:
        return np.zeros((num_rows, 1), np.uint8)
    return np.ascontiguousarray(rows).reshape(num_rows, int(np.prod(rows.shape[1:])))


def _reduce(stacked: np.ndarray, op: str) -> np.ndarray:
    """Reduces (size, k) to (k,) in rank order, for deterministic floats."""
    result: np.ndarray = stacked[0].copy()
    for other in stacked[1:]:
        _REDUCE[op](result, other, out=result)
    return result


def _trace(
    rank: int, name: str, array: np.ndarray | None, splits: np.ndarray | None = None
) -> None:
    """Prints a line about a collective of this rank, if SOK_LITE_COMM_TRACE is set."""
    if not os.environ.get(TRACE_VARIABLE):
        return
    what = "" if array is None else f" {array.dtype}{list(array.shape)}"
    where = "" if splits is None else f" -> {splits.tolist()}"
    print(f"r{rank} | {name}{what}{where}", file=sys.stderr, flush=True)
