"""Calls that ranks make together in sessions of TF1: one order, and faults that end no session."""

import contextlib
import gc
import threading
import weakref
from functools import partial

import numpy as np
import pytest
import tensorflow as tf

from sok_lite.backend import get_backend
from sok_lite.bridge import collective_order
from sok_lite.bridge.collective_order import CollectiveOrder
from sok_lite.comm.threads import run_ranks
from sok_lite.native.callbacks import Call, operations
from tests.support.helpers import run_threads
from tests.support.own_process import run_program

v1 = tf.compat.v1
CPU = get_backend("cpu")
FACTS = {"numbers": [], "Tout": [tf.float32], "J": 0, "Tkeys": [], "handles_of": []}
FACTS |= {"dims": [], "trainable": [], "names": []}


def asynchronous(call, given):
    """The operation of a call, which gives one number for one number."""
    make = operations().module.sok_collective_in_order
    return make(call=call.number, inputs=[given], **FACTS).outputs[0]


def summed(comm, number, frame):
    """Sums over ranks; a rank that is in another call is an error."""
    (given,) = frame.inputs(CPU)
    total = comm.allreduce(given, "sum", f"call {number}")
    frame.output(0, (), tf.float32.as_datatype_enum, CPU)[...] = total


class Calls:
    """Calls of a rank, and the calls that it has submitted."""

    def __init__(self, comm):
        self.comm, self.order = comm, CollectiveOrder(comm)
        self.submitted = {}
        self.calls = []

    def sum(self, number, given, run=summed):
        """A sum over ranks as an operation of the default graph."""
        event = self.submitted.setdefault(number, threading.Event())

        def submit(frame, running):
            self.order.submit(number, partial(run, self.comm, number, frame), running)
            event.set()

        self.calls.append(Call(submit, False))
        return asynchronous(self.calls[-1], given)

    def after(self, number, given):
        """The same number, when a call has been submitted."""
        event = self.submitted.setdefault(number, threading.Event())

        def wait(given):
            assert event.wait(60)
            return given

        (result,) = tf.py_function(wait, [given], [tf.float32])
        return tf.ensure_shape(result, [])


def session_of(num_threads):
    config = v1.ConfigProto(use_per_session_threads=True, inter_op_parallelism_threads=num_threads)
    return v1.Session(config=config)


def of_ranks(size, program):
    """What program(calls) gives on each rank, in a graph of its own."""

    def run(comm):
        calls = Calls(comm)
        try:
            with tf.Graph().as_default():
                return program(calls)
        finally:
            calls.order.close()

    return run_ranks(size, run)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_submit_in_other_orders_make_calls_in_one(size):
    numbers = list(range(4))

    def program(calls):
        rank = calls.comm.rank
        mine = np.roll(numbers, rank) if rank else numbers[::-1]
        sums, before = {}, None
        for number in mine:
            given = tf.constant(float(number + rank))
            given = given if before is None else calls.after(before, given)
            sums[number], before = calls.sum(number, given), number
        with session_of(len(numbers)) as session:  # a thread each for what waits in `after`
            return session.run([sums[number] for number in numbers])

    expected = [sum(number + rank for rank in range(size)) for number in numbers]
    assert of_ranks(size, program) == [expected] * size


def test_a_session_of_one_thread_makes_any_number_of_calls():
    def program(calls):
        numbers = range(20) if calls.comm.rank else range(19, -1, -1)
        sums = {number: calls.sum(number, tf.constant(float(number))) for number in numbers}
        again = {number: calls.sum(100 + number, sums[number]) for number in numbers}
        with session_of(1) as session:
            for _ in range(5):
                found = session.run([again[number] for number in range(20)])
                assert found == [4 * number for number in range(20)]

    of_ranks(2, program)


def test_a_session_is_closed_while_a_call_waits():
    """TensorFlow waits for the run, which must go on meanwhile."""
    comes = threading.Event()

    def program(calls):
        total = calls.sum(1, tf.constant(1.0))
        session = v1.Session()
        if calls.comm.rank:
            assert comes.wait(60)
            assert session.run(total) == 2
            return

        def run():
            with contextlib.suppress(tf.errors.CancelledError):
                assert session.run(total) == 2

        running = threading.Thread(target=run)
        running.start()
        assert calls.submitted[1].wait(60)
        threading.Timer(0.2, comes.set).start()
        session.close()
        running.join()

    of_ranks(2, program)


def failing(comm, number, frame):
    raise MemoryError(f"no memory for call {number}")


def test_an_exception_reaches_who_waits_for_that_call_alone():
    def program(calls):
        bad = calls.sum(1, tf.constant(1.0), failing)
        good = calls.sum(2, tf.constant(1.0))
        with v1.Session() as session:

            def work(number):
                if number:
                    assert session.run(good) == 2
                else:
                    with pytest.raises(tf.errors.ResourceExhaustedError, match="for call 1"):
                        session.run(bad)

            for _ in range(3):
                run_threads(work, 2)

    of_ranks(2, program)


def test_the_end_of_a_rank_reaches_all_calls_that_wait():
    waiting = threading.Barrier(2)

    def program(calls):
        if calls.comm.rank:
            waiting.wait(60)
            return
        sums = [calls.sum(number, tf.constant(1.0)) for number in range(3)]
        with v1.Session() as session:

            def work(number):
                if number == 3:
                    assert all(calls.submitted[each].wait(60) for each in range(3))
                    waiting.wait(60)
                    return
                with pytest.raises(tf.errors.UnknownError, match=r"CommunicatorError: .*Rank 1"):
                    session.run(sums[number])

            run_threads(work, 4)

    of_ranks(2, program)


def test_a_call_that_a_rank_does_not_come_to(monkeypatch):
    monkeypatch.setattr(collective_order, "_SUBMIT_TIMEOUT_S", 0.2)
    text = {
        0: "CommunicatorError",
        1: r"TimeoutError: Rank 0 makes a call that rank 1 has not come to for 0.2 s. Run the same",
    }

    def program(calls):
        rank = calls.comm.rank
        other = calls.sum(rank, tf.constant(1.0))
        with v1.Session() as session, pytest.raises(tf.errors.UnknownError, match=text[rank]):
            session.run(other)

    of_ranks(2, program)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_dies_ends_what_was_submitted_and_another_goes_on(monkeypatch):
    """Whatever it dies of, between two calls."""
    make_next, dying = CollectiveOrder._make_next, threading.Event()

    def die(self):
        if dying.is_set():
            dying.clear()
            with self._changed:
                self._changed.wait_for(lambda: self._submitted)
            raise SystemExit
        make_next(self)

    monkeypatch.setattr(CollectiveOrder, "_make_next", die)

    def program(comm):
        calls = Calls(comm)
        with tf.Graph().as_default():
            total = calls.sum(1, tf.constant(3.0))
            with v1.Session() as session:
                dying.set()
                with pytest.raises(tf.errors.CancelledError, match="interrupted"):
                    session.run(total)
                assert session.run(total) == 3
        calls.order.close()

    run_ranks(1, program)


def test_memory_of_a_call_is_let_go_of():
    frames = []

    def note(comm, number, frame):
        frames.append(weakref.ref(frame))
        summed(comm, number, frame)

    def program(calls):
        total = calls.sum(1, tf.constant(1.0), note)
        with v1.Session() as session:
            for _ in range(3):
                session.run(total)
                assert frames.pop()() is None

    gc.collect()
    gc.disable()
    try:
        of_ranks(1, program)
    finally:
        gc.enable()


def run_once(run):
    """Runs an asynchronous operation of a call in a session; returns what it gives."""
    call = Call(run, False)
    with tf.Graph().as_default(), v1.Session() as session:
        return session.run(asynchronous(call, tf.constant(1.0)))


def test_an_operation_that_nobody_can_end_fails():
    with pytest.raises(tf.errors.CancelledError, match="interrupted"):
        run_once(lambda frame, running: None)


def test_an_operation_whose_submission_raises_fails_with_it():
    kept = []

    def submit(frame, running):
        kept.append(running)
        raise ValueError("not so")

    with pytest.raises(tf.errors.InvalidArgumentError, match="ValueError: not so"):
        run_once(submit)
    kept.pop().end()  # it has ended


def test_an_operation_ends_once_and_gives_no_output_after_it():
    kept = []

    def submit(frame, running):
        kept.extend((frame, running))
        frame.output(0, (), tf.float32.as_datatype_enum, CPU)[...] = 5
        running.end()
        running.end(ValueError("too late"))

    assert run_once(submit) == 5
    with pytest.raises(RuntimeError, match="the operation has ended"):
        kept[0].output(0, (), tf.float32.as_datatype_enum, CPU)


def test_an_eager_call_waits_for_its_end():
    threads = []

    def submit(frame, running):
        def work():
            frame.output(0, (), tf.float32.as_datatype_enum, CPU)[...] = frame.inputs(CPU)[0] + 1
            running.end()

        threads.append(threading.Thread(target=work))
        threads[-1].start()

    call = Call(submit, True)
    make = operations().module.sok_collective_in_order
    (result,) = make(call=call.number, inputs=[tf.constant(4.0)], **FACTS).outputs
    assert result.numpy() == 5
    threads.pop().join()


# A child has none of its parent's calls, and does not end them. Then the process ends while a
# session waits in another thread.
PROGRAM = """
    import contextlib, os, threading
    import tensorflow as tf
    from sok_lite.bridge import collective_order
    from sok_lite.bridge.collectives import agreed_sum
    from sok_lite.comm.threads import ThreadsCommunicator, _World
    tf.compat.v1.disable_eager_execution()
    total = agreed_sum(ThreadsCommunicator(_World(2), 0), tf.constant(1.0), {}, "a sum")
    session = tf.compat.v1.Session()
    submitted, results = threading.Event(), []
    submit = collective_order.CollectiveOrder.submit

    def note(*args):
        submit(*args)
        submitted.set()

    collective_order.CollectiveOrder.submit = note
    def run():
        # It fails where the process ends, and could not say so: Python has no streams by then.
        with contextlib.suppress(tf.errors.OpError):
            results.append(session.run(total))
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    submitted.wait()
    child = os.fork()
    if child == 0:
        assert not collective_order._orders
        collective_order._close_all()
        os._exit(0 if thread.is_alive() or not results else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert not results
    print("done")
"""


def test_a_process_that_waits_for_a_rank_that_never_comes_forks_and_ends():
    assert run_program(PROGRAM, timeout=120) == "done\n"
