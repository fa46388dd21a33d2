"""TFRA's API with tables in RAM and on the simulated GPU: see tests/support/gpu_play.py."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from sok_lite import dynamic_embedding as de
from sok_lite.bridge import table_ops
from tests.dynamic_embedding.test_variable import VALUES
from tests.support.dict_variable import DictVariable

pytestmark = pytest.mark.usefixtures("tables_on")
CREATORS = [de.CuckooHashTableCreator, de.HkvHashTableCreator]


def assert_same(variable, oracle):
    keys, values = variable.export()
    assert sorted(keys.numpy().tolist()) == sorted(oracle.rows)
    np.testing.assert_array_equal(values, oracle.lookup(keys.numpy()))
    assert int(variable.size()) == len(oracle.rows)


def test_the_tables_are_where_they_are_said_to_be(tables_on):
    assert de.Variable().rows.table.backend.name == ("cpu" if tables_on == "cpu" else "cuda")


@pytest.mark.parametrize("make", CREATORS)
def test_rows_are_in_the_memory_of_the_device(make):
    variable = de.Variable(dim=8, kv_creator=make())
    variable.upsert(np.arange(5000), np.ones((5000, 8)))
    facts = table_ops.statistics(variable.rows)
    assert facts.near_bytes >= 5000 * 32 and facts.far_bytes == 0


@pytest.mark.parametrize("make", CREATORS)
@pytest.mark.parametrize("value_dtype", VALUES, ids=lambda d: d.name)
def test_every_method_for_every_dtype(make, value_dtype):
    variable = de.Variable(
        value_dtype=value_dtype, dim=3, devices=["a", "b"], initializer=-2, kv_creator=make()
    )
    oracle = DictVariable(3, -2, value_dtype.as_numpy_dtype)
    rng = np.random.default_rng(1)

    def rows(n):
        return rng.integers(-9, 10, (n, 3)).astype(value_dtype.as_numpy_dtype)

    keys, values = np.r_[rng.integers(-(2**62), 2**62, 65), 5, 7, 7], rows(68)
    for each in (variable, oracle):
        each.upsert(keys, values)
    assert_same(variable, oracle)
    asked = np.array([[5, -1, 7], [0, 5, 2**40]])
    looked_up, exists = variable.lookup(asked, return_exists=True)
    assert looked_up.dtype == value_dtype
    np.testing.assert_array_equal(looked_up, oracle.lookup(asked))
    np.testing.assert_array_equal(exists, oracle.exists(asked))
    accumulated = np.array([5, 5, 7, 8, 9, 9]), rows(6), rows(6)
    for each in (variable, oracle):
        each.accum(*accumulated, np.array([True, True, False, True, False, False]))
    assert_same(variable, oracle)
    for each in (variable, oracle):
        each.remove(np.array([9, 9, 123]))
    assert_same(variable, oracle)
    assert int(variable.size(0)) + int(variable.size(1)) == int(variable.size())
    variable.clear()
    assert int(variable.size()) == 0


@pytest.mark.parametrize("key_dtype", [tf.int32, tf.string], ids=lambda d: d.name)
def test_texts_and_integers_are_keys(key_dtype):
    keys = [b"a", b"b", b""] if key_dtype == tf.string else [3, -4, 0]
    variable = de.Variable(key_dtype, dim=1)
    variable.upsert(tf.constant(keys, key_dtype), [[1.0], [2.0], [3.0]])
    assert variable.lookup(tf.constant(keys[::-1], key_dtype)).numpy().tolist() == [[3], [2], [1]]
    assert sorted(variable.export()[0].numpy().tolist()) == sorted(keys)


@pytest.mark.parametrize("make", CREATORS)
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize(
    "dtype", [tf.float32, tf.float16, tf.bfloat16, tf.float64], ids=lambda d: d.name
)
def test_steps_of_momentum(make, traced, dtype):
    variable = de.Variable(value_dtype=dtype, dim=2, initializer=1.0, kv_creator=make())
    optimizer = de.DynamicEmbeddingOptimizer(keras.optimizers.SGD(0.25, momentum=0.5))
    shadow = variable.get_trainable_by_name("t")

    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(de.embedding_lookup(variable, ids, name="t"))
        optimizer.apply_gradients([(tape.gradient(loss, shadow), shadow)])

    step = tf.function(step) if traced else step
    for _ in range(2):
        step(tf.constant([[4, 9], [4, 6]], tf.int64))
    # Key 4 is there twice: v = -0.5, then -0.25 - 0.5; the others have half of it.
    np.testing.assert_array_equal(
        tf.cast(variable.lookup([4, 9, 6, 5])[:, 0], tf.float32), [-0.25, 0.375, 0.375, 1.0]
    )
    (slot,) = variable.get_slot_variables(optimizer)
    np.testing.assert_array_equal(slot.lookup([4, 6])[:, 0], [-0.75, -0.375])


def test_restrictions_take_keys_states_and_status():
    variable = de.Variable(dim=2, restrict_policy=de.FrequencyRestrictPolicy)
    optimizer = de.DynamicEmbeddingOptimizer(keras.optimizers.Adam(0.1))
    shadow = variable.get_trainable_by_name("t")
    for ids in ([1, 2, 3, 4], [4, 2], [4]):
        with tf.GradientTape() as tape:
            rows = de.embedding_lookup(variable, tf.constant(ids, tf.int64), name="t")
            loss = tf.reduce_sum(rows)
        optimizer.apply_gradients([(tape.gradient(loss, shadow), shadow)])
    variable.restrict(2)
    policy = variable.restrict_policy
    for each in (variable, policy.status, *variable.get_slot_variables(optimizer)):
        assert sorted(each.export()[0].numpy().tolist()) == [2, 4]
    assert policy.status.lookup([2, 4]).numpy().tolist() == [[2], [3]]


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64, tf.int32], ids=lambda d: d.name)
@pytest.mark.parametrize("combiner", ["mean", "sum", "sqrtn"])
def test_sparse_lookups(dtype, combiner):
    variable, dense = de.Variable(value_dtype=dtype, dim=2), np.arange(20).reshape(10, 2)
    variable.upsert(np.arange(10), dense.astype(dtype.as_numpy_dtype))
    ids = tf.ragged.constant([[2, 4], [], [9], [0, 2, 2, 2]], tf.int64)
    rows = de.safe_embedding_lookup_sparse(variable, ids.to_sparse(), combiner=combiner)
    divisor = {"mean": len, "sum": lambda _: 1, "sqrtn": lambda row: np.sqrt(len(row))}[combiner]
    expected = [dense[row].sum(0) / divisor(row) if row else np.zeros(2) for row in ids.to_list()]
    expected = np.array(expected).astype(dtype.as_numpy_dtype)  # of integers, towards 0
    np.testing.assert_allclose(rows, expected, rtol=1e-6)
    assert rows.dtype == dtype


def test_initial_values_are_of_the_key():
    initializer = keras.initializers.RandomNormal(stddev=2.0, seed=3)
    variable = de.Variable(dim=5, initializer=initializer, name="same")
    rows = variable.lookup(np.arange(1000)).numpy()
    np.testing.assert_array_equal(variable.lookup([999, 7, 7]), rows[[999, 7, 7]])
    assert len(np.unique(rows)) > 4900 and abs(rows.std() - 2.0) < 0.1
