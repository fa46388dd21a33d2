"""The transport between ranks of one machine: rows through shared memory, signals through sockets.

A transport meant for networks costs a millisecond of latency and two copies through the kernel.
Here ranks copy their parts out of each other's memory (`sok_lite.comm.shared_memory`). A rank that
dies closes its sockets, so the others know at once; one that can still say why writes it into
memory that they have mapped too, its last words.

The outbox of collective k is written again in collective k + 2, which a rank can reach only with
the signals of all others for k + 1; they send those when they have read everything of k. So nobody
needs to say when it has finished.
"""

import itertools
import os
import secrets
import select
import socket
import struct
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from sok_lite.comm.header import FAREWELL, disagreement, num_rows_of
from sok_lite.comm.hosts import HostsCommunicator
from sok_lite.comm.protocol import Communicator
from sok_lite.comm.rows import Gathered, split_offsets
from sok_lite.comm.shared_memory import LastWords, LinkError, Mailboxes, Signal
from sok_lite.comm.stalls import stall_limits

# "0" leaves everything to the transport that launched the ranks.
SWITCH_VARIABLE = "SOK_LITE_COMM_LOCAL"

_CONNECT_TIMEOUT_S = 30.0
_NAME_BYTES, _TOKEN_BYTES = 64, 16
_HELLO = struct.Struct(f"<q{_TOKEN_BYTES}s")


class LocalCommunicator(Communicator):
    """Ranks that share memory, brought together by another communicator over the same ranks."""

    def __init__(
        self, base: Communicator, links: dict[int, socket.socket], words: LastWords
    ) -> None:
        """Takes connected sockets, one for each other rank; `connect_local` makes them."""
        super().__init__(base.rank, base.size, base.local_rank)
        self._base = base
        self._boxes = Mailboxes(links)
        self._words = words
        self._warn_s, self._limit_s = stall_limits()

    def submitted_by_all(self, tensor: Any, name: str) -> Any:
        return self._base.submitted_by_all(tensor, name)

    def abort(self, message: str) -> None:
        self._base.abort(message)

    def leave(self) -> None:
        """Closes the links: a rank that waits for this one, now or later, raises."""
        if self._failure is None:
            self._break_off(f"Rank {self.rank} has come to {FAREWELL}")

    def disconnect(self) -> None:
        if self._failure is None:
            self._break_off(f"Rank {self.rank} was disconnected")
        self._base.disconnect()
        super().disconnect()

    def _alltoallv(self, call: str, rows: np.ndarray, send_splits: np.ndarray) -> Gathered:
        ends = split_offsets(send_splits).tolist()
        parts = [rows[start:end] for start, end in itertools.pairwise(ends)]
        return self._exchange("alltoall", call, rows, parts)

    def _allgatherv(self, call: str, rows: np.ndarray) -> Gathered:
        return self._exchange("gather", call, rows, [rows] * self.size)

    def _exchange(
        self, kind: str, call: str, rows: np.ndarray, parts: Sequence[np.ndarray]
    ) -> Gathered:
        """Gives parts[rank] to each rank and gathers what they have for this one."""
        header = self._next_header(call, rows)
        headers = header.pack(len(part) for part in parts)
        try:
            self._boxes.send(self.turn, headers, parts, kind == "gather")
            # All signals first: a rank that finds a fault in one leaves none of the others unread.
            signals = self._receive_all(kind)
        except LinkError as error:
            self._fail(self._why_gone(error.peer, kind, error))
        reason = disagreement(self.rank, header, {peer: s.packed for peer, s in signals.items()})
        if reason is not None:
            self._fail(reason)
        counts = np.empty(self.size, np.int32)
        counts[self.rank] = len(parts[self.rank])
        for peer, signal in signals.items():
            counts[peer] = num_rows_of(signal.packed)
        ends = split_offsets(counts).tolist()
        received = np.empty((ends[-1], rows.shape[1]), rows.dtype)
        received[ends[self.rank] : ends[self.rank + 1]] = parts[self.rank]
        for peer, signal in signals.items():
            self._boxes.take(self.turn, peer, signal, received[ends[peer] : ends[peer + 1]])
        return Gathered(received, counts)

    def _receive_all(self, kind: str) -> dict[int, Signal]:
        """Waits for the signals of all others; returns them by rank."""
        signals, start, noted = {}, time.monotonic(), 0.0
        waiting = {link.fileno(): peer for peer, link in self._boxes.links.items()}
        poll = select.poll()
        for number in waiting:
            poll.register(number, select.POLLIN)
        while waiting:
            due = min(noted + self._warn_s, self._limit_s) - (time.monotonic() - start)
            # At least now and then: poll bears no more than 2^31 ms.
            ready = poll.poll(min(max(0.0, due), 3600.0) * 1000 + 1)
            for number, _ in ready:
                peer = waiting.pop(number)
                poll.unregister(number)
                signals[peer] = self._boxes.receive(peer)
            waited_s = time.monotonic() - start
            if not ready and waited_s >= min(noted + self._warn_s, self._limit_s):
                noted = waited_s
                self._note_stall(min(waiting.values()), kind, waited_s)
        return signals

    def _note_stall(self, peer: int, kind: str, waited_s: float) -> None:
        if waited_s >= self._limit_s:
            self._fail(
                f"Rank {peer} did not call {kind} within {waited_s:.0f} s of rank "
                f"{self.rank} (HOROVOD_STALL_SHUTDOWN_TIME_SECONDS={self._limit_s:.0f})."
            )
        print(
            f"sok_lite: rank {self.rank} has waited {waited_s:.0f} s in {kind} for rank "
            f"{peer}. Do all ranks make the same calls in the same order?",
            file=sys.stderr,
            flush=True,
        )

    def _why_gone(self, peer: int, kind: str, sign: object) -> str:
        """Returns what to say of a rank that is not at the other end of its link any more."""
        words = self._words.of(peer)
        if words and not words.endswith(FAREWELL):
            return words
        how = words or f"Rank {peer} has died or has left"
        why = f"{sign}. Look at the first error of that rank."
        if words:
            why = "it waits there for that rank. All ranks must make the same calls."
        return f"{how}, seen by rank {self.rank} in {kind}: {why}"

    def _fail(self, reason: str) -> NoReturn:
        """Closes all links, so that the others learn of it too, and raises."""
        self._break_off(reason)
        super()._fail(reason)

    def _break_off(self, reason: str) -> None:
        self._failure = reason
        self._words.write(reason)
        self._boxes.close()


def is_wanted() -> bool:
    """Returns whether ranks on one machine may exchange through shared memory.

    Raises:
      ValueError: SOK_LITE_COMM_LOCAL is neither 0 nor 1.
    """
    switch = os.environ.get(SWITCH_VARIABLE, "").strip()
    if switch not in ("", "0", "1"):
        raise ValueError(
            f"{SWITCH_VARIABLE} must be 0 or 1. Received: {switch!r}. 0 leaves all to Horovod or "
            "MPI; leave it out, or set 1, for shared memory where ranks share a machine."
        )
    return switch != "0"


def connect_local(base: Communicator) -> Communicator:
    """Connects the ranks of each machine through shared memory. Every rank must call it.

    Args:
      base: connects the ranks already; it is used to bring them together here, to send rows between
        machines, and to abort the job.

    Returns:
      A `LocalCommunicator` if all ranks are on one machine; a `HostsCommunicator`, which uses both
      transports, if some share a machine; or `base` itself if none do (also where they are in
      separate containers), if it shares memory itself (`shares_memory`), or if SOK_LITE_COMM_LOCAL
      is "0". The same kind on all ranks.
    """
    if base.size == 1:
        return base
    token = secrets.token_bytes(_TOKEN_BYTES)
    place = _place()
    name = f"sok_lite-{secrets.token_hex(16)}".encode()
    card = b"".join([place.ljust(_NAME_BYTES), name.ljust(_NAME_BYTES), token])
    cards = [row.tobytes() for row in base.allgatherv(np.frombuffer(card, np.uint8)[None]).rows]
    places = [other[:_NAME_BYTES].rstrip() for other in cards]
    if b"" in places or len(set(places)) == base.size:
        return base
    if len(set(places)) > 1 and base.shares_memory:
        return base
    here = {rank: other for rank, other in enumerate(cards) if places[rank] == place}
    names = {rank: other[_NAME_BYTES : 2 * _NAME_BYTES].rstrip() for rank, other in here.items()}
    tokens = {rank: other[2 * _NAME_BYTES :] for rank, other in here.items()}
    listener = _listener(name, len(here))
    # Nobody connects before everybody listens.
    if not base.allreduce(listener is not None, "min") or listener is None:
        if listener is not None:
            listener.close()
        return base
    links: dict[int, socket.socket] = {}
    words = None
    try:
        with listener:
            _connect(links, listener, base.rank, names, tokens)
        words = LastWords(links)
    except OSError:
        pass
    if not base.allreduce(words is not None, "min") or words is None:
        for link in links.values():
            link.close()
        return base
    for link in links.values():
        link.settimeout(None)
    links = dict(sorted(links.items()))
    if len(here) < base.size:
        return HostsCommunicator(base, links)
    return LocalCommunicator(base, links, words)


def _connect(
    links: dict[int, socket.socket],
    listener: socket.socket,
    rank: int,
    names: dict[int, bytes],
    tokens: dict[int, bytes],
) -> None:
    """Calls the ranks before this one and is called by those after it; fills `links`.

    `names` and `tokens` are those of the ranks of this machine.
    """
    for peer in names:
        if peer < rank:
            links[peer] = _socket()
            links[peer].connect(b"\0" + names[peer])
            links[peer].send(_HELLO.pack(rank, tokens[peer]))
    while len(links) < len(names) - 1:
        link, _ = listener.accept()
        link.settimeout(_CONNECT_TIMEOUT_S)
        hello = link.recv(_HELLO.size)
        # Any process of the machine can call; only ranks of this job know the token.
        if len(hello) == _HELLO.size and _HELLO.unpack(hello)[1] == tokens[rank]:
            links[_HELLO.unpack(hello)[0]] = link
        else:
            link.close()


def _listener(name: bytes, size: int) -> socket.socket | None:
    """Returns a socket that waits for calls, or None where the system allows none."""
    listener = None
    try:
        listener = _socket()
        listener.bind(b"\0" + name)
        listener.listen(size)
    except OSError:
        if listener is not None:
            listener.close()
        return None
    return listener


def _socket() -> socket.socket:
    # SEQPACKET: one send is one receive, and the end of the other process is seen.
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link.settimeout(_CONNECT_TIMEOUT_S)
    return link


def _place() -> bytes:
    """Returns what ranks have in common that can reach each other's abstract sockets, or b""."""
    if not is_wanted() or not hasattr(os, "memfd_create"):
        return b""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}".encode()[:_NAME_BYTES]
    except OSError:
        return b""
