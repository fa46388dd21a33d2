"""Variables whose rows are in a real Redis, against a dict and against variables in memory."""

import json
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from sok_lite import dynamic_embedding as de
from tests.dynamic_embedding import redis_server
from tests.dynamic_embedding.dict_variable import DictVariable

if redis_server.unavailable() is not None:
    pytest.skip(f"no Redis: {redis_server.unavailable()}", allow_module_level=True)

tf1 = tf.compat.v1


@pytest.fixture(scope="module")
def port(tmp_path_factory):
    with redis_server.server(tmp_path_factory.mktemp("server")) as port:
        yield port


@pytest.fixture
def creator(port, tmp_path, request):
    """Makes tables in a Redis, under names of this test's own."""
    path = tmp_path / "redis.json"
    tag = request.node.name
    path.write_text(
        json.dumps({"redis_host_port": port, "model_tag_runtime": tag, "model_tag_import": tag})
    )
    return de.RedisTableCreator(de.RedisTableConfig(str(path)))


def test_as_a_dict(here, creator):
    rng = np.random.default_rng(0)
    variable = de.Variable(dim=3, initializer=0.5, name="v", kv_creator=creator)
    oracle = DictVariable(3, 0.5)
    for _ in range(8):
        keys = rng.integers(-9, 9, (2, 3))
        old, new = rng.normal(size=(2, 2, 3, 3)).astype(np.float32)
        exists = rng.integers(0, 2, (2, 3)).astype(bool)
        here.run(variable.upsert, keys, new)
        oracle.upsert(keys, new)
        keys = rng.integers(-12, 12, (2, 3))
        here.run(variable.accum, keys, old, new, exists)
        oracle.accum(keys, old, new, exists)
        gone = rng.integers(-12, 12, 2)
        here.run(variable.remove, gone)
        oracle.remove(gone)
        asked = rng.integers(-14, 14, (4, 5))
        rows, found = here.run(lambda ids: variable.lookup(ids, return_exists=True), asked)
        np.testing.assert_allclose(rows, oracle.lookup(asked), rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(found, oracle.exists(asked))
        assert here.run(variable.size) == len(oracle.rows)
        keys, rows = here.run(variable.export)
        assert keys.tolist() == sorted(oracle.rows)
        np.testing.assert_allclose(rows, oracle.lookup(keys), rtol=1e-6, atol=1e-6)
    here.run(variable.clear)
    assert here.run(variable.size) == 0 and len(here.run(variable.export)[0]) == 0


@pytest.mark.parametrize("dtype", ["int32", "int64", "int8", "float16", "bfloat16", "float64"])
def test_rows_of_any_dtype_and_keys_of_int32(creator, dtype):
    variable = de.Variable(tf.int32, dtype, dim=2, name="v", kv_creator=creator, initializer=3)
    values = tf.cast([[1, 2], [-3, 4]], dtype)
    variable.upsert(tf.constant([7, -7]), values)
    exists = [True, False, True]
    variable.accum(tf.constant([7, 5, 7]), *[tf.cast([[k] * 2] * 3, dtype) for k in (1, 3)], exists)
    rows = tf.cast(variable.lookup(tf.constant([[7], [5], [0], [-7]])), tf.float64)
    np.testing.assert_array_equal(rows[:, 0], [[5, 6], [3, 3], [3, 3], [-3, 4]])
    assert variable.export()[0].dtype == tf.int32 and variable.lookup([]).shape == (0, 2)


def test_a_missing_key_gives_what_it_gives_in_memory(creator):
    arguments = {"dim": 3, "name": "v", "initializer": keras.initializers.RandomNormal(seed=5)}
    there, here = de.Variable(kv_creator=creator, **arguments), de.Variable(**arguments)
    keys = np.arange(-5, 40)
    np.testing.assert_array_equal(there.lookup(keys), here.lookup(keys))
    assert np.unique(there.lookup(keys)).size > 100
    there.upsert(keys[:3], np.ones((3, 3), np.float32))
    # Whoever opens it sees the same.
    again = de.Variable(kv_creator=creator, **arguments)
    np.testing.assert_array_equal(again.lookup(keys[:3]), np.ones((3, 3)))
    np.testing.assert_array_equal(again.lookup(keys[3:]), here.lookup(keys[3:]))
    defaults = np.arange(3, dtype=np.float32)
    np.testing.assert_array_equal(
        again.rows.lookup(tf.constant([-5, 90], tf.int64), defaults), [[1, 1, 1], defaults]
    )


def test_accum_of_several_threads_loses_nothing(creator):
    variables = [de.Variable(dim=2, name="v", kv_creator=creator) for _ in range(3)]
    keys, zeros = np.arange(9), np.zeros((9, 2), np.float32)
    variables[0].upsert(keys[1:], zeros[1:])

    def work(variable):
        for _ in range(10):
            exists = variable.lookup(keys, return_exists=True)[1]
            variable.accum(keys, zeros, zeros + 1, tf.concat([exists[:1], [True] * 8], 0))

    threads = [threading.Thread(target=work, args=[variable]) for variable in variables]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows = variables[0].lookup(keys).numpy()
    np.testing.assert_array_equal(rows[1:], 30)
    # Those that saw no row while another wrote the first one have left it alone.
    assert 28 <= rows[0, 0] <= 30


# ---------------------------------------------------------------- training

OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(0.3),
    "Adam": lambda: keras.optimizers.Adam(0.1),
    "Adam of tf_keras": lambda: tf_keras.optimizers.Adam(0.1, amsgrad=True),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.2, initial_accumulator_value=0.3),
    "Ftrl": lambda: tf_keras.optimizers.legacy.Ftrl(0.2, l1_regularization_strength=0.01),
}


def train(variable, dense, optimizer, steps, traced=False):
    """Takes steps on a variable and a dense one."""
    shadow = variable.get_trainable_by_name("t")

    def step(ids, weights):
        with tf.GradientTape() as tape:
            rows = de.embedding_lookup(variable, ids, name="t")
            loss = tf.reduce_sum(tf.square(rows - weights)) + tf.reduce_sum(dense**2)
        variables = [shadow, dense]
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    step = tf.function(step) if traced else step
    for ids, weights in steps:
        step(tf.constant(ids), tf.constant(weights))


def some_steps(count=5, dim=3):
    rng = np.random.default_rng(3)
    return [
        (rng.integers(0, 5 + 4 * i, 8), rng.normal(size=(8, dim)).astype(np.float32))
        for i in range(count)
    ]


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "tf.function"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_trains_as_in_memory(creator, name, traced):
    arguments = {"dim": 3, "name": "v", "initializer": keras.initializers.RandomNormal(seed=5)}
    there, here = de.Variable(kv_creator=creator, **arguments), de.Variable(**arguments)
    ours, theirs = (de.DynamicEmbeddingOptimizer(OPTIMIZERS[name]()) for _ in range(2))
    for variable in (there, here):
        variable.upsert([1, 50], np.ones((2, 3), np.float32))  # before there are states
    dense = [tf.Variable([1.0, -2.0]) for _ in range(2)]
    train(there, dense[0], ours, some_steps(), traced)
    train(here, dense[1], theirs, some_steps(), traced)
    np.testing.assert_array_equal(*dense)
    for got, expected in zip(there.export(), here.export(), strict=True):
        np.testing.assert_array_equal(got, expected)
    assert int(ours.iterations) == int(theirs.iterations) == 5
    slots = zip(there.get_slot_variables(ours), here.get_slot_variables(theirs), strict=True)
    for got, expected in slots:
        assert got.name == expected.name
        np.testing.assert_array_equal(got.lookup([1, 50, 777]), expected.lookup([1, 50, 777]))
        for array, other in zip(got.export(), expected.export(), strict=True):
            np.testing.assert_array_equal(array, other)
    # States go with their rows, and stay where a row is written.
    for variable in (there, here):
        variable.remove([2])
        variable.upsert([1, 3], np.ones((2, 3), np.float32))
    train(there, dense[0], ours, some_steps(2))
    train(here, dense[1], theirs, some_steps(2))
    np.testing.assert_array_equal(there.export()[1], here.export()[1])
