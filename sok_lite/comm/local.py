"""Shared memory between ranks of one machine, with signals through sockets.

A transport meant for networks costs a millisecond of latency and two copies through the kernel. So
a rank writes the rows that it sends into its outbox and signals to each of the others where its
part lies; they copy it out. A rank that dies closes its sockets, so the others know at once; one
that can still say why writes it into memory that they have mapped too, its last words.

A `LocalCommunicator` has all its ranks on one machine. Every rank has two outboxes and uses them in
turn: that of collective k is written again in collective k + 2, which a rank can reach only with
the signals of all others for k + 1; they send those when they have read everything of k. So nobody
needs to say when it has finished.

A `HostsCommunicator` has ranks on several machines, and another transport between these. A
collective is one of that transport. If a rank has a large part for a rank of its machine, the ranks
of its machine get no rows in that collective, but find them in its outbox. It fills the outbox
before it enters the transport's collective, and they read it afterwards. So no rank waits for a
signal, ranks agree or fail in the transport, and all have read an outbox before its owner fills it
again.
"""

import itertools
import math
import mmap
import os
import secrets
import select
import socket
import struct
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np

from sok_lite.comm.header import (
    FAREWELL,
    HEADER_BYTES,
    disagreement,
    notes_of,
    num_rows_of,
    turn_of,
)
from sok_lite.comm.protocol import Communicator, CommunicatorError, Gathered, split_offsets

_SMALLEST_BOX_BYTES = 1 << 16
# A header, and where this part begins in the outbox.
_SIGNAL = struct.Struct(f"<{HEADER_BYTES}sq")
_LAST_WORDS_BYTES = 4096

# "0" leaves everything to the transport that launched the ranks.
SWITCH_VARIABLE = "SOK_LITE_COMM_LOCAL"

_CONNECT_TIMEOUT_S = 30.0
_NAME_BYTES, _TOKEN_BYTES = 64, 16
_HELLO = struct.Struct(f"<q{_TOKEN_BYTES}s")

T = TypeVar("T")

# Less is sooner sent with what goes to other machines: over two machines of two ranks (network
# namespaces, 2026-11-23) memory saved 16 to 18 % of processor time from 16 MB a rank on, and cost
# a small call 0.8 ms.
_LEAST_BYTES = 1 << 20


class LinkError(Exception):
    """A rank is not at the other end of its link any more.

    Attributes:
      peer: that rank.
    """

    def __init__(self, peer: int, sign: object) -> None:
        super().__init__(str(sign))
        self.peer = peer


class Signal(NamedTuple):
    """The signal of a rank about its part for this one.

    Attributes:
      packed: the header of the part, packed.
      offset: first byte of the part in the outbox of that rank.
    """

    packed: bytes
    offset: int


class Mailboxes:
    """The outboxes of this rank, and those of the other ranks of its machine.

    Attributes:
      links: rank -> connected socket, one for each other rank.
    """

    def __init__(self, links: dict[int, socket.socket]) -> None:
        self.links = links
        self._outboxes = [Outbox(), Outbox()]
        self._inboxes: dict[tuple[int, int], np.ndarray] = {}
        self._early: dict[int, Signal] = {}
        _alive.add(self)

    def send(
        self, turn: int, headers: Sequence[bytes], parts: Sequence[np.ndarray], same: bool
    ) -> None:
        """Gives each rank its part.

        Args:
          turn: number of the collective.
          headers: (ranks of the job,) packed.
          parts: (ranks of the job,) contiguous rows; those of ranks elsewhere are passed over.
          same: whether all parts are one array.

        Raises:
          LinkError: a rank is gone.
        """
        outbox = self._outboxes[turn % 2]
        kept = [parts[peer].nbytes for peer in self.links]
        file = outbox.reserve(max(kept, default=0) if same else sum(kept))
        offset = 0
        try:
            for i, (peer, link) in enumerate(self.links.items()):
                part = parts[peer]
                if i == 0 or not same:
                    outbox.memory[offset : offset + part.nbytes] = part.reshape(-1).view(np.uint8)
                signal = _SIGNAL.pack(headers[peer], offset)
                try:
                    if file is not None:
                        socket.send_fds(link, [signal], [file])
                    else:
                        link.send(signal)
                except OSError as error:
                    raise LinkError(peer, error) from error
                if not same:
                    offset += part.nbytes
        finally:
            # Whoever needs it has it now; the memory lives as long as somebody maps it.
            if file is not None:
                os.close(file)

    def receive(self, peer: int) -> Signal:
        """Waits for a rank's signal, and maps its outbox anew where that has grown.

        Raises:
          LinkError: the rank is gone.
        """
        signal = self._receive(peer)
        if signal is None:
            raise LinkError(peer, "it closed its connection")
        return signal

    def look(self, turn: int, peer: int) -> Signal | None:
        """Returns a rank's signal of this turn, or None if it has not arrived.

        Raises:
          LinkError: the rank is gone, or this one has closed its links.
        """
        if peer not in self._early:
            link = self.links[peer]
            if link.fileno() < 0:
                raise LinkError(peer, "this rank has closed the connection")
            poll = select.poll()
            poll.register(link, select.POLLIN)
            signal = self._receive(peer) if poll.poll(0) else None
            if signal is None:
                return None
            self._early[peer] = signal
        # It may be one of the next turn, of a rank that had none for this one and is ahead.
        return self._early.pop(peer) if turn_of(self._early[peer].packed) == turn else None

    def _receive(self, peer: int) -> Signal | None:
        """Takes a signal; None from a rank that has closed its links."""
        try:
            received, files, _, _ = socket.recv_fds(self.links[peer], _SIGNAL.size, 1)
        except OSError as error:
            raise LinkError(peer, error) from error
        if len(received) != _SIGNAL.size:
            return None
        signal = Signal(*_SIGNAL.unpack(received))
        for file in files:
            self._inboxes[peer, turn_of(signal.packed) % 2] = _map(file)
        return signal

    def take(self, turn: int, peer: int, signal: Signal, rows: np.ndarray) -> None:
        """Copies a rank's part to contiguous rows of that size."""
        if rows.nbytes:
            inbox = self._inboxes[peer, turn % 2]
            flat = rows.reshape(-1).view(np.uint8)
            flat[:] = inbox[signal.offset : signal.offset + rows.nbytes]

    def close(self) -> None:
        """Closes the links: a rank that waits for this one, now or later, learns of it."""
        for link in self.links.values():
            link.close()

    def forget(self) -> None:
        """Closes all that a forked child must not keep: the others would not notice the end of
        this process while a child has its links."""
        self.close()
        self._outboxes.clear()
        self._inboxes.clear()


class LastWords:
    """The reasons of ranks that closed their links, in memory that outlives their processes."""

    def __init__(self, peers: dict[int, socket.socket]) -> None:
        """Shares the memory of this rank with the others and maps theirs. Every rank must call it.

        Raises:
          OSError: a rank is gone, or has shared none.
        """
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
            self._theirs[peer] = _map(files[0])
        _alive.add(self)

    def write(self, text: str) -> None:
        words = np.frombuffer(text.encode()[:_LAST_WORDS_BYTES], np.uint8)
        self._mine[: len(words)] = words

    def of(self, peer: int) -> str:
        return self._theirs[peer].tobytes().rstrip(b"\0").decode(errors="replace")

    def forget(self) -> None:
        """Unmaps the memory, in a forked child."""
        del self._mine
        self._theirs.clear()


_alive: "weakref.WeakSet[Mailboxes | LastWords]" = weakref.WeakSet()


def _forget_all() -> None:
    for shared in list(_alive):
        shared.forget()


os.register_at_fork(after_in_child=_forget_all)


class Outbox:
    """Memory of this rank that the others may map; grows by powers of two."""

    def __init__(self) -> None:
        self.memory = np.empty(0, np.uint8)

    def reserve(self, num_bytes: int) -> int | None:
        """Grows if necessary; returns a file of new memory, which the others must map, or None.

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


def _map(file: int) -> np.ndarray:
    """Returns the memory of another rank, (size,) uint8, to be read, and closes the file."""
    try:
        return np.frombuffer(mmap.mmap(file, os.fstat(file).st_size, prot=mmap.PROT_READ), np.uint8)
    finally:
        os.close(file)


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
        self.notes.of_all = header.notes | notes_of(s.packed for s in signals.values())
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


class HostsCommunicator(Communicator):
    """Ranks of which some share a machine, brought together by another communicator."""

    def __init__(self, base: Communicator, links: dict[int, socket.socket]) -> None:
        """Takes connected sockets, one for each other rank of this machine."""
        super().__init__(base.rank, base.size, base.local_rank)
        self._base = base
        self.notes = base.notes  # headers of all ranks come by it in each collective
        self._boxes = Mailboxes(links)
        self._here = {base.rank, *links}

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


def stall_limits() -> tuple[float, float]:
    """Returns the seconds between two logs of a wait, and until it is an error; infinite: never.

    They are Horovod's settings, which reads whole seconds and takes a value that it cannot read for
    0. A job must not break at a setting that Horovod accepts, so nothing is rejected here either.
    """
    if _seconds("HOROVOD_STALL_CHECK_DISABLE", 0.0):
        return math.inf, math.inf
    return (
        _seconds("HOROVOD_STALL_CHECK_TIME_SECONDS", 60.0) or math.inf,
        _seconds("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0.0) or math.inf,
    )


def _seconds(name: str, otherwise: float) -> float:
    """Returns a variable's number, 0 or more; `otherwise` if it is not set or no such number."""
    try:
        seconds = float(os.environ.get(name) or otherwise)
    except ValueError:
        return otherwise
    return seconds if 0 <= seconds < math.inf else otherwise
