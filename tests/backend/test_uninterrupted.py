"""Ctrl-C and other signals wait for the end of a block, whatever handlers they have."""

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


def test_the_handler_that_was_there_is_called_once():
    seen = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with uninterrupted():
            press()
            press()
            assert seen == []
        assert seen == [signal.SIGINT]
        press()
        assert seen == [signal.SIGINT] * 2
    finally:
        signal.signal(signal.SIGINT, before)


def test_every_handler_runs_though_another_raises():
    """A job that gets SIGTERM and reaches a time limit within one change."""
    seen = []

    def end(number, frame):
        seen.append(number)
        if len(seen) == 1:
            raise SystemExit

    others = (signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1)
    before = {number: signal.signal(number, end) for number in others}
    try:
        with pytest.raises(SystemExit), uninterrupted():
            for number in others:
                signal.raise_signal(number)
            assert seen == []
        assert sorted(seen) == sorted(others)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
