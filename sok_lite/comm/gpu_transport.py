"""The interface of transports that send arrays of a GPU between ranks without the host.

Payload and control are separate. Payload is keys, rows and gradients: bytes on the device that
never pass through the host. Control is which call this is, how many keys each rank sends to each,
and who failed.
"""

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.comm.protocol import Communicator, CommunicatorError
from sok_lite.comm.rows import Gathered

LONGEST_REASON_BYTES = 4096

# Words of a block of control: the call, its number, the tag and tables of a lookup, and whether the
# rank that sends it has no keys, by a failure of its own.
TURN, CALL, TAG, NUM_TABLES, FAILED = range(5)
NUM_WORDS = 5


class Check(NamedTuple):
    """A check of this rank's keys on the device, read and sent to all ranks with the counts.

    Attributes:
      count: (1,) int64 of the backend, 0 if the keys may be sent.
      refuse: called if it is not 0; raises the error.
    """

    count: Array
    refuse: Callable[[], None]


class Counts(NamedTuple):
    """The numbers of keys that are sent and received.

    Attributes:
      sent: (size, num_tables) int64, on the host: keys of each table for each rank.
      received: the same from each rank.
    """

    sent: np.ndarray
    received: np.ndarray


class GpuTransport(ABC):
    """Carries arrays of a backend between the ranks of a communicator.

    `counts`, `keys`, `rows` and `refuse` are collectives of that communicator: every rank must call
    them in the same order, `keys` after each `counts`. A message is (n, 2) int64, its rows those
    for rank 0 first; splits count rows and are (size,) integers.

    Attributes:
      name: of the argument `gpu_transport` of `sok.init`.
      what: a description for people.
    """

    name: str
    what: str

    def __init__(self, comm: Communicator, backend: Backend) -> None:
        self._comm, self._backend = comm, backend

    @abstractmethod
    def counts(
        self, call: str, offsets: Array, num_tables: int, tag: int, check: Check | None
    ) -> Counts:
        """Tells each rank how many keys it will get. Every rank must call it, or `refuse`.

        The host waits once.

        Args:
          call: name of the call, ASCII, equal on all ranks; if another rank is in another call, all
            raise.
          offsets: (size * num_tables + 1,) int64, the first key of each rank and table.
          num_tables, tag: equal on all ranks.
          check: of this rank's keys; None: they are not checked.

        Raises:
          CommunicatorError: another rank called `refuse`, or this with another tag or number of
            tables; or a rank has died.
          Exception: whatever the check raises; on other ranks a CommunicatorError with the reason.
        """

    @abstractmethod
    def keys(self, message: Array, send_splits: np.ndarray, recv_splits: np.ndarray) -> Array:
        """Sends keys that were counted. Every rank must call it. The host need not wait.

        Returns:
          The received message. Until `check` has returned it may be partly zeros.
        """

    @abstractmethod
    def rows(
        self, call: str, message: Array, send_splits: np.ndarray, recv_splits: np.ndarray
    ) -> Array:
        """Sends rows or gradients whose counts all ranks know. Every rank must call it.

        The host waits once: the returned message has arrived completely.

        Raises:
          CommunicatorError: a rank has died, or is in another call.
        """

    @abstractmethod
    def refuse(self, call: str, reason: str) -> None:
        """Takes the place of `counts` on a rank that has no keys.

        Raises:
          CommunicatorError: with the reason, on all ranks.
        """

    @abstractmethod
    def fail(self, call: str) -> None:
        """Makes all ranks raise that wait for this one in `rows`, or come to it, or to `check`.

        It returns when the others know, and all may continue.

        Args:
          call: the failure, in place of the name of a call; equal failures have equal texts.
        """

    def check(self, turn: int) -> None:
        """Raises CommunicatorError if the keys of the collective `turn` may be incomplete.

        To be called when the device has used them, before results of them change anything.
        """
        return None

    def leave(self) -> None:
        """Frees the resources of this rank, which makes no more calls; one alone may call it."""
        return None

    # ---- what they share ------------------------------------------------------------------------

    def _check_arrays(self, *arrays: Any) -> None:
        """Raises TypeError if an array is not of the backend, such as one of NumPy."""
        for array in arrays:
            if not isinstance(array, self._backend.xp.ndarray):
                raise TypeError(
                    f"The {self.name!r} transport takes arrays of the {self._backend.name} backend."
                    f" Received: {type(array).__module__}.{type(array).__name__}. Use the "
                    "communicator's `alltoallv` for arrays of the host."
                )

    def _words(self, call: str, num_tables: int = 0, tag: int = 0, failed: int = 0) -> np.ndarray:
        """Returns the control of this rank's part in the collective that has begun."""
        words = np.zeros(NUM_WORDS, np.int64)
        words[[TURN, CALL]] = self._comm.turn, zlib.crc32(call.encode())
        words[[TAG, NUM_TABLES, FAILED]] = tag, num_tables, failed
        return words

    def _check_tables(self, theirs: np.ndarray, num_tables: int, tag: int) -> None:
        """Raises where a rank looks up other tables than this one; `theirs`: (size, words)."""
        for rank, words in enumerate(theirs[:, [TAG, NUM_TABLES]].tolist()):
            if words != [tag, num_tables]:
                raise CommunicatorError(other_lookup(self._comm.rank, num_tables, tag, rank, words))

    def _gathered(self, call: str, rows: np.ndarray) -> Gathered:
        """Gives the rows of all ranks to all ranks, by the communicator."""
        return self._comm.allgatherv(rows, call)

    def _raise_reasons(self, call: str, mine: str | None) -> NoReturn:
        """Tells all ranks why this one has no keys, if so, and raises the reason of the first rank.

        Every rank must call it; NCCL's in a collective, where another cannot begin.
        """
        text = (mine or "").encode()[:LONGEST_REASON_BYTES]
        rows = np.frombuffer(text, np.uint8).reshape(-1, 1)
        gathered = self._gathered(f"why not {call}", rows)
        for rank, reason in enumerate(gathered.by_rank()):
            if reason.size:
                raise CommunicatorError(no_lookup(rank, reason.tobytes().decode(errors="replace")))
        raise CommunicatorError("A rank has failed, and none says why.")


def no_lookup(rank: int, reason: str) -> str:
    """Returns the error of ranks when another one could not send its keys."""
    return f"Rank {rank} could not make this lookup. {reason}"


def other_lookup(rank: int, num_tables: int, tag: int, other: int, words: list[int]) -> str:
    """Returns what ranks raise when another looks up something else; `words`: its tag, tables."""
    return (
        f"Rank {rank} looks up {num_tables} tables with tag {tag}, rank {other} sent "
        f"[tag, tables] = {words}. All ranks must make the same lookups in the same order."
    )
