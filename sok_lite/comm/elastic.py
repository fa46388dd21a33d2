"""The communicator of an elastic job, which survives reconnecting the ranks.

Objects and traced functions that refer to it go on with the ranks of the new connection.
"""

from collections.abc import Callable

import numpy as np

from sok_lite.comm.protocol import Communicator, Gathered


class ElasticCommunicator(Communicator):
    """The ranks of an elastic job.

    `rank`, `size`, `local_rank` and `turn` are those of the current connection. After `disconnect`
    every collective raises CommunicatorError, until `reconnect`.
    """

    def __init__(self, connect: Callable[[], Communicator]) -> None:
        self._connect, self._inner = connect, connect()
        super().__init__(self._inner.rank, self._inner.size, self._inner.local_rank)
        self.turn = self._inner.turn  # connecting may have taken collectives

    def reconnect(self) -> None:
        """Connects the present ranks. Every rank must call it. CommunicatorError: one has died."""
        self._inner.disconnect()
        self._inner = inner = self._connect()
        self.rank, self.size, self.local_rank = inner.rank, inner.size, inner.local_rank
        self.turn, self._failure = inner.turn, None

    def disconnect(self) -> None:
        self._inner.disconnect()

    @property
    def connection(self) -> Communicator:
        return self._inner

    @property
    def is_alone(self) -> bool:
        return False

    def abort(self, message: str) -> None:
        self._inner.abort(message)

    def leave(self) -> None:
        self._inner.leave()

    def _alltoallv(self, call: str, rows: np.ndarray, send_splits: np.ndarray) -> Gathered:
        inner = self._inner
        return self._run_inner(
            lambda: inner._run_unlocked(inner._alltoallv, call, rows, send_splits)
        )

    def _allgatherv(self, call: str, rows: np.ndarray) -> Gathered:
        inner = self._inner
        return self._run_inner(lambda: inner._run_unlocked(inner._allgatherv, call, rows))

    def _run_inner(self, collective: Callable[[], Gathered]) -> Gathered:
        self._inner.turn = self.turn  # a transport runs collectives of its own
        try:
            return collective()
        finally:
            self.turn = self._inner.turn

    def _break_off(self, reason: str) -> None:
        self._inner._break_off(reason)
