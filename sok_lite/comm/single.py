"""The communicator of a single process, which receives what it sends."""

import os
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from sok_lite.comm.protocol import Communicator, Gathered, JobAborted, T


class SingleCommunicator(Communicator):
    """One rank. Returns arguments instead of copies where it can."""

    def __init__(self) -> None:
        super().__init__(rank=0, size=1, local_rank=0)

    def abort(self, message: str) -> NoReturn:
        """Raises JobAborted with the message: there is no other process to end."""
        raise JobAborted(message)

    def leave(self) -> None:
        """Does nothing, because no rank waits."""

    def _run_collective(self, collective: Callable[..., T], call: str, *arguments: Any) -> T:
        # A forked child talks to nobody either. A thread of its parent may have held the lock.
        if os.getpid() != self._process:
            self._process, self._lock = os.getpid(), threading.Lock()
        return super()._run_collective(collective, call, *arguments)

    def _alltoallv(self, call: str, rows: np.ndarray, send_splits: np.ndarray) -> Gathered:
        return Gathered(rows, send_splits)

    def _allgatherv(self, call: str, rows: np.ndarray) -> Gathered:
        return Gathered(rows, np.array([len(rows)], np.int32))

    def _barrier(self, call: str) -> None:
        pass

    def _break_off(self, reason: str) -> None:
        pass
