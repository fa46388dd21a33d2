"""What saves a model has its tables, with states: training goes on as if it had not been saved."""

import itertools
import json
import os
import warnings
import zipfile
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from sok_lite import dynamic_embedding as de
from sok_lite.dynamic_embedding.keras import models
from tests.support.own_process import run_with_tensorflow

RNG = np.random.default_rng(0)
X = RNG.integers(0, 30, (40, 3))
Y = RNG.normal(size=(40, 1)).astype(np.float32)
IN_FILES = de.CuckooHashTableCreator(saver=de.FileSystemSaver())


def embedding(keras, **arguments):
    """A layer with a table of its own, as of another session."""
    tf.compat.v1.reset_default_graph()
    arguments = {"name": "table"} | arguments
    return de.keras.layers_for(keras).Embedding(2, **arguments)


def functional(keras, **arguments):
    layer = embedding(keras, **arguments)
    ids = keras.Input([3], dtype=layer.params.key_dtype.name)
    rows = keras.layers.Flatten()(keras.layers.Activation("linear", dtype="float32")(layer(ids)))
    return keras.Model(ids, keras.layers.Dense(1)(rows)), layer


def subclassed(keras, **arguments):
    layer = embedding(keras, **arguments)

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.embedding = layer
            self.flatten, self.head = keras.layers.Flatten(), keras.layers.Dense(1)

        def call(self, ids):
            return self.head(self.flatten(self.embedding(ids)))

    model = Model()
    model(tf.constant(X[:1]))
    return model, layer


def optimizer_of(keras, model):
    optimizer = de.DynamicEmbeddingOptimizer(keras.optimizers.Adam(0.1))
    if hasattr(optimizer, "build"):
        optimizer.build(model.trainable_variables)
    return optimizer


def compiled(keras, model, run_eagerly=True):
    """To trace a step takes longer than all steps of a test that are called at once."""
    model.compile(optimizer_of(keras, model), "mse", run_eagerly=run_eagerly)
    return model


def fit(model, x=X):
    return model.fit(x, Y, batch_size=8, shuffle=False, verbose=0).history["loss"]


def trained(keras, build=functional, **arguments):
    model, layer = build(keras, **arguments)
    fit(compiled(keras, model))
    return model, layer


def rows_of(layer):
    return [part.numpy() for part in layer.params.export()]


def check_goes_on(model, again, layer, layer_again):
    """Both are trained on, with the same losses and rows."""
    for ours, theirs in zip(rows_of(layer_again), rows_of(layer), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_allclose(fit(again), fit(model), rtol=1e-5)
    for ours, theirs in zip(rows_of(layer_again), rows_of(layer), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


SAVES = ["de_save_model", "de_hvd_save_model"]
FORMATS = ["m.keras", "m.weights.h5", "m.ckpt"]


def brought_back(keras, build, model, save, path):
    """Saves a model in some way; returns another that was loaded from that, and its layer."""
    getattr(de.keras.models, save)(model, path)
    if path.suffix == ".keras":
        again = de.keras.models.load_model(path, package=keras)
        return again, again.layers[1]
    again, layer = build(keras)
    de.keras.models.load_weights(compiled(keras, again), path)
    return again, layer


@pytest.mark.parametrize("build", [functional, subclassed])
def test_whatever_saves_a_model_has_rows_and_states(keras, build, tmp_path):
    model, layer = trained(keras, build)
    for save, name in itertools.product(SAVES, FORMATS):
        if build is functional or name != "m.keras":
            path = tmp_path / "there" / name
            again, layer_again = brought_back(keras, build, model, save, path)
            assert layer_again.params is not layer.params
            check_goes_on(model, again, layer, layer_again)


def test_load_model_leaves_the_table_of_a_living_model_alone(keras, tmp_path):
    """Two models that were saved are compared, in a session that has a third."""
    for number in range(2):
        model, layer = functional(keras)
        layer.params.upsert(np.arange(30), np.full([30, 2], number))
        model.save(tmp_path / f"{number}.keras")
    layer.params.upsert(np.arange(30), np.full([30, 2], 7))
    models = [keras.models.load_model(tmp_path / f"{number}.keras") for number in range(2)]
    tables = [model.layers[1].params for model in models]
    for table, value in zip([*tables, layer.params], (0, 1, 7), strict=True):
        np.testing.assert_array_equal(rows_of(SimpleNamespace(params=table))[1], value)


def test_layers_that_a_class_makes_share_a_table_in_what_is_loaded(keras, tmp_path):
    @keras.saving.register_keras_serializable("test_keras_saving")
    class TwoOfOneName(keras.Model):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            made = de.keras.layers_for(keras).Embedding
            self.one, self.other = (made(1, name="of_both") for _ in range(2))

        def call(self, ids):
            return tf.reduce_sum(self.one(ids) + self.other(ids), 1)

        def build(self, shape):
            self.built = True

        def get_config(self):
            return {}

    model = TwoOfOneName()
    model(tf.constant(X[:1]))
    fit(compiled(keras, model))
    model.save(tmp_path / "m.keras")
    again = keras.models.load_model(tmp_path / "m.keras")
    assert again.one.params is again.other.params is not model.one.params
    check_goes_on(model, again, model.one, again.one)


@pytest.mark.full_only("test_layers_that_a_class_makes_share_... is the smoke")
@pytest.mark.parametrize("how", ["load_model", "a folder", "from_config"])
def test_what_is_made_of_a_config_shares_the_tables_that_were_shared(keras, how, tmp_path):
    """Three towers, each with a layer of one name: two of one session and one of another."""

    def tower(layer, name):
        ids = keras.Input([3], dtype="int64")
        return keras.Model(ids, keras.layers.Flatten()(layer(ids)), name=name)

    first = embedding(keras)  # of a session of its own
    others = [de.keras.layers_for(keras).Embedding(2, name="table") for _ in range(2)]
    others[1] = embedding(keras)
    others.append(de.keras.layers_for(keras).Embedding(2, name="table"))
    layers = [first, *others]
    towers = [tower(layer, f"tower_{number}") for number, layer in enumerate(layers)]
    ids = keras.Input([3], dtype="int64")
    rows = keras.layers.Concatenate()([each(ids) for each in towers])
    model = compiled(keras, keras.Model(ids, keras.layers.Dense(1)(rows)))
    fit(model)
    if how == "load_model":
        model.save(tmp_path / "m.keras")
        again = keras.models.load_model(tmp_path / "m.keras")
    elif how == "a folder":
        de.keras.models.save_model(model, tmp_path / "m")
        again = de.keras.models.load_model(tmp_path / "m", package=keras)
    else:
        again = type(model).from_config(model.get_config())
    made = [again.get_layer(f"tower_{number}").get_layer("table").params for number in range(4)]
    assert made[0] is made[1] is not made[2] and made[2] is made[3]
    assert not {id(each) for each in made} & {id(layer.params) for layer in layers}
    if how != "from_config":
        np.testing.assert_array_equal(again.predict(X, verbose=0), model.predict(X, verbose=0))
        np.testing.assert_allclose(fit(again), fit(model), rtol=1e-5)


@pytest.mark.parametrize("is_made_so", [False, True], ids=["frozen later", "made frozen"])
def test_a_frozen_layer_can_be_trained_after_loading(keras, is_made_so, tmp_path):
    model, layer = functional(keras, trainable=not is_made_so)
    layer.params.upsert(np.arange(30), np.ones([30, 2]))
    layer.trainable = False
    fit(compiled(keras, model))
    model.save(tmp_path / "m.keras")
    again = keras.models.load_model(tmp_path / "m.keras")
    loaded = again.layers[1]
    assert not loaded.trainable and loaded.trainable_variables == []
    fit(again)
    np.testing.assert_array_equal(loaded.params.lookup(np.arange(30)), np.ones([30, 2]))
    loaded.trainable = True
    fit(compiled(keras, again))
    assert np.abs(loaded.params.lookup(np.unique(X)) - 1).min() > 0


KINDS = {
    "int32 keys, bfloat16": {"key_dtype": "int32", "value_dtype": "bfloat16"},
    "float64": {"value_dtype": "float64"},
    "HKV": {"kv_creator": de.HkvHashTableCreator(), "keep_distribution": True},
    "policy": {"restrict_policy": de.FrequencyRestrictPolicy},
    "texts": {"key_dtype": "string"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_tables_of_each_kind_are_kept(keras, kind, tmp_path):
    arguments = KINDS[kind]
    model, layer = functional(keras, **arguments)
    x = X.astype(arguments.get("key_dtype", "int64").replace("string", "U"))
    x = tf.constant(np.char.add("z\x00ü", x)) if kind == "texts" else x
    fit(compiled(keras, model), x)
    model.save(str(tmp_path / "m.keras"))
    again = keras.models.load_model(str(tmp_path / "m.keras"))
    found = again.layers[1]
    assert type(found.params.rows) is type(layer.params.rows)
    assert rows_of(found)[1].dtype == rows_of(layer)[1].dtype
    for ours, theirs in zip(rows_of(found), rows_of(layer), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    if kind == "policy":
        status = [params.restrict_policy.status.export() for params in (found.params, layer.params)]
        np.testing.assert_array_equal(status[0][1], status[1][1])
    np.testing.assert_allclose(fit(again, x), fit(model, x), rtol=1e-4)


def test_functions_of_the_program_are_loaded_by_their_names(keras, tmp_path):
    @keras.saving.register_keras_serializable("test_keras_saving")
    def fields(ids):
        return tf.math.floormod(ids, 2)

    layer = de.keras.layers_for(keras).FieldWiseEmbedding(2, 2, fields)
    ids = keras.Input([3], dtype="int64")
    model = keras.Model(ids, layer(ids))
    layer.params.upsert(np.arange(30), RNG.normal(size=(30, 2)).astype("f4"))
    model.save(str(tmp_path / "m.keras"))
    again = keras.models.load_model(str(tmp_path / "m.keras"))
    np.testing.assert_array_equal(again.predict(X, verbose=0), model.predict(X, verbose=0))


IN_ANOTHER_PROCESS = """
import numpy as np
import {package} as keras
from sok_lite import dynamic_embedding as de

de.keras.layers_for(keras)
model, x, y, outputs = {files}
try:
    keras.models.load_model(model)  # the first thing that the process loads
except NotImplementedError as error:
    assert "de.keras.models.load_model" in str(error)
else:
    raise AssertionError("nothing was raised")
model = de.keras.models.load_model(model, package=keras)
one, other = (model.get_layer(name).get_layer("table").params for name in ("one", "other"))
assert one is other
np.save(outputs, model.predict(np.load(x), verbose=0))
model.fit(np.load(x), np.load(y), verbose=0)
"""


@pytest.mark.full_only("starts a process")
def test_another_process_shares_tables_or_says_that_it_cannot(keras, tmp_path):
    def tower(name):
        ids = keras.Input([3], dtype="int64")
        layer = de.keras.layers_for(keras).Embedding(2, name="table")
        return keras.Model(ids, keras.layers.Flatten()(layer(ids)), name=name)

    tf.compat.v1.reset_default_graph()
    ids, towers = keras.Input([3], dtype="int64"), [tower("one"), tower("other")]
    rows = keras.layers.Concatenate()([each(ids) for each in towers])
    model = compiled(keras, keras.Model(ids, keras.layers.Dense(1)(rows)), run_eagerly=False)
    fit(model)
    files = [str(tmp_path / name) for name in ("m.keras", "x.npy", "y.npy", "out.npy")]
    model.save(files[0])
    np.save(files[1], X)
    np.save(files[2], Y)
    program = IN_ANOTHER_PROCESS.format(package=keras.__name__, files=files)
    run_with_tensorflow(program, tmp_path)
    np.testing.assert_allclose(np.load(files[3]), model.predict(X, verbose=0), rtol=1e-5)


def test_what_was_saved_of_another_table_is_refused(keras, tmp_path):
    path = str(tmp_path / "m.weights.h5")
    model, _ = trained(keras)
    model.save_weights(path)
    for arguments, error in (
        ({"value_dtype": "float16"}, "values.*float32.*needs float16"),
        ({"restrict_policy": de.TimestampRestrictPolicy}, "has no 'status_keys'"),
    ):
        other, layer = functional(keras, **arguments)
        compiled(keras, other)
        with pytest.raises(ValueError, match=error):
            other.load_weights(path)
        assert int(layer.params.size()) == 0


def test_a_model_may_hold_the_variable_beside_its_layer(keras, tmp_path):
    model, layer = trained(keras, subclassed)
    model.rows = layer.params
    for save, load in (
        (model.save_weights, lambda again, path: again.load_weights(path)),
        (lambda path: de.keras.models.save_model(model, path), de.keras.models.load_weights),
    ):
        path = str(tmp_path / "m.weights.h5")
        save(path)
        again, layer_again = subclassed(keras)
        again.rows = layer_again.params
        compiled(keras, again)
        load(again, path)
        for ours, theirs in zip(rows_of(layer_again), rows_of(layer), strict=True):
            np.testing.assert_array_equal(ours, theirs)
    model.save(tmp_path / "m.keras")
    model.other = de.Variable(dim=2, name="other")
    with pytest.raises(NotImplementedError, match="rows of 'other:0' out"):
        model.save(tmp_path / "m.keras")


def test_a_model_with_an_optimizer_of_tf1_is_saved_without_it(tmp_path):
    keras = pytest.importorskip("tf_keras")
    model, layer = functional(keras)
    optimizer = tf.compat.v1.train.AdagradOptimizer(0.1)
    model.compile(de.DynamicEmbeddingOptimizer(optimizer), "mse")
    fit(model)
    for name in FORMATS:
        de.keras.models.save_model(model, tmp_path / name)
        again, found = functional(keras)
        de.keras.models.load_weights(again, tmp_path / name)
        np.testing.assert_array_equal(rows_of(found)[1], rows_of(layer)[1])
    assert model.optimizer.optimizer is optimizer
    fit(model)


def test_weights_as_a_list_are_refused(keras):
    model, layer = trained(keras)
    for holder in (model, layer):
        with pytest.raises(NotImplementedError, match="'table-shadow:0'. Use save_weights"):
            holder.get_weights()
        with pytest.raises(NotImplementedError, match="'table-shadow:0'. Use save_weights"):
            holder.set_weights([])


def test_checkpoints_leave_out_what_is_to_be_left_out(keras, tmp_path):
    model, layer = trained(keras, checkpoint=False)
    path = tf.train.Checkpoint(model=model).save(tmp_path / "c")
    again, found = functional(keras, checkpoint=False)
    tf.train.Checkpoint(model=again).restore(path)
    assert int(found.params.size()) == 0 < int(layer.params.size())


@pytest.mark.parametrize("is_of_tf1", [False, True], ids=["Keras", "TF1"])
def test_an_optimizer_that_another_wrapper_makes_anew_is_refused(keras, is_of_tf1):
    """As hvd.DistributedOptimizer makes one."""
    table = de.Variable(dim=2, name="table")
    shadow = table.get_trainable_by_name("t")
    with tf.GradientTape() as tape:
        rows = de.embedding_lookup(table, tf.constant([1], tf.int64), name="t")
    pairs = [(tape.gradient(rows, shadow), shadow)]
    if is_of_tf1:
        again = tf.compat.v1.train.AdamOptimizer(0.1)
    else:
        optimizer = de.DynamicEmbeddingOptimizer(keras.optimizers.Adam(0.1))
        again = type("Adam", (type(optimizer),), {}).from_config(optimizer.get_config())
    with pytest.raises(NotImplementedError, match="Adam.* would not train 't:0'.*after any other"):
        again.apply_gradients(pairs)
    assert int(table.size()) == 0
    de.DynamicEmbeddingOptimizer(again).apply_gradients(pairs)
    assert int(table.size()) == 1


def test_a_model_that_was_saved_with_an_optimizer_in_another_is_loaded(keras, tmp_path):
    """As it was saved once, when the optimizer's own class said that it trains tables."""
    model, layer = trained(keras)
    inner = keras.saving.serialize_keras_object(model.optimizer)
    model.save(tmp_path / "m.keras")
    old = {
        "module": None,
        "class_name": "DynamicEmbeddingOptimizer",
        "registered_name": "sok_lite.dynamic_embedding>DynamicEmbeddingOptimizer",
        "config": {"optimizer": inner, "synchronous": False},
    }
    with zipfile.ZipFile(tmp_path / "m.keras") as file:
        parts = {name: file.read(name) for name in file.namelist()}
    config = json.loads(parts["config.json"])
    config["compile_config"]["optimizer"] = old
    del config["compile_config"]["sok_lite"]
    parts["config.json"] = json.dumps(config).encode()
    with zipfile.ZipFile(tmp_path / "old.keras", "w") as file:
        for name, data in parts.items():
            file.writestr(name, data)
    again = keras.models.load_model(tmp_path / "old.keras")
    check_goes_on(model, again, layer, again.layers[1])


# ---- de.keras.models and de.keras.callbacks ------------------------------------------------------


def test_load_weights_gives_an_optimizer_without_states_those_that_were_saved(keras, tmp_path):
    model, layer = trained(keras)
    for name in FORMATS[1:]:
        de.keras.models.save_model(model, tmp_path / name)
        again, _ = functional(keras)
        again.compile(de.DynamicEmbeddingOptimizer(keras.optimizers.Adam(0.1)), "mse")
        de.keras.models.load_weights(again, tmp_path / name)
        assert int(again.optimizer.iterations) == int(model.optimizer.iterations) > 0
        check_goes_on(model, again, layer, again.layers[1])


@pytest.mark.parametrize("save", SAVES)
def test_save_model_leaves_the_optimizer_out(keras, save, tmp_path):
    model, layer = trained(keras)
    optimizer = model.optimizer
    for name in FORMATS:
        getattr(de.keras.models, save)(model, tmp_path / name, include_optimizer=False)
        assert model.optimizer is optimizer
        if name.endswith(".keras"):
            again = keras.models.load_model(tmp_path / name)
            assert getattr(again, "optimizer", None) is None
        else:
            again, _ = functional(keras)
            compiled(keras, again)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                de.keras.models.load_weights(again, tmp_path / name)
            assert int(again.optimizer.iterations) == 0
        np.testing.assert_array_equal(rows_of(again.layers[1])[1], rows_of(layer)[1])
    fit(model)
    getattr(de.keras.models, save)(model, tmp_path / "whole.keras")
    assert int(keras.models.load_model(tmp_path / "whole.keras").optimizer.iterations) == 10


@pytest.mark.parametrize("save", SAVES)
def test_save_model_replaces_only_what_it_may(keras, save, tmp_path):
    model, _ = trained(keras)
    path = tmp_path / "m.keras"
    path.write_text("a file of worth")
    with pytest.raises(FileExistsError, match="overwrite=False"):
        getattr(de.keras.models, save)(model, path, overwrite=False)
    assert path.read_text() == "a file of worth"
    (tmp_path / "m.part").mkdir()
    names = ["m.part/notes.txt", "m.rank1of2.npz", "m.keras.rank1of2.npz", "m.keras.part"]
    for name in names:
        (tmp_path / name).write_text("of another program")
    for name in ("m", "m.keras"):
        getattr(de.keras.models, save)(model, tmp_path / name)
    for name in names:
        assert (tmp_path / name).read_text() == "of another program"
    assert len(os.listdir(tmp_path)) == 6


def test_save_model_leaves_the_old_one_where_it_fails(keras, tmp_path, monkeypatch):
    model, layer = trained(keras)
    for name in FORMATS:
        de.keras.models.save_model(model, tmp_path / name)
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    write = models._write

    def failing(*arguments):
        write(*arguments)
        raise OSError("full")

    monkeypatch.setattr(models, "_write", failing)
    layer.params.upsert(tf.constant([77], layer.params.key_dtype), tf.ones([1, 2]))
    for name in FORMATS:
        with pytest.raises(OSError, match="full"):
            de.keras.models.save_model(model, tmp_path / name)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == files


def test_an_address_is_no_path(keras, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, _ = trained(keras)
    for path in ("s3://bucket/m.keras", "gs://bucket/m", ""):
        for call in (
            lambda path: de.keras.models.save_model(model, path),
            lambda path: de.keras.models.de_hvd_save_model(model, path),
            lambda path: de.keras.models.load_model(path, package=keras),
            lambda path: de.keras.models.load_weights(model, path),
        ):
            with pytest.raises(ValueError, match="`filepath` must be in a folder of this machine"):
                call(path)
    assert os.listdir(tmp_path) == []


def test_save_model_refuses_what_it_cannot_do(keras, tmp_path):
    model, _ = trained(keras)
    with pytest.raises(NotImplementedError, match="older format.*ends in .keras"):
        de.keras.models.save_model(model, tmp_path / "m.h5")
    with pytest.raises(NotImplementedError, match=r"de\.keras\.models\.save_model\(model, path\)"):
        model.save(str(tmp_path / "m.h5"))
    in_files, _ = functional(keras, kv_creator=IN_FILES)
    for save in SAVES:
        with pytest.raises(NotImplementedError, match="'table-parameter'.*de.train.Checkpoint"):
            getattr(de.keras.models, save)(in_files, tmp_path / "m.ckpt")
    with pytest.raises(ValueError, match="`signatures` are of TensorFlow's SavedModel"):
        de.keras.models.save_model(model, tmp_path / "m.keras", signatures={})
    with pytest.raises(ValueError, match="`options`"):
        de.keras.models.save_model(model, tmp_path / "m.keras", options=object())
    for name, kind in (("m.ckpt", "CheckpointOptions"), ("m", "SaveOptions")):
        with pytest.raises(TypeError, match=f"must be a {kind}"):
            de.keras.models.save_model(model, tmp_path / name, options=object())
    assert os.listdir(tmp_path) == []


def test_files_of_another_number_of_ranks_are_refused(keras, tmp_path):
    model, _ = trained(keras)
    path = tmp_path / "m.keras"
    de.keras.models.de_hvd_save_model(model, path)
    (tmp_path / "m.keras.rank1of2.npz").write_bytes(b"")
    with pytest.raises(ValueError, match="saved by 2 ranks, and there are 1"):
        de.keras.models.load_model(path, package=keras)
    for save in (de.keras.models.de_hvd_save_model, de.keras.models.de_save_model):
        (tmp_path / "m.keras.rank1of2.npz").write_bytes(b"")
        save(model, path)
        assert os.listdir(tmp_path) == ["m.keras"]


@pytest.mark.parametrize("weights_only", [False, True], ids=["model", "weights"])
def test_checkpoints_of_fit_have_the_tables(keras, weights_only, tmp_path):
    end = "weights.h5" if weights_only else "keras"
    model, layer = trained(keras)
    pattern = str(tmp_path / "{epoch}-{loss:.3f}") + f".{end}"
    for made in (de.keras.callbacks_for(keras).ModelCheckpoint, keras.callbacks.ModelCheckpoint):
        callback = made(pattern, save_weights_only=weights_only)
        model.fit(X, Y, epochs=2, verbose=0, callbacks=[callback])
        newest = max(tmp_path.iterdir(), key=lambda path: (path.stat().st_mtime_ns, path.name))
        if weights_only:
            again, found = functional(keras)
            compiled(keras, again).load_weights(newest)
        else:
            found = keras.models.load_model(newest).layers[1]
        np.testing.assert_array_equal(rows_of(found)[1], rows_of(layer)[1])
    with pytest.raises(ValueError, match="`signatures` are of TensorFlow's SavedModel"):
        de.keras.callbacks_for(keras).ModelCheckpoint(pattern, signatures={})


def test_what_cannot_be_saved_is_refused_before_fit(keras, tmp_path):
    class Holder(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.params = de.Variable(dim=2, name="held", trainable=False)

        def call(self, x):
            return x

    made = de.keras.callbacks_for(keras).ModelCheckpoint
    inputs = keras.Input([3])
    model = keras.Model(inputs, keras.layers.Dense(1)(Holder()(inputs)))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    kernel = model.layers[-1].kernel.numpy()
    for name in ("m.keras", "m.weights.h5", "m"):
        with pytest.raises(
            NotImplementedError, match=r"'held.* out.*de\.keras\.models\.save_model"
        ):
            model.fit(X.astype("f4"), Y, verbose=0, callbacks=[made(str(tmp_path / name))])
    ours, layer = functional(keras, kv_creator=IN_FILES)
    compiled(keras, ours)
    with pytest.raises(NotImplementedError, match="'table-parameter'.*de.train.Checkpoint"):
        ours.fit(X, Y, verbose=0, callbacks=[made(str(tmp_path / "m.ckpt"))])
    with pytest.raises(TypeError, match="A signature must be"):
        ours.fit(X, Y, verbose=0, callbacks=[made(str(tmp_path / "m"), signatures=fit)])
    with pytest.raises(NotImplementedError, match="older format"):
        made(str(tmp_path / "m.h5"))
    np.testing.assert_array_equal(model.layers[-1].kernel.numpy(), kernel)
    assert int(layer.params.size()) == 0 and os.listdir(tmp_path) == []


def test_the_callbacks_are_those_of_tf_keras():
    callbacks = de.keras.callbacks
    assert callbacks.ModelCheckpoint is callbacks.DEHvdModelCheckpoint
    assert issubclass(callbacks.ModelCheckpoint, tf.keras.callbacks.ModelCheckpoint)
    model, _ = functional(tf.keras)
    callback = callbacks.DEHvdBroadcastGlobalVariablesCallback(0)
    compiled(tf.keras, model).fit(X, Y, verbose=0, callbacks=[callback])
    assert callback.broadcast_done  # which is nothing where there is one rank
