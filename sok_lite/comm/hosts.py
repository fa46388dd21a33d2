"""Several machines: shared memory between ranks of one, another transport between machines.

A collective is one of the transport between machines. If a rank has a large part for a rank of its
machine, the ranks of its machine get no rows in that collective, but find them in its outbox
(`sok_lite.comm.shared_memory`). It fills the outbox before it enters the transport's collective,
and they read it afterwards. So no rank waits for a signal, ranks agree or fail in the transport,
and all have read an outbox before its owner fills it again.
"""

import itertools
import socket
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from sok_lite.comm.header import num_rows_of
from sok_lite.comm.protocol import Communicator, CommunicatorError
from sok_lite.comm.rows import Gathered, split_offsets
from sok_lite.comm.shared_memory import LinkError, Mailboxes, Signal

T = TypeVar("T")

# Less is sooner there with what goes to other machines: docs/measurements.md, "Ranks".
_LEAST_BYTES = 1 << 20


class HostsCommunicator(Communicator):
    """Ranks of which some share a machine, brought together by another communicator."""

    def __init__(self, base: Communicator, links: dict[int, socket.socket]) -> None:
        """Takes connected sockets, one for each other rank of this machine."""
        super().__init__(base.rank, base.size, base.local_rank)
        self._base = base
        self._boxes = Mailboxes(links)
        self._here = {base.rank, *links}

    def submitted_by_all(self, tensor: Any, name: str) -> Any:
        return self._base.submitted_by_all(tensor, name)

    def abort(self, message: str) -> None:
        self._base.abort(message)

    def leave(self) -> None:
        self._base.leave()

    def disconnect(self) -> None:
        self._boxes.close()
        self._base.disconnect()
        super().disconnect()

    def _alltoallv(self, call: str, rows: np.ndarray, send_splits: np.ndarray) -> Gathered:
        ends = split_offsets(send_splits).tolist()
        parts = [rows[start:end] for start, end in itertools.pairwise(ends)]
        return self._exchange(call, rows, parts, same=False)

    def _allgatherv(self, call: str, rows: np.ndarray) -> Gathered:
        return self._exchange(call, rows, [rows] * self.size, same=True)

    def _barrier(self, call: str) -> None:
        self.turn += 1
        self._through_base(self._base._barrier, call)

    def _exchange(
        self, call: str, rows: np.ndarray, parts: Sequence[np.ndarray], same: bool
    ) -> Gathered:
        """Gives parts[rank] to each rank and gathers what they have for this one."""
        headers = self._next_header(call, rows).pack(len(part) for part in parts)
        most = max((parts[peer].nbytes for peer in self._boxes.links), default=-1)
        in_memory = most >= _LEAST_BYTES
        kept = self._here if in_memory else {self.rank}
        away = [part[:0] if rank in kept else part for rank, part in enumerate(parts)]
        splits = np.array([len(part) for part in away], np.int32)
        lost = None
        try:
            if in_memory:
                self._boxes.send(self.turn, headers, parts, same)
        except LinkError as error:
            lost = error  # the transport knows more of it, and tells all ranks
        far = self._through_base(self._base._alltoallv, call, np.concatenate(away), splits)
        try:
            if lost is not None:
                raise lost
            signals = self._signals(far.recv_splits)
        except LinkError as error:
            self._break_off(
                f"Rank {error.peer} has died or has left, seen by rank {self.rank} in {call}: "
                f"{error}. Look at the first error of that rank."
            )
            raise CommunicatorError(self._failure) from error
        counts = far.recv_splits.copy()
        counts[self.rank] = len(parts[self.rank])
        for peer, signal in signals.items():
            counts[peer] = num_rows_of(signal.packed)
        ends = split_offsets(counts).tolist()
        received = np.empty((ends[-1], rows.shape[1]), rows.dtype)
        for rank, from_far in enumerate(far.by_rank()):
            part = received[ends[rank] : ends[rank + 1]]
            if rank == self.rank:
                part[:] = parts[rank]
            elif rank in signals:
                self._boxes.take(self.turn, rank, signals[rank], part)
            else:
                part[:] = from_far
        return Gathered(received, counts)

    def _signals(self, recv_splits: np.ndarray) -> dict[int, Signal]:
        """Returns the signals of ranks from which the transport has brought no rows."""
        found = {}
        for peer in self._boxes.links:
            signal = None if recv_splits[peer] else self._boxes.look(self.turn, peer)
            if signal is not None:
                found[peer] = signal
        return found

    def _through_base(self, collective: Callable[..., T], *arguments: Any) -> T:
        """Runs a collective of the transport. One that fails does so on all ranks, and is the last:
        the signals of this turn lie unread."""
        try:
            return self._base._together(collective, *arguments)
        except CommunicatorError as error:
            self._failure = str(error)
            self._boxes.close()
            raise

    def _break_off(self, reason: str) -> None:
        self._failure = reason
        self._boxes.close()
        # Unless it broke off in the transport's own part.
        if self._base._failure is None:
            self._base._failure = reason
            self._base._break_off(reason)
