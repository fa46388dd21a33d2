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
from tests.support.lone_rank import lone_rank

KEYS = np.arange(-40, 61)


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


def test_each_rank_gets_its_keys_and_rows(comm, folder):
    """Of a table and of a static variable: from as many ranks, from one, and one has all."""
    mine, rows = owned(KEYS), np.arange(14, dtype=np.float32).reshape(7, 2)
    sok.dump(folder / "all", [variable(mine), sok.Variable(rows, name="s")])

    def new():
        return [variable(np.arange(100, 103)), sok.Variable(np.zeros_like(rows), name="s")]

    other, static = new()
    sok.load(folder / "all", [static, other])
    assert_has(other, mine)
    np.testing.assert_array_equal(static.numpy(), rows[comm.rank :: comm.size])
    with lone_rank():
        whole = new()
        sok.load(folder / "all", whole)
        assert_has(whole[0], KEYS)
        np.testing.assert_array_equal(whole[1].numpy(), rows)
        if comm.rank == 0:
            sok.dump(folder / "one", whole)
    comm.barrier()
    other, last = new()[0], sok.Variable(rows * 0, name="s", mode=f"localized:{comm.size - 1}")
    sok.load(folder / "one", [other, last])
    assert_has(other, mine)
    expected = rows if comm.rank == comm.size - 1 else rows[:0]
    np.testing.assert_array_equal(last.numpy(), expected)
    place = "file://host/c" if comm.rank == comm.size - 1 else folder / "all"  # one rank alone
    with pytest.raises(ValueError, match="must be in a folder of this machine"):
        sok.dump(place, other)


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


def small_model(max_capacity):
    table = sk.Table(
        "item", 2, var_type="hybrid", max_capacity=max_capacity, evict_strategy="kCustomized"
    )
    ids = keras.Input([], dtype="int64")
    return keras.Model(ids, table(ids)), table


def test_a_full_table_goes_to_fewer_ranks(comm, once, folder):
    """From a model's file, on ranks that are as many jobs of one."""
    model, table = small_model(64)
    own = np.arange(comm.rank, 120 * comm.size, comm.size)[:60]
    sok.assign(table, own, rows_of(own), scores=(own * 7919) % 1000)
    model.save(folder / "m.keras")
    keys = np.concatenate(comm.allgatherv(sok.export(table)[0].numpy()).by_rank())
    if comm.size == 1:
        return
    comm.barrier()
    with lone_rank():
        with pytest.raises(ValueError, match=r"max_capacity=\d+ or.*on_full='evict'.*load_weights"):
            keras.models.load_model(folder / "m.keras")
        # As the error says, a larger table.
        larger, its_table = small_model(256)
        larger.load_weights(folder / "m.keras")
        assert_has(its_table, np.sort(keys))
