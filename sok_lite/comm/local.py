"""The fast way between ranks of one machine: rows through shared memory, signals through sockets.

A transport meant for networks costs a millisecond of latency and two copies through the kernel.
Here a rank writes the rows that leave it into its outbox, memory that the others have mapped, tells
each of them where its part lies, and copies its own parts out of theirs. A rank that dies closes
its sockets, so the others know at once; one that can still say why writes it into memory that they
have mapped too, its last words.

Every rank has two outboxes and takes them in turn. The one of collective k is written again in
collective k + 2, which a rank can reach only with the signals of all others for k + 1; they send
those when they have read everything of k. So nobody needs to say when it has finished.
"""

import itertools
import mmap
import os
import secrets
import select
import socket
import struct
import sys
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from sok_lite.comm.header import FAREWELL, HEADER_BYTES, Header, disagreement, num_rows_of
from sok_lite.comm.protocol import Communicator, Gathered, split_offsets
from sok_lite.comm.stalls import stall_limits

# "0" leaves everything to the transport that launched the ranks.
SWITCH_VARIABLE = "SOK_LITE_COMM_LOCAL"

_CONNECT_TIMEOUT_S = 30.0
_SMALLEST_BOX_BYTES = 1 << 16
_NAME_BYTES, _TOKEN_BYTES = 64, 16
_HELLO = struct.Struct(f"<q{_TOKEN_BYTES}s")
# A header, and where this part begins in the outbox.
_SIGNAL = struct.Struct(f"<{HEADER_BYTES}sq")
_LAST_WORDS_BYTES = 4096


class LocalCommunicator(Communicator):
    """Ranks that share memory, brought together by another communicator over the same ranks."""

    def __init__(
        self, base: Communicator, peers: dict[int, socket.socket], words: "_LastWords"
    ) -> None:
        """Takes connected sockets, one for each other rank; `connect_local` makes them."""
        super().__init__(base.rank, base.size, base.local_rank)
        self._base = base
        self._peers = peers
        self._outboxes = [_Outbox(), _Outbox()]
        self._inboxes: dict[tuple[int, int], np.ndarray] = {}
        self._words = words
        self._warn_s, self._limit_s = stall_limits()
        _alive.add(self)

    def given_by_all(self, tensor: Any, name: str) -> Any:
        return self._base.given_by_all(tensor, name)

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
        self._send(header, parts, kind)
        # All signals first: a rank that finds a fault in one leaves none of the others unread.
        signals = self._receive_all(kind)
        reason = disagreement(self.rank, header, {peer: s[0] for peer, s in signals.items()})
        if reason is not None:
            self._fail(reason)
        counts = np.empty(self.size, np.int32)
        counts[self.rank] = len(parts[self.rank])
        for peer, (packed, _) in signals.items():
            counts[peer] = num_rows_of(packed)
        ends = split_offsets(counts).tolist()
        received = np.empty((ends[-1], rows.shape[1]), rows.dtype)
        received[ends[self.rank] : ends[self.rank + 1]] = parts[self.rank]
        flat = received.reshape(-1).view(np.uint8)
        for peer, (_, offset) in signals.items():
            start, end = ends[peer] * header.row_bytes, ends[peer + 1] * header.row_bytes
            if end > start:
                inbox = self._inboxes[peer, self.turn % 2]
                flat[start:end] = inbox[offset : offset + end - start]
        return Gathered(received, counts)

    def _send(self, header: Header, parts: Sequence[np.ndarray], kind: str) -> None:
        outbox = self._outboxes[self.turn % 2]
        everyone_the_same = kind == "gather"
        leaving = sum(parts[peer].nbytes for peer in self._peers)
        if everyone_the_same:
            leaving = parts[self.rank].nbytes
        file = outbox.reserve(leaving)
        headers = header.pack(len(part) for part in parts)
        offset = 0
        try:
            for i, (peer, link) in enumerate(self._peers.items()):
                part = parts[peer]
                if i == 0 or not everyone_the_same:
                    outbox.memory[offset : offset + part.nbytes] = part.reshape(-1).view(np.uint8)
                signal = _SIGNAL.pack(headers[peer], offset)
                try:
                    if file is not None:
                        socket.send_fds(link, [signal], [file])
                    else:
                        link.send(signal)
                except OSError as error:
                    self._fail(self._why_gone(peer, kind, error))
                if not everyone_the_same:
                    offset += part.nbytes
        finally:
            # Whoever needs it has it now; the memory lives as long as somebody maps it.
            if file is not None:
                os.close(file)

    def _receive_all(self, kind: str) -> dict[int, tuple[bytes, int]]:
        """Waits for the signals of all others; returns peer -> (packed header, offset)."""
        signals, start, noted = {}, time.monotonic(), 0.0
        waiting = {link.fileno(): peer for peer, link in self._peers.items()}
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
                signals[peer] = self._receive(peer, kind)
            waited_s = time.monotonic() - start
            if not ready and waited_s >= min(noted + self._warn_s, self._limit_s):
                noted = waited_s
                self._note_stall(min(waiting.values()), kind, waited_s)
        return signals

    def _receive(self, peer: int, kind: str) -> tuple[bytes, int]:
        """Takes a rank's signal and maps its outbox anew where that has grown."""
        try:
            signal, files, _, _ = socket.recv_fds(self._peers[peer], _SIGNAL.size, 1)
        except OSError as error:
            self._fail(self._why_gone(peer, kind, error))
        for file in files:
            self._inboxes[peer, self.turn % 2] = _mapped(file)
        if len(signal) != _SIGNAL.size:
            self._fail(self._why_gone(peer, kind, "it closed its connection"))
        packed, offset = _SIGNAL.unpack(signal)
        return packed, offset

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
        for link in self._peers.values():
            link.close()

    def _forget(self) -> None:
        """Lets go of all that a forked child must not keep: the others would not see the end of
        this process while a child holds its links."""
        for link in self._peers.values():
            link.close()
        self._outboxes.clear()
        self._inboxes.clear()
        del self._words


_alive: "weakref.WeakSet[LocalCommunicator]" = weakref.WeakSet()


def _forget_all() -> None:
    for comm in list(_alive):
        comm._forget()


os.register_at_fork(after_in_child=_forget_all)


class _LastWords:
    """What each rank had to say before it closed its links: memory that outlives its process."""

    def __init__(self, peers: dict[int, socket.socket]) -> None:
        """Gives the memory of this rank to the others and takes theirs. Every rank must call it."""
        self._mine, file = _shared_memory(_LAST_WORDS_BYTES)
        try:
            for link in peers.values():
                socket.send_fds(link, [b"words"], [file])
        finally:
            os.close(file)
        self._theirs: dict[int, np.ndarray] = {}
        for peer, link in peers.items():
            _, files, _, _ = socket.recv_fds(link, 16, 1)
            if not files:
                raise ConnectionError(f"rank {peer} gave no memory")
            self._theirs[peer] = _mapped(files[0])

    def write(self, text: str) -> None:
        words = np.frombuffer(text.encode()[:_LAST_WORDS_BYTES], np.uint8)
        self._mine[: len(words)] = words

    def of(self, peer: int) -> str:
        return self._theirs[peer].tobytes().rstrip(b"\0").decode(errors="replace")


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
        self.memory, file = _shared_memory(size)
        return file


def _shared_memory(size: int) -> tuple[np.ndarray, int]:
    """Returns (size,) uint8, zeros, and a file by which others map it; the caller closes that."""
    # Anonymous: not bound by the size of /dev/shm, and nothing is left behind by a crash.
    file = os.memfd_create("sok_lite")
    try:
        os.ftruncate(file, size)
        return np.frombuffer(mmap.mmap(file, size), np.uint8), file
    except BaseException:
        os.close(file)
        raise


def _mapped(file: int) -> np.ndarray:
    """Returns the memory of another rank, (size,) uint8, to be read, and closes the file."""
    try:
        return np.frombuffer(mmap.mmap(file, os.fstat(file).st_size, prot=mmap.PROT_READ), np.uint8)
    finally:
        os.close(file)


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
    words = None
    try:
        with listener:
            _connect(peers, listener, base.rank, names, tokens)
        words = _LastWords(peers)
    except OSError:
        pass
    if not base.allreduce(words is not None, "min") or words is None:
        for link in peers.values():
            link.close()
        return base
    for link in peers.values():
        link.settimeout(None)
    return LocalCommunicator(base, dict(sorted(peers.items())), words)


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
    if not is_wanted() or not hasattr(os, "memfd_create"):
        return b""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}".encode()[:_NAME_BYTES]
    except OSError:
        return b""
