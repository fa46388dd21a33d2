"""`Variable` against a Python dict: each method, in each of TensorFlow's modes, awkward sizes."""

import gc
import json
import re
import threading
import weakref

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from sok_lite import dynamic_embedding as de
from sok_lite.dynamic_embedding.partition import default_partition_fn
from sok_lite.engine import texts
from tests.support.dict_variable import DictVariable
from tests.support.helpers import run_threads
from tests.support.modes import Function

KEYS = [tf.int64, tf.int32, tf.string]
VALUES = [tf.float32, tf.float16, tf.bfloat16, tf.float64, tf.int32, tf.int64, tf.int8]


def as_keys(numbers, dtype):
    """Returns keys of a dtype, one for each number and the same for equal ones."""
    numbers = np.asarray(numbers)
    if dtype == tf.string:
        return np.array([f"key {n}".encode() for n in numbers.ravel()], object).reshape(
            numbers.shape
        )
    return numbers.astype(dtype.as_numpy_dtype)


def assert_same(here, variable, oracle, tolerance=0):
    keys, values = here.run(variable.export)
    assert sorted(keys.tolist()) == sorted(oracle.rows)
    assert values.shape == (len(oracle.rows), oracle.dim)
    for key, row in zip(keys.tolist(), values, strict=True):
        np.testing.assert_allclose(
            np.float64(row), np.float64(oracle.rows[key]), rtol=tolerance, atol=tolerance
        )
    assert here.run(variable.size) == len(oracle.rows)


@pytest.mark.parametrize("key_dtype", KEYS, ids=lambda d: d.name)
@pytest.mark.parametrize("value_dtype", VALUES, ids=lambda d: d.name)
def test_every_dtype_in_every_mode(here, key_dtype, value_dtype):
    variable = de.Variable(key_dtype, value_dtype, dim=3, initializer=-2, name="types")
    oracle = DictVariable(3, -2, value_dtype.as_numpy_dtype)
    rng = np.random.default_rng(1)
    first = as_keys([5, -7, 0, 2**31 - 1], key_dtype)
    values = rng.integers(-5, 6, (4, 3)).astype(value_dtype.as_numpy_dtype)
    here.run(variable.upsert, first, values)
    oracle.upsert(first, values)
    assert_same(here, variable, oracle)

    asked = as_keys([[0, 1], [5, -7]], key_dtype)
    rows, exists = here.run(lambda keys: variable.lookup(keys, return_exists=True), asked)
    assert rows.dtype == value_dtype.as_numpy_dtype
    np.testing.assert_array_equal(np.float64(rows), np.float64(oracle.lookup(asked)))
    np.testing.assert_array_equal(exists, [[True, False], [True, True]])

    keys = as_keys([5, 9, 0, 0], key_dtype)
    old = rng.integers(-5, 6, (4, 3)).astype(value_dtype.as_numpy_dtype)
    new = rng.integers(-5, 6, (4, 3)).astype(value_dtype.as_numpy_dtype)
    here.run(variable.accum, keys, old, new, [True, False, True, True])
    oracle.accum(keys, old, new, [True, False, True, True])
    assert_same(here, variable, oracle)

    here.run(variable.remove, as_keys([0, 0, 77], key_dtype))
    oracle.remove(as_keys([0], key_dtype))
    assert_same(here, variable, oracle)
    here.run(variable.clear)
    oracle.rows.clear()
    assert_same(here, variable, oracle)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (0, 3), (4, 1), (2, 3, 5)])
@pytest.mark.parametrize("shards", [1, 3])
def test_keys_of_any_shape(here, shape, shards):
    variable = de.Variable(dim=2, devices=["/CPU:0"] * shards, initializer=0.5)
    keys = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)
    values = np.arange(keys.size * 2, dtype=np.float32).reshape(*shape, 2)
    here.run(variable.upsert, keys, values)
    np.testing.assert_array_equal(here.run(variable.lookup, keys), values)
    assert here.run(variable.size) == keys.size


KEY = st.integers(0, 9)
ROWS = st.lists(st.tuples(KEY, st.integers(-9, 9), st.booleans()), max_size=25)
CALL = st.one_of(
    st.tuples(st.just("upsert"), ROWS),
    st.tuples(st.just("accum"), ROWS),
    st.tuples(st.just("remove"), ROWS),
    st.tuples(st.just("clear"), st.just([])),
)


@given(st.lists(CALL, max_size=8), st.integers(1, 3))
def test_any_calls_one_after_the_other(calls, shards):
    variable = de.Variable(dim=2, devices=["/CPU:0"] * shards, initializer=3.0)
    oracle = DictVariable(2, 3.0)
    for name, items in calls:
        keys = np.array([key for key, _, _ in items], np.int64)
        values = np.array([[n, -n] for _, n, _ in items], np.float32).reshape(-1, 2)
        flags = np.array([flag for _, _, flag in items], bool)
        arguments = {
            "upsert": (keys, values),
            "accum": (keys, 2 * values, values, flags),
            "remove": (keys,),
            "clear": (),
        }[name]
        getattr(variable, name)(*arguments)
        if name == "clear":
            oracle.rows.clear()
        else:
            getattr(oracle, name)(*arguments)
    keys, values = variable.export()
    assert sorted(keys.numpy().tolist()) == sorted(oracle.rows)
    np.testing.assert_array_equal(values, oracle.lookup(keys.numpy()))
    everything = np.arange(12)
    rows, exists = variable.lookup(everything, return_exists=True)
    np.testing.assert_array_equal(rows, oracle.lookup(everything))
    np.testing.assert_array_equal(exists, oracle.exists(everything))


def test_the_last_of_a_repeated_key_is_written(here):
    variable = de.Variable(dim=1)
    keys = np.zeros(100_000, np.int64)
    here.run(variable.upsert, keys, np.arange(100_000, dtype=np.float32)[:, None])
    assert here.run(variable.lookup, [0]) == [[99_999.0]]


def test_lookups_change_nothing(here):
    variable = de.Variable(dim=2, initializer=1.0)
    here.run(variable.lookup, [1, 2, 3])
    here.run(lambda keys: variable.lookup(keys, return_exists=True), [1, 2])
    here.run(lambda keys: de.embedding_lookup(variable, keys, name="n"), [4, 5])
    assert here.run(variable.size) == 0


# ---- accum ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_there", [True, False])
@pytest.mark.parametrize("flag", [True, False])
def test_the_four_cases_of_accum(here, is_there, flag):
    variable = de.Variable(dim=2)
    if is_there:
        here.run(variable.upsert, [7], [[10.0, 20.0]])
    here.run(variable.accum, [7], [[1.0, 1.0]], [[4.0, 6.0]], [flag])
    expected = {
        (True, True): [[13.0, 25.0]],
        (False, False): [[4.0, 6.0]],
        (True, False): [[10.0, 20.0]],
        (False, True): [[0.0, 0.0]],
    }[is_there, flag]
    np.testing.assert_array_equal(here.run(variable.lookup, [7]), expected)
    assert here.run(variable.size) == int(is_there or not flag)


def test_accum_sums_repeated_keys_and_keeps_the_first_new_one(here):
    variable = de.Variable(dim=1)
    here.run(variable.upsert, [1], [[10.0]])
    keys, old = [1, 1, 2, 2], [[0.0]] * 4
    here.run(variable.accum, keys, old, [[1.0], [2.0], [5.0], [6.0]], [True, True, False, False])
    np.testing.assert_array_equal(here.run(variable.lookup, [1, 2]), [[13.0], [5.0]])


def test_a_difference_of_halves_is_taken_in_float32():
    for dtype in (tf.float16, tf.bfloat16):
        variable = de.Variable(value_dtype=dtype, dim=1)
        keys = tf.constant([1, 2], tf.int64)
        variable.upsert(keys, tf.constant([[-30000.0], [2048.0]], dtype))
        old = tf.constant([[-40000.0], [2048.0]], dtype)
        variable.accum(keys, old, tf.constant([[40000.0], [2048.0]], dtype), [True, True])
        rows = tf.cast(variable.lookup(keys), tf.float32).numpy()[:, 0]
        np.testing.assert_allclose(rows, [50000.0, 2048.0], rtol=0.01)


def test_old_values_of_another_length_are_refused_where_shapes_are_unknown():
    variable = de.Variable(dim=1)

    @tf.function(
        input_signature=[tf.TensorSpec(None, tf.int64), *[tf.TensorSpec(None, tf.float32)] * 2]
    )
    def accum(keys, old, new):
        variable.accum(keys, old, new, [False, False])

    with pytest.raises((ValueError, tf.errors.OpError), match="must have one shape"):
        accum([1, 2], [[1.0]], [[1.0], [2.0]])
    assert int(variable.size()) == 0


def test_texts_that_end_in_zero_bytes_are_keys_of_their_own():
    variable = de.Variable(tf.string, dim=1)
    variable.upsert([b"a\0", b"a", b""], [[1.0], [2.0], [3.0]])
    variable.upsert(tf.constant(b"b\0"), [4.0])
    assert sorted(variable.export()[0].numpy().tolist()) == [b"", b"a", b"a\0", b"b\0"]
    assert variable.lookup([b"a\0", b"a", b"", b"b\0"])[:, 0].numpy().tolist() == [1, 2, 3, 4]


def test_texts_of_keys_that_did_not_come_are_forgotten(monkeypatch):
    monkeypatch.setattr(texts, "RECENT", 100)
    variable = de.Variable(tf.string, dim=1)
    variable.upsert([f"kept {i}" for i in range(50)], np.ones((50, 1)))
    for batch in range(60):
        ids = tf.constant([f"{batch} {i}" for i in range(50)])
        de.embedding_lookup(variable, ids, name="t")
    assert len(variable.rows._texts) < 1500  # of 3,050
    assert sorted(variable.export()[0].numpy().tolist()) == sorted(
        f"kept {i}".encode() for i in range(50)
    )


def test_exists_of_any_shape_with_one_for_each_key(here):
    variable = de.Variable(dim=1)
    values = np.ones((2, 2, 1), np.float32)
    here.run(variable.accum, [[1, 2], [3, 4]], values, values, [False] * 4)
    assert here.run(variable.size) == 4


# ---- devices and partitioners --------------------------------------------------------------------


def by_tens(keys, shard_num):
    return tf.cast(keys // 10, tf.int32)


def test_shards_are_what_the_partitioner_says(here):
    variable = de.Variable(dim=1, devices=["/CPU:0"] * 3, partitioner=by_tens)
    keys = np.array([25, 1, 12, 2, 29, 3], np.int64)
    here.run(variable.upsert, keys, keys[:, None].astype(np.float32))
    assert [here.run(lambda i=i: variable.size(i)) for i in range(3)] == [3, 1, 2]
    assert [here.run(table.size) for table in variable.tables] == [3, 1, 2]
    exported, values = here.run(variable.export)
    assert [key // 10 for key in exported.tolist()] == [0, 0, 0, 1, 2, 2]
    np.testing.assert_array_equal(values[:, 0], exported)
    assert sorted(here.run(variable.tables[2].export)[0].tolist()) == [25, 29]
    with pytest.raises(IndexError):
        variable.size(3)


@pytest.mark.parametrize("keys", [tf.int64, tf.int32, tf.string], ids=lambda d: d.name)
def test_the_default_partitioner_takes_every_key_dtype(keys):
    numbers = as_keys([-7, -1, 0, 5, 11], keys)
    variable = de.Variable(keys, dim=1, devices=["/CPU:0", "/CPU:0"])
    variable.upsert(numbers, np.ones((5, 1)))
    assert int(variable.size(0)) + int(variable.size(1)) == int(variable.size()) == 5
    if keys != tf.string:
        np.testing.assert_array_equal(default_partition_fn(tf.constant(numbers), 2), numbers % 2)


@pytest.mark.parametrize("call", ["upsert", "lookup", "remove"])
def test_what_a_partitioner_may_not_give(call):
    def too_large(keys, shard_num):
        return tf.fill(tf.shape(keys), 2)

    def wrong_dtype(keys, shard_num):
        return keys % shard_num

    values = [[[1.0]]] if call == "upsert" else []
    for partitioner, text in ((too_large, r"\[0, 2\).*Received: 2"), (wrong_dtype, "int64")):
        variable = de.Variable(dim=1, devices=["/CPU:0"] * 2, partitioner=partitioner)
        with pytest.raises(tf.errors.InvalidArgumentError, match=text):
            getattr(variable, call)(tf.constant([1], tf.int64), *values)
        assert int(variable.rows.size()) == 0
    variable = de.Variable(dim=1, devices=["/CPU:0"] * 2, partitioner=too_large)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"\[0, 2\)"):
        Function().run(lambda keys: getattr(variable, call)(keys, *values), [1])


def test_a_partitioner_is_asked_for_one_shard_too():
    def refuse(keys, shard_num):
        raise KeyError("asked")

    variable = de.Variable(dim=1, partitioner=refuse)
    with pytest.raises(KeyError, match="asked"):
        variable.lookup([1])


# ---- initial values ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("initializer", "expected"),
    [
        (None, [0, 0]),
        (3, [3, 3]),
        (np.float32(0.25), [0.25, 0.25]),
        (np.array([7.0]), [7, 7]),
        ([1.5, -2.0], [1.5, -2.0]),
        (np.array([[4.0], [5.0]]), [4, 5]),
        (lambda: 2.0, [2, 2]),
        (lambda shape: np.arange(shape[0]) + 1, [1, 2]),
        (tf.keras.initializers.Constant(6.0), [6, 6]),
        (tf.keras.initializers.Ones, [1, 1]),
        (tf.compat.v1.ones_initializer(), [1, 1]),
        (tf.compat.v1.constant_initializer(9.0), [9, 9]),
    ],
)
def test_what_a_missing_key_gives(initializer, expected):
    variable = de.Variable(dim=2, initializer=initializer)
    np.testing.assert_array_equal(variable.lookup([[3], [4]]), [[expected], [expected]])


def test_integers_begin_with_what_is_before_the_point():
    for initializer, expected in ((2.7, [2, 2]), ([1.0, -2.5], [1, -2]), (-0.5, [0, 0])):
        variable = de.Variable(value_dtype=tf.int32, dim=2, initializer=initializer)
        np.testing.assert_array_equal(variable.lookup([7]), [expected])
    for initializer in (np.nan, [1.0, np.inf]):
        with pytest.raises(ValueError, match="int32 begin with numbers.*Received"):
            de.Variable(value_dtype=tf.int32, dim=2, initializer=initializer)


@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float32], ids=lambda dtype: dtype.name)
def test_an_array_of_bfloat16_as_initializer(dtype):
    for row in (np.array([1.5, -2.0], tf.bfloat16.as_numpy_dtype), tf.constant(0.25, tf.bfloat16)):
        variable = de.Variable(value_dtype=dtype, dim=2, initializer=row)
        expected = np.broadcast_to(np.asarray(row, np.float32), [1, 2])
        np.testing.assert_array_equal(tf.cast(variable.lookup([3]), tf.float32), expected)


def test_a_tensor_as_initializer():
    np.testing.assert_array_equal(
        de.Variable(dim=2, initializer=tf.constant([1.0, 2.0])).lookup([1]), [[1, 2]]
    )
    with tf.Graph().as_default():
        de.Variable(dim=2, initializer=tf.constant([1.0, 2.0]))
        with pytest.raises(ValueError, match="known when the variable is made"):
            de.Variable(dim=2, initializer=tf.random.uniform([2]))


def test_random_initial_values_are_of_the_key_alone():
    import keras
    import tf_keras

    for initializer in (
        keras.initializers.RandomNormal(stddev=2.0, seed=3),
        tf_keras.initializers.RandomNormal(stddev=2.0),
        tf.random_normal_initializer(stddev=2.0),
        tf.compat.v1.random_normal_initializer(stddev=2.0),
    ):
        variable = de.Variable(dim=4, initializer=initializer, name="random")
        rows = variable.lookup(np.arange(1000)).numpy()
        np.testing.assert_array_equal(variable.lookup([[7, 7], [3, 999]]), rows[[[7, 7], [3, 999]]])
        assert len(np.unique(rows)) > 3900
        assert abs(rows.std() - 2.0) < 0.1 and abs(rows.mean()) < 0.1


FANS = {
    "Glorot uniform": lambda of: of.GlorotUniform(),
    "Glorot normal": lambda of: of.GlorotNormal(),
    "He uniform": lambda of: of.HeUniform(),
    "He normal": lambda of: of.HeNormal(),
    "scaled by fan_in": lambda of: of.VarianceScaling(0.5, "fan_in", "untruncated_normal"),
}


@pytest.mark.parametrize("make", FANS.values(), ids=FANS)
def test_initializers_that_count_with_fans_take_a_shape(keras, make, recwarn):
    """The oracle is what the initializer itself draws of a weight of that shape."""
    initializer = make(keras.initializers)
    variable = de.Variable(dim=12, initializer=initializer, row_shape=(1024, 12))
    rows, drawn = variable.lookup(np.arange(1024)).numpy(), initializer([1024, 12]).numpy()
    assert abs(rows.std() / drawn.std() - 1) < 0.03
    assert not [each for each in recwarn if "row_shape" in str(each.message)]


@pytest.mark.parametrize("make", FANS.values(), ids=FANS)
def test_without_a_shape_they_take_a_row_for_a_vector_and_say_so(keras, make):
    initializer = make(keras.initializers)
    with pytest.warns(RuntimeWarning, match="of 'fans' depends on.*row_shape=") as told:
        variable = de.get_variable("fans", dim=12, initializer=initializer)
    rows = variable.lookup(np.arange(5000)).numpy()
    drawn = initializer([1024, 12]).numpy()  # as TFRA does in a lookup of 1024 keys
    said = re.search(r"deviation of ([0-9.]+)\. .*it is ([0-9.]+)\. ", str(told[0].message))
    here, there = said.groups()
    assert abs(rows.std() / float(here) - 1) < 0.03
    assert abs(drawn.std() / float(there) - 1) < 0.03


def test_no_warning_where_the_batch_makes_no_difference(recwarn):
    of = tf.keras.initializers
    for initializer in (of.RandomNormal(), of.VarianceScaling(mode="fan_out"), of.Zeros(), 0.5):
        de.Variable(dim=4, initializer=initializer)
    assert not [each for each in recwarn if "row_shape" in str(each.message)]
    for row_shape in ((4,), (0, 4), 4):
        with pytest.raises(ValueError, match="`row_shape` must be"):
            de.Variable(dim=4, initializer=of.HeNormal(), row_shape=row_shape)


@pytest.mark.parametrize(
    ("initializer", "error", "text"),
    [
        ("normal", TypeError, "Received: 'normal'"),
        ([1.0, 2.0, 3.0], ValueError, "one number, or 2.*3 numbers"),
        ([], ValueError, "one number, or 2.*0 numbers"),
        (object(), TypeError, "must be a number"),
        (tf.keras.initializers.Identity(), ValueError, "Received: Identity"),
    ],
)
def test_initializers_that_there_are_not(initializer, error, text):
    with pytest.raises(error, match=text):
        de.Variable(dim=2, initializer=initializer)


# ---- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"dim": 0}, ValueError, "dim=0"),
        ({"dim": 1.5}, TypeError, "dim=1.5"),
        ({"init_size": -1}, ValueError, "init_size=-1"),
        ({"devices": []}, ValueError, "devices"),
        ({"devices": 16}, TypeError, "`devices` must be a name.*devices=16"),
        # Of Embedding(rows, dim): TensorFlow has 9 for int64 and 7 for string.
        ({"key_dtype": 1000, "value_dtype": 16}, TypeError, "key_dtype=1000. A table has a dim"),
        ({"key_dtype": 9}, TypeError, "`key_dtype` must be a dtype such as .*key_dtype=9"),
        ({"value_dtype": 1}, TypeError, "`value_dtype` must be a dtype such as .*value_dtype=1"),
        ({"key_dtype": tf.float32}, TypeError, "key_dtype=float32"),
        ({"value_dtype": tf.complex64}, TypeError, "value_dtype=complex64"),
        ({"value_dtype": tf.string}, TypeError, "value_dtype=string"),
        ({"kv_creator": 3}, TypeError, "KVCreator"),
        ({"restrict_policy": int}, TypeError, "restrict_policy must be subclass"),
        ({"restrict_policy": 3}, TypeError, "restrict_policy must be subclass"),
    ],
)
def test_arguments_that_do_not_fit(arguments, error, text):
    with pytest.raises(error, match=text):
        de.Variable(**arguments)


REFUSED_KEYS = {
    "above int64": (tf.int64, [2**63 + 7, 5], "must fit int64.*9223372036854775815. Make"),
    "above uint64": (tf.int64, [2**64], "must fit int64.*18446744073709551616. No key has more"),
    "above int32": (tf.int32, [5, 2**40], "must fit int32.*1099511627776. Make the table"),
    "texts": (tf.int64, ["a"], "must be int64. Received: texts. Make .* key_dtype=tf.string"),
    "bytes": (tf.int32, np.array([b"a"]), "must be int32. Received: texts"),
    "a tensor of texts": (tf.int64, tf.constant(["a"]), "must be int64. Received: string. Make"),
    "numbers for texts": (tf.string, [1, 2], "must be string. Received: int64. .*as_string"),
    "a number among texts": (tf.string, ["a", 2], "must be string. Received"),
    "no text": (tf.string, np.array(["a", None], object), "must be string. Received: object"),
}


@pytest.mark.parametrize("case", REFUSED_KEYS)
def test_keys_that_do_not_fit(case):
    key_dtype, keys, text = REFUSED_KEYS[case]
    variable = de.Variable(key_dtype, dim=1)
    rows = np.ones((len(keys), 1), np.float32)
    for call in (variable.lookup, variable.remove, lambda keys: variable.upsert(keys, rows)):
        with pytest.raises(TypeError, match=text):
            call(keys)
    assert int(variable.size()) == 0


def test_integers_of_python_as_objects_are_keys():
    variable = de.Variable(dim=1)
    variable.upsert(np.array([2**62 + 1, -3], object), np.array([[1.0], [2.0]]))
    np.testing.assert_array_equal(variable.lookup([-3, 2**62 + 1]), [[2.0], [1.0]])


@pytest.mark.parametrize("call", ["lookup", "remove", "upsert", "accum"])
def test_dtypes_that_do_not_fit(call):
    variable = de.Variable(dim=2)
    keys, values = tf.constant([1], tf.int64), tf.ones([1, 2])
    good = {
        "lookup": [keys],
        "remove": [keys],
        "upsert": [keys, values],
        "accum": [keys, values, values, [True]],
    }[call]
    wrong_keys = [tf.constant([1], tf.int32), *good[1:]]
    # TypeError by TFRA's documents, ValueError by what it raises.
    for error in (TypeError, ValueError):
        with pytest.raises(error, match="must be int64. Received: int32"):
            getattr(variable, call)(*wrong_keys)
        with pytest.raises(error, match="Received: float"):
            getattr(variable, call)([1.5], *good[1:])
        if len(good) > 1:
            with pytest.raises(error, match="must be float32. Received: float64"):
                getattr(variable, call)(keys, tf.ones([1, 2], tf.float64), *good[2:])
    assert int(variable.size()) == 0


@pytest.mark.parametrize("values", [np.ones((1, 3)), np.ones((2, 2)), np.ones(2)])
def test_values_of_another_shape(values):
    variable = de.Variable(dim=2)
    for error in (tf.errors.InvalidArgumentError, ValueError):
        with pytest.raises(error, match=r"Expected shape \(1, 2\)"):
            variable.upsert([1], values)
    assert int(variable.size()) == 0


def test_lists_and_arrays_become_keys():
    variable = de.Variable(dim=1)
    variable.upsert([1, 2], [[1.0], [2.0]])
    variable.upsert(np.array([3], np.int32), np.array([[3.0]]))
    np.testing.assert_array_equal(variable.lookup([1, 2, 3]), [[1], [2], [3]])
    variable.remove([1])
    assert int(variable.size()) == 2
    with pytest.raises(TypeError, match="int32"):
        de.Variable(tf.int32).lookup([2**40])


def test_what_a_variable_says_of_itself(monkeypatch):
    variable = de.Variable(dim=5, devices="/CPU:0", name="facts", init_size=100)
    assert variable.devices == ["/CPU:0"] and variable.shard_num == 1
    assert variable.shared_name == "shared_name.facts"
    assert isinstance(variable.kv_creator, de.CuckooHashTableCreator)
    assert (variable.trainable, variable.checkpoint, variable.bp_v2) == (True, True, False)
    assert isinstance(variable.tables[0], de.CuckooHashTable)
    assert variable.trainable_store == {} and variable.restrict_policy is None
    assert "facts" in repr(variable) and "dim=5" in repr(variable)
    assert de.Variable(devices=["a", "b"], init_size=101).init_size == 101


def test_the_initial_size(monkeypatch):
    monkeypatch.delenv("TF_HASHTABLE_INIT_SIZE", raising=False)
    usual = de.Variable().rows.table.capacity
    monkeypatch.setenv("TF_HASHTABLE_INIT_SIZE", "200000")
    assert de.Variable().rows.table.capacity >= 200_000 > usual >= 8192
    assert de.Variable(init_size=5000).rows.table.capacity < 200_000


# ---- by name -------------------------------------------------------------------------------------


PS = ["/job:ps/replica:0/task:0/CPU:0", "/job:ps/replica:0/task:1/CPU:0"]


def cluster(**jobs):
    named = {name: [f"machine{i}:1" for i in range(count)] for name, count in jobs.items()}
    return json.dumps({"cluster": named, "task": {"type": "worker", "index": 0}})


@pytest.mark.parametrize("jobs", [{"ps": 2, "worker": 2}, {"ps": 1, "chief": 1, "worker": 1}])
def test_workers_share_no_table_on_parameter_servers(monkeypatch, jobs):
    """Each would train one of its own, and nobody would be told."""
    monkeypatch.setenv("TF_CONFIG", cluster(**jobs))
    with pytest.raises(NotImplementedError, match=r"'users'.*/job:ps.*2 workers.*horovodrun"):
        de.Variable(dim=2, name="users", devices=PS)
    assert (
        de.Variable(dim=2, name="users", devices=["/CPU:0", "/job:localhost/CPU:0"]).shard_num == 2
    )


@pytest.mark.parametrize("config", ["", "{}", "no JSON", cluster(ps=2, worker=1), '{"cluster": 3}'])
def test_the_name_of_a_device_is_nothing_but_one_where_there_is_one_worker(monkeypatch, config):
    monkeypatch.setenv("TF_CONFIG", config)
    assert de.Variable(dim=2, name="users", devices=PS).devices == PS


def test_get_variable_gives_the_same_one_again():
    first = de.get_variable("again", dim=3)
    assert de.get_variable("again", dim=3) is first
    for other in ({"dim": 4}, {"dim": 3, "key_dtype": tf.int32}, {"dim": 3, "devices": ["a", "b"]}):
        with pytest.raises(ValueError, match="exists with"):
            de.get_variable("again", **other)
    first.upsert([1], [[1.0, 2.0, 3.0]])
    del first
    gc.collect()
    assert de.get_variable("again", dim=3).lookup([1]).numpy().tolist() == [[1.0, 2.0, 3.0]]


@pytest.mark.parametrize("package", ["keras", "tf_keras", None])
def test_a_new_session_knows_no_names_and_what_is_held_keeps_its_rows(package):
    """As in TFRA, which keeps variables by name with the default graph."""
    keras = package and pytest.importorskip(package)
    clear = keras.backend.clear_session if keras else tf.compat.v1.reset_default_graph
    first = de.get_variable("of a session", dim=3)
    first.upsert([1], [[1.0, 2.0, 3.0]])
    clear()
    second = de.get_variable("of a session", dim=2)  # nothing compares it with the old one
    assert second is not first and int(second.size()) == 0
    assert first.lookup([1]).numpy().tolist() == [[1.0, 2.0, 3.0]]
    assert de.get_variable("of a session", dim=2) is second
    table = weakref.ref(second.rows.table)
    del second
    clear()
    de.get_variable("another")
    gc.collect()
    assert table() is None


def test_a_graph_that_is_entered_and_a_function_are_of_the_same_session():
    found = [de.get_variable("around", dim=2)]
    with tf.Graph().as_default():
        assert de.get_variable("around", dim=2) is not found[0]  # the graph's own
    tf.function(lambda: found.append(de.get_variable("around", dim=2)))()
    found.append(de.get_variable("around", dim=2))
    assert {id(variable) for variable in found} == {id(found[0])}


def test_a_thread_that_clears_its_session_leaves_the_names_of_others():
    mine, found = de.get_variable("of threads", dim=2), []

    def ask():
        found.append(de.get_variable("of threads", dim=2))
        tf.compat.v1.reset_default_graph()
        found.append(de.get_variable("of threads", dim=2))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert found[0] is mine and found[1] is not mine
    assert de.get_variable("of threads", dim=2) is mine
    tf.compat.v1.reset_default_graph()
    assert de.get_variable("of threads", dim=2) not in (mine, found[1])


def test_one_variable_of_a_name_whoever_asks_first():
    start, found = threading.Barrier(4), []

    def ask(number):
        start.wait()
        variable = de.get_variable("asked at once", dim=2)
        found.append((variable, variable.get_trainable_by_name("t")))

    run_threads(ask)
    assert len({id(variable) for variable, _ in found}) == 1
    assert len({id(trainable) for _, trainable in found}) == 1


def test_get_variable_in_a_graph_follows_scopes():
    tf1 = tf.compat.v1
    with tf.Graph().as_default():
        with tf1.variable_scope("outer"):
            first = de.get_variable("a", dim=2)
            short = de.get_variable("b", dim=2, short_file_name=True)
        assert (first.name, short.name) == ("outer/a", "b")
        with (
            tf1.variable_scope("outer"),
            pytest.raises(ValueError, match="already exists, disallowed.*AUTO_REUSE"),
        ):
            de.get_variable("a", dim=2)
        for reuse in (True, tf1.AUTO_REUSE):
            with tf1.variable_scope("outer", reuse=reuse):
                assert de.get_variable("a", dim=2) is first
        with tf1.variable_scope("outer", reuse=True):  # as in TFRA, a new one too
            new = de.get_variable("c", dim=2)
            assert new.name == "outer/c" and de.get_variable("c", dim=2) is new
        collections = de.GraphKeys
        assert tf1.get_collection(collections.DYNAMIC_EMBEDDING_VARIABLES) == [first, short, new]
    with tf.Graph().as_default():
        assert de.get_variable("a") is not first


def test_a_finalized_graph_of_tf1_tells_the_size():
    tf1 = tf.compat.v1
    with tf.Graph().as_default() as graph, tf1.Session() as session:
        variable = de.get_variable("sized", dim=2)
        upsert = variable.upsert(tf.constant([1, 2, 3], tf.int64), tf.ones([3, 2]))
        with tf.control_dependencies([upsert]):
            after = variable.size()
        assert variable.size() is variable.size() and after is not variable.size()
        graph.finalize()
        assert session.run(variable.size()) == 0
        assert session.run(after) == session.run(variable.size()) == 3


def test_trainables_of_a_graph_have_the_names_of_tfra():
    tf1 = tf.compat.v1
    with tf.Graph().as_default():
        variable = de.get_variable("v", dim=2)
        ids = tf.constant([1], tf.int64)
        matrix = tf.RaggedTensor.from_row_lengths(ids, [1])
        with tf1.variable_scope("test"), tf1.variable_scope("q"):
            _, one = de.embedding_lookup(variable, ids, name="emb", return_trainable=True)
            _, again = de.embedding_lookup(variable, ids, name="emb", return_trainable=True)
        _, pooled = de.embedding_lookup_sparse(
            variable, matrix, None, name="s", return_trainable=True
        )
    assert [each.name for each in (one, again, pooled)] == [
        "test/q/emb/emb:0",
        "test/q/emb/emb_1:0",
        "s/embedding_lookup/s/embedding_lookup:0",
    ]


def test_a_variable_is_freed_when_nobody_holds_it():
    variable = de.Variable(name="freed", dim=2)
    de.embedding_lookup(variable, tf.constant([1], tf.int64), name="x")
    table = weakref.ref(variable.rows.table)
    del variable
    gc.collect()
    assert table() is None


# ---- in place of a dense variable ----------------------------------------------------------------

NOT_A_TENSOR = {
    "sampled_softmax_loss": lambda variable: softmax_loss(variable, tf.ones([2, 3])),
    "nce_loss": lambda variable: tf.nn.nce_loss(
        variable, tf.zeros([10]), tf.constant([[1], [7]], tf.int64), tf.ones([2, 3]), 2, 10
    ),
    "embedding_lookup": lambda variable: tf.nn.embedding_lookup(variable, [1]),
    "matmul": lambda variable: tf.matmul(tf.ones([2, 3]), variable, transpose_b=True),
    "convert_to_tensor": tf.convert_to_tensor,
}


def softmax_loss(weights, inputs):
    """The loss of labels 1 and 7 among ten, with 2 and 5 for the others, and dense biases."""
    sampled = (tf.constant([2, 5], tf.int64), tf.fill([2, 1], 0.25), tf.fill([2], 0.5))
    labels = tf.constant([[1], [7]], tf.int64)
    biases = tf.linspace(0.0, 1.0, 10)
    return tf.nn.sampled_softmax_loss(weights, biases, labels, inputs, 2, 10, 1, sampled)


@pytest.mark.parametrize("use", NOT_A_TENSOR.values(), ids=NOT_A_TENSOR.keys())
@pytest.mark.parametrize("is_traced", [False, True])
def test_a_use_as_a_tensor_says_what_to_call(use, is_traced):
    variable = de.Variable(dim=3, name="tensor")
    call = tf.function(lambda: use(variable)) if is_traced else lambda: use(variable)
    with pytest.raises(TypeError, match=r"de.Variable.*de.embedding_lookup\(.*get_trainable_by_n"):
        call()


@pytest.mark.parametrize("is_traced", [False, True])
def test_a_sampled_softmax_reads_a_trainable_as_dense_weights(is_traced):
    rng = np.random.default_rng(0)
    rows, inputs = (tf.constant(rng.normal(size=(n, 3)), tf.float32) for n in (10, 2))
    variable, dense = de.Variable(dim=3, name="softmax"), tf.Variable(rows)
    variable.upsert(np.arange(10), rows)

    def gradient(weights):
        with tf.GradientTape() as tape:
            loss = softmax_loss(weights, inputs)
        return loss, tf.convert_to_tensor(tape.gradient(loss, weights).values)

    def ours():
        return gradient(variable.get_trainable_by_name("softmax"))

    loss, values = tf.function(ours)() if is_traced else ours()
    expected, of_dense = gradient(dense)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    np.testing.assert_allclose(values, of_dense, rtol=1e-6)
