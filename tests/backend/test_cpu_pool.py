"""The worker threads of the CPU, with Python functions as kernels."""

import ctypes
import os
import threading
import time

import numpy as np
import pytest

from sok_lite.backend import get_backend
from sok_lite.backend.cpu import CpuBackend
from tests.backend.test_backend import gather
from tests.support.helpers import run_threads


class Share(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("first", "end", "of")]


class SokLaunch(ctypes.Structure):
    _fields_ = [
        ("run", ctypes.CFUNCTYPE(None, ctypes.POINTER(Share), ctypes.c_void_p)),
        ("begin", ctypes.c_void_p),
        ("words", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("num_parts", "num_arguments")),
        *((name, ctypes.c_int64) for name in ("workers", "pieces", "probe", "may_spin")),
    ]


def launch(work, sizes, workers, pieces=8, probe=0, may_spin=1):
    """Calls work(part, first, end) for pieces of parts of these sizes."""
    begin = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    numbers = np.arange(len(sizes))

    def run(share, words):
        part = ctypes.cast(words, ctypes.POINTER(ctypes.c_int64))[0]
        assert share[0].of == sizes[part]
        work(part, share[0].first, share[0].end)

    kernel = SokLaunch._fields_[0][1](run)
    arguments = (begin.ctypes.data, numbers.ctypes.data, len(sizes), 1)
    call = SokLaunch(kernel, *arguments, workers, pieces, probe, may_spin)
    get_backend("cpu")._library.sok_launch(ctypes.byref(call))


class Seen:
    """Counts how often each item was worked on, and by which threads."""

    def __init__(self, sizes, seconds=0.0):
        self.counts = [np.zeros(size, np.int64) for size in sizes]
        self.threads = set()
        self._seconds = seconds

    def work(self, part, first, end):
        self.counts[part][first:end] += 1
        self.threads.add(threading.get_ident())
        time.sleep(self._seconds)

    @property
    def all_once(self):
        return all((counts == 1).all() for counts in self.counts)


class Meeting:
    """Where threads wait for what others do, however late they come: a minute for all waits."""

    def __init__(self):
        self._changed = threading.Condition()
        self._end = time.monotonic() + 60

    def wait(self, condition):
        """Returns whether the condition is true."""
        with self._changed:
            self._changed.notify_all()
            return self._changed.wait_for(condition, max(0.0, self._end - time.monotonic()))


@pytest.mark.parametrize("may_spin", [0, 1])
@pytest.mark.parametrize("probe", [0, 1, 5])
@pytest.mark.parametrize("workers", [1, 2, 3, 7, 256])
def test_every_item_is_worked_on_once(workers, probe, may_spin):
    for sizes in ([1], [2], [6], [31, 33], [1, 1, 1], [0, 5, 0, 70, 0], [997]):
        for pieces in (1, 3, 8):
            seen = Seen(sizes)
            launch(seen.work, sizes, workers, pieces, min(probe, sum(sizes)), may_spin)
            assert seen.all_once


@pytest.mark.parametrize("may_spin", [0, 1])
@pytest.mark.parametrize("rest", [0, 1e-4, 2e-3], ids=["awake", "perhaps", "asleep"])
def test_long_work_is_shared_by_all_threads(rest, may_spin):
    """Threads that were started for a larger launch may help too."""
    sizes = [40]
    for _ in range(3):
        seen, meeting = Seen(sizes), Meeting()

        def work(part, first, end, seen=seen, meeting=meeting):
            seen.work(part, first, end)
            if first == 0:
                time.sleep(3e-3)  # the probe: by it the rest is worth all threads
            else:
                meeting.wait(lambda: len(seen.threads) >= 4)

        launch(work, sizes, workers=4, probe=1, may_spin=may_spin)
        assert seen.all_once and len(seen.threads) >= 4
        time.sleep(rest)


def test_a_launch_within_a_launch_runs_on_its_own_thread():
    sizes = [12]
    inner, outer = [], Seen(sizes, seconds=1e-3)

    def work(part, first, end):
        seen = Seen([9])
        launch(seen.work, [9], workers=4)
        inner.append((seen.all_once, seen.threads == {threading.get_ident()}))
        outer.work(part, first, end)

    launch(work, sizes, workers=4, pieces=3)
    assert outer.all_once and len(inner) == 12 and all(once and own for once, own in inner)


def test_whoever_is_held_up_takes_fewer_pieces():
    """The others take those of its range: all, while the first piece waits for them."""
    taken, outcomes, meeting = [], {}, Meeting()

    def work(part, first, end):
        taken.extend(range(first, end))
        outcomes[first] = meeting.wait(lambda: first > 0 or len(taken) == 64)

    launch(work, [64], workers=2, pieces=32)
    assert sorted(taken) == list(range(64)) and outcomes[0]


def test_launches_from_several_threads_with_rests_that_workers_may_sleep_through():
    def some(seed):
        rng = np.random.default_rng(seed)
        for _ in range(100):
            sizes = rng.choice([0, 1, 3, 20, 50], rng.integers(1, 6)).tolist() + [2]
            seen = Seen(sizes)
            probe = int(rng.integers(0, sum(sizes)))
            launch(seen.work, sizes, int(rng.integers(2, 6)), int(rng.integers(1, 9)), probe)
            assert seen.all_once
            time.sleep(rng.choice([0, 1e-5, 2e-4, 1e-3]))

    run_threads(some, 3)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_children_forked_in_the_middle_of_launches_have_threads_of_their_own():
    backend = CpuBackend(num_threads=3)
    backend.grain = 1
    done = threading.Event()

    def go_on():
        while not done.is_set():
            gather(backend, 300)

    thread = threading.Thread(target=go_on)
    thread.start()
    codes = []
    for _ in range(10):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                gather(backend, 300)
                threads = len(os.listdir("/proc/self/task"))
                code = 0 if threads == 3 else 2
            finally:
                os._exit(code)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    done.set()
    thread.join()
    assert codes == [0] * 10
