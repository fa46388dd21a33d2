"""Counters of this process for metrics: calls, their time, and bytes."""

import ctypes
import os
import threading
import time

# When this module was imported, seconds since 1970.
BEGAN = time.time()

# Reentrant: a signal handler or a finalizer may look up while its thread adds.
_lock = threading.RLock()


def _renew_lock() -> None:
    global _lock
    _lock = threading.RLock()


# In a forked child nobody would release it for a thread of the parent.
os.register_at_fork(after_in_child=_renew_lock)


class WorkCounter:
    """Counts calls of one kind. Any thread may add to it.

    Attributes:
      number: of calls.
      seconds: time on the host, with the wait for the device and for other ranks. An update on a
        GPU does not wait for its kernels: the next call does.
      native: (2,) int64, to which native code adds calls and nanoseconds; `number` and `seconds`
        include them.
      num_bytes: written or sent.
      last: time of the last call, seconds since 1970; None: there was none, or it gave no time.
      is_read: whether the program exports metrics, so that costly measurements pay.
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
        """Adds one call."""
        with _lock:
            self._number += 1
            self._seconds += seconds
            self.num_bytes += num_bytes
            self.last = now


class TrainingProgress:
    """Progress of training.

    Attributes:
      number: of steps over all runs; None: unknown.
      last: end of the last one, seconds since 1970.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self.last = 0.0

    def reach(self, number: int) -> None:
        """Sets the number of steps that are done now."""
        self.number, self.last = number, time.time()


# Steps of training, as a Checkpoint or an Autosave counts them.
STEPS = TrainingProgress()
# Calls from TensorFlow, of all tables together.
LOOKUPS, GRADIENTS, UPDATES = WorkCounter(), WorkCounter(), WorkCounter()
# What this rank has sent to others, and its part of dumps that were finished.
SENT_KEYS, SENT_ROWS, SENT_GRADIENTS = WorkCounter(), WorkCounter(), WorkCounter()
DUMPS = WorkCounter()
# Batches that training has taken, and its wait for them.
INPUT_WAITS = WorkCounter()
