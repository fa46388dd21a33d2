"""`warm_start`: rows of a TF1 checkpoint for a graph that is about to be trained."""

import numpy as np
import pytest
import tensorflow as tf

from sok_lite import dynamic_embedding as de
from tests.dynamic_embedding.test_file_system import KEYS, rows_of

tf1 = tf.compat.v1


@pytest.fixture
def saved(tmp_path):
    """A checkpoint of variables "a/one", "two" and, with texts as keys, "texts"."""
    with tf.Graph().as_default(), tf1.Session() as session:
        one, two = de.Variable(dim=3, name="a/one"), de.Variable(dim=2, name="two")
        texts = de.Variable(tf.string, dim=1, name="texts")
        session.run(one.upsert(KEYS, rows_of(KEYS)))
        session.run(two.upsert([1, 2], rows_of([1, 2], 2)))
        session.run(texts.upsert(tf.constant(["x", "y"]), [[1.0], [2.0]]))
        return tf1.train.Saver().save(session, str(tmp_path / "c"), global_step=3)


@pytest.fixture
def session():
    with tf.Graph().as_default(), tf1.Session() as session:
        yield session


def held(session, variable):
    keys, rows = session.run(variable.export())
    return dict(zip(keys.tolist(), rows.tolist(), strict=True))


def expected(keys, dim):
    return dict(zip(np.asarray(keys).tolist(), rows_of(keys, dim).tolist(), strict=True))


def test_all_variables(saved, session, tmp_path):
    one = de.Variable(dim=3, name="a/one", devices=["/CPU:0"] * 2)
    two, texts = de.Variable(dim=2, name="two"), de.Variable(tf.string, dim=1, name="texts")
    session.run(two.upsert([2, 9], rows_of([9, 9], 2)))
    session.run(de.warm_start(f"file://{tmp_path}"))  # the latest of a folder
    assert held(session, one) == expected(KEYS, 3)
    assert held(session, two) == expected([1, 2, 9], 2)
    assert held(session, texts) == {b"x": [1.0], b"y": [2.0]}


def test_some_variables(saved, session):
    one, two = de.Variable(dim=3, name="a/one"), de.Variable(dim=2, name="two")
    other = de.Variable(dim=2, name="other")
    for which in ("a/.*", ["no", "a/"], [one]):
        session.run(de.warm_start(saved, which))
        assert held(session, one) == expected(KEYS, 3)
        assert held(session, two) == held(session, other) == {}
        session.run(one.clear())
    session.run(de.warm_start(saved, [other], var_name_to_prev_var_name={"other": "two"}))
    assert held(session, other) == expected([1, 2], 2)


def test_a_hook_warms_one_session(saved, session):
    two = de.Variable(dim=2, name="two")
    clear, export = two.clear(), two.export()
    hook = de.WarmStartHook(saved, [two])
    with tf1.train.MonitoredSession(hooks=[hook]) as first:
        assert first.run(export)[0].tolist() == [1, 2]
        first.run(clear)
    hook.after_create_session(session, None)
    assert session.run(export)[0].tolist() == []


@pytest.mark.parametrize("which", [3, None, [3], ["two", object()]])
def test_what_says_no_variables(saved, session, which):
    with pytest.raises(ValueError, match="a regular expression, a list of them, or a list of"):
        de.warm_start(saved, which)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"name": "b"}, "there is no 'b-keys'"),
        ({"name": "two", "dim": 3}, r"must be float32 of shape \[None, 3\].*shape \[2, 2\]"),
        ({"name": "two", "dim": 2, "key_dtype": tf.int32}, "must be int32.*Received: int64"),
        ({"name": "two", "dim": 2, "key_dtype": tf.string}, "there is no 'two-texts'"),
    ],
)
def test_a_checkpoint_without_such_rows(saved, session, options, text):
    de.Variable(**options)
    with pytest.raises(ValueError, match=text):
        de.warm_start(saved)


def test_it_is_for_graphs(saved, tmp_path):
    with pytest.raises(RuntimeError, match="for graphs of TF1"):
        de.warm_start(saved)
    with tf.Graph().as_default(), pytest.raises(ValueError, match="no checkpoint at"):
        de.warm_start(tmp_path / "nothing")
