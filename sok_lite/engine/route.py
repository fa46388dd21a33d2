"""How a batch of keys travelled to the ranks that own them: rows and gradients follow it."""

from dataclasses import dataclass

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.comm.protocol import Communicator


@dataclass(frozen=True)
class Route:
    """How one batch of keys was sent: all that rows and gradients need to follow it.

    Attributes:
      backend: where the exchanged arrays live.
      comm: the ranks.
      send_counts: (size, num_tables) int64, on the host: keys of each table sent to each rank.
      recv_counts: (size, num_tables) int64, on the host: keys of each table from each rank.
      order: (n,) int32, an array of the backend: the keys of all tables, numbered one table after
        the other, in the order in which they were sent. Empty with one rank.
      lookup: number of the collective in which the keys were sent, equal on all ranks: it
        identifies the lookup.
    """

    backend: Backend
    comm: Communicator
    send_counts: np.ndarray
    recv_counts: np.ndarray
    order: Array
    lookup: int

    @staticmethod
    def alone(backend: Backend, comm: Communicator, num_keys: np.ndarray) -> "Route":
        """Returns the route of keys that stay on this rank, the only one.

        Args:
          num_keys: (num_tables,) int64, keys of each table.
        """
        counts = num_keys[None]
        nothing = backend.xp.empty(0, np.int32)
        return Route(backend, comm, counts, counts, nothing, comm.turn)

    @property
    def num_sent(self) -> np.ndarray:
        """(num_tables,) int64, the number of keys of each table that this rank sent."""
        counts = self.send_counts
        return counts[0] if len(counts) == 1 else counts.sum(axis=0)

    @property
    def num_received(self) -> np.ndarray:
        """(num_tables,) int64, the number of keys of each table that this rank received."""
        counts = self.recv_counts
        return counts[0] if len(counts) == 1 else counts.sum(axis=0)

    @property
    def told(self) -> np.ndarray:
        """All of it but `order`, (k,) int64 on the host: `of_told` takes it."""
        if self.comm.size == 1:
            return np.array([1], np.int64)
        counts = (self.send_counts.reshape(-1), self.recv_counts.reshape(-1))
        return np.concatenate([np.array([self.comm.size, self.lookup], np.int64), *counts])

    @staticmethod
    def of_told(
        backend: Backend, comm: Communicator, told: np.ndarray, order: Array, num_keys: np.ndarray
    ) -> "Route":
        """Returns the route that told this.

        Args:
          order: of the route; it may be longer.
          num_keys: (num_tables,) int64, the keys of each table of this rank.

        Raises:
          ValueError: there are other ranks now, or numbers and order do not fit each other.
        """
        size, *numbers = told.tolist()
        if size != comm.size:
            raise ValueError(
                f"A lookup and its gradient need the same ranks, of which there are {comm.size} "
                f"now. Received: what {size} ranks have sent. Take the gradient of a step before "
                "ranks come or go."
            )
        if size == 1:
            return Route.alone(backend, comm, num_keys)
        lookup, *counts = numbers
        send_counts, recv_counts = np.array(counts, np.int64).reshape(2, size, -1)
        num_sent = int(send_counts.sum())
        if len(order) < num_sent:
            raise ValueError(
                f"A route of {num_sent} keys was expected. Received: the order of {len(order)}."
            )
        return Route(backend, comm, send_counts, recv_counts, order[:num_sent], lookup)
