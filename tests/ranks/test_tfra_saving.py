"""Checkpoints of TFRA's API over real ranks: rank 0's dense variables, the rows of every rank."""

import os

import keras
import numpy as np
import pytest
import tensorflow as tf

from sok_lite import dynamic_embedding as de
from tests.support.lone_rank import lone_rank

KEYS = np.arange(-40, 60)


IN_TURN = "comm"


def variables():
    creator = de.CuckooHashTableCreator(saver=de.FileSystemSaver())
    return de.Variable(dim=2, name="v", kv_creator=creator), tf.Variable(0.0)


def rows_of(keys):
    return np.stack([keys * 2.0, keys + 0.5], 1).astype(np.float32)


def mine(comm):
    return KEYS[KEYS % comm.size == comm.rank]


def assert_has(variable, keys):
    found, rows = variable.export()
    np.testing.assert_array_equal(found, keys)
    np.testing.assert_array_equal(rows, rows_of(keys))


def stepped(variable, optimizer, keys, factor=1.0):
    """Takes a step; returns the slot of the first moments."""
    shadow = variable.get_trainable_by_name("t")
    with tf.GradientTape() as tape:
        rows = de.embedding_lookup(variable, keys, name="t")
        loss = factor * tf.reduce_sum(tf.sin(rows + 1))
    optimizer.apply_gradients([(tape.gradient(loss, shadow), shadow)])
    (m,) = [each for each in variable.get_slot_variables(optimizer) if each.slot_name == "m"]
    return m


def test_all_ranks_save(comm, folder):
    variable, dense = variables()
    optimizer = de.DynamicEmbeddingOptimizer(keras.optimizers.Adam(0.1))
    for _ in range(2 + comm.rank):
        m = stepped(variable, optimizer, mine(comm))
    dense.assign(float(comm.rank + 3))
    checkpoint = de.train.Checkpoint(v=variable, dense=dense)
    assert checkpoint.write(str(folder / "all")) == str(folder / "all")
    saved = {f"v_rank{rank}_size{comm.size}-states.npz" for rank in range(comm.size)}
    assert saved <= set(os.listdir(folder / "TFRADynamicEmbedding"))
    keys, rows = (each.numpy() for each in variable.export())
    m = m.lookup(keys).numpy()
    other, other_dense = variables()
    other.upsert([1000], np.ones((1, 2), np.float32))
    de.train.Checkpoint(v=other, dense=other_dense).read(str(folder / "all")).assert_consumed()
    for found, saved in zip(other.export(), (keys, rows), strict=True):
        np.testing.assert_array_equal(found, saved)
    assert float(other_dense) == 3.0  # of rank 0
    comm.barrier()
    with lone_rank():
        whole, whole_dense = variables()
        checkpoint = de.train.Checkpoint(v=whole, dense=whole_dense)
        checkpoint.read(str(folder / "all")).assert_consumed()
        found, its_rows = (each.numpy() for each in whole.export())
        optimizer = de.DynamicEmbeddingOptimizer(keras.optimizers.Adam(0.1))
        its_m = stepped(whole, optimizer, KEYS[:1], 0.0).lookup(keys)
    np.testing.assert_array_equal(found, KEYS)
    np.testing.assert_array_equal(its_rows[np.searchsorted(found, keys)], rows)
    assert float(whole_dense) == 3.0
    # A step without a gradient leaves 0.9 of the average of the one key that it was taken on.
    np.testing.assert_array_equal(its_m[keys != KEYS[0]], m[keys != KEYS[0]])


def test_one_rank_saves_for_all(comm, folder):
    if comm.rank == 0:
        with lone_rank():
            variable, dense = variables()
            variable.upsert(KEYS, rows_of(KEYS))
            dense.assign(7.0)
            de.train.Checkpoint(v=variable, dense=dense).write(str(folder / "one"))
    comm.barrier()
    variable, dense = variables()
    de.train.Checkpoint(v=variable, dense=dense).read(str(folder / "one")).assert_consumed()
    assert_has(variable, mine(comm))
    assert float(dense) == 7.0


def test_a_manager_on_every_rank(comm, folder):
    variable, dense = variables()
    checkpoint = de.train.Checkpoint(v=variable, dense=dense)
    manager = tf.train.CheckpointManager(checkpoint, str(folder), max_to_keep=1)
    for step in range(3):
        keys = mine(comm)[: step + 1]
        variable.upsert(keys, rows_of(keys))
        manager.save()
    comm.barrier()
    assert (folder / "TFRADynamicEmbedding-3").is_dir()
    variable.clear()
    checkpoint.restore(tf.train.latest_checkpoint(str(folder))).assert_consumed()
    assert_has(variable, mine(comm)[:3])


def test_a_saver_of_tf1(comm, folder):
    paths = []
    for is_second in (False, True):
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            variable = de.Variable(
                dim=2,
                name="v",
                kv_creator=de.CuckooHashTableCreator(saver=de.FileSystemSaver()),
            )
            upsert = variable.upsert(mine(comm), rows_of(mine(comm)))
            saver, export = de.train.DEHvdSaver(), variable.export()
            if is_second:
                saver.restore(session, paths[0])
                keys, rows = session.run(export)
                np.testing.assert_array_equal(keys, mine(comm))
                np.testing.assert_array_equal(rows, rows_of(keys))
            else:
                session.run(upsert)
                paths.append(saver.save(session, str(folder / "c"), global_step=4))
    assert paths == [str(folder / "c-4")]
    assert (folder / "TFRADynamicEmbedding-4").is_dir()


def test_a_rank_that_fails_is_told_of_by_all(comm, folder):
    if comm.size == 1:
        pytest.skip("one rank waits for nobody")
    variable, _ = variables()
    if comm.rank == 1:
        variable.rows.files.write = fail
    error, text = (OSError, "disk full") if comm.rank == 1 else (RuntimeError, "rank 1 has failed")
    with pytest.raises(error, match=text):
        de.train.Checkpoint(v=variable).write(str(folder / "c"))


def fail():
    raise OSError("disk full")


def test_rows_inside_the_checkpoint_are_refused(comm, folder):
    variable = de.Variable(dim=2, name="v")
    checkpoint = de.train.Checkpoint(v=variable)
    if comm.size == 1:
        checkpoint.write(str(folder / "c"))
        return
    with pytest.raises(ValueError, match="on several ranks needs a FileSystemSaver.*'v'"):
        checkpoint.write(str(folder / "c"))
    assert not list(folder.glob("c.*"))
