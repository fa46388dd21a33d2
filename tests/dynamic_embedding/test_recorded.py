"""sok_lite.dynamic_embedding answers to the scenarios as TFRA did when it was asked.

tools/record_tfra.py asked it; scenarios.py says what was asked.
"""

import json
from functools import partial
from pathlib import Path

import pytest
import tensorflow as tf

from sok_lite import dynamic_embedding as de
from tests.dynamic_embedding.scenarios import SCENARIOS
from tests.support.gpu_play import play_gpu
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


def check(names, asked=de):
    """Asks the scenarios of these names, and compares with TFRA's answers."""
    for name in names:
        tf.compat.v1.reset_default_graph()
        found = SCENARIOS[name](asked, tf)
        ours, theirs = (dict(flat(each, name)) for each in (found, ANSWERS[name]))
        kinds = [{place: type(each) for place, each in found.items()} for found in (ours, theirs)]
        assert kinds[0] == kinds[1]
        assert ours == {
            place: pytest.approx(each, rel=1e-5, abs=1e-5) if isinstance(each, float) else each
            for place, each in theirs.items()
        }


def test_every_scenario_has_the_answer_of_tfra():
    """In one test, so that quick asks all of them."""
    assert sorted(ANSWERS) == sorted(SCENARIOS)
    check(SCENARIOS)


class OfKind:
    """sok_lite.dynamic_embedding, in which tables are of one creator where nothing else is said."""

    def __init__(self, creator):
        self._creator = creator

    def __getattr__(self, name):
        found = getattr(de, name)
        is_made = name in ("Variable", "get_variable")
        return partial(found, kv_creator=self._creator) if is_made else found


# Those that say what their tables are, and what tables of a kind do otherwise.
LAYERS = {"embedding_layer", "field_wise_layer", "layer_in_steps", "squashed_layer"}
OTHERWISE = {
    "HKV": {"table_calls_refused", *LAYERS},  # they have scores
    "Redis": {
        *("key_dtypes", "shards_of_text", "trains_text_keys"),  # no keys of text
        # No checkpoint has them.
        *("checkpoint_restores_rows", "saver_of_a_graph", "training_goes_on_after_a_restore"),
        *LAYERS,
    },
}


@pytest.mark.parametrize("kind", ["HKV", "Redis", "simulated GPU"])
@pytest.mark.filterwarnings("ignore:No checkpoint or Saver has the rows")
def test_tables_of_every_kind_have_the_answers_of_tfra(kind, request, monkeypatch):
    if kind == "simulated GPU":
        play = play_gpu(monkeypatch)
        check(SCENARIOS)
        play.check()
    else:
        creator = de.HkvHashTableCreator() if kind == "HKV" else request.getfixturevalue("creator")
        check([name for name in SCENARIOS if name not in OTHERWISE[kind]], OfKind(creator))


def test_the_record_is_written_as_its_tool_writes():
    assert record_tfra.as_text(json.loads(RECORD)) == RECORD
