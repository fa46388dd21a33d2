"""What the package changes of TensorFlow and Keras: nothing before a table, then what guards it."""

import pytest

from tests.support.own_process import run_program
from tests.support.patched_names import (
    OF_CHECKPOINTS,
    OF_LAYERS,
    OF_LOSS_SCALES,
    OF_MODELS,
    OF_OPTIMIZERS,
    OF_SESSIONS,
    PROGRAM,
)


def test_under_keras_3_a_program_without_tables_finds_everything_as_it_was():
    pytest.importorskip("keras")
    text = run_program(PROGRAM, TF_USE_LEGACY_KERAS="0")
    found = {line.split()[0]: line.split()[1:] for line in text.splitlines()}
    assert int(found["LOOKED"][1]) > 10_000
    assert found["BEFORE"] == []
    expected = OF_CHECKPOINTS + OF_LAYERS + OF_LOSS_SCALES + OF_MODELS + OF_SESSIONS
    assert found["AFTER"] == sorted(expected)
    assert found["STOCK"] == OF_OPTIMIZERS
    # One file changes their classes, and each method once.
    assert int(found["CHANGED"][0]) > 40
    assert found["OTHERWISE"] == []
