"""A transport that sends control by the communicator, through the host, and payload without it."""

from abc import abstractmethod
from contextlib import suppress

import numpy as np

from sok_lite.backend import Array
from sok_lite.comm.gpu_transport import FAILED, NUM_WORDS, Check, Counts, GpuTransport
from sok_lite.comm.protocol import CommunicatorError


class HostControlledTransport(GpuTransport):
    """Exchanges counts and calls by collectives of the host, which compare the calls of all ranks.

    A message that a subclass sends has arrived when its method returns. It also has to raise if a
    rank dies meanwhile.
    """

    @abstractmethod
    def _carried(self, message: Array, send_splits: np.ndarray, recv_splits: np.ndarray) -> Array:
        """Carries a message, (n, 2) int64 of the backend; returns when all has arrived."""

    def counts(
        self, call: str, offsets: Array, num_tables: int, tag: int, check: Check | None
    ) -> Counts:
        self._check_arrays(offsets)
        size, told = self._comm.size, [offsets] if check is None else [offsets, check.count]
        on_host = self._backend.to_host(self._backend.xp.concatenate(told))  # one wait
        if check is not None and on_host[-1]:
            try:
                check.refuse()
            except Exception as error:
                with suppress(CommunicatorError):  # the reason that counts here is still this one
                    self.refuse(call, f"{type(error).__name__}: {error}")
                raise
        sent = np.diff(on_host[: len(offsets)]).reshape(size, num_tables)
        words = np.tile(self._words(call, num_tables, tag), (size, 1))
        theirs = self._exchange(call, np.concatenate([words, sent], axis=1))
        if any(part[FAILED] for part in theirs):
            self._raise_reasons(call, None)
        self._check_tables(np.stack([part[:NUM_WORDS] for part in theirs]), num_tables, tag)
        return Counts(sent, np.stack([part[NUM_WORDS:] for part in theirs]))

    def keys(self, message: Array, send_splits: np.ndarray, recv_splits: np.ndarray) -> Array:
        return self.rows("keys", message, send_splits, recv_splits)

    def rows(
        self, call: str, message: Array, send_splits: np.ndarray, recv_splits: np.ndarray
    ) -> Array:
        self._check_arrays(message)
        # Who fails before it can send is met here: what carries waits for it, and it never comes.
        self._comm.barrier(call)
        return self._comm._together(
            lambda _: self._carried(message, send_splits, recv_splits), call
        )

    def refuse(self, call: str, reason: str) -> None:
        words = np.tile(self._words(call, failed=1), (self._comm.size, 1))
        self._exchange(call, words)
        self._raise_reasons(call, reason)

    def fail(self, call: str) -> None:
        self._comm.barrier(call)

    def _exchange(self, call: str, blocks: np.ndarray) -> list[np.ndarray]:
        """Gives a block to each rank; returns theirs, whose lengths may differ."""
        size, width = blocks.shape
        came = self._comm.alltoallv(blocks.reshape(-1), np.full(size, width), call=call)
        return came.by_rank()
