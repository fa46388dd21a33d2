"""The layers called by themselves, against rows in a dict and NumPy's reductions."""

import threading
import warnings

import numpy as np
import pytest
import tensorflow as tf

from sok_lite import dynamic_embedding as de

DIM = 3
KEYS = np.array([-7, 0, 5, 2**40, 9], np.int64)
ROWS = np.random.default_rng(0).normal(size=(5, DIM)).astype(np.float32)
ROW_OF = dict(zip(KEYS.tolist(), ROWS, strict=True))
INITIAL = np.full(DIM, 0.25, np.float32)


def expected(ids):
    ids = np.asarray(ids)
    flat = [ROW_OF.get(key, INITIAL) for key in ids.reshape(-1).tolist()]
    return np.array(flat, np.float32).reshape(*ids.shape, DIM)


def filled(layer):
    layer.params.upsert(KEYS, ROWS)
    return layer


RAGGED = [[5, 77], [], [9, 9, 0]]


def test_embedding_gives_the_row_of_each_id(layers):
    layer = filled(layers.Embedding(DIM, initializer=0.25))
    for shape in ((0,), (33,), (2, 0), (2, 3, 5)):
        ids = np.random.default_rng(1).choice([*KEYS, 77], shape)
        rows = layer(tf.constant(ids))
        np.testing.assert_array_equal(rows, expected(ids))
        assert rows.shape == layer.compute_output_shape(shape) == (*shape, DIM)
    rows = layer(tf.ragged.constant(RAGGED, dtype=tf.int64))
    assert rows.row_lengths().numpy().tolist() == [2, 0, 3]
    np.testing.assert_array_equal(rows.flat_values, expected([5, 77, 9, 9, 0]))
    assert int(layer.params.size()) == len(KEYS)
    with pytest.raises((TypeError, ValueError), match="must be int64.*Received.*int32"):
        layer(tf.constant([1], tf.int32))


def test_keys_may_be_of_each_dtype(layers):
    for keys in (tf.constant(["a", "b"]), tf.constant([1, 2])):
        name = keys.dtype.name
        layer = layers.Embedding(2, key_dtype=name, value_dtype="float16", name=name)
        layer.params.upsert(keys, tf.constant([[1, 2], [3, 4]], tf.float16))
        rows = layer(tf.stack([keys, keys[::-1]]))
        assert rows.dtype == tf.float16
        np.testing.assert_array_equal(rows, [[[1, 2], [3, 4]], [[3, 4], [1, 2]]])


def test_names_and_defaults_are_those_of_the_documents(keras, layers):
    layer = layers.Embedding("4")
    assert isinstance(layer, keras.layers.Layer)
    assert layers.BasicEmbedding is layers.Embedding
    assert layer.name == "DynamicEmbeddingLayer"
    assert isinstance(layer.params, de.Variable)
    assert layer.params.name == "DynamicEmbeddingLayer-parameter"
    assert (layer.params.dim, layer.params.key_dtype) == (4, tf.int64)
    assert isinstance(layer.shadow, de.shadow_ops.ShadowVariable)
    assert layer.params.get_trainable_by_name("DynamicEmbeddingLayer-shadow") is layer.shadow
    assert [v is layer.shadow for v in layer.trainable_variables] == [True]
    assert [v is layer.shadow for v in layer.trainable_weights] == [True]
    rows = layer(tf.range(1000, dtype=tf.int64)).numpy()  # RandomNormal
    assert 0.045 < rows.std() < 0.055 and abs(rows.mean()) < 0.005
    assert layer.count_params() == 0


def test_the_layers_of_the_module_are_those_of_tf_keras():
    assert issubclass(de.keras.layers.Embedding, tf.keras.layers.Layer)
    assert de.keras.layers_for(tf.keras).Embedding is de.keras.layers.Embedding
    with pytest.raises(TypeError, match="tf_keras or tf.keras. Received"):
        de.keras.layers_for(np)


def test_what_is_no_size_is_refused(layers):
    with pytest.raises(TypeError, match="embedding_size=None"):
        layers.Embedding(None)
    with pytest.raises(ValueError, match="embedding_size=0"):
        layers.Embedding(0)
    with pytest.raises(TypeError, match="nslots='many'"):
        layers.FieldWiseEmbedding(2, "many", slot_map_fn=lambda ids: ids)
    for dim in (16, 9, 7):  # the last two are int64 and string to TensorFlow
        with pytest.raises(TypeError, match=f"key_dtype={dim}. A table has a dimension and no"):
            layers.Embedding(1000, dim)


def test_an_initializer_may_be_a_name_of_keras(layers):
    layer = layers.Embedding(DIM, initializer="ones")
    layer = type(layer).from_config(layer.get_config())
    np.testing.assert_array_equal(layer(tf.constant([4, 7], tf.int64)), np.ones([2, DIM]))


@pytest.mark.parametrize("is_built", [False, True], ids=["called", "built"])
def test_a_sequential_without_an_input_looks_up_integer_ids(keras, layers, is_built):
    model = keras.Sequential([filled(layers.Embedding(DIM)), keras.layers.Flatten()])
    if is_built and keras.__name__ == "keras":
        model.build((None, 3))
    ids = np.resize(KEYS, [2, 3])
    np.testing.assert_array_equal(model(tf.constant(ids)), expected(ids).reshape(2, -1))


def test_rows_are_clipped_to_max_norm(layers):
    layer = filled(layers.Embedding(DIM, max_norm=0.5))
    norms = np.linalg.norm(layer(tf.constant(KEYS)), axis=1)
    np.testing.assert_allclose(norms, np.minimum(np.linalg.norm(ROWS, axis=1), 0.5), rtol=1e-5)
    np.testing.assert_array_equal(layer.params.lookup(KEYS), ROWS)


def test_squashed_embedding_reduces_all_but_the_first_and_the_last_axis(layers):
    for combiner in ("sum", "mean", "max", "min", "prod"):
        layer = layers.SquashedEmbedding(DIM, combiner=combiner, initializer=0.25, name=combiner)
        filled(layer)
        for shape in ((5,), (3, 4), (2, 3, 5)):
            ids = np.random.default_rng(2).choice([*KEYS, 77], shape)
            result = layer(tf.constant(ids))
            axes = tuple(range(1, len(shape))) or 0  # one row for ids of one axis
            oracle = getattr(np, combiner)(expected(ids).astype(np.float64), axis=axes)
            np.testing.assert_allclose(result, oracle, rtol=1e-4, atol=1e-6)
            assert result.shape == layer.compute_output_shape(shape) == oracle.shape
    layer = layers.SquashedEmbedding(DIM, initializer=0.25, name="sum")
    oracle = [expected(row).sum(0) if row else np.zeros(DIM) for row in RAGGED]
    result = layer(tf.ragged.constant(RAGGED, dtype=tf.int64))
    np.testing.assert_allclose(result, oracle, rtol=1e-5)


def fields(ids):
    return tf.math.floormod(ids, 4)


def combined_by_field(ids, combiner):
    result = np.zeros((len(ids), 4, DIM))
    for number, row in enumerate(ids):
        for field in range(4):
            rows = expected([key for key in row if key % 4 == field]).astype(np.float64)
            if len(rows):
                by = {"sum": 1, "mean": len(rows), "sqrtn": len(rows) ** 0.5}[combiner]
                result[number, field] = rows.sum(0) / by
    return result


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_field_wise_embedding_combines_by_field(layers, combiner):
    layer = layers.FieldWiseEmbedding(DIM, 4, fields, combiner=combiner, initializer=0.25)
    filled(layer)
    assert layer.name == "SlotDynamicEmbeddingLayer"
    dense, ragged = [[5, 9, 77, 0], [0, 0, 1, 2], [3, 3, 3, 3]], [[5, 9, 77, 0], [], [0]]
    for ids, given in ((dense, tf.constant(dense, tf.int64)), (ragged, None)):
        given = tf.ragged.constant(ragged, dtype=tf.int64) if given is None else given
        np.testing.assert_allclose(layer(given), combined_by_field(ids, combiner), rtol=1e-5)
    result = layer(tf.constant(dense[0], tf.int64))  # of one axis
    np.testing.assert_allclose(result, combined_by_field(dense[:1], combiner)[0], rtol=1e-5)
    assert layer.compute_output_shape((None, 4)).as_list() == [None, 4, DIM]


def test_field_wise_embedding_refuses_what_has_no_fields(layers):
    with pytest.raises(ValueError, match="slot_map_fn=None"):
        layers.FieldWiseEmbedding(2, 3)
    with pytest.raises(ValueError, match="`combiner`.*'max'"):
        layers.FieldWiseEmbedding(2, 3, fields, combiner="max")
    layer = layers.FieldWiseEmbedding(2, 3, fields)
    with pytest.raises(NotImplementedError, match="rank 3"):
        layer(tf.zeros([1, 1, 1], tf.int64))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"in \[0, 3\)"):
        layer(tf.constant([[3]], tf.int64))


def test_a_layer_is_made_again_of_its_config(layers):
    layer = layers.SquashedEmbedding(
        DIM,
        value_dtype="bfloat16",
        combiner="mean",
        name="mine",
        restrict_policy=de.FrequencyRestrictPolicy,
        max_norm=2.0,
        init_capacity=64,
        checkpoint=False,
        initializer="glorot_uniform",
        row_shape=(1024, 3),
    )
    again = type(layer).from_config(layer.get_config())
    assert again.params is not layer.params
    ids = tf.range(20, dtype=tf.int64)
    assert np.abs(tf.cast(layer.params.lookup(ids), tf.float32)).max() < 0.08  # by the shape
    np.testing.assert_array_equal(again.params.lookup(ids), layer.params.lookup(ids))
    assert isinstance(again.params.restrict_policy, de.FrequencyRestrictPolicy)
    assert again.get_config().keys() == layer.get_config().keys()
    assert (again.name, again.max_norm, again.combiner) == ("mine", 2.0, "mean")
    params = again.params
    assert (params.init_size, params.checkpoint, params.row_shape) == (64, False, (1024, 3))


def test_layers_of_one_name_share_a_table_until_the_session_ends(keras, layers):
    first, second = layers.Embedding(DIM, name="user"), layers.SquashedEmbedding(DIM, name="user")
    assert first.params is second.params is de.get_variable("user-parameter", dim=DIM)
    assert layers.Embedding(DIM, name="item").params is not first.params
    filled(first)
    np.testing.assert_allclose(second(tf.constant([[0, 5]], tf.int64))[0], ROWS[1] + ROWS[2])
    with pytest.raises(ValueError, match="'user-parameter' exists with.*clear_session"):
        layers.Embedding(DIM + 1, name="user")
    keras.backend.clear_session()
    other = layers.Embedding(DIM + 1, name="user")
    assert int(other.params.size()) == 0
    np.testing.assert_array_equal(first(tf.constant(KEYS)), ROWS)


def test_layers_without_a_name_share_a_table_with_a_warning(keras, layers):
    layers.Embedding(DIM)
    layers.FieldWiseEmbedding(DIM, 2, lambda ids: ids % 2)
    with pytest.warns(UserWarning, match="'DynamicEmbeddingLayer', the default, share one table"):
        layers.SquashedEmbedding(DIM)
    keras.backend.clear_session()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layers.Embedding(DIM)


def test_a_thread_begins_with_tables_of_its_own(layers):
    """Such as of a trial of a search, after one in another thread."""
    layer, made = filled(layers.Embedding(DIM, name="trial")), []

    def make():
        made.extend(layers.Embedding(DIM, name="trial") for _ in range(2))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert made[0].params is made[1].params is not layer.params
    assert int(made[0].params.size()) == 0
    assert layers.Embedding(DIM, name="trial").params is layer.params


def test_clone_model_is_refused_though_a_table_of_the_name_is_there(keras, layers):
    model = keras.Sequential([layers.Embedding(DIM, name="cloned"), keras.layers.Flatten()])
    with pytest.raises((NotImplementedError, TypeError), match="clone_model"):
        keras.models.clone_model(model)


def test_the_config_has_devices_and_creator_only_where_the_distribution_is_kept(layers):
    creator = de.HkvHashTableCreator(de.HkvHashTableConfig(max_capacity=256))
    arguments = {"devices": ["/CPU:0", "/CPU:0"], "kv_creator": creator}
    config = layers.Embedding(2, **arguments).get_config()
    assert (config["devices"], config["kv_creator"]) == (None, None)
    layer = layers.Embedding(2, keep_distribution=True, **arguments)
    again = type(layer).from_config(layer.get_config())
    assert again.params.devices == ["/CPU:0", "/CPU:0"]
    assert isinstance(again.params.rows, de.HkvHashTable)
    assert vars(again.params.kv_creator.config) == vars(creator.config)


def test_a_frozen_layer_has_no_gradient(layers):
    layer = filled(layers.Embedding(DIM))
    layer.trainable = False
    assert layer.trainable_variables == []
    assert [v is layer.shadow for v in layer.non_trainable_variables] == [True]
    layer.trainable = True
    assert [v is layer.shadow for v in layer.trainable_variables] == [True]
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(tf.constant(KEYS)))
    assert tape.gradient(loss, layer.shadow).indices.shape == (5,)


def test_layer_normalization_takes_ragged_rows(keras, layers, tmp_path):
    rows = np.random.default_rng(0).normal(size=(7, 4)).astype(np.float32)
    layer, oracle = layers.LayerNormalization(), keras.layers.LayerNormalization()(rows)
    ragged = layer(tf.RaggedTensor.from_row_lengths(rows, [2, 0, 5]))
    assert ragged.row_lengths().numpy().tolist() == [2, 0, 5]
    np.testing.assert_allclose(ragged.flat_values, oracle, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(layers.LayerNormalization()(rows), oracle)
    ids = keras.Input([3], dtype="int64")
    embedding = layers.Embedding(4, name="rows")
    model = keras.Model(ids, layers.LayerNormalization(epsilon=0.5)(embedding(ids)))
    embedding.params.upsert(np.arange(7), rows)
    model.save(str(tmp_path / "m.keras"))
    again = keras.models.load_model(str(tmp_path / "m.keras"))
    expected = keras.layers.LayerNormalization(epsilon=0.5)(rows)[None, :3]
    np.testing.assert_allclose(again(tf.constant([[0, 1, 2]], tf.int64)), expected, rtol=1e-5)


def test_a_layer_on_all_ranks_is_a_plain_one_where_there_is_one(layers):
    layer = filled(layers.HvdAllToAllEmbedding(DIM, initializer=0.25, name="all"))
    ids = [[5, 77], [9, 9]]
    np.testing.assert_array_equal(layer(tf.constant(ids, tf.int64)), expected(ids))
    again = type(layer).from_config(layer.get_config())
    assert again.embedding_size == DIM
    with pytest.raises(NotImplementedError, match="from_sparse"):
        layer.hvd_variable.lookup(tf.sparse.from_dense(tf.constant(ids, tf.int64)))
    with pytest.raises(ValueError, match="mpi_size.*Received: 3"):
        layers.HvdAllToAllEmbedding(DIM, mpi_size=3)
