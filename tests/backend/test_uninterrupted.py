"""Ctrl-C and other signals wait for the end of a block, whatever handlers they have."""

import asyncio
import ctypes
import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from sok_lite.backend.uninterrupted import uninterrupted


@pytest.fixture(autouse=True)
def same_handlers():
    """The handlers that a test sets are gone after it."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def press():
    signal.raise_signal(signal.SIGINT)


def test_ctrl_c_comes_at_the_end_of_the_outermost_block():
    done = []
    with pytest.raises(KeyboardInterrupt):
        with uninterrupted():
            with uninterrupted():
                press()
                done.append("inner")
            press()
            done.append("outer")
        done.append("after")
    assert done == ["inner", "outer"]
    with pytest.raises(KeyboardInterrupt):
        press()
    with uninterrupted():
        pass  # the one before does not come again


def test_the_handler_that_was_there_is_called_once():
    seen = []
    signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    with uninterrupted():
        press()
        press()
        assert seen == []
    assert seen == [signal.SIGINT]
    press()
    assert seen == [signal.SIGINT] * 2


def test_every_handler_runs_though_another_raises():
    """A job that gets SIGTERM and reaches a time limit within one change."""
    seen = []

    def end(number, frame):
        seen.append(number)
        if len(seen) == 1:
            raise SystemExit

    others = (signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1)
    for number in others:
        signal.signal(number, end)
    with pytest.raises(SystemExit), uninterrupted():
        for number in others:
            signal.raise_signal(number)
        assert seen == []
    assert sorted(seen) == sorted(others)


def test_an_error_in_the_block_is_told_with_it():
    with pytest.raises(KeyboardInterrupt) as raised, uninterrupted():
        press()
        raise ValueError("of the block")
    assert isinstance(raised.value.__context__, ValueError)
    with pytest.raises(KeyboardInterrupt):
        press()


def test_another_handler_that_the_block_sets_stays():
    with uninterrupted():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    with uninterrupted():
        press()
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


def test_other_threads_neither_hold_it_back_nor_give_it_up():
    entered, leave = threading.Event(), threading.Event()

    def other():
        with uninterrupted():
            entered.set()
            leave.wait()

    thread = threading.Thread(target=other)
    thread.start()
    entered.wait()
    with pytest.raises(KeyboardInterrupt):
        press()
    done = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        press()
        leave.set()
        thread.join()
        done.append("still held back")
    assert done


class Action(ctypes.Structure):
    """`struct sigaction` of Linux, whose mask keeps some words that nobody writes."""

    _fields_ = (
        *[("handler", ctypes.c_void_p), ("mask", ctypes.c_uint64), ("_", ctypes.c_uint64 * 15)],
        *[("flags", ctypes.c_int), ("restorer", ctypes.c_void_p), ("_end", ctypes.c_char * 256)],
    )


def system_action(number):
    action = Action()
    assert ctypes.CDLL(None).sigaction(int(number), None, ctypes.byref(action)) == 0
    return action.handler, action.mask, action.flags


def test_system_calls_go_on_after_a_signal_as_the_program_has_asked():
    """`siginterrupt` sets SA_RESTART, which `signal.signal` clears."""
    signal.signal(signal.SIGALRM, lambda *_: None)
    actions = []
    for flag in (True, False, True):
        signal.siginterrupt(signal.SIGALRM, flag)
        actions.append(system_action(signal.SIGALRM))
        with uninterrupted():
            assert system_action(signal.SIGALRM) == actions[-1]
        assert system_action(signal.SIGALRM) == actions[-1]
    assert actions[0] == actions[2] != actions[1]


def test_faulthandler_goes_on_with_the_signals_that_it_was_given(tmp_path):
    """It prints in a handler in C, which calls that of Python (`chain=True`)."""
    seen, log = [], tmp_path / "log"
    signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    with open(log, "w") as file:
        faulthandler.register(signal.SIGUSR1, file, all_threads=False, chain=True)
        try:
            with uninterrupted():
                signal.raise_signal(signal.SIGUSR1)
                assert seen == [] and log.read_text().count("most recent call first") == 1
            assert seen == [signal.SIGUSR1]
            signal.raise_signal(signal.SIGUSR1)
            assert log.read_text().count("most recent call first") == 2 and len(seen) == 2
        finally:
            faulthandler.unregister(signal.SIGUSR1)


def test_where_ctrl_c_ends_the_process_it_does():
    program = """
import signal
from sok_lite.backend.uninterrupted import uninterrupted
signal.signal(signal.SIGINT, signal.SIG_DFL)
with uninterrupted():
    signal.raise_signal(signal.SIGINT)
"""
    assert subprocess.run([sys.executable, "-c", program]).returncode == -signal.SIGINT


def test_a_child_of_another_thread_has_the_handlers_that_were_there():
    """It is forked within a block of the main thread, which ends in the parent alone."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
    ends = []

    def fork():
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            for _ in range(1000):
                time.sleep(0.01)
            os._exit(1)
        ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    with uninterrupted():
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()
    assert ends == [7]


def test_a_loop_of_asyncio_hears_of_a_signal_once():
    async def program():
        heard, loop = [], asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, heard.append, 1)
        with uninterrupted():
            signal.raise_signal(signal.SIGTERM)
        for _ in range(10):
            await asyncio.sleep(0.01)
        loop.remove_signal_handler(signal.SIGTERM)
        return heard

    assert asyncio.run(program()) == [1]
