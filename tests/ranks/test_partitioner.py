"""Tables whose keys have owners by a hash, or by a function of the program: real ranks."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite.bridge import job
from sok_lite.comm import SingleCommunicator
from sok_lite.engine.owner import HASH

DIM = 3
KEYS = np.arange(-40, 400, 2)  # all even: by their remainder they would be on one rank of two


@pytest.fixture(autouse=True)
def over(comm, monkeypatch):
    """Every test runs over each transport, as if `sok.init` had chosen it."""
    monkeypatch.setattr(job, "_communicator", comm)


def by_tens(keys, ranks):
    return (keys // 10) % ranks


def other_tens(keys, ranks):
    return (keys // 10 + 1) % ranks


@pytest.mark.parametrize("key_type", [tf.int64, tf.int32, tf.uint64], ids=lambda d: d.name)
@pytest.mark.parametrize("partitioner", ["mod", "hash", by_tens])
def test_keys_are_asked_for_at_their_owners(comm, partitioner, key_type):
    """Each rank asks about others, some with a row on no rank, and some by nobody."""
    name = f"asked {partitioner} {key_type.name}"
    table = sok.DynamicVariable(DIM, name=name, partitioner=partitioner, key_type=key_type)
    keys = np.arange(0, 90, 2).astype(key_type.as_numpy_dtype)
    owners = table.table.owner.owners(keys.astype(np.int64), comm.size)
    own = keys[owners == comm.rank]
    sok.assign(table, own, np.ones((own.size, DIM), np.float32))
    asked = np.random.default_rng(comm.rank).integers(0, 120, (comm.rank * 5, 3))
    traced = tf.function(lambda ids: table.contains(ids, all_ranks=True))
    for find in (traced, lambda ids: table.contains(ids, all_ranks=True)):
        found = find(tf.constant(asked.astype(key_type.as_numpy_dtype)))
        np.testing.assert_array_equal(found, np.isin(asked, keys))
    assert table.table.size == own.size


def new_tables():
    return [
        sok.DynamicVariable(DIM, "uniform", name="mod", partitioner="mod"),
        sok.DynamicVariable(DIM, "uniform", name="hash", partitioner="hash"),
        sok.DynamicVariable(DIM, "uniform", "hybrid", name="tens", partitioner=by_tens),
        sok.DynamicVariable(DIM, "uniform", name="narrow", partitioner=by_tens, key_type=tf.int32),
    ]


def train(size, rank):
    """Trains on the rank's part of equal batches."""
    tables, optimizer = new_tables(), sok.OptimizerWrapper(keras.optimizers.Adam(0.01))
    for step in range(4):
        ids = np.random.default_rng(step).choice(KEYS, (24, 3))[rank::size]
        with tf.GradientTape() as tape:
            rows = sok.lookup_sparse(
                tables,
                [tf.RaggedTensor.from_tensor(tf.constant(ids, t.key_type)) for t in tables],
                combiners=["sum"] * len(tables),
            )
            loss = tf.add_n([tf.reduce_sum(tf.sin(each)) for each in rows])
        gradients = tape.gradient(loss, tables)
        optimizer.apply_gradients(zip(gradients, tables, strict=True))
    return tables


def owners_of(keys, size):
    return [keys % size, HASH.owners(keys, size), keys // 10 % size, keys // 10 % size]


def test_keys_are_where_the_partitioner_says_and_train_as_on_one_rank(comm, monkeypatch, folder):
    tables = train(comm.size, comm.rank)
    sok.dump(folder / "c", tables)
    found = []
    for i, table in enumerate(tables):
        keys, rows = (each.numpy() for each in sok.export(table))
        assert (owners_of(keys.astype(np.int64), comm.size)[i] == comm.rank).all()
        assert keys.size > 20 or table.name.startswith("mod")
        found.append(dict(zip(keys.tolist(), rows, strict=True)))
    with monkeypatch.context() as patch:  # every rank by itself, with all batches
        patch.setattr(job, "_communicator", SingleCommunicator())
        alone = train(1, 0)
        loaded = new_tables()
        sok.load(folder / "c", loaded)
    for mine, one, again in zip(found, alone, loaded, strict=True):
        for table in (one, again):
            rows = dict(zip(*(each.numpy().tolist() for each in sok.export(table)), strict=True))
            assert len(rows) == comm.allgatherv(np.zeros(len(mine), np.int8)).rows.size
            for key, row in mine.items():
                np.testing.assert_allclose(rows[key], row, atol=1e-5)
    other = sok.DynamicVariable(DIM, name="tens", partitioner=other_tens)
    sok.load(folder / "c", other)  # by another rule: every rank reads what is its own
    keys = sok.export(other)[0].numpy()
    assert ((keys // 10 + 1) % comm.size == comm.rank).all() and keys.size > 20
    comm.barrier()


def test_ranks_that_have_other_partitioners_are_told(comm):
    if comm.size == 1:
        pytest.skip("one rank")
    rule = by_tens if comm.rank == 0 else other_tens
    table = sok.DynamicVariable(DIM, name="differs", partitioner=rule)
    with pytest.raises(ValueError, match="by_tens"):
        sok.lookup_sparse(table, tf.ragged.constant([[1, 2]], dtype=tf.int64), combiners="sum")
