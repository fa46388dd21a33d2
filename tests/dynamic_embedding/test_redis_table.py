"""Variables whose rows are in a real Redis, against a dict and against variables in memory."""

import contextlib
import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite import dynamic_embedding as de
from sok_lite.bridge.lookup_arguments import checked_arguments
from tests.dynamic_embedding.test_training import step_on
from tests.support.dict_variable import check_as_a_dict
from tests.support.helpers import run_threads

tf1 = tf.compat.v1


def test_a_variable_does_what_a_dict_does(here, creator):
    form = {"key_dtype": tf.int32, "value_dtype": tf.bfloat16, "dim": 3}
    variable = de.Variable(**form, initializer=-2, name="v", kv_creator=creator)
    check_as_a_dict(here, variable, -2)
    assert here.run(variable.size) == 0  # as it ends


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

    def work(number):
        variable = variables[number]
        for _ in range(10):
            exists = variable.lookup(keys, return_exists=True)[1]
            variable.accum(keys, zeros, zeros + 1, tf.concat([exists[:1], [True] * 8], 0))

    run_threads(work, 3)
    rows = variables[0].lookup(keys).numpy()
    np.testing.assert_array_equal(rows[1:], 30)
    # Those that saw no row while another wrote the first one have left it alone.
    assert 28 <= rows[0, 0] <= 30


def test_it_is_one_table_of_all_processes(creator, tmp_path):
    variable = de.Variable(dim=2, name="v", kv_creator=creator)
    variable.upsert([3, 4], [[1.0, 2], [3, 4]])
    ids = tf.ragged.constant([[3, 4, 4], [], [9]], dtype=tf.int64)
    with pytest.raises(ValueError, match="one table of all processes"):
        variable.save_to_file_system(tmp_path, proc_size=2)
    with pytest.raises(NotImplementedError, match="'v' cannot be looked up over all ranks"):
        checked_arguments([variable.rows], [ids], None, "sum", 1)
    assert "keys=2 not in this process" in repr(variable.rows)


def test_an_exported_model_has_its_rows(creator, tmp_path):
    variable = de.Variable(dim=2, name="v", kv_creator=creator, initializer=0)
    keys, rows = np.arange(40), np.arange(80, dtype=np.float32).reshape(40, 2)
    variable.upsert(keys, rows)
    ids = [tf.TensorSpec([None], tf.int64)]
    sok.export_serving(variable.lookup, tmp_path / "m", ids, cutoff=1.5)
    served = tf.saved_model.load(str(tmp_path / "m"))(tf.constant(keys))
    np.testing.assert_array_equal(served, np.where(keys[:, None] == 0, 0, rows))


def test_a_checkpoint_has_nothing_of_it(creator, tmp_path):
    variable, dense = de.Variable(dim=2, name="v", kv_creator=creator), tf.Variable(1.0)
    variable.upsert([1], [[2.0, 3.0]])
    checkpoint = tf.train.Checkpoint(table=variable, dense=dense)
    path = checkpoint.write(str(tmp_path / "c"))
    assert [name for name, _ in tf.train.list_variables(path) if "dense" not in name] == [
        "_CHECKPOINTABLE_OBJECT_GRAPH"
    ]
    variable.upsert([1, 2], [[5.0, 6.0], [7.0, 8.0]])
    dense.assign(4.0)
    checkpoint.read(path).assert_consumed()
    assert float(dense) == 1
    np.testing.assert_array_equal(variable.export()[1], [[5, 6], [7, 8]])


def test_a_saver_of_tf1_leaves_it_alone(creator, tmp_path):
    with tf.Graph().as_default(), tf1.Session() as session:
        variable = de.get_variable("v", dim=2, kv_creator=creator)
        dense = tf1.get_variable("dense", initializer=1.0)
        session.run(tf1.global_variables_initializer())
        session.run(variable.upsert(tf.constant([1], tf.int64), tf.ones([1, 2])))
        path = tf1.train.Saver().save(session, str(tmp_path / "c"))
        assert tf.train.list_variables(path) == [("dense", [])]
        del dense


def test_a_warning_says_that_nothing_saves_it(creator, recwarn):
    de.Variable(dim=2, name="known", kv_creator=creator, checkpoint=False)
    assert not [each for each in recwarn if "Redis" in str(each.message)]
    for graph in (None, tf.Graph()):
        with contextlib.ExitStack() as entered:
            if graph is not None:
                entered.enter_context(graph.as_default())
            with pytest.warns(RuntimeWarning, match="No checkpoint or Saver has the rows of 'v'"):
                variable = de.get_variable("v", dim=2, kv_creator=creator)
            with pytest.raises(NotImplementedError, match="cannot save 'v'.*stay in the Redis"):
                tf1.train.Saver([variable]).save(None, "nowhere")


def test_a_new_version_begins_with_an_earlier_one(redis_port, tmp_path):
    def opened(runtime, earlier):
        settings = {"model_tag_runtime": runtime, "model_tag_import": earlier}
        path = tmp_path / f"{runtime}.json"
        path.write_text(json.dumps({"redis_host_port": redis_port, **settings}))
        return de.Variable(
            dim=2, name="v", kv_creator=de.RedisTableCreator(de.RedisTableConfig(str(path)))
        )

    def trained(variable):
        optimizer = de.DynamicEmbeddingOptimizer(keras.optimizers.Adagrad(0.5))
        step_on(optimizer, variable.get_trainable_by_name("t"), [7])
        return variable.get_slot_variables(optimizer)[0].lookup([7])

    first = opened("first", "none")
    first.upsert([1], [[2.0, 3.0]])
    states = trained(first)
    second = opened("second", "first")
    np.testing.assert_array_equal(second.lookup([1, 7]), first.lookup([1, 7]))
    np.testing.assert_allclose(trained(second), states + 1)
    # Only a new one does, and the earlier one stays as it is.
    assert int(first.size()) == 2
    first.upsert([9], [[2.0, 3.0]])
    assert int(opened("second", "first").size()) == 2


def test_what_does_not_fit_is_refused(creator, redis_port):
    with pytest.raises(NotImplementedError, match="has integer keys.*Received: key_dtype=string"):
        de.Variable(tf.string, dim=2, kv_creator=creator)
    with pytest.raises(TypeError, match="must be a RedisTableConfig. Received: dict"):
        de.Variable(dim=2, kv_creator=de.RedisTableCreator({"redis_host_port": redis_port}))
    with pytest.raises(TypeError, match="must be a RedisTableConfig. Received: str"):
        creator.create(tf.int64, tf.float32, 0.0, "v", config="redis.json")
    with pytest.raises(RuntimeError, match="must be a DynamicEmbeddingSaver"):
        de.RedisTableCreator(saver="file")
    de.Variable(dim=2, name="v", kv_creator=creator)
    with pytest.raises(ValueError, match="rows of 8 bytes .2 x float32.. Expected 12"):
        de.Variable(dim=3, name="v", kv_creator=creator)
    with pytest.raises(ValueError, match="Expected 8 bytes .1 x float64"):
        de.Variable(tf.int64, tf.float64, dim=1, name="v", kv_creator=creator)
    config = de.RedisTableConfig("/no/such/file.json")
    with pytest.raises(ValueError, match="cannot be read"):
        de.Variable(dim=2, kv_creator=de.RedisTableCreator(config))


def test_a_keras_model_is_saved_without_the_rows(creator, tmp_path):
    layer = de.keras.layers.Embedding(2, name="t", kv_creator=creator, initializer="ones")
    ids = keras.Input([], dtype="int64")
    model = keras.Model(ids, layer(ids))
    layer.params.upsert([1], [[3.0, 4.0]])
    for save, name in ((model.save, "m.keras"), (model.save_weights, "m.weights.h5")):
        save(tmp_path / name)
    model.load_weights(tmp_path / "m.weights.h5")
    np.testing.assert_array_equal(model(tf.constant([1], tf.int64)), [[3, 4]])
