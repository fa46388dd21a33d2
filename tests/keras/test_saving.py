"""What Keras saves, loads, rolls back and clones: tables and optimizer states go with the model."""

import copy
import datetime
import pickle
import uuid

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite.engine.files import manifest
from tests.keras.models import (
    DATA,
    N,
    Y,
    batches,
    check_equal,
    compiled,
    content,
    functional,
    rows_in,
    tables_of,
)
from tests.support.datasets import batched


@pytest.fixture
def model(keras, sk):
    model = compiled(keras, sk)
    model.fit(batches(), verbose=0)
    return model


def fresh(keras, sk):
    """Another model, which has been trained otherwise."""
    model = compiled(keras, sk)
    other = {**DATA, "user": DATA["user"] + 500}
    model.fit(batched((other, Y), 32), verbose=0)
    return model


def check_goes_on(model, other):
    """That two models are equal, and stay so in training: their optimizers' states are as well."""
    check_equal(content(other), content(model))
    np.testing.assert_array_equal(
        other.predict(batches(), verbose=0), model.predict(batches(), verbose=0)
    )
    for each in (model, other):
        each.fit(batches(), verbose=0)
    check_equal(content(other), content(model))


def test_load_model_gives_tables_and_states(keras, model, tmp_path):
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    tables = tables_of(loaded)
    assert list(tables) == ["user", "item", "city"]  # "item" is one for two features
    check_goes_on(model, loaded)


def test_what_a_wrapper_says_is_saved(keras, sk, tmp_path):
    model = functional(keras, sk)
    inner = keras.optimizers.SGD(0.1)
    wrapper = sok.OptimizerWrapper(inner, on_nonfinite="error", stochastic_rounding=True)
    model.compile(wrapper, "binary_crossentropy", run_eagerly=True)
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    loaded.save(tmp_path / "again.keras")
    wrong = tf.data.Dataset.from_tensors((DATA, np.full_like(Y, np.nan)))
    for path in ("m.keras", "again.keras"):
        loaded = keras.models.load_model(tmp_path / path)
        with pytest.raises(Exception, match="finite"):
            loaded.fit(wrong, verbose=0)
    loaded.compile("sgd", "mse")
    assert not {"on_nonfinite", "sok_lite"} & loaded.get_compile_config().keys()


SUBCLASSED = {
    "one": (lambda data: data["user"], lambda tables, x: tables[0](x)),
    "texts and ragged": (
        lambda data: data,
        lambda tables, x: tf.concat(
            [tables[0](x["user"]), tables[1](x["city"]), tf.reduce_sum(tables[0](x["hist"]), 1)], 1
        ),
    ),
    "by a layer": (
        lambda data: tf.stack([data["user"], data["item"]], 1),
        lambda tables, x: tables[2](x),
    ),
    "two": (
        lambda data: (data["user"], data["item"]),
        lambda tables, x: tables[0](x[0]) + tables[0](x[1]),
    ),
    "cannot be built": (
        lambda data: data,
        lambda tables, x: (
            tables[0](x["user"]) + tf.cast(x["hist"].row_lengths(), tf.float32)[:, None]
        ),
    ),
}


@pytest.mark.parametrize("kind", SUBCLASSED)
def test_a_subclassed_model_that_looks_up_in_tables_itself_is_loaded_whole(
    keras, sk, tmp_path, kind
):
    """Keras builds it by its call on dense floats, and says nothing of layers that it does not."""
    taken, joined = SUBCLASSED[kind]

    @keras.saving.register_keras_serializable(f"tests of {keras.__name__}", f"Itself {kind}")
    class Itself(keras.Model):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.tables = [sk.Table("user", 3), sk.Table("city", 2, key_type=str)]
            self.tables.append(sk.Embedding(sk.Table("both", 3), "mean"))
            self.hidden, self.norm = keras.layers.Dense(4), keras.layers.BatchNormalization()
            self.head, self.never = keras.layers.Dense(1), keras.layers.Dense(7)

        def call(self, x, training=None):
            return self.head(self.norm(self.hidden(joined(self.tables, x)), training=training))

    data = batches().map(lambda x, y: (taken(x), y))

    def made():
        model = Itself()
        model.compile("adam", "mse", run_eagerly=kind != "two")  # one of them is traced
        return model

    model = made()
    model.fit(data, verbose=0)
    model.save(tmp_path / "m.keras")
    if kind == "cannot be built":
        expected = NotImplementedError if keras.__name__ == "keras" else AttributeError
        with pytest.raises(expected, match="'hidden|'dense|row_lengths"):
            keras.models.load_model(tmp_path / "m.keras")
        if keras.__name__ == "tf_keras":
            return
        loaded = made()
        loaded(next(iter(data))[0])
        loaded.load_weights(tmp_path / "m.keras")  # which has no states of what is dense
    else:
        loaded = keras.models.load_model(tmp_path / "m.keras")
    for _ in range(1 if kind == "cannot be built" else 2):
        np.testing.assert_array_equal(
            loaded.predict(data, verbose=0), model.predict(data, verbose=0)
        )
        for each in (loaded, model):
            each.fit(data, verbose=0)


WHOLES = {
    "a model": lambda model: model,
    "a layer": lambda model: model.get_layer("rows"),
    "a list": lambda model: [tables_of(model)["city"], model, tables_of(model)["item"]],
    "a dict": lambda model: dict(enumerate(tables_of(model).values())),
    "its own mapping": lambda model: model.get_layer("rows").tables,
}


def test_dump_and_load_take_what_holds_tables(keras, sk, model, tmp_path):
    other = fresh(keras, sk)
    for name, whole in WHOLES.items():
        sok.dump(tmp_path / name, whole(model))
        assert sorted(manifest.read(tmp_path / name).tables) == ["city", "item", "user"]
        sok.dump(tmp_path / name, whole(model), incremental=True)
        for table in tables_of(other).values():
            table.clear()
        sok.load(tmp_path / name, whole(other))
        check_equal(content(other), content(model))
        shown = {table.name: table.keys for table in sok.report(whole(other)).tables}
        assert shown == {name: len(table) for name, table in tables_of(model).items()}
    tables, long_ago = tables_of(model), datetime.datetime(2020, 1, 1)
    keys, rows = sok.incremental_model_dump(model, long_ago)
    for name, found, values in zip(sorted(tables), keys, rows, strict=True):
        np.testing.assert_array_equal(found, tables[name].export()[0], err_msg=name)
        np.testing.assert_array_equal(values, tables[name].export()[1], err_msg=name)
    (keys,), (rows,) = sok.incremental_model_dump(tables["user"], long_ago)
    for given in (tables["user"], tables["user"].variable):
        sok.assign(given, keys[:1], rows[:1] + 1)
        np.testing.assert_array_equal(sok.export(given)[1], np.vstack([rows[:1] + 1, rows[1:]]))
        rows = sok.export(given)[1].numpy()


def test_static_and_dynamic_variables_of_a_model_are_dumped_too(keras, sk, tmp_path):
    class Mixed(keras.Model):
        def __init__(self, number):
            super().__init__()
            self.of_keras = sk.Table("of_keras", 2)
            self.variable = sok.DynamicVariable(2, name="dynamic")
            self.held = [sok.Variable(tf.fill([3, 2], number), name="static")]

    model, other = Mixed(1.0), Mixed(2.0)
    sok.assign(model.of_keras, [1], [[1.0, 2.0]])
    sok.assign(model.variable, [5], [[3.0, 4.0]])
    names = {"of_keras", "dynamic"} | ({"static"} if keras.__name__ == "keras" else set())
    sok.dump(tmp_path, model)  # static ones are weights of tf_keras like any other
    assert set(manifest.read(tmp_path).tables) == names
    sok.load(tmp_path, other)
    np.testing.assert_array_equal(other.of_keras.export()[1], [[1, 2]])
    np.testing.assert_array_equal(sok.export(other.variable)[1], [[3, 4]])
    assert float(other.held[0][0, 0]) == (1 if "static" in names else 2)


def test_a_model_without_tables_is_refused_by_dump(keras, tmp_path):
    ids = keras.Input([2])
    plain = keras.Model(ids, keras.layers.Dense(1)(ids))
    for call in (sok.dump, sok.load):
        text = "layers and models that hold such. Received: Functional without a table"
        with pytest.raises(TypeError, match=text):
            call(tmp_path, plain)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("make", [compiled, fresh], ids=["new", "trained otherwise"])
def test_tables_by_dump_and_the_rest_by_a_checkpoint_go_on(keras, sk, model, make, tmp_path):
    """To the bit, dense moments included: the recipe of docs/keras.md."""

    def rest(model):
        dense = [layer for layer in model.layers if layer.name != "rows"]
        return tf.train.Checkpoint(dense=dense, optimizer=model.optimizer)

    sok.dump(tmp_path / "tables", list(tables_of(model).values()))
    path = rest(model).write(str(tmp_path / "rest"))
    assert not [name for name, _ in tf.train.list_variables(path) if name.endswith("/keys")]
    other = make(keras, sk)
    sok.load(tmp_path / "tables", list(tables_of(other).values()))
    rest(other).read(path)
    check_goes_on(model, other)


def test_a_model_that_was_not_compiled(keras, sk, tmp_path):
    model = functional(keras, sk)
    tables_of(model)["user"].assign([1, 2], np.ones((2, 3), np.float32))
    model.save(tmp_path / "m.keras")
    check_equal(content(keras.models.load_model(tmp_path / "m.keras")), content(model))


def test_load_weights_gives_tables_and_states(keras, sk, model, tmp_path):
    model.save_weights(tmp_path / "m.weights.h5")
    other = fresh(keras, sk)
    other.load_weights(tmp_path / "m.weights.h5")
    check_goes_on(model, other)


# ---- which optimizer goes on ---------------------------------------------------------------------


def by_adagrad(keras, model):
    model.compile(keras.optimizers.Adagrad(0.1), "mae", run_eagerly=True)
    return model


def one_row(keras, rows):
    ids = keras.Input([1], dtype="int64")
    return by_adagrad(keras, keras.Model(ids, keras.layers.Flatten()(rows(ids))))


ONE = np.zeros([1, 1], np.int64)


def step(model):
    """Trains once; returns how far the row went."""
    before = model(ONE).numpy()
    model.train_on_batch(ONE, np.full([1, 1], -9.0))
    return float((model(ONE) - before).numpy()[0, 0])


def file_without_compile(keras, model, other, folder):
    model.save(folder / "m.keras")
    return by_adagrad(keras, keras.models.load_model(folder / "m.keras", compile=False))


def weights_into_a_new_model(keras, model, other, folder):
    model.save_weights(folder / "m.weights.h5")
    other.load_weights(folder / "m.weights.h5")
    return other


def weights_before_compile(keras, model, other, folder):
    step(other)
    weights_into_a_new_model(keras, model, other, folder)
    return by_adagrad(keras, other)


def arrays_into_a_new_model(keras, model, other, folder):
    other.set_weights(model.get_weights())
    return other


def arrays_before_compile(keras, model, other, folder):
    model.set_weights(model.get_weights())  # as EarlyStopping does
    return by_adagrad(keras, model)


def file(keras, model, other, folder):
    model.save(folder / "m.keras")
    return keras.models.load_model(folder / "m.keras")


def weights_into_a_built_optimizer(keras, model, other, folder):
    other.optimizer.build(other.trainable_variables)
    return weights_into_a_new_model(keras, model, other, folder)


@pytest.mark.parametrize(
    "way",
    [
        file_without_compile,
        weights_into_a_new_model,
        weights_before_compile,
        arrays_into_a_new_model,
        arrays_before_compile,
        file,
        weights_into_a_built_optimizer,
    ],
)
def test_states_of_rows_go_on_where_those_of_dense_weights_do(keras, sk, tmp_path, way):
    found = []
    for number in range(2):
        models = []
        for _ in range(2):
            table = sk.Table("t", 1, initializer="zeros")
            dense = keras.layers.Embedding(3, 1, "zeros")
            models.append(one_row(keras, dense if number else table))
        steps = [step(models[0]) for _ in range(5)]
        assert abs(steps[-1]) < 0.7 * abs(steps[0])
        found.append(step(way(keras, *models, tmp_path)))
    assert found[0] == pytest.approx(found[1], rel=1e-3)


# ---- get_weights, set_weights --------------------------------------------------------------------


def test_get_weights_has_the_rows_and_set_weights_all(keras, sk, model):
    weights = model.get_weights()
    tables = list(tables_of(model).values())
    assert [each.shape for each in weights[:3]] == [(len(t), t.dim) for t in tables]
    for array, table in zip(weights, tables, strict=False):
        np.testing.assert_array_equal(array, table.export()[1])
    other = fresh(keras, sk)
    other.set_weights(copy.deepcopy(weights))
    check_equal(content(other), content(model))
    other = fresh(keras, sk)
    other.set_weights(pickle.loads(pickle.dumps(weights)))
    check_equal(content(other), content(model))
    layer = other.get_layer("rows")
    layer.set_weights(model.get_layer("rows").get_weights())


def test_weights_that_do_not_fit_change_nothing(keras, sk, model):
    weights, before = model.get_weights(), content(model)
    kernel = model.layers[-1].get_weights()[0]
    cases = {
        "an array": [weights[0] * 1, *weights[1:]],
        "another table": [weights[1], *weights[1:]],
        "a number of them": weights[1:],
        "a shape": [*weights[:-1], np.zeros(7)],
    }
    for name, given in cases.items():
        with pytest.raises(ValueError):
            model.set_weights(given)
        check_equal(content(model), before)
        np.testing.assert_array_equal(model.layers[-1].get_weights()[0], kernel, err_msg=name)
    with pytest.raises(ValueError, match=r"takes what get_weights\(\) gives"):
        model.set_weights(cases["an array"])
    with pytest.raises(ValueError, match="read-only"):
        weights[0][0] = 1


# ---- configs and clones --------------------------------------------------------------------------


def test_a_clone_has_new_tables(keras, model):
    clone = keras.models.clone_model(model)
    ours, theirs = tables_of(model), tables_of(clone)
    assert list(theirs) == list(ours)
    assert all(len(table) == 0 for table in theirs.values())
    assert not any(theirs[name] is ours[name] for name in ours)
    clone.set_weights(model.get_weights())
    check_equal(rows_in(clone), rows_in(model))


COPIES = {
    "from_config": lambda keras, model: type(model).from_config(model.get_config()),
    "json": lambda keras, model: keras.models.model_from_json(model.to_json()),
}


def sharing(keras, sk, first="an embedding"):
    table, ids = sk.Table("shared", 2), keras.Input([3], dtype="int64")
    layer = table if first == "the table" else sk.Embedding(table, name="each")
    rows = [keras.layers.Flatten()(layer(ids)), sk.Embedding(table, "mean", name="mean")(ids)]
    return keras.Model(ids, keras.layers.Concatenate()(rows)), table


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES.keys())
@pytest.mark.parametrize("first", ["an embedding", "the table"])
def test_a_copy_of_layers_that_share_a_table_shares_a_new_one(keras, sk, copied, first):
    model, table = sharing(keras, sk, first)
    table.assign([1, 2], [[1.0, 2], [3, 4]])
    copies = [copied(keras, model) for _ in range(2)]
    theirs = [each.get_layer("mean").tables["shared"] for each in copies]
    for each, new in zip(copies, theirs, strict=True):
        layer = each.layers[1]
        assert new is (layer if first == "the table" else layer.tables["shared"])
        assert new is not table and len(new) == 0
    assert theirs[0] is not theirs[1]
    theirs[0].set_weights(table.get_weights())
    found = copies[0].predict(np.array([[1, 2, 2]]), verbose=0)
    np.testing.assert_allclose(found, [[1, 2, 3, 4, 3, 4, 7 / 3, 10 / 3]], rtol=1e-6)


def test_a_table_is_not_shared_by_halves(keras, sk):
    model, _ = sharing(keras, sk)
    with pytest.raises(NotImplementedError, match="several layers share table 'shared'.*from_conf"):
        keras.models.clone_model(model)
    layer = model.get_layer("mean")
    with pytest.raises(NotImplementedError, match="Several layers share table 'shared'"):
        type(layer).from_config(layer.get_config())
    assert "shared" not in sk.Table("alone", 2).get_config()


@pytest.mark.parametrize("in_towers", [False, True])
def test_layers_that_share_a_table_are_saved_with_one(keras, sk, tmp_path, in_towers):
    """In a model, and in models within a model."""
    table, ids = sk.Table("shared", 2), keras.Input([3], dtype="int64")
    parts = []
    for combiner in ("sum", "mean"):
        layer = sk.Embedding(table, combiner, name=combiner)
        own = keras.Input([3], dtype="int64")
        tower = keras.Model(own, layer(own), name=f"tower_{combiner}") if in_towers else layer
        parts.append(tower(ids))
    model = keras.Model(ids, keras.layers.Concatenate()(parts))
    table.assign([1, 2], [[1.0, 2], [3, 4]])
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    theirs = []
    for combiner in ("sum", "mean"):
        whole = loaded.get_layer(f"tower_{combiner}") if in_towers else loaded
        theirs.append(whole.get_layer(combiner).tables["shared"])
    assert theirs[0] is theirs[1]
    rows = [[7, 10, 7 / 3, 10 / 3]]
    np.testing.assert_allclose(loaded(np.array([[1, 2, 2]])), rows, rtol=1e-6)


def test_an_input_of_floats_is_refused_where_the_model_is_made(keras, sk):
    inputs = keras.Input([2])
    with pytest.raises(TypeError, match="must be (int64|integers).*[Rr]eceived: .*float32"):
        sk.Embedding(sk.Table("t", 4), "mean")(inputs)


@pytest.mark.parametrize("container", [list, tuple, dict])
@pytest.mark.parametrize("num", [1, 2])
def test_features_in_each_container_are_loaded(keras, sk, tmp_path, container, num):
    table = sk.Table("shared", 2)
    features = [sk.Feature(table, "mean", 0), (table, "sum")][:num]
    inputs = [keras.Input([3], dtype="int64", name=f"in{i}") for i in range(num)]

    def packed(values):
        return dict(zip("ab", values, strict=False)) if container is dict else container(values)

    rows = sk.Embeddings(packed(features), name="rows")(packed(inputs))
    rows = list(rows.values()) if container is dict else list(rows)
    model = keras.Model(inputs, keras.layers.Dense(1)(sum(rows[1:], rows[0])))
    model.compile("sgd", "mse", run_eagerly=True)
    x = [np.arange(6).reshape(2, 3) + i for i in range(num)]
    x = x if num > 1 else x[0]
    model.train_on_batch(x, np.ones([2, 1]))
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    for made in (loaded, *(copied(keras, model) for copied in COPIES.values())):
        found = made.get_layer("rows").features_of()
        known = [(each.combiner, each.mask_value) for each in found]
        assert known == [("mean", 0), ("sum", None)][:num]
        made.set_weights(model.get_weights())
        np.testing.assert_array_equal(made.predict_on_batch(x), model.predict_on_batch(x))


def test_config_of_all_arguments(keras, sk):
    made = {
        "initializer": keras.initializers.HeNormal(seed=1),
        "row_shape": (7, 5),
        "key_type": "uint64",
        "var_type": "hybrid",
        "row_dtype": "float16",
        "seed": 3,
        "trainable": False,
        "max_capacity": 4096,
        "evict_strategy": "kLfu",
    }
    table = sk.Table("t", 5, **made)
    config = keras.saving.serialize_keras_object(table)
    again = keras.saving.deserialize_keras_object(config)
    engine, other = table.variable.table, again.variable.table
    for name in ("name", "dim", "key_dtype", "row_dtype", "var_type", "max_capacity"):
        assert getattr(other, name) == getattr(engine, name), name
    assert not again.trainable and again.get_config()["seed"] == 3
    assert other.initializer == engine.initializer  # of the shape
    again(tf.constant([1], tf.uint64))
    layer = sk.Embedding(table, "sqrtn", mask_value=9, name="e", dtype="float16")
    config = keras.saving.serialize_keras_object(layer)
    again = keras.saving.deserialize_keras_object(config)
    assert again.name == "e" and again.compute_dtype == "float16"
    assert again._of.features[0][1:] == ("sqrtn", 9)


# ---- tf.train.Checkpoint -------------------------------------------------------------------------


def test_checkpoints_of_tensorflow_have_the_tables(keras, sk, model, tmp_path):
    path = tf.train.Checkpoint(model=model).save(str(tmp_path / "c"))
    other = fresh(keras, sk)
    tf.train.Checkpoint(model=other).restore(path)
    check_goes_on(model, other)


def test_addresses_of_tensorflows_file_systems_are_for_what_goes_by_them(
    keras, sk, model, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    folder, again = f"ram://{uuid.uuid4().hex}", compiled(keras, sk)
    tf.train.Checkpoint(model=again).restore(
        tf.train.Checkpoint(model=model).save(f"{folder}/c")
    ).expect_partial()
    check_equal(content(again), content(model))
    model.save(f"{folder}/m.keras")
    check_equal(content(keras.models.load_model(f"{folder}/m.keras")), content(model))
    backup = keras.callbacks.BackupAndRestore(f"{folder}/backup")
    model.fit(batches(), epochs=2, verbose=0, callbacks=[backup])
    assert list(tmp_path.iterdir()) == []


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["m.h5", "folder"])
def test_formats_that_have_no_place_for_keys_are_refused(keras, model, tmp_path, name):
    with pytest.raises((NotImplementedError, ValueError), match="keys|extension"):
        model.save(tmp_path / name)
    assert not (tmp_path / name).exists()
    with pytest.raises(NotImplementedError, match="keys of 'city:0', 'item:0', 'user:0'"):
        model.save_weights(tmp_path / "w.h5")
    with pytest.raises(NotImplementedError, match="export_serving"):
        model.export(tmp_path / "served")


def test_tensorflow_lite_is_told_to_take_what_is_exported(keras, sk, tmp_path):
    ids = keras.Input([2], dtype="int64")
    model = keras.Model(ids, sk.Embedding(sk.Table("a", 2, "ones"), "sum")(ids))
    model(tf.constant([[1, 2]], tf.int64), training=True)
    with pytest.raises(NotImplementedError, match="convert 'a:0', .*export_serving.*from_saved_mo"):
        tf.lite.TFLiteConverter.from_keras_model(model)
    sok.export_serving(model, tmp_path / "m")
    assert tf.lite.TFLiteConverter.from_saved_model(str(tmp_path / "m")).convert()
    plain = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    assert tf.lite.TFLiteConverter.from_keras_model(plain) is not None


def test_what_was_saved_of_another_table_is_refused(keras, sk, tmp_path):
    ids = keras.Input([], dtype="int64")
    model = keras.Model(ids, sk.Embedding(sk.Table("a", 2))(ids))
    model.save_weights(tmp_path / "m.weights.h5")
    other = sk.Table("a", 3)
    other.assign([1], [[1.0, 2, 3]])
    wider = keras.Model(ids, sk.Embedding(other)(ids))
    with pytest.raises(ValueError):
        wider.load_weights(tmp_path / "m.weights.h5")
    with pytest.warns(UserWarning, match="skip_mismatch=True has left 'a:0' as it was"):
        wider.load_weights(tmp_path / "m.weights.h5", skip_mismatch=True)
    np.testing.assert_array_equal(other.export()[1], [[1, 2, 3]])


def test_serving_gives_the_same(keras, model, tmp_path):
    new = {**DATA, "user": DATA["user"] + 17}  # some have no row
    expected = model.predict(tf.data.Dataset.from_tensors(new), verbose=0)
    sok.export_serving(model, tmp_path / "served")
    served = tf.saved_model.load(str(tmp_path / "served"))
    found = served(
        {name: tf.convert_to_tensor(x) if name != "hist" else x for name, x in new.items()}
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert expected.shape == (N, 1)


def test_a_cutoff_is_taken_where_missing_keys_give_zeros(keras, sk, tmp_path):
    """Whatever the initial value is."""
    table = sk.Table("a", 2, "ones")
    table.assign([1, 2], [[3, 4], [0, 0]])
    ids = keras.Input([], dtype="int64")
    sok.export_serving(keras.Model(ids, table(ids)), tmp_path / "m", cutoff=1e-20)
    served = tf.saved_model.load(str(tmp_path / "m"))
    np.testing.assert_array_equal(
        served(tf.constant([1, 2, 9], tf.int64)), [[3, 4], [0, 0], [0, 0]]
    )


@pytest.mark.cases("name")
@pytest.mark.parametrize("name", ["m.keras", "m.weights.h5"])
def test_a_full_disk_is_told_with_the_file_and_the_tables(keras, sk, tmp_path, name):
    ids = keras.Input([], dtype="int64")
    table = sk.Table("item", 4)
    model = keras.Model(ids, table(ids))
    table.assign(np.arange(9), np.ones([9, 4]))
    path = tmp_path / name
    path.symlink_to("/dev/full")
    told = f"No space left on device: a model with 'item.*', with 144 bytes of .*free: '{path}'"
    with pytest.raises(OSError, match=told):
        (model.save if name == "m.keras" else model.save_weights)(str(path))
