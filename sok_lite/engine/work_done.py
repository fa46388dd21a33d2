"""Counters of this process for metrics: calls, the time that they took, and bytes."""

import ctypes
import os
import threading
import time

# When the process began with it, seconds since 1970.
BEGAN = time.time()

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
      native: (2,) int64, what native code has done of it, to which that adds: how often, and how
        many nanoseconds. `number` and `seconds` have it.
      num_bytes: what it has written or sent.
      last: when it was done last, seconds since 1970; None: never, or nobody says.
      is_read: whether the program has metrics made, so that it is worth to time what costs time.
    """

    is_read = False

    def __init__(self) -> None:
        self._number, self.num_bytes = 0, 0
        self._seconds = 0.0
        self.last: float | None = None
        self.native = (ctypes.c_int64 * 2)()

    @property
    def number(self) -> int:
        return self._number + self.native[0]

    @property
    def seconds(self) -> float:
        return self._seconds + 1e-9 * self.native[1]

    def add(self, seconds: float = 0.0, num_bytes: int = 0, now: float | None = None) -> None:
        """Notes that it was done once more."""
        with _lock:
            self._number += 1
            self._seconds += seconds
            self.num_bytes += num_bytes
            self.last = now


class Reached:
    """How far training has come.

    Attributes:
      number: of steps over all runs; None: nobody says.
      last: when the last one ended, seconds since 1970.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self.last = 0.0

    def reach(self, number: int) -> None:
        """Notes how many steps are done now."""
        self.number, self.last = number, time.time()


# Steps of training, as a Checkpoint or an Autosave counts them.
STEPS = Reached()
# Calls from TensorFlow, of all tables together.
LOOKUPS, GRADIENTS, UPDATES = WorkDone(), WorkDone(), WorkDone()
# What this rank has sent to others, and its part of dumps that were finished.
SENT_KEYS, SENT_ROWS, SENT_GRADIENTS = WorkDone(), WorkDone(), WorkDone()
DUMPS = WorkDone()
# Batches that training has taken, and how long it waited for them.
INPUT_WAITS = WorkDone()
