"""Shared memory between ranks of one machine, with signals through sockets.

A rank writes the rows that it sends into its outbox and signals to each of the others where its
part lies; they copy it out. Every rank has two outboxes and uses them in turn: the content of one
may be read until its owner has met its readers in two more collectives.
"""

import mmap
import os
import select
import socket
import struct
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sok_lite.comm.header import HEADER_BYTES, turn_of

_SMALLEST_BOX_BYTES = 1 << 16
# A header, and where this part begins in the outbox.
_SIGNAL = struct.Struct(f"<{HEADER_BYTES}sq")
_LAST_WORDS_BYTES = 4096


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
