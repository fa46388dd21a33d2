"""sok.dump and sok.load over real ranks."""

from datetime import datetime, timedelta

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite.bridge import job
from sok_lite.comm import SingleCommunicator
from sok_lite.engine.files import manifest

KEYS = np.arange(-40, 61)


@pytest.fixture(autouse=True)
def over(comm, monkeypatch):
    """Every test runs over each transport, as if `sok.init` had chosen it."""
    monkeypatch.setattr(job, "_communicator", comm)


def variable(keys):
    made = sok.DynamicVariable(2, name="v")
    sok.assign(made, keys, tf.constant(rows_of(keys)))
    return made


def rows_of(keys):
    return np.stack([keys * 2.0, keys + 0.5], 1).astype(np.float32)


def assert_has(one, keys):
    found, rows = sok.export(one)
    np.testing.assert_array_equal(found, keys)
    np.testing.assert_array_equal(rows, rows_of(keys))


def test_each_rank_gets_its_keys(comm, folder, monkeypatch):
    mine = KEYS[KEYS % comm.size == comm.rank]
    sok.dump(folder / "all", variable(mine))
    other = variable(np.arange(100, 103))
    sok.load(folder / "all", other)
    assert_has(other, mine)
    with monkeypatch.context() as patch:  # every rank by itself, as a job of one
        patch.setattr(job, "_communicator", SingleCommunicator())
        sok.load(folder / "all", other)
        assert_has(other, KEYS)
        if comm.rank == 0:
            sok.dump(folder / "one", other)
    comm.barrier()
    sok.load(folder / "one", other)
    assert_has(other, mine)


def test_a_second_dump_into_a_folder_is_refused_on_all_ranks(comm, folder):
    one = variable(KEYS[KEYS % comm.size == comm.rank])
    sok.dump(folder / "all", one)
    lock = manifest.lock(str(folder / "all")) if comm.rank == 0 else None
    comm.barrier()
    for options in ({}, {"incremental": True}, {"background": True}):
        with pytest.raises(OSError, match=r"must have one writer at a time.*\(pid \d+ on host"):
            sok.dump(folder / "all", variable(KEYS[:1]), **options)
    comm.barrier()
    if lock is not None:
        lock.release()
    comm.barrier()
    other = variable(KEYS[:1])
    sok.load(folder / "all", other)
    assert_has(other, KEYS[KEYS % comm.size == comm.rank])
    with pytest.raises(ValueError, match="must be in a folder of this machine"):
        sok.dump("s3://bucket/c" if comm.rank else folder / "all", one)  # one rank alone


def test_each_rank_gets_its_rows_of_a_static_variable(comm, folder, monkeypatch):
    rows = np.arange(14, dtype=np.float32).reshape(7, 2)
    one = [variable(KEYS[KEYS % comm.size == comm.rank]), sok.Variable(rows, name="s")]
    sok.dump(folder / "all", one)
    zeros = np.zeros_like(rows)
    other = [sok.Variable(zeros, name="s"), variable(np.array([100]))]
    sok.load(folder / "all", other)
    np.testing.assert_array_equal(other[0].numpy(), rows[comm.rank :: comm.size])
    assert_has(other[1], KEYS[KEYS % comm.size == comm.rank])
    last = sok.Variable(zeros, name="s", mode=f"localized:{comm.size - 1}")
    sok.load(folder / "all", last)
    expected = rows if comm.rank == comm.size - 1 else rows[:0]
    np.testing.assert_array_equal(last.numpy(), expected)
    with monkeypatch.context() as patch:  # every rank by itself, as a job of one
        patch.setattr(job, "_communicator", SingleCommunicator())
        alone = sok.Variable(zeros, name="s")
        sok.load(folder / "all", alone)
        np.testing.assert_array_equal(alone.numpy(), rows)
    comm.barrier()
    with pytest.raises(ValueError, match=r"shape \(7, 2\)\. Received: shape \(8, 2\)"):
        sok.load(folder / "all", sok.Variable(np.zeros((8, 2), np.float32), name="s"))


def test_each_rank_adds_its_changes(comm, folder, monkeypatch):
    mine = KEYS[KEYS % comm.size == comm.rank]
    one = variable(mine)
    sok.dump(folder / "parts", one, incremental=True)
    one.erase(mine[:2])
    sok.assign(one, mine[-3:], tf.zeros([3, 2]))
    sok.dump(folder / "parts", one, incremental=True)
    other = sok.DynamicVariable(2, name="v")
    sok.load(folder / "parts", other)
    for expected, got in zip(sok.export(one), sok.export(other), strict=True):
        np.testing.assert_array_equal(got, expected)
    assert len(list((folder / "parts").glob("data-*"))) == 2
    with monkeypatch.context() as patch:  # every rank by itself, as a job of one
        patch.setattr(job, "_communicator", SingleCommunicator())
        sok.load(folder / "parts", other)
        assert other.size[0] == len(KEYS) - 2 * comm.size
    comm.barrier()


def test_what_has_changed_is_that_of_all_ranks(comm):
    mine = KEYS[KEYS % comm.size == comm.rank]
    since = datetime.now() - timedelta(hours=1)
    keys_list, values_list = sok.incremental_model_dump([variable(mine)], since)
    order = np.argsort(keys_list[0], kind="stable")
    np.testing.assert_array_equal(keys_list[0][order], KEYS)
    np.testing.assert_array_equal(values_list[0], rows_of(keys_list[0]))


def test_a_folder_that_cannot_be_made_is_one_error(comm):
    with pytest.raises(OSError, match="checkpoint"):
        sok.dump("/dev/null/checkpoint", variable(KEYS))
    comm.barrier()


def test_ranks_train_while_a_dump_is_written(comm, folder):
    mine = KEYS[KEYS % comm.size == comm.rank]
    one = variable(mine)
    begun = sok.dump(folder / "all", one, background=True)
    ids = tf.ragged.constant([[1, 2, 3, 1000 + comm.rank]], dtype=tf.int64)
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(0.1))
    for _ in range(3):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(sok.lookup_sparse(one, ids, combiners="sum"))
        optimizer.apply_gradients([(tape.gradient(loss, one), one)])
    begun.wait()
    other = variable(np.array([100]))
    sok.load(folder / "all", other)
    assert_has(other, mine)
    if comm.rank == comm.size - 1:
        (folder / "is a file").touch()
    comm.barrier()
    with pytest.raises(OSError, match="is a file"):
        sok.dump(folder / "is a file", one, background=True)
