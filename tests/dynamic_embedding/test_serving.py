"""Models of TFRA's names, exported, give in a process without sok_lite what they give here."""

import importlib

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite import dynamic_embedding as de
from sok_lite.bridge.serving import files
from tests.dynamic_embedding.test_variable import VALUES
from tests.support.fresh_process import FreshProcess

pytestmark = pytest.mark.usefixtures("initialised")

RNG = np.random.default_rng(0)
LOADERS = ["tf2", "tf1"]
KEYS = np.array([5, 1, -3, np.iinfo(np.int64).max, 0, np.iinfo(np.int64).min])
IDS = np.append(KEYS, [77, 5])
X = RNG.integers(0, 30, (40, 3))
Y = RNG.normal(size=(40, 1)).astype(np.float32)


@pytest.fixture(scope="module")
def fresh():
    with FreshProcess() as process:
        yield process


def filled(keys=KEYS, **arguments):
    variable = de.Variable(**({"dim": 3, "initializer": 0.5} | arguments))
    rows = RNG.normal(size=(len(keys), 3)) * 9
    variable.upsert(
        tf.constant(keys, variable.key_dtype), tf.cast(tf.constant(rows), variable.value_dtype)
    )
    return variable


@pytest.mark.full_only("bridge/test_serving.py is the smoke: lookups of every kind")
def test_keys_and_values_of_every_dtype(fresh, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "PIECE_BYTES", 1)  # TensorFlow puts rows together, of each dtype
    int32 = np.array([2**31 - 1, -(2**31), 0], np.int32)
    texts = np.array([b"a", b"", b"\xff\0", b"long" * 99], object)
    keys_of = {tf.int64: KEYS, tf.int32: int32, tf.string: texts}
    variables, inputs = {}, {}
    for value_dtype, key_dtype in zip(VALUES, [*keys_of] * 3, strict=False):
        name, keys = value_dtype.name, keys_of[key_dtype]
        initial = 1 if value_dtype.is_integer else 0.5
        options = {"key_dtype": key_dtype, "value_dtype": value_dtype, "initializer": initial}
        variables[name] = filled(keys, name=name, **options)
        other = np.array([b"other"], object) if key_dtype == tf.string else 77
        inputs[name] = np.append(keys, other).astype(keys.dtype)

    def look_up(ids):
        results = {}
        for name, variable in variables.items():
            rows, exists = variable.lookup(ids[name], return_exists=True)
            results |= {f"{name}_rows": rows, f"{name}_exists": exists}
        return results

    specs = {name: tf.TensorSpec([None], v.key_dtype, name) for name, v in variables.items()}
    look_up = tf.function(look_up, input_signature=[specs])
    expected = look_up({name: tf.constant(ids) for name, ids in inputs.items()})
    sok.export_serving(look_up, tmp_path / "m")
    served = fresh.run(tmp_path / "m", inputs)
    for name, ids in inputs.items():
        assert served[f"{name}_exists"].tolist() == [True] * (len(ids) - 1) + [False]
        rows = tf.cast(expected[f"{name}_rows"], served[f"{name}_rows"].dtype)
        np.testing.assert_array_equal(served[f"{name}_rows"], rows, err_msg=name)


@pytest.mark.parametrize("loader", LOADERS)
def test_lookups_through_a_trainable(fresh, loader, tmp_path):
    variable = filled(key_dtype=tf.string, keys=np.array([b"a", b"b", b"c"], object))
    policy = filled(restrict_policy=de.TimestampRestrictPolicy, devices=["/CPU:0"] * 3, name="p")

    @tf.function(input_signature=[tf.SparseTensorSpec([None, None], tf.string)])
    def look_up(words):
        numbers = tf.strings.length(words.values)
        own = de.embedding_lookup(policy, tf.cast(numbers, tf.int64), name="own", max_norm=1.0)
        pairs = {"words": words, "weights": words.with_values(tf.cast(numbers, tf.float32))}
        some = [
            de.embedding_lookup_sparse(variable, pairs["words"], None, combiner="sum", name="s"),
            de.embedding_lookup_sparse(variable, pairs["words"], pairs["weights"], name="w"),
            de.safe_embedding_lookup_sparse(variable, words, combiner="sqrtn", default_id="b"),
        ]
        return {"own": own} | {f"some_{i}": rows for i, rows in enumerate(some)}

    texts = np.array([b"a", b"c", b"no such"], object)
    words = tf.SparseTensor([[0, 0], [0, 1], [2, 3]], texts, [4, 4])
    expected = look_up(words)
    sok.export_serving(look_up, tmp_path / "m")
    inputs = {"words_indices": words.indices.numpy(), "words_values": texts}
    served = fresh.run(tmp_path / "m", inputs | {"words_dense_shape": [4, 4]}, loader)
    for name, rows in expected.items():
        np.testing.assert_allclose(served[name], rows, rtol=1e-6, err_msg=name)


def test_a_graph_of_tf1(fresh, tmp_path):
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        variable = de.get_variable("table", key_dtype=tf.string, dim=3, initializer=0.5)
        texts = np.array([b"a", b"b"], object)
        session.run(variable.upsert(tf.constant(texts), RNG.normal(size=(2, 3)).astype("f")))
        words = v1.placeholder(tf.string, [None, 1], "words")
        rows, trainable = de.embedding_lookup(variable, words, name="e", return_trainable=True)
        bag = tf.RaggedTensor.from_tensor(words)
        pooled = de.embedding_lookup_sparse(variable, bag, None, combiner="sum")
        dense = v1.get_variable("dense", [3, 1])
        outputs = {"rows": rows, "scores": pooled @ dense, "plain": variable.lookup(words)}
        optimizer = de.DynamicEmbeddingOptimizer(v1.train.AdamOptimizer(0.1))
        train = optimizer.minimize(tf.reduce_sum(outputs["scores"] + rows), var_list=[trainable])
        session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
        asked = np.array([[b"a"], [b"no such"], [b"b"]], object)
        session.run(train, {words: asked[:1]})
        expected = session.run(outputs, {words: asked})
        sok.export_serving_graph(session, tmp_path / "m", {"words": words}, outputs)
    for loader in LOADERS:
        served = fresh.run(tmp_path / "m", {"words": asked}, loader)
        for name, array in expected.items():
            np.testing.assert_allclose(served[name], array, rtol=1e-6, err_msg=name)


# ---------------------------------------------------------------- models of Keras


def trained(keras, **arguments):
    layers = de.keras.layers_for(keras)
    inputs = keras.Input([3], dtype="int64", name="ids")
    squashed = layers.SquashedEmbedding(4, combiner="mean", name="mean", **arguments)
    fields = layers.FieldWiseEmbedding(2, 5, slot_map_fn=lambda ids: ids % 5, name="fields")
    parts = [squashed(inputs), keras.layers.Flatten()(layers.Embedding(2, name="rows")(inputs))]
    if keras.__name__ == "tf_keras":
        parts.append(keras.layers.Reshape([10])(fields(inputs)))
    outputs = keras.layers.Dense(1, name="score")(keras.layers.Concatenate()(parts))
    model = keras.Model(inputs, outputs)
    optimizer = de.DynamicEmbeddingOptimizer(keras.optimizers.Adam(0.1))
    # To trace a step takes longer than the five steps at once.
    model.compile(optimizer, "mse", run_eagerly=True)
    model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    return model


@pytest.mark.parametrize("loader", LOADERS)
def test_a_model_of_layers(fresh, keras, loader, tmp_path):
    model = trained(keras)
    asked = np.append(X, [[1000, -1, 7]], 0)
    expected = model(tf.constant(asked[:-1])).numpy()
    sok.export_serving(model, tmp_path / "m")
    served = fresh.run(tmp_path / "m", {"ids": asked}, loader)["output_0"]
    np.testing.assert_allclose(served[:-1], expected, rtol=1e-5, atol=1e-6)
    # Training goes on.
    model.fit(X, Y, batch_size=8, verbose=0)


def by_nodes(model, path):
    @tf.function
    def serve(ids):
        return model(ids)

    spec = tf.TensorSpec([None, 3], tf.int64, "ids")
    saving = importlib.import_module("tensorflow.python.saved_model.save")
    saving.save_and_return_nodes(
        obj=model,
        export_dir=path,
        experimental_skip_checkpoint=True,
        signatures={"serving_default": serve.get_concrete_function(spec)},
    )


SAVES = {
    "de_save_model": lambda keras, model, path: de.keras.models.de_save_model(model, path),
    "save": lambda keras, model, path: model.save(path),
    "save_model": lambda keras, model, path: keras.models.save_model(
        model, path, options=OPTIONS, include_optimizer=False
    ),
    "saved_model.save": lambda keras, model, path: tf.saved_model.save(model, path),
    "nodes": lambda keras, model, path: by_nodes(model, path),
}


@pytest.mark.full_only("a process that serves; a lookup through a trainable is the smoke")
@pytest.mark.parametrize("way", SAVES)
def test_whatever_saves_a_saved_model_serves_and_is_loaded(fresh, keras, way, tmp_path):
    path, model = str(tmp_path / "saved"), trained(keras, initializer="zeros")
    is_old = keras.__name__ == "tf_keras"
    if way == "save_model" and not is_old:
        with pytest.raises(ValueError, match="Invalid filepath extension"):
            keras.models.save_model(model, path)  # Keras 3 has no SavedModels
        return
    SAVES[way](keras, model, path)
    expected = model.predict(X, verbose=0)
    served = fresh.run(path, {"ids": X})["output_0"]
    np.testing.assert_allclose(served, expected, rtol=1e-5, atol=1e-6)
    names = ("Embedding", "SquashedEmbedding", "FieldWiseEmbedding")
    custom = {name: getattr(de.keras.layers_for(keras), name) for name in names}
    if way == "de_save_model":
        again = de.keras.models.load_model(path, custom, safe_mode=False, package=keras)
        losses = [
            each.fit(X, Y, batch_size=8, shuffle=False, verbose=0).history["loss"]
            for each in (model, again)
        ]
        assert losses[0] == losses[1]
        with pytest.raises(FileExistsError, match="overwrite=False"):
            de.keras.models.de_save_model(model, path, overwrite=False)
    elif is_old:
        again = keras.models.load_model(path, custom, safe_mode=False)
        np.testing.assert_allclose(again.predict(X, verbose=0), expected, rtol=1e-5, atol=1e-6)
    for load in (lambda model: de.keras.models.load_weights(model, path), None):
        other = trained(keras, initializer="ones")
        other.load_weights(path) if load is None else load(other)
        np.testing.assert_allclose(other.predict(X, verbose=0), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ending", ["", ".keras"])
@pytest.mark.parametrize("way", ["of Keras", "of TFRA"])
def test_weights_are_loaded_before_a_model_is_called(keras, way, ending, tmp_path):
    path, model = tmp_path / f"m{ending}", fit(keras, of_a_class(keras))
    de.keras.models.save_model(model, path)
    again = of_a_class(keras)
    if way == "of Keras" and not ending:
        again.load_weights(path)
    else:
        de.keras.models.load_weights(again, path)
    given = tf.nest.map_structure(tf.constant, FEATURES)
    np.testing.assert_array_equal(again(given), model(given))


# ---------------------------------------------------------------- models of a program's own class

FEATURES = {"user": X[:, :1], "items": X}
OPTIONS = tf.saved_model.SaveOptions(namespace_whitelist=["TFRA"])


def of_a_class(keras):
    made = de.keras.layers_for(keras)

    @keras.saving.register_keras_serializable("test_serving")
    class OfAClass(keras.Model):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.users = made.Embedding(4, name="users", initializer="zeros")
            self.items = made.Embedding(4, name="items", initializer="zeros")
            self.held = self.users.params  # the model holds it as well as its layer
            self.head = keras.layers.Dense(1)

        def call(self, features):
            rows = [self.users(features["user"]), self.items(features["items"])]
            return self.head(tf.reduce_mean(tf.concat(rows, 1), 1))

    return OfAClass()


def fit(keras, model, **options):
    model.compile(de.DynamicEmbeddingOptimizer(keras.optimizers.Adam(0.1)), "mse")
    model.fit(FEATURES, Y, batch_size=8, shuffle=False, verbose=0, **options)
    return model


def check_served(fresh, path, model, **options):
    for n in (len(X), 3):
        features = {name: array[:n] for name, array in FEATURES.items()}
        served = fresh.run(path, features, **options)
        (served,) = served.values()
        expected = model(tf.nest.map_structure(tf.constant, features))
        np.testing.assert_allclose(served, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", ["fit", "call"])
def test_a_model_of_a_class_is_saved_as_it_was_called(fresh, keras, way, tmp_path):
    model = of_a_class(keras)
    with pytest.raises(ValueError, match="was not called.*give `signatures`"):
        de.keras.models.save_model(model, tmp_path / "m")
    with pytest.raises(ValueError, match="was not called.*give `signature`"):
        sok.export_serving(model, tmp_path / "m")
    if way == "fit":
        fit(keras, model)
    else:
        model({name: tf.constant(array[:5]) for name, array in FEATURES.items()})
        for layer in (model.users, model.items):
            layer.params.upsert(np.arange(30), RNG.normal(size=(30, 4)))
    de.keras.models.save_model(model, tmp_path / "m", options=OPTIONS)
    sok.export_serving(model, tmp_path / "served")
    for name in ("m", "served"):
        check_served(fresh, tmp_path / name, model)
    again = of_a_class(keras)
    again({name: tf.constant(array[:5]) for name, array in FEATURES.items()})
    de.keras.models.load_weights(again, tmp_path / "m")
    given = tf.nest.map_structure(tf.constant, FEATURES)
    np.testing.assert_array_equal(again(given), model(given))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["m", "served"]


def test_checkpoints_of_fit_are_served(fresh, keras, tmp_path):
    model = of_a_class(keras)
    callback = de.keras.callbacks_for(keras).ModelCheckpoint
    callback = callback(str(tmp_path / "{epoch}-{loss:.1f}"), options=OPTIONS)
    fit(keras, model, epochs=2, callbacks=[callback])
    (first, second) = sorted(tmp_path.iterdir())
    assert (first.name[:2], second.name[:2]) == ("1-", "2-")
    check_served(fresh, second, model)


@pytest.mark.full_only("test_save_model_... is the smoke")
def test_a_concrete_function_is_a_signature(fresh, keras, tmp_path):
    model = fit(keras, of_a_class(keras))

    @tf.function
    def serve(*args, **kwargs):
        return {"score": model(*args, **kwargs)}

    specs = {
        name: tf.TensorSpec([None, array.shape[1]], tf.int64) for name, array in FEATURES.items()
    }
    concrete = serve.get_concrete_function(specs)
    save = de.keras.models.save_model
    save(model, tmp_path / "m", signatures={"serving_default": concrete}, include_optimizer=False)
    check_served(fresh, tmp_path / "m", model)
    save(model, tmp_path / "one", signatures=concrete)
    check_served(fresh, tmp_path / "one", model)

    @tf.function
    def of_model(the_model, features, is_score):
        features = {name: each for name, each in features.items() if tf.is_tensor(each)}
        return {"score" if is_score else "other": the_model(features)}

    save(model, tmp_path / "of", signatures=of_model.get_concrete_function(model, specs, True))
    check_served(fresh, tmp_path / "of", model)
    mixed = of_model.get_concrete_function(model, {**specs, "flag": 3}, is_score=True)
    with pytest.raises(TypeError, match="whose 'features' has both"):
        save(model, tmp_path / "both", signatures=mixed)


@pytest.mark.full_only("saves three models")
@pytest.mark.parametrize("save", ["de_save_model", "de_hvd_save_model"])
def test_what_cannot_be_served_leaves_no_folder(keras, save, tmp_path):
    save = getattr(de.keras.models, save)
    model = trained(keras)

    @tf.function(input_signature=[tf.TensorSpec([None, 3], tf.int64)])
    def python(ids):
        return tf.numpy_function(lambda rows: rows, [model(ids)], tf.float32)

    with pytest.raises(NotImplementedError, match="calls a function of Python"):
        save(model, tmp_path / "m", signatures=python)
    assert list(tmp_path.iterdir()) == []
    save(model, tmp_path / "m")
    (tmp_path / "m" / "mine.txt").write_text("of the program")
    files = {each: each.read_bytes() for each in tmp_path.rglob("*") if each.is_file()}
    with pytest.raises(NotImplementedError, match="calls a function of Python"):
        save(model, tmp_path / "m", signatures=python)
    assert {each: each.read_bytes() for each in tmp_path.rglob("*") if each.is_file()} == files
    save(model, f"file://{tmp_path}/m")
    assert (tmp_path / "m" / "mine.txt").exists() and len(list(tmp_path.iterdir())) == 1


@pytest.mark.full_only("serves in three processes")
def test_signatures_that_are_given_are_served(fresh, keras, tmp_path):
    model = trained(keras)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64, "user")])
    def twice(user):
        return {"twice": 2 * model(tf.stack([user] * 3, axis=1))}

    @tf.function(input_signature=[tf.TensorSpec([None, 3], tf.int64)])
    def plain(ids):
        return model(ids)

    save = de.keras.models.de_hvd_save_model
    save(model, tmp_path / "m", signatures={"twice": twice, "serving_default": plain})
    users = X[:, 0]
    served = fresh.run(tmp_path / "m", {"user": users}, signature="twice")["twice"]
    np.testing.assert_allclose(served, twice(tf.constant(users))["twice"], rtol=1e-5, atol=1e-6)
    served = fresh.run(tmp_path / "m", {"ids": X})["output_0"]
    np.testing.assert_allclose(served, plain(tf.constant(X)), rtol=1e-5, atol=1e-6)
    save(model, tmp_path / "one", signatures=plain)
    assert fresh.run(tmp_path / "one", {"ids": X})["output_0"].shape == (40, 1)
    with pytest.raises(TypeError, match="must be a tf.function with an input_signature, or a conc"):
        save(model, tmp_path / "none", signatures=lambda ids: ids)
