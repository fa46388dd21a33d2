"""Counters of this process for metrics: calls, the time that they took, and bytes."""

import os
import threading

# A signal handler or a finalizer may look up while its thread adds.
_lock = threading.RLock()


def _renew_lock() -> None:
    global _lock
    _lock = threading.RLock()


# In a forked child nobody would release it for a thread of the parent.
os.register_at_fork(after_in_child=_renew_lock)


class WorkDone:
    """Work of one kind. Any thread may add to it.

    Attributes:
      number: how often it was done.
      seconds: what it took on the host, with the wait for the device and for other ranks. An update
        on a GPU does not wait for its kernels: the next call does.
      num_bytes: what it has written or sent.
      last: when it was done last, seconds since 1970; None: never, or nobody says.
    """

    def __init__(self) -> None:
        self.number, self.num_bytes = 0, 0
        self.seconds = 0.0
        self.last: float | None = None

    def add(self, seconds: float = 0.0, num_bytes: int = 0, now: float | None = None) -> None:
        """Notes that it was done once more."""
        with _lock:
            self.number += 1
            self.seconds += seconds
            self.num_bytes += num_bytes
            self.last = now


# Calls from TensorFlow, of all tables together.
LOOKUPS, GRADIENTS, UPDATES = WorkDone(), WorkDone(), WorkDone()
# What this rank has sent to others, and its part of dumps that were finished.
SENT_KEYS, SENT_ROWS, SENT_GRADIENTS = WorkDone(), WorkDone(), WorkDone()
DUMPS = WorkDone()
