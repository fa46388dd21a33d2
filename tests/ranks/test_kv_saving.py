"""Checkpoints of KvVariables over real ranks: each saves its keys, any number of them reads all."""

import contextlib

import pytest
import tensorflow as tf

from sok_lite import kv_variable as kv
from tests.support.lone_rank import lone_rank
from tests.support.saved_graphs import Trained, of, saved, tf1

BATCHES = [[1, 2, 3, -4], [3, 5, -(2**63)], [2**63 - 1, 0, 2]]
AFTER = [[3, 2, 8], [-4, 9]]


IN_TURN = "comm"


def own(comm, known):
    """Returns what belongs to this rank of what is known of all keys."""
    return {key: value for key, value in known.items() if key % comm.size == comm.rank}


def trained_alone(parts=None, batches=BATCHES, path=None):
    """Returns what one rank knows that was given the batches of all, and saves it."""
    with lone_rank():
        graph = Trained(parts)
        with graph.session() as session:
            graph.train(*batches)
            if path is not None:
                tf1.train.Saver().save(session, path)
            return graph.known()[0]


def batches_of(comm, batches):
    """Every key is in the batch of one rank alone, so that counts are those of one rank."""
    return [[key for key in batch if abs(key) // 2 % comm.size == comm.rank] for batch in batches]


def test_ranks_save_and_another_number_of_them_restores(comm, folder):
    graph = Trained(3)
    with graph.session() as session:
        graph.train(*batches_of(comm, BATCHES))
        known = graph.known()[0]
        path = tf1.train.Saver().save(session, kv.rank_path(f"{folder}/model"), global_step=3)
    whole = trained_alone()
    assert known == own(comm, whole)
    assert set(of(saved(path), "freq_keys")) == set(known)
    comm.barrier("all have saved")

    # As many ranks: each from its own file, or each from that of the first rank.
    first = path.replace(f".rank-{comm.rank}-", ".rank-0-")
    for its_path, parts in [(path, 5), (first, None)]:
        again = Trained(parts)
        with again.session(initialized=False) as session:
            tf1.train.Saver().restore(session, its_path)
            assert again.known()[0] == known
            again.train(*batches_of(comm, AFTER))
            assert again.known()[0] == own(comm, trained_alone(None, BATCHES + AFTER))
    # One rank.
    with lone_rank():
        again = Trained(5)
        with again.session(initialized=False) as session:
            tf1.train.Saver().restore(session, first)
            assert again.known()[0] == whole
            again.train(*AFTER)
            assert again.known()[0] == trained_alone(None, BATCHES + AFTER)


def test_keys_that_other_ranks_own_are_named_where_they_are_saved(comm, folder, caplog):
    with contextlib.ExitStack() as stack:
        with lone_rank():  # each rank has all keys
            graph = Trained(None)
            session = stack.enter_context(graph.session())
            graph.train(*BATCHES)
            saver = tf1.train.Saver()
        path = saver.save(session, kv.rank_path(f"{folder}/model"))
        assert ("that other ranks own" in caplog.text) == (comm.size > 1)
        comm.barrier("all have saved")
        if comm.size > 1:
            with pytest.raises(tf.errors.OpError, match="its parts have .* keys in common"):
                saver.restore(session, path)


def test_one_rank_saves_and_several_restore(comm, folder):
    path = f"{folder}/model"
    if comm.rank == 0:
        whole = trained_alone(3, path=path)
    else:
        whole = trained_alone(3)
    comm.barrier("it is saved")
    assert kv.saved_path(path) == path
    again = Trained(5)
    with again.session(initialized=False) as session:
        tf1.train.Saver().restore(session, kv.saved_path(path))
        assert again.known()[0] == own(comm, whole)
        again.train(*batches_of(comm, AFTER))
        assert again.known()[0] == own(comm, trained_alone(None, BATCHES + AFTER))


def test_paths(comm, folder):
    path = f"{folder}/model"
    if comm.size == 1:
        assert kv.rank_path(path) == path
    else:
        assert kv.rank_path(path) == f"{path}.rank-{comm.rank}-of-{comm.size}"
    graph = Trained(2)
    with graph.session() as session:
        saver = tf1.train.Saver()
        graph.train([1, 2])
        with pytest.raises(FileNotFoundError, match="No checkpoint"):
            kv.saved_path(path)
        comm.barrier("all have looked")
        saver.save(session, kv.rank_path(path))
        comm.barrier("all have saved")
        assert kv.saved_path(path) == kv.rank_path(path)
        with lone_rank():
            first = kv.saved_path(path)
        assert first == (path if comm.size == 1 else f"{path}.rank-0-of-{comm.size}")
        with pytest.raises(FileNotFoundError, match="No checkpoint"):
            kv.saved_path(f"{path}-7")
        comm.barrier("all have looked again")
        own_path = saver.save(session, kv.rank_path(path), global_step=7)
        comm.barrier("all have saved a step")
        assert kv.saved_path(f"{path}-7") == own_path
        with lone_rank():
            first = kv.saved_path(f"{path}-7")
        assert first == (own_path if comm.size == 1 else f"{path}.rank-0-of-{comm.size}-7")


def test_what_one_rank_cannot_do_alone_is_refused(comm, folder):
    if comm.size == 1:
        pytest.skip("needs several ranks")
    graph = Trained(2)
    with graph.session() as session:
        saver = tf1.train.Saver()
        graph.train([1, 2])
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"rank_path\(path\), on every"):
            saver.save(session, f"{folder}/model")
        sharded = tf1.train.Saver(sharded=True)
        path = sharded.save(session, kv.rank_path(f"{folder}/sharded"))
        assert of(saved(path), "keys").size == 1
        known = graph.known()
        comm.barrier("all have saved")
        mine = saver.save(session, kv.rank_path(f"{folder}/{comm.rank}"))
        missing = f"rank-{1 - comm.rank}-of-{comm.size}' of rank {1 - comm.rank} is missing"
        if comm.size == 2:
            with pytest.raises(tf.errors.InvalidArgumentError, match=missing):
                saver.restore(session, mine)
        for file in tf.io.gfile.glob(f"{mine}*"):
            tf.io.gfile.rename(file, file.replace(f".rank-{comm.rank}-of-{comm.size}", ".moved"))
        with pytest.raises(tf.errors.InvalidArgumentError, match="the name that it was saved by"):
            saver.restore(session, f"{folder}/{comm.rank}.moved")
        assert graph.known() == known


def test_deltas_of_ranks(comm, folder):
    kv.enable_delta_export()
    try:
        graph = Trained(2)
        with graph.session() as session:
            saver = tf1.train.Saver()
            graph.train(*batches_of(comm, BATCHES))
            full = saver.save(session, kv.rank_path(f"{folder}/full"))
            graph.train(*batches_of(comm, AFTER))
            delta = kv.save_delta(saver, session, kv.rank_path(f"{folder}/delta"))
            known = graph.known()
        comm.barrier("all have saved")
        again = Trained(3)
        with again.session(initialized=False) as session:
            for path in (full, delta):
                tf1.train.Saver().restore(session, path)
            assert again.known() == known
        with lone_rank():
            again = Trained(3)
            with again.session(initialized=False) as session:
                for path in (full, delta):
                    tf1.train.Saver().restore(session, path)
                assert again.known()[0] == trained_alone(None, BATCHES + AFTER)
    finally:
        kv.disable_delta_export()
