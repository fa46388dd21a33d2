"""What the ranks of the job do together; with one rank, nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

import sok_lite as sok

T = TypeVar("T")


class Ranks:
    """The processes of this job, after `sok.init`.

    Attributes:
      rank: the number of this process.
      size: the number of processes.
    """

    def __init__(self) -> None:
        self.rank = sok.communication.rank()
        self.size = sok.communication.num_ranks()
        self._hvd: Any = None
        if self.size > 1:
            import horovod.tensorflow as hvd  # one rank needs no Horovod

            self._hvd = hvd

    def share(self, num_rows: int, batch: int) -> slice:
        """Returns which rows of a global batch are this rank's.

        Args:
          num_rows: rows of this batch; the last one of an epoch is smaller than `batch`.
          batch: rows of a whole batch.

        Returns:
          The slice; empty where the rows do not reach this rank.
        """
        # `batch`, not `num_rows`: the borders stay where they are in a smaller batch
        per_rank = -(-batch // self.size)
        start = min(num_rows, self.rank * per_rank)
        return slice(start, min(num_rows, start + per_rank))

    def sum(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sums dense tensors over ranks, each with its like. Every rank must call it."""
        if self._hvd is None:
            return list(tensors)
        return self._hvd.grouped_allreduce(list(tensors), op=self._hvd.Sum)

    def gather(self, array: np.ndarray) -> np.ndarray:
        """Returns the rows of all ranks, in rank order. Every rank must call it."""
        return array if self._hvd is None else self._hvd.allgather(array).numpy()

    def broadcast(self, variables: Sequence[tf.Variable]) -> None:
        """Gives every rank the values of rank 0. Every rank must call it."""
        if self._hvd is not None:
            self._hvd.broadcast_variables(variables, root_rank=0)

    def from_first(self, work: Callable[[], T]) -> T:
        """Lets rank 0 do something, and gives every rank what it returns. Every rank must call it.

        Raises:
          Exception: what `work` raised, on every rank: a rank that failed alone would leave the
            others waiting for it.
        """
        if self._hvd is None:
            return work()
        result: Any = None
        failure: Exception | None = None
        if self.rank == 0:
            try:
                result = work()
            except Exception as error:
                failure = error
        result, failure = self._hvd.broadcast_object((result, failure), root_rank=0)
        if failure is not None:
            raise failure
        return result
