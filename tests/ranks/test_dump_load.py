"""sok.dump and sok.load over real ranks."""

import itertools
from datetime import datetime, timedelta

import keras
import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
import sok_lite.keras as sk
from sok_lite import kv_variable as kv
from sok_lite.bridge import job
from sok_lite.cli.main import main
from sok_lite.comm import SingleCommunicator
from sok_lite.engine.files import manifest

KEYS = np.arange(-40, 61)


@pytest.fixture(autouse=True)
def over(comm, monkeypatch):
    """Every test runs over each transport, as if `sok.init` had chosen it."""
    monkeypatch.setattr(job, "_communicator", comm)


def variable(keys):
    """One that has those of the keys that this rank owns."""
    made, own = sok.DynamicVariable(2, name="v"), owned(keys)
    sok.assign(made, own, tf.constant(rows_of(own)))
    return made


def owned(keys):
    comm = job.communicator()
    return keys[keys % comm.size == comm.rank]


def rows_of(keys):
    return np.stack([keys * 2.0, keys + 0.5], 1).astype(np.float32)


def assert_has(one, keys):
    found, rows = sok.export(one)
    np.testing.assert_array_equal(found, keys)
    np.testing.assert_array_equal(rows, rows_of(keys))


def test_each_rank_gets_its_keys(comm, folder, monkeypatch):
    mine = owned(KEYS)
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
    one = variable(owned(KEYS))
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
    assert_has(other, owned(KEYS))
    place = "file://host/c" if comm.rank == comm.size - 1 else folder / "all"  # one rank alone
    with pytest.raises(ValueError, match="must be in a folder of this machine"):
        sok.dump(place, one)


def test_each_rank_gets_its_rows_of_a_static_variable(comm, folder, monkeypatch):
    rows = np.arange(14, dtype=np.float32).reshape(7, 2)
    one = [variable(owned(KEYS)), sok.Variable(rows, name="s")]
    sok.dump(folder / "all", one)
    zeros = np.zeros_like(rows)
    other = [sok.Variable(zeros, name="s"), variable(np.array([100]))]
    sok.load(folder / "all", other)
    np.testing.assert_array_equal(other[0].numpy(), rows[comm.rank :: comm.size])
    assert_has(other[1], owned(KEYS))
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


def test_what_has_changed_and_was_removed_is_that_of_all_ranks(comm):
    mine, since = owned(KEYS), datetime.now() - timedelta(hours=1)
    one = sok.DynamicVariable(2, name="v")
    with pytest.raises(ValueError, match="does not note which keys are removed"):
        sok.incremental_model_dump(one, since, removed=True)
    sok.log_removals(one)
    sok.assign(one, mine, rows_of(mine))
    gone = KEYS[:5]
    one.erase(gone[gone % comm.size == comm.rank])
    keys, rows, removed = sok.incremental_model_dump(one, since, removed=True)
    assert sorted(removed[0].tolist()) == sorted(gone.tolist())
    assert sorted(keys[0].tolist()) == sorted(KEYS[5:].tolist())
    np.testing.assert_array_equal(rows[0], rows_of(keys[0]))


def test_ranks_train_while_a_dump_is_written(comm, folder):
    mine = owned(KEYS)
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


def new_kv_variable():
    return kv.get_kv_variable(f"kv_{next(_numbers)}", 2)


def number_of(table):
    return getattr(table, "variable", table).table.size


_numbers = itertools.count()
WRITES = {
    "sok.assign": (lambda: sok.DynamicVariable(2, name="v"), sok.assign),
    "Table.assign": (lambda: sk.Table("v", 2), lambda table, *rows: table.assign(*rows)),
    "KvVariable.insert": (new_kv_variable, lambda v, *rows: v.insert(*rows)),
    "scatter_update": (
        new_kv_variable,
        lambda v, keys, rows: v.scatter_update(tf.IndexedSlices(rows, keys)),
    ),
    "scatter_add": (
        new_kv_variable,
        lambda v, keys, rows: v.scatter_add(tf.IndexedSlices(rows, keys)),
    ),
}


@pytest.mark.parametrize("is_graph", [False, True])
@pytest.mark.parametrize("api", WRITES)
def test_keys_of_other_ranks_are_not_written(comm, api, is_graph):
    make, write = WRITES[api]
    table = make()
    call = tf.function(lambda keys, rows: write(table, keys, rows) and None) if is_graph else None
    call = call or (lambda keys, rows: write(table, keys, rows))
    own = owned(KEYS)
    if comm.size > 1:
        text = f"{KEYS.size - own.size} of {KEYS.size} keys .*, {comm.rank}.* Received: key "
        with pytest.raises((ValueError, tf.errors.OpError), match=text):
            call(tf.constant(KEYS), tf.constant(rows_of(KEYS)))
        assert number_of(table) == 0
    call(tf.constant(own), tf.constant(rows_of(own)))
    assert number_of(table) == own.size


@pytest.mark.parametrize("background", [False, True])
def test_a_key_on_several_ranks_is_not_dumped(comm, folder, background):
    one = variable(KEYS)
    sok.dump(folder, one)
    tf.nn.embedding_lookup(one, KEYS)  # on this rank alone: it inserts any key
    if comm.size > 1:
        text = f"{KEYS.size} keys of table 'v' are on several ranks.* on ranks 0, 1"
        with pytest.raises(ValueError, match=text):
            sok.dump(folder, one, background=background)
    sok.load(folder, one)  # the checkpoint before is there still
    assert_has(one, owned(KEYS))
    tf.nn.embedding_lookup(one, [1000 + comm.rank + 1])
    sok.dump(folder, one)  # each of these is on one rank, if not on that of its owner
    assert sum(len(keys) for keys in comm.allgatherv(sok.export(one)[0].numpy()).by_rank()) == (
        KEYS.size + comm.size
    )


@pytest.mark.parametrize("name", ["m.keras", "m.weights.h5"])
def test_a_key_on_several_ranks_is_not_saved_by_keras(comm, once, folder, name):
    table, ids = sk.Table("v", 2), keras.Input([], dtype="int64")
    model = keras.Model(ids, table(ids))
    save = model.save if name == "m.keras" else model.save_weights
    table.assign(owned(KEYS), rows_of(owned(KEYS)))
    save(folder / name)
    before = (folder / name).read_bytes()
    tf.nn.embedding_lookup(table.variable, KEYS)
    if comm.size > 1:
        with pytest.raises(ValueError, match=f"{KEYS.size} keys of table 'v' are on several"):
            save(folder / name)
        assert (folder / name).read_bytes() == before
    table.erase(KEYS[KEYS % comm.size != comm.rank])
    save(folder / name)


def test_all_ranks_take_the_tables_of_a_model_from_the_newest_save(comm, once, folder):
    ids = keras.Input([], dtype="int64")
    tables = [sk.Table(name, 2) for name in ("b", "a")]
    model = keras.Model(ids, [table(ids) for table in tables])
    for step, name in ((9, "step-0000000009"), (10, "step-0000000010")):
        for table in tables:
            table.assign(owned(KEYS), rows_of(owned(KEYS)) + step)
        sok.dump(folder / name, model)
    for table in tables:
        table.clear()
    sok.load(folder, model)
    for table in tables:
        keys, rows = table.export()
        np.testing.assert_array_equal(keys, np.sort(owned(KEYS)))
        np.testing.assert_array_equal(rows, rows_of(keys.numpy()) + 10)


def small_model(max_capacity):
    table = sk.Table(
        "item", 2, var_type="hybrid", max_capacity=max_capacity, evict_strategy="kCustomized"
    )
    ids = keras.Input([], dtype="int64")
    return keras.Model(ids, table(ids)), table


def test_a_full_table_goes_to_fewer_ranks(comm, once, folder, monkeypatch, tmp_path, caplog):
    """As its dump and as a model's file, on ranks that are as many jobs of one."""
    model, table = small_model(64)
    own = np.arange(comm.rank, 120 * comm.size, comm.size)[:60]
    sok.assign(table, own, rows_of(own), scores=(own * 7919) % 1000)
    sok.dump(folder / "dump", table)
    model.save(folder / "m.keras")
    keys = np.concatenate(comm.allgatherv(sok.export(table)[0].numpy()).by_rank())
    if comm.size == 1:
        return
    comm.barrier()
    monkeypatch.setattr(job, "_communicator", SingleCommunicator())
    with pytest.raises(ValueError, match=r"max_capacity=\d+ or.*on_full='evict'.*load_weights"):
        keras.models.load_model(folder / "m.keras")
    # As the error says: a larger table, or without the keys of the lowest scores.
    larger, its_table = small_model(256)
    larger.load_weights(folder / "m.keras")
    found, rows = sok.export(its_table)
    np.testing.assert_array_equal(found, np.sort(keys))
    np.testing.assert_array_equal(rows, rows_of(np.sort(keys)))
    assert main(["convert", str(folder / "m.keras"), str(tmp_path / "converted")]) == 0
    ordered = keys[np.argsort(-((keys * 7919) % 1000), kind="stable")]
    for path in (folder / "dump", tmp_path / "converted"):
        _, again = small_model(64)
        with pytest.raises(ValueError, match="has no room for"):
            sok.load(path, again)
        assert len(again) == 0
        sok.load(path, again, on_full="evict")
        found, rows = (each.numpy() for each in sok.export(again))
        np.testing.assert_array_equal(rows, rows_of(found))
        assert set(ordered[:40]) <= set(found) <= set(ordered) and len(found) >= 60
        assert f"{keys.size - len(found)} of {keys.size} keys" in caplog.records[-1].getMessage()
