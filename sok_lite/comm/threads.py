"""Ranks as threads of one process, for tests of the whole exchange without a launcher.

A rank that raises, returns early or calls another collective fails the run at once, with an error
that names it; only a rank that hangs runs into the timeout.
"""

import functools
import operator
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import numpy as np

from sok_lite.backend.ragged import split
from sok_lite.comm.header import FAREWELL, advice
from sok_lite.comm.protocol import Communicator, CommunicatorError, Gathered, JobAborted

T = TypeVar("T")


class _World:
    """The meeting point of all ranks: each brings an item, and receives all items."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.failure: str | None = None
        self._condition = threading.Condition()
        self._items: dict[int, Any] = {}
        self._calls: dict[int, str] = {}
        self._meetings = 0
        self._last: list[Any] = []
        self._returned: set[int] = set()

    def meet(self, rank: int, call: str, item: Any) -> list[Any]:
        """Waits for all ranks; returns their items in rank order.

        CommunicatorError: another rank failed, returned, or makes another call.
        """
        with self._condition:
            self._raise_if_broken()
            self._items[rank], self._calls[rank] = item, call
            if self._returned:
                self._break(self._has_returned(min(self._returned), rank))
            elif len(self._items) == self.size and len(set(self._calls.values())) > 1:
                calls = ", ".join(f"rank {r}: {self._calls[r]}" for r in sorted(self._calls))
                self._break(f"Ranks make different calls: {calls}. {advice(self._calls)}")
            self._raise_if_broken()
            if len(self._items) == self.size:
                self._last = [self._items[r] for r in range(self.size)]
                self._items, self._calls = {}, {}
                self._meetings += 1
                self._condition.notify_all()
                return self._last
            meeting = self._meetings
            self._condition.wait_for(lambda: self._meetings != meeting or self.failure is not None)
            if self._meetings == meeting:
                self._raise_if_broken()
            return self._last

    def leave(self, rank: int) -> None:
        """Records that a rank has returned: ranks that wait for it fail."""
        with self._condition:
            self._returned.add(rank)
            if self._items:
                self._break(self._has_returned(rank, min(self._items)))

    def _has_returned(self, rank: int, waiting: int) -> str:
        call = self._calls[waiting]
        told = advice({rank: FAREWELL, waiting: call})
        return f"Rank {rank} returned, rank {waiting} is in {call}. {told}"

    def waiting(self) -> dict[int, str]:
        """Returns the ranks that wait in a collective now, and in which."""
        with self._condition:
            return dict(self._calls)

    def fail(self, reason: str) -> None:
        """Fails every meeting, now and later."""
        with self._condition:
            self._break(reason)

    def _break(self, reason: str) -> None:
        if self.failure is None:
            self.failure = reason
        self._condition.notify_all()

    def _raise_if_broken(self) -> None:
        if self.failure is not None:
            raise CommunicatorError(self.failure)


class ThreadsCommunicator(Communicator):
    """One rank of `run_ranks`."""

    def __init__(self, world: _World, rank: int) -> None:
        super().__init__(rank, world.size, local_rank=rank)
        self._world = world

    def abort(self, message: str) -> NoReturn:
        """Raises JobAborted here; the other ranks get an error from their next collective."""
        self._world.fail(f"Rank {self.rank} aborted: {message}")
        raise JobAborted(message)

    def leave(self) -> None:
        self._world.leave(self.rank)

    def _alltoallv(self, call: str, rows: np.ndarray, send_splits: np.ndarray) -> Gathered:
        # A copy: the sender may overwrite its rows before the last receiver has read them.
        mine = [part.copy() for part in split(rows, send_splits)]
        everyone = self._meet(f"{call} {rows.dtype}(n, {rows.shape[1]})", mine)
        return _gather([parts[self.rank] for parts in everyone])

    def _allgatherv(self, call: str, rows: np.ndarray) -> Gathered:
        return _gather(self._meet(f"{call} {rows.dtype}(n, {rows.shape[1]})", rows.copy()))

    def _barrier(self, call: str) -> None:
        self._meet(call, None)

    def _break_off(self, reason: str) -> None:
        self._world.fail(reason)

    def _meet(self, call: str, item: Any) -> list[Any]:
        self.turn += 1
        met = self._world.meet(self.rank, call, (self.notes.sent(), item))
        self.notes.of_all = functools.reduce(operator.or_, (notes for notes, _ in met))
        return [each for _, each in met]


def run_ranks(size: int, fn: Callable[[Communicator], T], timeout: float = 60.0) -> list[T]:
    """Runs fn(comm) on `size` threads, one per rank, and waits for all.

    Args:
      fn: the program of every rank; `comm.rank` tells them apart.

    Returns:
      The results of fn by rank.

    Raises:
      Exception: what fn raised, on the rank that raised first.
      TimeoutError: a rank was still running after `timeout`.
    """
    world = _World(size)
    results: dict[int, T] = {}
    errors: list[tuple[int, BaseException]] = []  # in the order they happened

    def run(rank: int) -> None:
        try:
            comm = ThreadsCommunicator(world, rank)
            results[rank] = fn(comm)
            comm.leave()
        except BaseException as error:  # re-raised in the caller's thread
            errors.append((rank, error))
            world.fail(f"Rank {rank} failed: {type(error).__name__}: {error}")

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank-{rank}", daemon=True)
        for rank in range(size)
    ]
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if errors:
        rank, error = errors[0]
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(f"Raised on rank {rank} of {size}.")
        raise error
    running = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    if running:
        waiting = "".join(f" Rank {r} waits in {call}." for r, call in world.waiting().items())
        reason = f"Ranks {running} were still running after {timeout} s.{waiting}"
        world.fail(reason)
        raise TimeoutError(reason)
    return [results[rank] for rank in range(size)]


def _gather(parts: list[np.ndarray]) -> Gathered:
    return Gathered(np.concatenate(parts), np.array([len(part) for part in parts], np.int32))
