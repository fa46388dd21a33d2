"""Work of ranks that wait for each other: all succeed, or all raise."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial

import numpy as np

from sok_lite.comm import Communicator, CommunicatorError
from sok_lite.comm.header import save_by
from sok_lite.engine import failure

_CALL = save_by("export_serving()")


class Ranks:
    """The ranks that export a model, any of which may fail alone; `is_first` writes."""

    def __init__(self, comm: Communicator | None) -> None:
        self.comm = comm
        self.is_first = comm is None or comm.rank == 0
        self._has_met = False

    @contextmanager
    def together(self) -> Iterator[None]:
        """A `with` block that all ranks finish together; it raises on all if one has failed.

        The error has the failed rank's number and reason.
        """
        if self.comm is None:
            yield
            return
        try:
            yield
        except CommunicatorError:
            raise
        except Exception as error:
            if not self._has_met:
                # The others are here, or in `meet`.
                with suppress(Exception):
                    failure.together(self.comm, partial(_raise, error), _CALL)
            raise
        failure.together(self.comm, lambda: None, _CALL)

    def meet(self) -> None:
        """Waits for all ranks; raises as `together`, within which every rank must call it."""
        if self.comm is None:
            return
        try:
            failure.together(self.comm, lambda: None, _CALL)
        except Exception:
            self._has_met = True  # all raise this, and none waits for another
            raise

    def to_first(self, array: np.ndarray) -> np.ndarray:
        """Returns the arrays of all ranks, joined, on rank 0; nothing elsewhere.

        Every rank must call it, as `meet`.
        """
        assert self.comm is not None
        self.meet()
        splits = [len(array)] + [0] * (self.comm.size - 1)
        return self.comm.alltoallv(array, splits, call=_CALL).rows

    def reduce(self, number: int, op: str) -> int:
        """Returns the "sum", "min" or "max" over all ranks. Every rank must call it, as `meet`."""
        assert self.comm is not None
        self.meet()
        return int(self.comm.allreduce(np.array([number], np.int64), op, _CALL)[0])


def _raise(error: Exception) -> None:
    raise error
