"""Ctrl-C waits for the end of a block, whatever handler it has."""

import signal
import subprocess
import sys
import threading

import pytest

from sok_lite.backend.uninterrupted import uninterrupted


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


def test_the_handler_that_was_there_is_called_with_its_frame():
    seen = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append((number, frame)))
    try:
        with uninterrupted():
            press()
            assert seen == []
        (number, frame), *others = seen
        assert (number, others) == (signal.SIGINT, []) and frame is not None
        assert signal.getsignal(signal.SIGINT) is not before
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_error_in_the_block_is_told_with_it():
    with pytest.raises(KeyboardInterrupt) as raised, uninterrupted():
        press()
        raise ValueError("of the block")
    assert isinstance(raised.value.__context__, ValueError)
    with pytest.raises(KeyboardInterrupt):
        press()


def test_another_handler_that_the_block_sets_stays():
    before = signal.getsignal(signal.SIGINT)
    try:
        with uninterrupted():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        with uninterrupted():
            press()
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


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


def test_where_ctrl_c_ends_the_process_it_does():
    program = """
import signal
from sok_lite.backend.uninterrupted import uninterrupted
signal.signal(signal.SIGINT, signal.SIG_DFL)
with uninterrupted():
    signal.raise_signal(signal.SIGINT)
"""
    assert subprocess.run([sys.executable, "-c", program]).returncode == -signal.SIGINT
