"""The communicator of a single process, which receives what it sends."""

from typing import NoReturn

import numpy as np

from sok_lite.comm.protocol import Communicator, Gathered, JobAborted


class SingleCommunicator(Communicator):
    """One rank. Returns arguments instead of copies where it can."""

    def __init__(self) -> None:
        super().__init__(rank=0, size=1, local_rank=0)

    def abort(self, message: str) -> NoReturn:
        """Raises JobAborted with the message: there is no other process to end."""
        raise JobAborted(message)

    def leave(self) -> None:
        """Does nothing, because no rank waits."""

    def _alltoallv(self, call: str, rows: np.ndarray, send_splits: np.ndarray) -> Gathered:
        return Gathered(rows, send_splits)

    def _allgatherv(self, call: str, rows: np.ndarray) -> Gathered:
        return Gathered(rows, np.array([len(rows)], np.int32))

    def _barrier(self, call: str) -> None:
        pass

    def _break_off(self, reason: str) -> None:
        pass
