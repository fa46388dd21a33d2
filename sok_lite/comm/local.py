"""The fast way between ranks of one machine: rows through shared memory, signals through sockets.

A transport meant for networks costs a millisecond of latency and two copies through the kernel.
Here a rank writes the rows that leave it into its outbox, memory that the others have mapped, tells
each of them where its part lies, and copies its own parts out of theirs. A rank that dies closes
its sockets, so the others know at once.

Every rank has two outboxes and takes them in turn. The one of collective k is written again in
collective k + 2, which a rank can reach only with the signals of all others for k + 1; they send
those when they have read everything of k. So nobody needs to say when it has finished.
"""

import itertools
import mmap
import os
import secrets
import socket
import struct
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from sok_lite.comm.protocol import Communicator, CommunicatorError, Gathered, split_offsets

# "0" leaves everything to the transport that launched the ranks.
SWITCH_VARIABLE = "SOK_LITE_COMM_LOCAL"

_CONNECT_TIMEOUT_S = 30.0
_SMALLEST_BOX_BYTES = 1 << 16
_NAME_BYTES, _TOKEN_BYTES = 64, 16
_HELLO = struct.Struct(f"<q{_TOKEN_BYTES}s")
# Number of the collective, its kind, dtype, bytes of a row; offset and number of rows of this part.
_SIGNAL = struct.Struct("<q8s8sqqq")


class LocalCommunicator(Communicator):
    """Ranks that share memory, brought together by another communicator over the same ranks."""

    def __init__(self, base: Communicator, peers: dict[int, socket.socket]) -> None:
        """Takes connected sockets, one for each other rank; `connect_local` makes them."""
        super().__init__(base.rank, base.size, base.local_rank)
        self._base = base
        self._peers = peers
        self._outboxes = [_Outbox(), _Outbox()]
        self._inboxes: dict[tuple[int, int], np.ndarray] = {}
        self._turn = 0
        self._failure: str | None = None

    def abort(self, message: str) -> None:
        self._base.abort(message)

    def _alltoallv(
        self, rows: np.ndarray, send_splits: np.ndarray, recv_splits: np.ndarray | None
    ) -> Gathered:
        ends = split_offsets(send_splits).tolist()
        parts = [rows[start:end] for start, end in itertools.pairwise(ends)]
        return self._exchange(b"alltoall", rows, parts)

    def _allgatherv(self, rows: np.ndarray, recv_splits: np.ndarray | None) -> Gathered:
        return self._exchange(b"gather", rows, [rows] * self.size)

    def _exchange(self, kind: bytes, rows: np.ndarray, parts: Sequence[np.ndarray]) -> Gathered:
        """Gives parts[rank] to each rank and gathers what they have for this one."""
        if self._failure is not None:
            raise CommunicatorError(self._failure)
        self._turn += 1
        row_bytes = rows.shape[1] * rows.dtype.itemsize
        header = (self._turn, kind, rows.dtype.str.encode(), row_bytes)
        self._send(header, parts, everyone_the_same=kind == b"gather")
        # All signals first: a rank that finds a fault in one leaves none of the others unread.
        signals = {peer: _SIGNAL.unpack(self._receive(peer, kind)) for peer in self._peers}
        counts = np.empty(self.size, np.int32)
        counts[self.rank] = len(parts[self.rank])
        for peer, (*theirs, _, num_rows) in signals.items():
            counts[peer] = num_rows
            if _describe(theirs) != _describe(header):
                self._fail(
                    f"Ranks make different calls: rank {self.rank} is in {_describe(header)}, rank "
                    f"{peer} in {_describe(theirs)}. All ranks must make the same calls in the "
                    "same order."
                )
        ends = split_offsets(counts).tolist()
        received = np.empty((ends[-1], rows.shape[1]), rows.dtype)
        received[ends[self.rank] : ends[self.rank + 1]] = parts[self.rank]
        flat = received.reshape(-1).view(np.uint8)
        for peer, (*_, offset, _) in signals.items():
            start, end = ends[peer] * row_bytes, ends[peer + 1] * row_bytes
            if end > start:
                inbox = self._inboxes[peer, self._turn % 2]
                flat[start:end] = inbox[offset : offset + end - start]
        return Gathered(received, counts)

    def _send(
        self, header: tuple[Any, ...], parts: Sequence[np.ndarray], everyone_the_same: bool
    ) -> None:
        outbox = self._outboxes[self._turn % 2]
        leaving = sum(parts[peer].nbytes for peer in self._peers)
        if everyone_the_same:
            leaving = parts[self.rank].nbytes
        file = outbox.reserve(leaving)
        offset = 0
        try:
            for i, (peer, link) in enumerate(self._peers.items()):
                part = parts[peer]
                if i == 0 or not everyone_the_same:
                    outbox.memory[offset : offset + part.nbytes] = part.reshape(-1).view(np.uint8)
                signal = _SIGNAL.pack(*header, offset, len(part))
                try:
                    if file is not None:
                        socket.send_fds(link, [signal], [file])
                    else:
                        link.send(signal)
                except OSError as error:
                    self._fail(_died(self.rank, peer, header[1], error))
                if not everyone_the_same:
                    offset += part.nbytes
        finally:
            # Whoever needs it has it now; the memory lives as long as somebody maps it.
            if file is not None:
                os.close(file)

    def _receive(self, peer: int, kind: bytes) -> bytes:
        """Waits for a rank's signal and maps its outbox anew where that has grown."""
        link, start = self._peers[peer], time.monotonic()
        while True:
            try:
                signal, files, _, _ = socket.recv_fds(link, _SIGNAL.size, 1)
                break
            except TimeoutError:
                self._note_stall(peer, kind, time.monotonic() - start)
            except OSError as error:
                self._fail(_died(self.rank, peer, kind, error))
        if not signal:
            self._fail(_died(self.rank, peer, kind, "it closed its connection"))
        for file in files:
            memory = mmap.mmap(file, os.fstat(file).st_size, prot=mmap.PROT_READ)
            os.close(file)
            self._inboxes[peer, self._turn % 2] = np.frombuffer(memory, np.uint8)
        return signal

    def _note_stall(self, peer: int, kind: bytes, waited_s: float) -> None:
        limit = float(os.environ.get("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS") or 0)
        if 0 < limit < waited_s:
            self._fail(
                f"Rank {peer} did not call {kind.decode()} within {waited_s:.0f} s of rank "
                f"{self.rank} (HOROVOD_STALL_SHUTDOWN_TIME_SECONDS={limit:.0f})."
            )
        print(
            f"sok_lite: rank {self.rank} has waited {waited_s:.0f} s in {kind.decode()} for rank "
            f"{peer}. Do all ranks make the same calls in the same order?",
            file=sys.stderr,
            flush=True,
        )

    def _fail(self, reason: str) -> NoReturn:
        """Closes all links, so that the others learn of it too, and raises."""
        self._failure = reason
        for link in self._peers.values():
            link.close()
        raise CommunicatorError(reason)


class _Outbox:
    """Memory of this rank that the others may map; grows by powers of two."""

    def __init__(self) -> None:
        self.memory = np.empty(0, np.uint8)

    def reserve(self, num_bytes: int) -> int | None:
        """Makes room; returns a file of new memory, which the others must map, or None.

        The caller closes the file.
        """
        if num_bytes <= len(self.memory):
            return None
        size = max(_SMALLEST_BOX_BYTES, 1 << (num_bytes - 1).bit_length())
        # Anonymous: not bound by the size of /dev/shm, and nothing is left behind by a crash.
        file = os.memfd_create("sok_lite")
        try:
            os.ftruncate(file, size)
            self.memory = np.frombuffer(mmap.mmap(file, size), np.uint8)
        except BaseException:
            os.close(file)
            raise
        return file


def connect_local(base: Communicator) -> Communicator:
    """Connects the ranks through shared memory if all are on this machine. Every rank must call it.

    Args:
      base: connects the ranks already; it brings them together here, and can still end the job.

    Returns:
      The fast communicator, or `base` itself if ranks are on several machines, are kept apart (in
      containers of their own), or SOK_LITE_COMM_LOCAL is "0"; the same kind on all ranks.
    """
    if base.size == 1:
        return base
    token = secrets.token_bytes(_TOKEN_BYTES)
    place = _place()
    name = f"sok_lite-{secrets.token_hex(16)}".encode()
    card = b"".join([place.ljust(_NAME_BYTES), name.ljust(_NAME_BYTES), token])
    cards = [row.tobytes() for row in base.allgatherv(np.frombuffer(card, np.uint8)[None]).rows]
    if not place or any(other[:_NAME_BYTES].rstrip() != place for other in cards):
        return base
    names = [other[_NAME_BYTES : 2 * _NAME_BYTES].rstrip() for other in cards]
    tokens = [other[2 * _NAME_BYTES :] for other in cards]
    listener = _listener(name, base.size)
    # Nobody connects before everybody listens.
    if not base.allreduce(listener is not None, "min") or listener is None:
        if listener is not None:
            listener.close()
        return base
    peers: dict[int, socket.socket] = {}
    try:
        with listener:
            _connect(peers, listener, base.rank, names, tokens)
        connected = True
    except OSError:
        connected = False
    if not base.allreduce(connected, "min"):
        for link in peers.values():
            link.close()
        return base
    stall_check_s = float(os.environ.get("HOROVOD_STALL_CHECK_TIME_SECONDS") or 60)
    for link in peers.values():
        link.settimeout(stall_check_s)
    return LocalCommunicator(base, dict(sorted(peers.items())))


def _connect(
    peers: dict[int, socket.socket],
    listener: socket.socket,
    rank: int,
    names: list[bytes],
    tokens: list[bytes],
) -> None:
    """Calls the ranks before this one and is called by those after it; fills `peers`."""
    for peer in range(rank):
        peers[peer] = _socket()
        peers[peer].connect(b"\0" + names[peer])
        peers[peer].send(_HELLO.pack(rank, tokens[peer]))
    while len(peers) < len(names) - 1:
        link, _ = listener.accept()
        link.settimeout(_CONNECT_TIMEOUT_S)
        hello = link.recv(_HELLO.size)
        # Any process of the machine can call; only ranks of this job know the token.
        if len(hello) == _HELLO.size and _HELLO.unpack(hello)[1] == tokens[rank]:
            peers[_HELLO.unpack(hello)[0]] = link
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
    if os.environ.get(SWITCH_VARIABLE) == "0" or not hasattr(os, "memfd_create"):
        return b""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}".encode()[:_NAME_BYTES]
    except OSError:
        return b""


def _describe(header: Sequence[Any]) -> str:
    turn, kind, dtype, row_bytes = header
    kind, dtype = (text.rstrip(b"\0").decode() for text in (kind, dtype))
    return f"{kind} number {turn} of {dtype} rows of {row_bytes} bytes"


def _died(rank: int, peer: int, kind: bytes, why: object) -> str:
    return (
        f"Rank {peer} has died or has left, seen by rank {rank} in {kind.decode()}: {why}. "
        "Look at the first error of that rank."
    )
