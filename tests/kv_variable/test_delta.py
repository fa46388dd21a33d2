"""Deltas: what has changed in KvVariables since the last full save, saved and restored."""

import numpy as np
import pytest
import tensorflow as tf

from sok_lite import kv_variable as kv
from tests.support.saved_graphs import FIRST, Saved, Trained, of, saved, shrinking, tf1


@pytest.fixture(params=["call", "environment"])
def enabled(request, monkeypatch):
    """Deltas are enabled, by each of the two ways."""
    if request.param == "call":
        kv.enable_delta_export()
        yield
        kv.disable_delta_export()
    else:
        monkeypatch.setenv("SUPPORT_DELTA_EXPORT", "1")
        yield


@pytest.fixture
def deltas():
    kv.enable_delta_export()
    yield
    kv.disable_delta_export()


@pytest.mark.parametrize("then", [2, None, 5])
def test_a_full_save_and_a_delta_are_the_table(tmp_path, enabled, then):
    ours = Saved(tmp_path)
    again = Trained(then)
    with again.session(initialized=False) as session:
        saver = tf1.train.Saver()
        saver.restore(session, ours.full)
        assert again.known([5, 6, 7]) == ours.known[0]
        saver.restore(session, ours.delta)
        assert again.known([5, 6, 7]) == ours.known[1]
        saver.restore(session, ours.later)
        assert again.known([5, 6, 7]) == ours.known[2]
        again.train(*FIRST)  # with its states too
        assert again.known([5, 6, 7]) == ours.known[3]
        saver.restore(session, ours.full)
        saver.restore(session, ours.later)
        assert again.known([5, 6, 7]) == ours.known[2]


def test_what_a_delta_has(tmp_path, deltas):
    ours = Saved(tmp_path)
    first, later = saved(ours.delta), saved(ours.later)
    # What the last lookup before the full save saw may have changed after it.
    assert set(of(first, "keys")) == {2, 3, 77, 60}
    assert set(of(first, "delete_keys")) == {50, -4}
    assert set(of(later, "keys")) == {1, 2, 3, 50, 60, 88}  # of the first delta as well
    assert set(of(later, "delete_keys")) == {-4, 77}
    for tensors, is_full in [(saved(ours.full), True), (first, False), (later, False)]:
        assert all(
            bool(array) is is_full
            for name, array in tensors.items()
            if name.endswith("-need_full_import")
        )
    assert "dense" in first


def test_deltas_of_shrunk_keys_have_their_states(tmp_path, deltas):
    graph = Trained(2, shrinking)
    with graph.session() as session:
        saver = tf1.train.Saver()
        graph.look_up([1, 2, 3])
        graph.look_up([9])
        full = saver.save(session, str(tmp_path / "full"))
        graph.train([1, 3])
        delta = kv.save_delta(saver, session, str(tmp_path / "delta"))
        known, states = graph.known(), graph.states()
    assert set(of(saved(delta), "blacklist")) == {1, 3}
    again = Trained(3, shrinking)
    with again.session(initialized=False) as session:
        for path in (full, delta):
            tf1.train.Saver().restore(session, path)
        assert again.known() == known
        restored = again.states()
    assert [*restored] == [*states] and len(states) == 2
    for name, rows in states.items():
        np.testing.assert_array_equal(restored[name], rows)


def test_deltas_have_the_sightings_of_keys_without_a_row(tmp_path, deltas):
    graph = Trained(2, enter_threshold=2)
    with graph.session() as session:
        saver = tf1.train.Saver()
        graph.train([1, 1, 2, 3])
        full = saver.save(session, str(tmp_path / "full"))
        graph.train([2, 4])
        delta = kv.save_delta(saver, session, str(tmp_path / "delta"))
        known = graph.known([3, 4])
    again = Trained(2, enter_threshold=2)
    with again.session(initialized=False) as session:
        for path in (full, delta):
            tf1.train.Saver().restore(session, path)
        assert again.known([3, 4]) == known
        assert known[1] == {3: 1, 4: 1} and known[0][2][1] == 2


def test_deltas_go_on_after_a_restore(tmp_path, deltas):
    ours = Saved(tmp_path)
    middle, end = Trained(3), Trained(None)
    with middle.session(initialized=False) as session:
        saver = tf1.train.Saver()
        saver.restore(session, ours.full)
        saver.restore(session, ours.delta)
        middle.train([60, 123])
        known = middle.known()
        path = kv.save_delta(saver, session, str(tmp_path / "again"))
    tensors = saved(path)
    assert set(of(tensors, "keys")) == {2, 3, 60, 77, 123}
    assert set(of(tensors, "delete_keys")) == {50, -4}
    with end.session(initialized=False) as session:
        for each in (ours.full, path):
            tf1.train.Saver().restore(session, each)
        assert end.known() == known


@pytest.fixture
def predicting():
    kv.set_tfplus_saver_mode(0)
    yield
    kv.set_tfplus_saver_mode(1)


def test_a_delta_for_serving_removes_what_has_become_zeros(tmp_path, deltas, predicting):
    graph = Trained(2, shrinking)
    with graph.session() as session:
        saver = tf1.train.Saver([graph.variable])
        rows = graph.look_up([1, 2, 3])
        graph.look_up([9])
        full = saver.save(session, str(tmp_path / "full"))
        graph.train([1, 3])
        delta = kv.save_delta(saver, session, str(tmp_path / "delta"))
    assert set(of(saved(delta), "keys")) == {9}
    assert set(of(saved(delta), "delete_keys")) == {1, 3}
    again = Trained(3, None)
    with again.session() as session:
        saver = tf1.train.Saver([again.variable])
        for path in (full, delta):
            saver.restore(session, path)
        known = again.known()[0]
        assert set(known) == {2, 9} and known[2][0] == tuple(rows[1].tolist())


# ---- what is refused -----------------------------------------------------------------------------


def refuses(saver, session, graph, path, match):
    known, dense = graph.known(), session.run(graph.dense)
    with pytest.raises(tf.errors.InvalidArgumentError, match=match):
        saver.restore(session, path)
    assert graph.known() == known
    np.testing.assert_array_equal(session.run(graph.dense), dense)


def test_a_delta_that_does_not_go_on_from_the_table_is_refused(tmp_path, deltas):
    (tmp_path / "other").mkdir()
    ours, other = Saved(tmp_path), Saved(tmp_path / "other")
    again = Trained(2)
    with again.session() as session:
        saver = tf1.train.Saver()
        refuses(saver, session, again, ours.delta, "(?s)Restore the full save first")
        saver.restore(session, ours.full)
        refuses(saver, session, again, other.delta, "(?s)does not go on from that one")
        saver.restore(session, ours.delta)
        refuses(saver, session, again, other.later, "(?s)does not go on from that one")
        saver.restore(session, ours.full)
        again.train([2, 1234])
        refuses(saver, session, again, ours.delta, "(?s)1 other keys of the table have changed")
        for path in (ours.full, ours.later):
            saver.restore(session, path)
        refuses(saver, session, again, ours.delta, "(?s)other keys of the table have changed")


def test_a_delta_without_a_full_save_is_refused(tmp_path, deltas):
    graph = Trained(2)
    with graph.session() as session:
        saver = tf1.train.Saver()
        graph.train([1])
        with pytest.raises(tf.errors.InvalidArgumentError, match="save in full first"):
            kv.save_delta(saver, session, str(tmp_path / "delta"))
        saver.save(session, str(tmp_path / "full"))
        kv.save_delta(saver, session, str(tmp_path / "delta"))
        graph.train([2])  # and by the name of the placeholder
        names, path = saver.saver_def, str(tmp_path / "named")
        feed = {names.filename_tensor_name: path, "do_full_export:0": False}
        session.run(names.save_tensor_name, feed)
    assert set(of(saved(path), "keys")) == {1, 2}


def test_a_saver_without_deltas_saves_none(tmp_path):
    graph = Trained(2)
    with graph.session() as session:
        saver = tf1.train.Saver()
        graph.train([1])
        saver.save(session, str(tmp_path / "full"))
        with pytest.raises(ValueError, match=r"enable_delta_export\(\) before it is made"):
            kv.save_delta(saver, session, str(tmp_path / "delta"))
        kv.enable_delta_export()
        try:
            second = tf1.train.Saver()
        finally:
            kv.disable_delta_export()
        # The last full save is of the other saver, which has noted no removed keys.
        with pytest.raises(tf.errors.InvalidArgumentError, match="removed keys were noted"):
            kv.save_delta(second, session, str(tmp_path / "delta"))


def test_names_of_tfplus_that_do_nothing():
    kv.enable_full_or_delta_import_v2()
    kv.disable_full_or_delta_import_v2()
    kv.enable_save_v3()
    kv.disable_save_v3()
    kv.set_new_num_shards(3)
