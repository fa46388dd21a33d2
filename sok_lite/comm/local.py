"""Shared memory between ranks of one machine, signaled through sockets.

A network transport costs a millisecond of latency and two copies through the kernel. Here a rank
writes the rows to send into its outbox, and signals to each rank the offset of its part, which that
rank copies. A dying rank closes its sockets, which the others notice at once; if it can, it first
writes the reason into memory that they have mapped.

A `LocalCommunicator` has all its ranks on one machine. Every rank alternates between two outboxes:
that of collective k is reused in k + 2, which a rank can reach only with the signals of all others
for k + 1, sent after they have read everything of k. So no acknowledgment is needed.

A `MultiHostCommunicator` has ranks on several machines, and a base transport that runs every
collective. If a rank has a large part for a rank of its machine, it sends no rows to its machine's
ranks through the base, but writes them into its outbox before the collective; they read it
afterwards. So no rank waits for a signal, ranks agree or fail in the base transport, and all have
read an outbox before its owner fills it again.
"""

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

from sok_lite.backend.ragged import split
from sok_lite.comm.header import (
    FAREWELL,
    HEADER_BYTES,
    disagreement,
    notes_of,
    num_rows_of,
    turn_of,
)
from sok_lite.comm.protocol import Communicator, CommunicatorError, Gathered

_SMALLEST_BOX_BYTES = 1 << 16
# A header, and the offset of this part in the outbox.
_SIGNAL = struct.Struct(f"<{HEADER_BYTES}sq")
_REASON_BYTES = 4096

# "0" leaves everything to the transport that launched the ranks.
SWITCH_VARIABLE = "SOK_LITE_COMM_LOCAL"

_CONNECT_TIMEOUT_S = 30.0
_NAME_BYTES, _TOKEN_BYTES = 64, 16
_HELLO = struct.Struct(f"<q{_TOKEN_BYTES}s")

T = TypeVar("T")

# Smaller parts are faster through the base transport. With two machines of two ranks (network
# namespaces, 2026-11-23), shared memory saved 16 to 18 % of processor time from 16 MB a rank on,
# and cost a small call 0.8 ms.
_MIN_SHARED_BYTES = 1 << 20


class LinkError(Exception):
    """The link to rank `peer` is broken."""

    def __init__(self, peer: int, reason: object) -> None:
        super().__init__(str(reason))
        self.peer = peer


class Signal(NamedTuple):
    """A rank's signal about its part for this one."""

    packed: bytes  # header of the part
    offset: int  # first byte of the part in that rank's outbox


class Mailboxes:
    """The outboxes of this rank, and of the other ranks of its machine, connected by `links`."""

    def __init__(self, links: dict[int, socket.socket]) -> None:
        self.links = links
        self._outboxes = [Outbox(), Outbox()]
        self._inboxes: dict[tuple[int, int], np.ndarray] = {}
        self._early: dict[int, Signal] = {}
        _alive.add(self)

    def send(
        self, turn: int, headers: Sequence[bytes], parts: Sequence[np.ndarray], same: bool
    ) -> None:
        """Sends each rank of this machine its part. LinkError: a rank is gone.

        Args:
          headers, parts: of all ranks of the job; parts are contiguous.
          same: whether all parts are the same array.
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
            # All ranks have it now; the memory lives while mapped.
            if file is not None:
                os.close(file)

    def receive(self, peer: int) -> Signal:
        """Waits for a rank's signal, and remaps a grown outbox. LinkError: the rank is gone."""
        signal = self._receive(peer)
        if signal is None:
            raise LinkError(peer, "it closed its connection")
        return signal

    def look(self, turn: int, peer: int) -> Signal | None:
        """Returns a rank's signal of this turn, or None so far. LinkError: the link is closed."""
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
        # A rank without a signal for this turn may have sent one for its next turn.
        return self._early.pop(peer) if turn_of(self._early[peer].packed) == turn else None

    def _receive(self, peer: int) -> Signal | None:
        """Receives a signal; None from a rank that has closed its links."""
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
        """Copies a rank's part into contiguous rows of that size."""
        if rows.nbytes:
            inbox = self._inboxes[peer, turn % 2]
            flat = rows.reshape(-1).view(np.uint8)
            flat[:] = inbox[signal.offset : signal.offset + rows.nbytes]

    def close(self) -> None:
        """Closes the links: a rank that waits for this one, now or later, notices."""
        for link in self.links.values():
            link.close()

    def forget(self) -> None:
        """Closes everything in a forked child, whose links would hide the end of its parent."""
        self.close()
        self._outboxes.clear()
        self._inboxes.clear()


class FailureReasons:
    """Why ranks closed their links, in shared memory that outlives their processes."""

    def __init__(self, peers: dict[int, socket.socket]) -> None:
        """Shares memory between all ranks, which must call it. OSError: a rank is gone."""
        self._mine, file = _shared_memory(_REASON_BYTES)
        try:
            for link in peers.values():
                socket.send_fds(link, [b"memory"], [file])
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
        data = np.frombuffer(text.encode()[:_REASON_BYTES], np.uint8)
        self._mine[: len(data)] = data

    def of(self, peer: int) -> str:
        return self._theirs[peer].tobytes().rstrip(b"\0").decode(errors="replace")

    def forget(self) -> None:
        """Unmaps the memory, in a forked child."""
        del self._mine
        self._theirs.clear()


_alive: "weakref.WeakSet[Mailboxes | FailureReasons]" = weakref.WeakSet()


def _forget_all() -> None:
    for shared in list(_alive):
        shared.forget()


os.register_at_fork(after_in_child=_forget_all)


class Outbox:
    """Memory of this rank that others may map; grows by powers of two."""

    def __init__(self) -> None:
        self.memory = np.empty(0, np.uint8)

    def reserve(self, num_bytes: int) -> int | None:
        """Grows if needed; returns a file for others to map, which the caller closes, or None."""
        if num_bytes <= len(self.memory):
            return None
        size = max(_SMALLEST_BOX_BYTES, 1 << (num_bytes - 1).bit_length())
        self.memory, file = _shared_memory(size)
        return file


def _shared_memory(size: int) -> tuple[np.ndarray, int]:
    """Returns (size,) uint8 zeros, and a file to map them by, which the caller closes."""
    # Anonymous: not limited by /dev/shm, and a crash leaves nothing behind.
    file = os.memfd_create("sok_lite")
    try:
        os.ftruncate(file, size)
        return np.frombuffer(mmap.mmap(file, size), np.uint8), file
    except BaseException:
        os.close(file)
        raise


def _map(file: int) -> np.ndarray:
    """Maps another rank's memory read-only, (size,) uint8, and closes the file."""
    try:
        return np.frombuffer(mmap.mmap(file, os.fstat(file).st_size, prot=mmap.PROT_READ), np.uint8)
    finally:
        os.close(file)


class LocalCommunicator(Communicator):
    """Ranks that share memory, set up through another communicator of the same ranks."""

    def __init__(
        self, base: Communicator, links: dict[int, socket.socket], reasons: FailureReasons
    ) -> None:
        """Takes a connected socket per other rank, from `connect_local`."""
        super().__init__(base.rank, base.size, base.local_rank)
        self._base = base
        self._boxes = Mailboxes(links)
        self._reasons = reasons
        self._warn_s, self._limit_s = stall_timeouts()

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
        return self._exchange("alltoall", call, rows, split(rows, send_splits))

    def _allgatherv(self, call: str, rows: np.ndarray) -> Gathered:
        return self._exchange("gather", call, rows, [rows] * self.size)

    def _exchange(
        self, kind: str, call: str, rows: np.ndarray, parts: Sequence[np.ndarray]
    ) -> Gathered:
        """Sends parts[rank] to each rank and gathers their parts for this one."""
        header = self._next_header(call, rows)
        headers = header.pack(len(part) for part in parts)
        try:
            self._boxes.send(self.turn, headers, parts, kind == "gather")
            # Receives all signals before checking any, so that none stays unread.
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
        received = np.empty((counts.sum(), rows.shape[1]), rows.dtype)
        into = split(received, counts)
        into[self.rank][:] = parts[self.rank]
        for peer, signal in signals.items():
            self._boxes.take(self.turn, peer, signal, into[peer])
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
            # With a bound: poll accepts at most 2^31 ms.
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

    def _why_gone(self, peer: int, kind: str, error: LinkError) -> str:
        """Returns the error for a rank that is gone."""
        reason = self._reasons.of(peer)
        if reason and not reason.endswith(FAREWELL):
            return reason
        how = reason or f"Rank {peer} has died or has left"
        why = f"{error}. Look at the first error of that rank."
        if reason:
            why = "it waits there for that rank. All ranks must make the same calls."
        return f"{how}, seen by rank {self.rank} in {kind}: {why}"

    def _fail(self, reason: str) -> NoReturn:
        """Closes all links, so that the others notice too, and raises."""
        self._break_off(reason)
        super()._fail(reason)

    def _break_off(self, reason: str) -> None:
        self._failure = reason
        self._reasons.write(reason)
        self._boxes.close()


class MultiHostCommunicator(Communicator):
    """Ranks of several machines, some with several ranks, set up through a base communicator."""

    def __init__(self, base: Communicator, links: dict[int, socket.socket]) -> None:
        """Takes a connected socket per other rank of this machine."""
        super().__init__(base.rank, base.size, base.local_rank)
        self._base = base
        self.notes = base.notes  # exchanged by the base transport
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
        return self._exchange(call, rows, split(rows, send_splits), same=False)

    def _allgatherv(self, call: str, rows: np.ndarray) -> Gathered:
        return self._exchange(call, rows, [rows] * self.size, same=True)

    def _barrier(self, call: str) -> None:
        self.turn += 1
        self._through_base(self._base._barrier, call)

    def _exchange(
        self, call: str, rows: np.ndarray, parts: Sequence[np.ndarray], same: bool
    ) -> Gathered:
        """Sends parts[rank] to each rank and gathers their parts for this one."""
        headers = self._next_header(call, rows).pack(len(part) for part in parts)
        most = max((parts[peer].nbytes for peer in self._boxes.links), default=-1)
        in_memory = most >= _MIN_SHARED_BYTES
        kept = self._here if in_memory else {self.rank}
        away = [part[:0] if rank in kept else part for rank, part in enumerate(parts)]
        splits = np.array([len(part) for part in away], np.int32)
        lost = None
        try:
            if in_memory:
                self._boxes.send(self.turn, headers, parts, same)
        except LinkError as error:
            lost = error  # the base transport knows more, and its error is on all ranks
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
        received = np.empty((counts.sum(), rows.shape[1]), rows.dtype)
        of_ranks = zip(split(received, counts), far.by_rank(), strict=True)
        for rank, (part, from_far) in enumerate(of_ranks):
            if rank == self.rank:
                part[:] = parts[rank]
            elif rank in signals:
                self._boxes.take(self.turn, rank, signals[rank], part)
            else:
                part[:] = from_far
        return Gathered(received, counts)

    def _signals(self, recv_splits: np.ndarray) -> dict[int, Signal]:
        """Returns the signals of ranks whose rows did not come through the base transport."""
        found = {}
        for peer in self._boxes.links:
            signal = None if recv_splits[peer] else self._boxes.look(self.turn, peer)
            if signal is not None:
                found[peer] = signal
        return found

    def _through_base(self, collective: Callable[..., T], *arguments: Any) -> T:
        """Runs a collective of the base transport. If it fails, it fails on all ranks and is the
        last, because the signals of this turn stay unread.
        """
        try:
            return self._base._run_collective(collective, *arguments)
        except CommunicatorError as error:
            self._failure = str(error)
            self._boxes.close()
            raise

    def _break_off(self, reason: str) -> None:
        self._failure = reason
        self._boxes.close()
        # Unless it broke off inside the base transport.
        if self._base._failure is None:
            self._base._failure = reason
            self._base._break_off(reason)


def is_enabled() -> bool:
    """Returns whether local ranks may share memory. ValueError: bad SOK_LITE_COMM_LOCAL."""
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
      base: a connected communicator, used for the set-up, for rows between machines, and to abort
        the job.

    Returns:
      A `LocalCommunicator` if all ranks are on one machine; a `MultiHostCommunicator`, which uses
      both transports, if some share a machine; or `base` if none do (as in separate containers), if
      it shares memory itself (`shares_memory`), or if SOK_LITE_COMM_LOCAL is "0". The same kind on
      all ranks.
    """
    if base.size == 1:
        return base
    token = secrets.token_bytes(_TOKEN_BYTES)
    machine = _machine_id()
    name = f"sok_lite-{secrets.token_hex(16)}".encode()
    contact = b"".join([machine.ljust(_NAME_BYTES), name.ljust(_NAME_BYTES), token])
    contacts = [
        row.tobytes() for row in base.allgatherv(np.frombuffer(contact, np.uint8)[None]).rows
    ]
    machines = [other[:_NAME_BYTES].rstrip() for other in contacts]
    if b"" in machines or len(set(machines)) == base.size:
        return base
    if len(set(machines)) > 1 and base.shares_memory:
        return base
    here = {rank: other for rank, other in enumerate(contacts) if machines[rank] == machine}
    names = {rank: other[_NAME_BYTES : 2 * _NAME_BYTES].rstrip() for rank, other in here.items()}
    tokens = {rank: other[2 * _NAME_BYTES :] for rank, other in here.items()}
    listener = _listener(name, len(here))
    # No rank connects before all listen.
    if not base.allreduce(listener is not None, "min") or listener is None:
        if listener is not None:
            listener.close()
        return base
    links: dict[int, socket.socket] = {}
    reasons = None
    try:
        with listener:
            _connect(links, listener, base.rank, names, tokens)
        reasons = FailureReasons(links)
    except OSError:
        pass
    if not base.allreduce(reasons is not None, "min") or reasons is None:
        for link in links.values():
            link.close()
        return base
    for link in links.values():
        link.settimeout(None)
    links = dict(sorted(links.items()))
    if len(here) < base.size:
        return MultiHostCommunicator(base, links)
    return LocalCommunicator(base, links, reasons)


def _connect(
    links: dict[int, socket.socket],
    listener: socket.socket,
    rank: int,
    names: dict[int, bytes],
    tokens: dict[int, bytes],
) -> None:
    """Connects to earlier ranks of this machine and accepts later ones; fills `links`."""
    for peer in names:
        if peer < rank:
            links[peer] = _socket()
            links[peer].connect(b"\0" + names[peer])
            links[peer].send(_HELLO.pack(rank, tokens[peer]))
    while len(links) < len(names) - 1:
        link, _ = listener.accept()
        link.settimeout(_CONNECT_TIMEOUT_S)
        hello = link.recv(_HELLO.size)
        # Any local process can connect; only ranks of this job know the token.
        if len(hello) == _HELLO.size and _HELLO.unpack(hello)[1] == tokens[rank]:
            links[_HELLO.unpack(hello)[0]] = link
        else:
            link.close()


def _listener(name: bytes, size: int) -> socket.socket | None:
    """Returns a listening socket, or None if the system allows none."""
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
    # SEQPACKET: one send is one receive, and the end of the other process shows.
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link.settimeout(_CONNECT_TIMEOUT_S)
    return link


def _machine_id() -> bytes:
    """Returns an id shared by ranks that can reach each other's abstract sockets, or b""."""
    if not is_enabled() or not hasattr(os, "memfd_create"):
        return b""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}".encode()[:_NAME_BYTES]
    except OSError:
        return b""


def stall_timeouts() -> tuple[float, float]:
    """Returns the seconds between two warnings of a wait, and until it fails; inf: never.

    These are Horovod's settings. It takes unreadable values for 0, so none is rejected here either.
    """
    if _seconds("HOROVOD_STALL_CHECK_DISABLE", 0.0):
        return math.inf, math.inf
    return (
        _seconds("HOROVOD_STALL_CHECK_TIME_SECONDS", 60.0) or math.inf,
        _seconds("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0.0) or math.inf,
    )


def _seconds(name: str, otherwise: float) -> float:
    """Returns a variable's number, 0 or more; `otherwise` if it is missing or invalid."""
    try:
        seconds = float(os.environ.get(name) or otherwise)
    except ValueError:
        return otherwise
    return seconds if 0 <= seconds < math.inf else otherwise
