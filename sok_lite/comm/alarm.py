"""The alarm: a rank that cannot go on tells the others, even while they wait on their GPUs.

A wait for a GPU that waits for another GPU never ends by itself, and no collective can begin
meanwhile. So the ranks also have sockets, in a ring, and each a thread that listens. A message is
sent round in both directions: a rank that dies breaks the ring in one place only.

Each rank also tells the next which call it begins. Ranks that are in different calls would wait on
their GPUs for messages that are never sent; the alarm tells them.

A message of a living rank takes effect after the sender's last collective: every rank has begun
that one, or it would not have ended, and all can complete it.
"""

import os
import select
import socket
import struct
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from sok_lite.comm.protocol import Communicator
from sok_lite.comm.ring import connect_ring
from sok_lite.comm.stalls import stall_limits

_TICK_S = 1.0
# Bytes of text that follow; kind; epoch; number of the collective.
_FRAME = struct.Struct("<IBqq")
_BEGINS, _FAILS, _ENDS, _LEAVES = range(4)


class _Begun(NamedTuple):
    """A collective that a rank has begun."""

    epoch: int
    turn: int
    call: str


class Alarm:
    """The sockets of a rank to its neighbors in the ring, and the messages received.

    Attributes:
      reason: why this rank cannot go on, or None.
      is_final: whether ranks cannot continue after that either.
    """

    def __init__(
        self, comm: Communicator, ended: Callable[[], None], look: Callable[[], str | None]
    ) -> None:
        """Connects the ring. Every rank must call it, in a collective of `comm`.

        Args:
          comm: brings the ranks together.
          ended: called after a reason is set, by the thread that received it.
          look: called about once a second; returns why this rank cannot go on, or None.

        Raises:
          CommunicatorError: a rank cannot be reached; on all ranks.
        """
        self.reason: str | None = None
        self.is_final = False
        self._comm, self._ended, self._look = comm, ended, look
        self._lock = threading.RLock()
        self._rings = threading.Event()
        self._epoch = 0  # counts what ranks have gone on after
        self._at: int | None = None  # the collective that this rank is in
        self._call = ""  # what that is called
        # Of another rank: its last collective, and why it does not come to the next.
        self._failed: tuple[int, str] | None = None
        self._left: tuple[int, str] | None = None
        self._early: list[tuple[int, int, str]] = []  # of an epoch to come
        # Calls that this rank or the one before it has begun, and the other not yet.
        self._mine: deque[_Begun] = deque()
        self._theirs: deque[_Begun] = deque()
        self._since = self._noted = time.monotonic()
        self._warn_s, self._limit_s = stall_limits()
        self._is_closed = False
        self._links = connect_ring(comm)
        self._farewells: set[socket.socket] = set()  # whose ranks have said that they leave
        _alive.add(self)
        threading.Thread(target=self._listen, name="sok_lite-alarm", daemon=True).start()

    # ---------------------------------------------------------------- what this rank says

    def begin(self, call: str) -> None:
        """Notes that this rank begins a collective, and tells the rank after it."""
        with self._lock:
            if self.reason is not None:
                return
            self._at, self._call = self._comm.turn, call
            self._mine.append(_Begun(self._epoch, self._at, call))
            self._since = self._noted = time.monotonic()
            self._send(0, _BEGINS, self._at, call)
            self._compare()
            self._weigh()

    def end(self) -> None:
        """Notes that this rank is in no collective any more."""
        with self._lock:
            self._at = None
            self._weigh()

    def fail(self, reason: str) -> None:
        """Tells all ranks why this one does not come to the next collective."""
        with self._lock:
            self._has_failed(self._comm.turn, reason)

    def ring(self, reason: str) -> None:
        """Tells all ranks at once why none can go on."""
        with self._lock:
            if not self.is_final:
                self._tell(_ENDS, 0, reason)
                self._set(reason, is_final=True)

    def wait(self, timeout_s: float) -> bool:
        """Returns whether there is a reason, or one arrives within a time."""
        return self._rings.wait(timeout_s)

    def quiet(self) -> None:
        """Clears a reason after which ranks continue. Every rank must call it, at the same time."""
        with self._lock:
            self.reason = self._failed = None
            self._rings.clear()
            self._epoch += 1
            self._mine.clear()
            self._theirs = deque(each for each in self._theirs if each.epoch >= self._epoch)
            early, self._early = self._early, []
            for epoch, turn, reason in early:
                if epoch == self._epoch:
                    self._has_failed(turn, reason)

    def close(self) -> None:
        """Tells the others that this rank makes no more calls. Calls that it has begun continue."""
        with self._lock:
            if self._is_closed:
                return
            text = f"Rank {self._comm.rank} has come to the end of its program."
            self._tell(_LEAVES, self._comm.turn, text)
            self.cut()

    def cut(self) -> None:
        """Closes the links without a word, as the end of the process does."""
        self._is_closed = True
        for link in self._links:
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)

    def forget(self) -> None:
        """Closes the sockets of a forked child, which would hide the end of this process."""
        for link in self._links:
            link.close()

    # ---------------------------------------------------------------- what comes

    def _listen(self) -> None:
        poll = select.poll()
        links = {link.fileno(): (link, bytearray()) for link in self._links}
        for number in links:
            poll.register(number, select.POLLIN)
        while links and not self._is_closed:
            for number, _ in poll.poll(_TICK_S * 1000):
                link, buffer = links[number]
                came = b""
                with suppress(OSError):
                    came = link.recv(1 << 16)
                buffer += came
                self._take_frames(link, buffer)
                if not came:
                    poll.unregister(number)
                    del links[number]
                    self._is_gone(link)
            self._tick()

    def _take_frames(self, link: socket.socket, buffer: bytearray) -> None:
        """Takes all whole frames from a buffer."""
        while len(buffer) >= _FRAME.size:
            length, kind, epoch, turn = _FRAME.unpack_from(buffer)
            end = _FRAME.size + length
            if len(buffer) < end:
                return
            text = bytes(buffer[_FRAME.size : end]).decode(errors="replace")
            del buffer[:end]
            with self._lock:
                if kind == _BEGINS:
                    self._theirs.append(_Begun(epoch, turn, text))
                    self._compare()
                elif kind == _ENDS:
                    self.ring(text)
                elif kind == _LEAVES:
                    self._farewells.add(link)
                    self._has_left(turn, text)
                elif epoch == self._epoch:
                    self._has_failed(turn, text)
                elif epoch > self._epoch:  # the others have gone on already
                    self._early.append((epoch, turn, text))

    def _is_gone(self, link: socket.socket) -> None:
        if not self._is_closed and link not in self._farewells:
            away = 1 if link is self._links[0] else -1
            rank = (self._comm.rank + away) % self._comm.size
            self.ring(f"Rank {rank} has died. Look at its first error.")

    def _has_failed(self, turn: int, reason: str) -> None:
        if self._failed is None:
            self._failed = (turn, reason)
            self._tell(_FAILS, turn, reason)
            self._weigh()

    def _has_left(self, turn: int, reason: str) -> None:
        if self._left is None or turn < self._left[0]:
            self._left = (turn, reason)
            self._tell(_LEAVES, turn, reason)
            self._weigh()

    # ---------------------------------------------------------------- what follows from it

    def _weigh(self) -> None:
        """Applies a message of another rank, once this one is past that rank's last collective."""
        if self._failed is not None:
            turn, reason = self._failed
            if self._comm.turn >= turn if self._at is None else self._at > turn:
                self._set(reason, is_final=False)
        if self._left is not None and self._at is not None and self._at > self._left[0]:
            self._set(self._left[1], is_final=True)

    def _set(self, reason: str, is_final: bool) -> None:
        if self.reason is None or (is_final and not self.is_final):
            self.reason, self.is_final = reason, is_final
            self._rings.set()
            # Before anybody can go on: what it ends must not be what comes after.
            self._ended()

    def _compare(self) -> None:
        """Detects that this rank and the previous one are in different calls."""
        while self._mine and self._theirs and self.reason is None:
            if self._theirs[0].epoch != self._epoch:
                return
            mine, theirs = self._mine.popleft(), self._theirs.popleft()
            if mine != theirs:
                before = (self._comm.rank - 1) % self._comm.size
                self.ring(
                    f"Ranks make different calls: rank {self._comm.rank} is in {mine.call} "
                    f"(collective {mine.turn}), rank {before} in {theirs.call} (collective "
                    f"{theirs.turn}). All ranks must make the same calls in the same order."
                )

    def _tick(self) -> None:
        """Checks whether this rank cannot go on, or has waited long for another."""
        reason = self._look()
        if reason is not None:
            self.ring(reason)
        now, rank = time.monotonic(), self._comm.rank
        with self._lock:
            due = min(self._noted + self._warn_s, self._since + self._limit_s)
            if self._at is None or self.reason is not None or now < due:
                return
            waited_s, self._noted = now - self._since, now
            begun = self._mine[0] if self._mine else None
        before = (rank - 1) % self._comm.size
        # Where both have begun, a GPU is busy, or waits for another communicator on it.
        what = f"its GPU, in {self._call}" if begun is None else f"{begun.call} for rank {before}"
        if waited_s >= self._limit_s:
            self.ring(
                f"Rank {rank} has waited {waited_s:.0f} s in {what} "
                f"(HOROVOD_STALL_SHUTDOWN_TIME_SECONDS={self._limit_s:.0f})."
            )
            return
        print(
            f"sok_lite: rank {rank} has waited {waited_s:.0f} s in {what}. Do all ranks make the "
            "same calls in the same order?",
            file=sys.stderr,
            flush=True,
        )

    def _tell(self, kind: int, turn: int, text: str) -> None:
        for side in range(2):
            self._send(side, kind, turn, text)

    def _send(self, side: int, kind: int, turn: int, text: str) -> None:
        content = text.encode()
        frame = _FRAME.pack(len(content), kind, self._epoch, turn) + content
        with suppress(OSError):  # who is gone is found where that is read
            self._links[side].sendall(frame)


_alive: "weakref.WeakSet[Alarm]" = weakref.WeakSet()


def _forget_all() -> None:
    for alarm in list(_alive):
        alarm.forget()


os.register_at_fork(after_in_child=_forget_all)
