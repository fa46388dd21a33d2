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

RECORD = Path(__file__).with_name("recorded_by_tfra.json").read_text()
ANSWERS = json.loads(RECORD)["answers"]


def flat(answer, where=""):
    """Yields (place, number or text) of all in an answer, and how long each list in it is."""
    if isinstance(answer, (list, dict)):
        yield where, len(answer)
        pairs = answer.items() if isinstance(answer, dict) else enumerate(answer)
        for name, each in pairs:
            yield from flat(each, f"{where}/{name}")
    else:
        yield where, answer


def test_every_scenario_has_the_answer_of_tfra():
    """In one test, so that quick asks all of them."""
    assert sorted(ANSWERS) == sorted(SCENARIOS)
    for name, scenario in SCENARIOS.items():
        tf.compat.v1.reset_default_graph()
        ours, theirs = (dict(flat(each, name)) for each in (scenario(de, tf), ANSWERS[name]))
        kinds = [{place: type(each) for place, each in found.items()} for found in (ours, theirs)]
        assert kinds[0] == kinds[1]
        assert ours == {
            place: pytest.approx(each, rel=1e-5, abs=1e-5) if isinstance(each, float) else each
            for place, each in theirs.items()
        }


def test_the_record_is_written_as_its_tool_writes():
    assert record_tfra.as_text(json.loads(RECORD)) == RECORD
