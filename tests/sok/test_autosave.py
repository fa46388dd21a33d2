"""`Autosave` on one rank; tests/ranks/test_autosave.py has it over several."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok

ROOT = Path(__file__).resolve().parents[2]


def test_it_saves_every_so_many_steps():
    for every, steps, expected in (
        (3, range(1, 10), [3, 6, 9]),
        (3, [2, 5, 9, 10, 20], [5, 9, 20]),  # several steps in a call
        (3, range(4, 8), [6]),  # a run that goes on
        *((every, range(1, 5), []) for every in (None, "2h")),
    ):
        saved = []
        with sok.Autosave(saved.append, every) as saves:
            for step in steps:
                saves.after(step)
        assert saved == expected


@pytest.mark.cases("arguments")
@pytest.mark.parametrize(
    ("arguments", "error", "reason"),
    [
        ((3,), TypeError, "`save` must be a function of the number of steps"),
        (([],), TypeError, "`save` must be a function"),
        ((print, 0), ValueError, "`every` must be at least 1"),
        ((print, 1.5), TypeError, "`every` must be an integer"),
        ((print, "10 minutes"), ValueError, "a time such as .*Received: every='10 minutes'"),
        ((print, "0s"), ValueError, "Received: every='0s'"),
    ],
)
def test_wrong_arguments_are_refused(arguments, error, reason):
    with pytest.raises(error, match=reason):
        sok.Autosave(*arguments)


def test_a_tf_function_does_not_save():
    with pytest.raises(ValueError, match="must be one of 'warn', 'raise'"):
        sok.Autosave(print, on_error="ignore")
    with sok.Autosave(print) as saves, pytest.raises(RuntimeError, match="outside of the tf.func"):
        tf.function(lambda: saves.after(1))()


def test_a_dump_in_the_background_counts_by_itself(tmp_path):
    table = sok.DynamicVariable(2, name="rows")
    tf.nn.embedding_lookup(table, np.arange(5))
    begun = []

    def save(steps):
        begun.append(sok.dump(tmp_path / "dump", table, background=not saves.ends))
        return begun[-1]

    with sok.Autosave(save, every=2) as saves:
        saves.after(2)
    begun[0].wait()  # what is over, is over
    again = sok.DynamicVariable(2, name="rows")
    sok.load(tmp_path / "dump", again)
    assert len(again) == 5


# A program that is told to end: while it trains, in a forked child, after it.
TOLD = """
import os, signal, sys
import sok_lite as sok

def handler(number, frame):
    print("own handler", flush=True)

WAY = sys.argv[1]
if WAY == "own":
    signal.signal(signal.SIGTERM, handler)
if WAY == "ignored":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
with sok.Autosave(lambda steps: print("saved", steps, flush=True)) as saves:
    if WAY == "child":
        here, there = os.pipe()
        child = os.fork()
        if not child:
            os.write(there, b".")  # what comes while Python forks, Python forgets
            signal.pause()
        os.read(here, 1)
        os.kill(child, signal.SIGTERM)
        print("child", os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
    for steps in range(1, 6):
        if steps == 3 and WAY != "child":
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
        saves.after(steps)
print("through", flush=True)
if WAY != "ignored":
    os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.parametrize(
    ("way", "code", "printed"),
    [
        ("training", 143, ["saved 3"]),
        ("own", 143, ["own handler", "own handler", "saved 3"]),
        ("ignored", 0, ["through"]),
        ("child", -signal.SIGTERM, ["child -15", "through"]),
    ],
)
def test_a_program_that_is_told_to_end_saves_and_ends(way, code, printed):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        [sys.executable, "-c", TOLD, way],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment,
    )
    assert done.stdout.splitlines() == printed, done.stderr
    assert done.returncode == code, done.stderr
