"""Transports that send arrays of a GPU between ranks without the host.

Payload and control are separate. Payload is keys, rows and gradients: bytes on the device that
never pass through the host. Control is which call this is, how many keys each rank sends to each,
and who failed.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.comm.protocol import Communicator, CommunicatorError

LONGEST_REASON_BYTES = 4096

# Words of a block of control: the tag and tables of a lookup, and whether the rank that sends it
# has no keys, by a failure of its own.
FAILED = 2
NUM_WORDS = 3


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

    Control goes through the host, by collectives of that communicator, which compare the calls of
    all ranks; payload does not. `counts`, `rows` and `refuse` are collectives too: every rank
    must call them in the same order. A message is (n, 2) int64,
    its rows those for rank 0 first; splits count rows and are (size,) integers.

    Attributes:
      name: of the argument `gpu_transport` of `sok.init`.
      what: a description for people.
    """

    name: str
    what: str

    def __init__(self, comm: Communicator, backend: Backend) -> None:
        self._comm, self._backend = comm, backend

    @abstractmethod
    def _carried(self, message: Array, send_splits: np.ndarray, recv_splits: np.ndarray) -> Array:
        """Carries a message, (n, 2) int64 of the backend; returns when all has arrived.

        It has to raise if a rank dies meanwhile.
        """

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
        self._check_arrays(offsets)
        size, told = self._comm.size, [offsets] if check is None else [offsets, check.count]
        on_host = self._backend.to_host(self._backend.xp.concatenate(told))  # one wait
        if check is not None and on_host[-1]:
            try:
                check.refuse()
            except Exception as error:
                with suppress(CommunicatorError):  # the reason that counts here is still this one
                    self.refuse(call, f"{type(error).__name__}: {error}")
                raise
        sent = np.diff(on_host[: len(offsets)]).reshape(size, num_tables)
        words = np.tile(np.array([tag, num_tables, 0], np.int64), (size, 1))
        theirs = self._exchange(call, np.concatenate([words, sent], axis=1))
        if any(part[FAILED] for part in theirs):
            self._raise_reasons(call, None)
        for rank, part in enumerate(theirs):
            if part[:FAILED].tolist() != [tag, num_tables]:
                told_by = part[:FAILED].tolist()
                raise CommunicatorError(
                    other_lookup(self._comm.rank, num_tables, tag, rank, told_by)
                )
        return Counts(sent, np.stack([part[NUM_WORDS:] for part in theirs]))

    def rows(
        self, call: str, message: Array, send_splits: np.ndarray, recv_splits: np.ndarray
    ) -> Array:
        """Sends keys, rows or gradients whose counts all ranks know. Every rank must call it.

        Raises:
          CommunicatorError: a rank has died, or is in another call.
        """
        self._check_arrays(message)
        # Who fails before it can send is met here: what carries waits for it, and it never comes.
        self._comm.barrier(call)
        return self._comm._together(
            lambda _: self._carried(message, send_splits, recv_splits), call
        )

    def refuse(self, call: str, reason: str) -> None:
        """Takes the place of `counts` on a rank that has no keys.

        Raises:
          CommunicatorError: with the reason, on all ranks.
        """
        self._exchange(call, np.tile(np.array([0, 0, 1], np.int64), (self._comm.size, 1)))
        self._raise_reasons(call, reason)

    def _exchange(self, call: str, blocks: np.ndarray) -> list[np.ndarray]:
        """Gives a block to each rank; returns theirs, whose lengths may differ."""
        size, width = blocks.shape
        came = self._comm.alltoallv(blocks.reshape(-1), np.full(size, width), call=call)
        return came.by_rank()

    def _check_arrays(self, *arrays: Any) -> None:
        """Raises TypeError if an array is not of the backend, such as one of NumPy."""
        for array in arrays:
            if not isinstance(array, self._backend.xp.ndarray):
                raise TypeError(
                    f"The {self.name!r} transport takes arrays of the {self._backend.name} backend."
                    f" Received: {type(array).__module__}.{type(array).__name__}. Use the "
                    "communicator's `alltoallv` for arrays of the host."
                )

    def _raise_reasons(self, call: str, mine: str | None) -> NoReturn:
        """Tells all ranks why this one has no keys, if so, and raises the reason of the first rank.

        Every rank must call it.
        """
        text = (mine or "").encode()[:LONGEST_REASON_BYTES]
        rows = np.frombuffer(text, np.uint8).reshape(-1, 1)
        gathered = self._comm.allgatherv(rows, f"why not {call}")
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
