"""Deltas: what has changed in KvVariables since the last full save, saved and restored."""

import numpy as np
import pytest
import tensorflow as tf

from sok_lite import kv_variable as kv
from tests.support.saved_graphs import Saved, Trained, adam, ftrl, of, saved, shrinking, tf1


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


KEYS = [0, 1, 2, -5, 77, -(2**63), 2**63 - 1]


def opened(parts, is_new, **options):
    """Returns a graph with a session, and with what else a program does to keys."""
    graph = Trained(parts, **options)
    with graph.graph.as_default():
        graph.counts = tf1.placeholder(tf.int64, [None])
        graph.delete = graph.variable.delete(graph.keys)
        graph.count = graph.variable.increase_counting(graph.keys, graph.counts)
        graph.saver, graph.its_session = tf1.train.Saver(), tf1.Session()
    graph.run = graph.its_session.run
    if is_new:
        graph.run(graph.initializer)
    return graph


def facts(graph):
    """Rows, counts, times and states of keys, and what is dense."""
    states = {name: rows.tolist() for name, rows in graph.states().items()}
    dense = [each.tolist() for each in graph.run([graph.dense, graph.global_step])]
    return graph.known(KEYS), graph.times(KEYS).tolist(), states, dense


@pytest.mark.parametrize("optimizer", [adam, ftrl, shrinking])
def test_a_program_that_is_interrupted_knows_what_another_does(
    tmp_path, monkeypatch, deltas, optimizer
):
    """Between saves in full and deltas, into other numbers of partitions."""
    now, rng, paths = [1e9], np.random.default_rng(1), []
    monkeypatch.setattr("time.time", lambda: now[0])
    options = {"optimizer": optimizer, "enter_threshold": 3}
    whole, broken = (opened(parts, True, **options) for parts in (None, 2))
    calls = ["train", "train", "look up", "count", "delete", "save", "save"]
    for turn, call in enumerate([*rng.permutation(calls * 3), "train"]):
        now[0] += 100
        keys, counts = rng.choice(KEYS, 4), rng.choice([1, 2, 2**32 - 1], 4)
        for graph in (whole, broken):
            graph.variable.table.record.allows = 0  # native code has the machine's clock
            if call == "train":
                graph.train(keys)
            elif call == "look up":
                graph.look_up(keys)
            elif call in ("count", "delete"):
                fed = {graph.keys: keys} | ({graph.counts: counts} if call == "count" else {})
                graph.run(getattr(graph, call), fed)
        if call == "save":
            path, is_delta = str(tmp_path / str(turn)), bool(paths) and rng.integers(3) > 0
            with broken.graph.as_default():
                if is_delta:
                    paths.append(kv.save_delta(broken.saver, broken.its_session, path))
                else:
                    paths = [broken.saver.save(broken.its_session, path)]
            if rng.integers(3):
                broken.its_session.close()
                broken = opened([None, 1, 2, 3][rng.integers(4)], False, **options)
                # A delta has all that has changed since the full save.
                between = [each for each in paths[1:-1] if rng.integers(2)]
                with broken.graph.as_default():
                    for each in [*paths[:1], *between, *paths[1:][-1:]]:
                        broken.saver.restore(broken.its_session, each)
        assert facts(broken) == facts(whole)


def test_rows_that_training_set_to_zeros_are_listed(tmp_path, deltas):
    graph = Trained(3, shrinking)
    with graph.session() as session:
        saver = tf1.train.Saver()
        graph.look_up([5, 6])
        graph.train([1, 2, -3], [2])
        full = saved(saver.save(session, str(tmp_path / "full")))
        graph.train([1])
        delta = saved(kv.save_delta(saver, session, str(tmp_path / "delta")))
        with graph.graph.as_default():
            assert session.run(graph.variable.total_count) == 2
    assert set(of(full, "keys")) == {5, 6} and set(of(full, "blacklist")) == {1, 2, -3}
    assert of(full, "states").shape[0] == 5 and 1 in of(delta, "blacklist")


def test_what_a_delta_has(tmp_path, enabled):
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
