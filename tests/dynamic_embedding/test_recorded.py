"""sok_lite.dynamic_embedding answers to the scenarios as TFRA did when it was asked.

tools/record_tfra.py asked it; scenarios.py says what was asked.
"""

import json
from pathlib import Path

import pytest
import tensorflow as tf

from sok_lite import dynamic_embedding as de
from tests.dynamic_embedding.scenarios import SCENARIOS
from tools import record_tfra

pytest.importorskip("tf_keras", reason="no tf_keras, whose optimizers TFRA knows")

ROOT = Path(__file__).resolve().parent.parent.parent
RECORDED = Path(__file__).with_name("recorded_by_tfra.json")
ANSWERS = json.loads(RECORDED.read_text())["answers"]


def differences(ours, recorded, where=""):
    """Yields a line for every place where two answers differ: floats by more than 1e-5."""
    if isinstance(recorded, dict) and isinstance(ours, dict):
        for name in sorted({*recorded, *ours}):
            if name not in ours or name not in recorded:
                yield f"{where}/{name}: only {'recorded' if name in recorded else 'ours'}"
            else:
                yield from differences(ours[name], recorded[name], f"{where}/{name}")
    elif isinstance(recorded, list) and isinstance(ours, list) and len(ours) == len(recorded):
        for place, pair in enumerate(zip(ours, recorded, strict=True)):
            yield from differences(*pair, f"{where}[{place}]")
    elif isinstance(recorded, float) and isinstance(ours, float):
        if ours != pytest.approx(recorded, rel=1e-5, abs=1e-5):
            yield f"{where}: {ours} and not {recorded}"
    elif type(ours) is not type(recorded) or ours != recorded:
        yield f"{where}: {ours} and not {recorded}"


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_has_the_answer_of_tfra(name):
    found = list(differences(SCENARIOS[name](de, tf), ANSWERS[name]))
    assert not found, "\n".join(found[:20])


def test_every_scenario_is_recorded_once():
    assert sorted(ANSWERS) == sorted(SCENARIOS)


def test_the_record_is_written_as_its_tool_writes():
    assert record_tfra.as_text(json.loads(RECORDED.read_text())) == RECORDED.read_text()


@pytest.mark.parametrize(
    ("ours", "line"),
    [
        ({"a": [1.0, 2.0]}, "/a[1]: 2.0 and not 2.5"),
        ({"a": [1.0]}, "/a: [1.0] and not [1.0, 2.5]"),
        ({"a": [1.0, 2.5], "b": 1}, "/b: only ours"),
        ({"a": [1, 2.5]}, "/a[0]: 1 and not 1.0"),
        ({}, "/a: only recorded"),
    ],
)
def test_a_difference_is_seen(ours, line):
    assert list(differences(ours, {"a": [1.0, 2.5]})) == [line]
    assert not list(differences({"a": [1.000009, 2.5]}, {"a": [1.0, 2.5]}))
