"""tests/fuzz/programs.py runs, finds nothing in a few rounds, and finds what is planted."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.own_process import run_program

pytest.importorskip("tensorflow")

ROOT = Path(__file__).resolve().parents[2]
# In one process: to start one takes longer than what it does.
PROGRAM = """
import contextlib
import json
import sys
import warnings
from collections import Counter

import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite.bridge import row_gradient
from sok_lite.engine.table import content
from tests.fuzz import programs as fuzz
from tests.support import state_groups

warnings.simplefilter("ignore")
fuzz.begin()


def found(seeds, *kinds):
    counts = Counter()
    with pytest.MonkeyPatch.context() as patch, fuzz.tables_on("cpu"):
        patch.setattr(fuzz, "_WEIGHTS", dict.fromkeys(kinds, 1) if kinds else fuzz._WEIGHTS)
        for seed in seeds:
            try:
                fuzz.run_round(seed, counts)
            except AssertionError as error:
                return str(error), counts
    return "", counts


def dense(dim):
    return tf.constant([1 << 20, dim])


PLANTED = {
    "a subtraction": (sok.DynamicVariable, "scatter_sub", sok.DynamicVariable.scatter_add),
    "a dense gradient": (row_gradient, "gradient_shape", dense),
    "a number that is believed": (content, "number_of", lambda value, *_: value),
    "an oracle that shares": (state_groups, "for_step", lambda groups, _: (groups or [None])[0]),
}
KINDS = {
    "a subtraction": ["assign", "scatter"],
    "a dense gradient": ["dense"],
    "a number that is believed": ["assign", "forge"],
    "an oracle that shares": ["step"],
}
# Few rounds draw a number and forge it in a place where it is believed.
SEEDS = {"a number that is believed": range(90, 120)}
if "planted" not in sys.argv:
    print("CLEAN", json.dumps(found(range(1, 4))))
for name, planted in PLANTED.items() if "planted" in sys.argv else ():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*planted)
        print("PLANTED", json.dumps([name, found(SEEDS.get(name, range(1, 9)), *KINDS[name])[0]]))
"""


def said(word, *arguments):
    """Returns what the program says in the lines that begin with a word."""
    lines = [line.partition(" ") for line in run_program(PROGRAM, *arguments).splitlines()]
    return [json.loads(rest) for first, _, rest in lines if first == word]


@pytest.mark.full_only("runs random programs")
def test_random_programs_find_nothing():
    ((text, counts),) = said("CLEAN")
    assert text == ""
    assert counts["operations"] > 30


@pytest.mark.full_only("searches four planted faults")
def test_what_is_planted_is_found():
    texts = dict(said("PLANTED", "planted"))
    words = {
        "a subtraction": "rows that were written",
        "a dense gradient": "gave a dense tensor",
        "a number that is believed": "forge",
        "an oracle that shares": "step of",
    }
    assert texts.keys() == words.keys()
    for name, text in texts.items():
        assert words[name] in text and "program: " in text, name


@pytest.mark.full_only("starts another process")
def test_it_says_what_it_does_and_ends_in_time():
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.programs", "--seed", "5", "--operations", "20"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert lines[0] == "round 1 on cpu, seed 5"
    counts = json.loads(lines[-1].removeprefix("RESULT "))
    assert counts["on cpu"] == counts["operations"] >= 20 and counts["failures"] == 0
