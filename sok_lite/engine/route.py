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
    def numbers(self) -> np.ndarray:
        """Its counts and its lookup, (`num_numbers`,) int64 on the host: all but `order`."""
        counts = (self.send_counts.reshape(-1), self.recv_counts.reshape(-1))
        return np.concatenate([*counts, np.array([self.lookup], np.int64)])

    @staticmethod
    def num_numbers(size: int, num_tables: int) -> int:
        """Returns the length of `numbers` for so many ranks and tables."""
        return 2 * size * num_tables + 1

    @staticmethod
    def of(backend: Backend, comm: Communicator, numbers: np.ndarray, order: Array) -> "Route":
        """Returns the route that has these numbers and this order.

        Raises:
          ValueError: they do not fit each other.
        """
        *counts, lookup = numbers.tolist()
        send_counts, recv_counts = np.array(counts, np.int64).reshape(2, comm.size, -1)
        num_keys = 0 if comm.size == 1 else int(send_counts.sum())
        if len(order) != num_keys:
            raise ValueError(
                f"A route of {num_keys} keys was expected. Received: the order of {len(order)}."
            )
        return Route(backend, comm, send_counts, recv_counts, order, lookup)
