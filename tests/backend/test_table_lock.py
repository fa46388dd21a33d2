"""The lock that Python and native code share: kernels/table_lock.h, by both of them."""

import ctypes
import os
import queue
import shutil
import signal
import subprocess
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from sok_lite.backend import get_backend
from sok_lite.backend.table_lock import TableLock, TableLocks
from tests.backend.test_sanitizers import SANITIZERS, Sanitizer, runtime
from tests.support.locks import SLEEPING, compile_locks
from tests.support.own_process import in_child
from tests.support.tripwire import Interrupt

ALONE = 1 << 31
BACKEND = get_backend("cpu")  # it gives locks their functions


@pytest.fixture(scope="module")
def native(tmp_path_factory):
    """Functions that take and give back a lock as native code does, without Python's own lock."""
    target = tmp_path_factory.mktemp("locks") / "locks.so"
    compile_locks(target, ["-O2", "-shared", "-fPIC"])
    library = ctypes.CDLL(str(target))
    for name in ("take_alone", "give_alone", "take_shared", "give_shared"):
        getattr(library, name).argtypes = [ctypes.POINTER(TableLock)]
    return library


class Worker:
    """A thread that does one thing after another. Nobody waits for its end: a test may fail while
    it waits for a lock."""

    def __init__(self):
        self._jobs = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        while (job := self._jobs.get()) is not None:
            done, function, args = job
            try:
                done.set_result(function(*args))
            except BaseException as error:
                done.set_exception(error)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._jobs.put(None)

    def begin(self, function, *args):
        done = Future()
        self._jobs.put((done, function, args))
        return done

    def do(self, function, *args):
        return self.begin(function, *args).result(60)


def wait_until(is_so):
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.001)


def words(lock):
    return lock.state, lock.waiting, lock.depth, lock.owner != 0


FREE = (0, 0, 0, False)


@pytest.fixture
def lock():
    """A lock that is free after the test, too."""
    made = TableLock()
    yield made
    assert words(made) == FREE


# -------------------------------------------------------------------- one thread, then many


def test_a_thread_takes_it_again_and_gives_it_back_as_often(lock):
    with lock:
        assert words(lock) == (ALONE, 0, 1, True)
        with lock, TableLocks([lock]):
            assert words(lock) == (ALONE, 0, 3, True)
            assert lock.acquire(blocking=False) and lock.acquire()
            lock.release()
            lock.release()
        with pytest.raises(ZeroDivisionError), lock:
            raise ZeroDivisionError
        assert words(lock) == (ALONE, 0, 1, True)
        assert lock._is_owned()
    assert not lock._is_owned()


def test_another_thread_does_not_get_it_and_cannot_give_it_back(lock):
    with Worker() as other:
        with lock:
            assert not other.do(lock._is_owned)
            assert not other.do(lock.acquire, False)
            with pytest.raises(RuntimeError, match="given back by a thread that does not have it"):
                other.do(lock.release)
        assert other.do(lock.acquire, False)
        assert other.do(lock._is_owned)
        other.do(lock.release)
    with pytest.raises(RuntimeError, match="given back by a thread that does not have it"):
        lock.release()


def test_counts_of_many_threads_are_exact():
    locks, counts = [TableLock() for _ in range(3)], [0, 0, 0]

    def add(i):
        count = counts[i]
        time.sleep(0)  # another thread's turn
        counts[i] = count + 1

    def work(number):
        for i in range(300):
            mine = (number + i) % 3
            with locks[mine]:
                add(mine)
            with TableLocks(locks[:: 1 if number % 2 else -1]):
                for each in range(3):
                    add(each)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert counts == [8 * 300 + 800] * 3
    assert [words(lock) for lock in locks] == [FREE] * 3


# -------------------------------------------------------------------- native code and Python


def test_python_waits_for_native_code_and_other_threads_of_python_go_on(native, lock):

    def take():
        with lock:
            return words(lock)

    with Worker() as writer, Worker() as waiter:
        writer.do(native.take_alone, lock)
        waiting = waiter.begin(take)
        wait_until(lambda: lock.waiting == 1 and lock.state == ALONE | SLEEPING)
        assert not lock.acquire(blocking=False) and not waiting.done()
        writer.do(native.give_alone, lock)
        assert waiting.result(60)[1:] == (0, 1, True)


def test_native_code_waits_for_python(native, lock):
    with Worker() as writer, Worker() as reader:
        with lock:
            waiting = [
                writer.begin(native.take_alone, lock),
                reader.begin(native.take_shared, lock),
            ]
            wait_until(lambda: lock.waiting == 1)
        waiting[0].result(60)
        writer.do(native.give_alone, lock)
        waiting[1].result(60)
        assert words(lock)[0] & ~SLEEPING == 1
        reader.do(native.give_shared, lock)


def test_several_read_and_who_has_it_alone_may_read(native, lock):
    with Worker() as one, Worker() as two:
        one.do(native.take_shared, lock)
        two.do(native.take_shared, lock)
        assert words(lock) == (2, 0, 0, False)
        assert not lock.acquire(blocking=False)
        one.do(native.give_shared, lock)
        two.do(native.give_shared, lock)
        two.do(native.take_alone, lock)
        two.do(native.take_shared, lock)
        assert words(lock) == (ALONE, 0, 2, True)
        two.do(native.give_shared, lock)
        two.do(native.give_alone, lock)


def test_readers_give_way_to_a_writer_that_waits_but_for_those_that_read_already(native, lock):
    order = []

    def write():
        with lock:
            order.append("writer")

    def read():
        native.take_shared(lock)
        order.append("reader")
        native.give_shared(lock)

    with Worker() as reader, Worker() as writer, Worker() as late:
        reader.do(native.take_shared, lock)
        writing = writer.begin(write)
        wait_until(lambda: lock.waiting == 1)
        reading = late.begin(read)
        reader.do(native.take_shared, lock)
        time.sleep(0.05)  # for a late reader that does not give way
        reader.do(native.give_shared, lock)
        reader.do(native.give_shared, lock)
        writing.result(60)
        reading.result(60)
    assert order == ["writer", "reader"]


def test_each_of_those_that_wait_has_its_turn(native, lock):

    def take_and_give():
        native.take_alone(lock)
        native.give_alone(lock)

    with Worker() as holder, Worker() as one, Worker() as two, Worker() as three:
        holder.do(native.take_alone, lock)
        waiting = [each.begin(take_and_give) for each in (one, two, three)]
        wait_until(lambda: lock.waiting == 3 and lock.state == ALONE | SLEEPING)
        time.sleep(0.05)  # until they sleep
        holder.do(native.give_alone, lock)
        for each in waiting:
            each.result(60)


def test_several_locks_are_taken_in_the_order_of_their_addresses(native):
    locks = sorted((TableLock() for _ in range(7)), key=ctypes.addressof)

    def take_all():
        with TableLocks([locks[i] for i in (3, 0, 6, 2, 5, 1, 4)]):
            return [lock.depth for lock in locks]

    with Worker() as holder, Worker() as taker:
        holder.do(native.take_alone, locks[3])
        waiting = taker.begin(take_all)
        wait_until(lambda: locks[3].waiting == 1)
        assert [lock.depth for lock in locks] == [1, 1, 1, 1, 0, 0, 0]
        holder.do(native.give_alone, locks[3])
        assert waiting.result(60) == [1] * 7
    assert [words(lock) for lock in locks] == [FREE] * 7


# -------------------------------------------------------------------- signals


@pytest.fixture
def signals():
    """Has a function called by a signal again and again, as soon as one is given, until it raises:
    on a busy machine the next signal would else come before the test has stopped them."""
    before = signal.getsignal(signal.SIGALRM)

    def every_moment(handler):
        has_raised = []

        def call(*_):
            if not has_raised:
                try:
                    handler()
                except BaseException:
                    has_raised.append(True)
                    raise

        signal.signal(signal.SIGALRM, call)
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)

    yield every_moment
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def watch(lock):
    """Returns an event: a thread has been seen to wait for a lock. While a handler of its signals
    runs it does not."""
    seen = threading.Event()

    def look():
        wait_until(lambda: lock.waiting == 1)
        seen.set()

    threading.Thread(target=look, daemon=True).start()
    return seen


@pytest.mark.parametrize("several", [False, True])
def test_a_signal_ends_waiting(native, signals, several):
    locks = sorted((TableLock() for _ in range(3)), key=ctypes.addressof)
    last = locks[2]

    def interrupt():
        if waits.is_set():
            raise Interrupt

    def wait():
        with TableLocks(locks) if several else last:
            raise AssertionError("it was taken")

    with Worker() as holder:
        holder.do(native.take_shared, last)
        waits = watch(last)
        signals(interrupt)
        with pytest.raises(Interrupt):
            wait()
        assert [words(lock) for lock in locks] == [*[FREE] * 2, (1, 0, 0, False)]
        holder.do(native.give_shared, last)
    with TableLocks(locks):
        pass
    assert [words(lock) for lock in locks] == [FREE] * 3


def test_a_signal_whose_handler_does_not_raise_ends_nothing(native, lock, signals):
    count, holder = [0], Worker()

    def handle():
        count[0] += waits.is_set()
        if count[0] == 3:
            holder.begin(native.give_alone, lock)

    with holder:
        holder.do(native.take_alone, lock)
        waits = watch(lock)
        signals(handle)
        with lock:
            assert count[0] >= 3


def test_readers_need_not_give_way_to_who_has_given_up(native, lock, signals):
    with Worker() as holder, Worker() as late:
        holder.do(native.take_shared, lock)

        def interrupt():
            if late_ones:
                raise Interrupt
            if waits.is_set():
                late_ones.append(late.begin(native.take_shared, lock))

        late_ones, waits = [], watch(lock)
        signals(interrupt)
        with pytest.raises(Interrupt):
            lock.acquire()
        late_ones[0].result(60)
        late.do(native.give_shared, lock)
        holder.do(native.give_shared, lock)


def test_a_handler_may_read_what_its_thread_waits_for(native, lock, signals):
    read = []

    def handle():
        if read or not waits.is_set():
            return
        read.append(False)
        holder.begin(native.give_alone, lock)
        native.take_shared(lock)
        native.give_shared(lock)
        read[0] = True

    with Worker() as holder:
        holder.do(native.take_alone, lock)
        waits = watch(lock)
        signals(handle)
        with lock:
            assert read == [True]


# -------------------------------------------------------------------- fork


def test_a_child_has_the_locks_of_its_own_thread_alone(native):
    own, written, read, free = (TableLock() for _ in range(4))
    locks = (own, written, read, free)

    def look():
        told = [lock.after_fork() for lock in locks]
        return told, own._is_owned(), [words(lock) for lock in locks]

    none = FREE
    with Worker() as writer, Worker() as reader, own:
        writer.do(native.take_alone, written)
        reader.do(native.take_shared, read)
        assert in_child(look) == repr(([1, 0, 1, 1], True, [(ALONE, 0, 1, True), none, none, none]))
        writer.do(native.give_alone, written)
        reader.do(native.give_shared, read)
    assert [words(lock) for lock in locks] == [none] * 4


# -------------------------------------------------------------------- threads without Python


def contend(target, sanitizer):
    command = [str(target)]
    if sanitizer.env and shutil.which("setarch"):
        command = ["setarch", os.uname().machine, "-R", *command]
    env = {**os.environ, **sanitizer.env}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("kind", ["none", *SANITIZERS])
def test_threads_that_contend(kind, tmp_path):
    sanitizer = SANITIZERS.get(kind, Sanitizer(["-O2"], [], {}))
    for name in sanitizer.runtimes:
        runtime(name)  # or the test is skipped
    compile_locks(tmp_path / "locks", sanitizer.flags)
    done = contend(tmp_path / "locks", sanitizer)
    assert (done.stdout, done.stderr, done.returncode) == ("done\n", "", 0)
