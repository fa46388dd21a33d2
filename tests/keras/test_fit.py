"""Training through `model.fit`; tests/ranks/test_keras_matrix.py has what it comes to."""

import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from tests.support.dense_rows import dense_rows

DIM, NUM_KEYS, FIELDS = 3, 40, 5
RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(NUM_KEYS, DIM)).astype(np.float32)
KERNEL = RNG.normal(size=(2 * DIM, 1)).astype(np.float32)
X = RNG.integers(0, NUM_KEYS, (70, FIELDS))  # 8 batches of 8 and one of 6
X[X == 13] = 12  # a key that is in no batch
Y = (RNG.normal(size=(70, 1)) > 0).astype(np.float32)


def with_table(keras, sk):
    """A model of two features of one table: of the first field, and of the mean of all."""
    table = sk.Table("table", DIM)
    table.assign(np.arange(NUM_KEYS), ROWS)
    ids = keras.Input([FIELDS], dtype="int64")
    rows = [sk.Embedding(table)(ids[:, 0]), sk.Embedding(table, "mean")(ids)]
    kernel = keras.initializers.Constant(KERNEL)
    head = keras.layers.Dense(1, "sigmoid", kernel_initializer=kernel)
    return keras.Model(ids, head(keras.layers.Concatenate()(rows))), table


def fit(model, **options):
    options = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0} | options
    return model.fit(X, Y, **options).history["loss"]


def check_rows(table, layer, atol=1e-5):
    keys, rows = (each.numpy() for each in table.export())
    np.testing.assert_allclose(rows, layer.get_weights()[0][keys], atol=atol)


def test_ids_that_a_batch_repeats_are_summed_before_they_are_squared(keras, sk):
    """As by tf_keras, and not by Keras 3: docs/howto/coming-from-embedding.md says so."""
    table, dense = sk.Table("t", 1, "zeros"), keras.layers.Embedding(8, 1, "zeros")
    for layer in (table, dense):
        ids = keras.Input([], dtype="int64")
        model = keras.Model(ids, layer(ids))
        model.compile(keras.optimizers.Adagrad(1.0), "mse")
        model.fit(np.array([7, 7]), np.ones([2, 1]), verbose=0)  # each has a gradient of -1
    summed, by_itself = 2 / np.sqrt(0.1 + (1 + 1) ** 2), 2 / np.sqrt(0.1 + 1**2 + 1**2)
    np.testing.assert_allclose(table.export()[1], [[summed]], rtol=1e-5)
    of_keras = by_itself if keras.__name__ == "keras" else summed
    np.testing.assert_allclose(dense.embeddings.numpy()[7], [of_keras], rtol=1e-5)


def test_evaluate_and_predict_change_nothing_and_evict_nothing(keras, sk):
    table = sk.Table("small", DIM, var_type="hybrid", init_capacity=64, max_capacity=64)
    ids = keras.Input([FIELDS], dtype="int64")
    model = keras.Model(ids, keras.layers.Dense(1)(sk.Embedding(table, "sum")(ids)))
    model.compile("adam", "mse", metrics=["AUC"])
    x = np.arange(70 * FIELDS).reshape(70, FIELDS)
    model.fit(x, Y, batch_size=10, verbose=0)

    def state():
        return [each.numpy() for each in table.variable.saved_tensors().values()]

    before, evicted, new = state(), table.variable.table.num_evicted, x + 10_000
    assert evicted > 0
    model.evaluate(new, Y, verbose=0)
    model.predict(new, verbose=0)
    model.predict_on_batch(new[:3])
    model.test_on_batch(new[:3], Y[:3])
    for one, other in zip(before, state(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert table.variable.table.num_evicted == evicted
    model.train_on_batch(new[:3], Y[:3])
    assert table.variable.table.num_evicted > evicted and 10_000 in table


def test_jit_compile_needs_no_thought(keras, sk):
    model, _ = with_table(keras, sk)
    model.compile("sgd", "mse")
    assert not model.jit_compile
    if keras.__name__ == "tf_keras":
        model.compile("sgd", "mse", jit_compile=True)
        with pytest.raises(Exception, match="XLA"):
            fit(model)
        return
    with pytest.warns(UserWarning, match="jit_compile"):
        model.compile("sgd", "mse", jit_compile=True)
        fit(model)


HOLDERS = ("the model", "a layer", "made when it is built", "the program")


@pytest.mark.parametrize("holder", HOLDERS)
def test_keras_takes_no_xla_on_a_machine_with_a_gpu(keras, sk, monkeypatch, holder):
    """There Keras 3 compiles models by XLA, unless a layer says that XLA cannot."""
    devices = [*tf.config.list_physical_devices(), SimpleNamespace(device_type="GPU")]
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: devices)
    plain = keras.Sequential([keras.layers.Dense(1)])
    plain.compile("sgd", "mse")
    table = sok.DynamicVariable(DIM, name="own", trainable=False)

    class Rows(keras.layers.Layer):
        def build(self, _):
            if holder == "made when it is built":
                self.table = table

        def call(self, ids):
            return tf.reduce_sum(tf.nn.embedding_lookup(table, ids), 1)

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.rows, self.head = Rows(), keras.layers.Dense(1)

        def call(self, ids):
            return self.head(self.rows(ids))

    model = Model()
    if holder in ("the model", "a layer"):
        (model if holder == "the model" else model.rows).table = table
    model.compile("sgd", "mse")
    # Keras 3 decides for or against XLA before it builds the layers.
    if holder not in ("the model", "a layer") and keras.__name__ == "keras":
        with pytest.raises(NotImplementedError, match=r"compile\(jit_compile=False\)"):
            model.fit(X, Y, verbose=0)
        model.compile("sgd", "mse", jit_compile=False)
        model.fit(X, Y, verbose=0)
        return
    model.fit(X, Y, verbose=0)
    model.predict(X, verbose=0)
    assert not model.jit_compile
    assert bool(plain.jit_compile) == (keras.__name__ == "keras")


def test_a_frozen_table_stays_as_it_is(keras, sk):
    model, table = with_table(keras, sk)
    model.layers[-3].trainable = False
    model.compile("sgd", "binary_crossentropy", run_eagerly=True)
    kernel = model.layers[-1].get_weights()[0]
    fit(model)
    np.testing.assert_array_equal(table.export()[1], ROWS)
    assert np.abs(model.layers[-1].get_weights()[0] - kernel).max() > 0
    table.trainable = True
    model.compile("sgd", "binary_crossentropy", run_eagerly=True)
    fit(model)
    assert np.abs(table.export()[1].numpy() - ROWS).max() > 0


def test_apply_without_variables_trains_what_it_was_built_for(keras, sk):
    if keras.__name__ == "tf_keras":
        pytest.skip("its optimizers are always given the variables")
    models, optimizers = [with_table(keras, sk)[0] for _ in range(2)], []
    for model in models:
        optimizers.append(keras.optimizers.Adagrad(0.1))
        optimizers[-1].build(model.trainable_variables)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(X[:8], training=True) - Y[:8]) ** 2)
        grads = tape.gradient(loss, model.trainable_variables)
        with_variables = [model.trainable_variables] if model is models[0] else []
        optimizers[-1].apply(grads, *with_variables)
    for one, other in zip(*(model.get_weights() for model in models), strict=True):
        np.testing.assert_array_equal(one, other)
    assert np.abs(models[1].get_weights()[0] - ROWS).max() > 1e-3
    with pytest.raises(ValueError, match="gradients must match"):
        optimizers[1].apply(grads[:1])


@pytest.mark.parametrize("times", [FIELDS, None], ids=["known times", "unknown times"])
def test_a_layer_at_each_of_several_times(keras, sk, times, tmp_path):
    table = sk.Table("table", DIM)
    table.assign(np.arange(NUM_KEYS), ROWS)
    layers = (sk.Embedding(table, "sum"), dense_rows(keras, ROWS))
    models, losses = [], []
    for layer in layers:
        ids = keras.Input([times, 1], dtype="int64")
        if layer is layers[0]:
            rows = keras.layers.TimeDistributed(layer)(ids)
            mean = keras.layers.GlobalAveragePooling1D()(rows)
        else:
            mean = layer(keras.layers.Reshape([FIELDS])(ids))
        kernel = keras.initializers.Constant(KERNEL[:DIM])
        head = keras.layers.Dense(1, "sigmoid", kernel_initializer=kernel)
        models.append(keras.Model(ids, head(mean)))
        options = {"run_eagerly": layer is layers[1]}  # of dense rows, which is faster
        models[-1].compile(keras.optimizers.Adagrad(0.1), "binary_crossentropy", **options)
        options = {"batch_size": 8, "shuffle": False, "verbose": 0}
        losses.append(models[-1].fit(X[:, :, None], Y, **options).history["loss"])
    np.testing.assert_allclose(*losses, rtol=1e-4)
    check_rows(table, layers[1])
    assert np.abs(table.export()[1].numpy() - ROWS).max() > 1e-3
    if keras.__name__ == "keras":
        models[0].save(tmp_path / "m.keras")
        loaded = keras.models.load_model(tmp_path / "m.keras")
        found, expected = (m.predict(X[:, :, None], verbose=0) for m in (loaded, models[0]))
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("combiner", [None, "mean"])
def test_a_sequential_without_an_input(keras, sk, combiner, tmp_path):
    table = sk.Table("table", DIM)
    table.assign(np.arange(NUM_KEYS), ROWS)
    ends = [keras.layers.Dense(1, "sigmoid")]
    if combiner is None:
        ends.insert(0, keras.layers.GlobalAveragePooling1D())
    model = keras.Sequential([sk.Embedding(table, combiner), *ends])
    # One of them is traced, which takes seconds.
    options = {"run_eagerly": combiner is not None}
    model.compile(keras.optimizers.SGD(0.5), "binary_crossentropy", **options)
    losses = fit(model)
    assert losses[1] < losses[0]
    assert np.abs(table.export()[1].numpy() - ROWS).max() > 1e-3
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    np.testing.assert_array_equal(loaded.predict(X, verbose=0), model.predict(X, verbose=0))
    assert fit(loaded) == fit(model)
    if keras.__name__ == "keras":  # tf_keras casts to what the model was first called on
        with pytest.raises(Exception, match="must be int64. Received: float32"):
            model.predict(X.astype(np.float32), verbose=0)


def test_summary_counts_rows(keras, sk):
    model, table = with_table(keras, sk)
    lines = []
    model.summary(print_fn=lambda line, **_: lines.append(line))
    text = "\n".join(map(str, lines))
    assert str(NUM_KEYS * DIM) in text
    assert "Total params: 127" in text  # 40 rows of 3, a kernel of 6 and a bias
    assert f"keys={NUM_KEYS}" in repr(table)
    assert model.count_params() == NUM_KEYS * DIM + 7


def model_with(keras, rows, stopped):
    """A model one of whose parts gets no gradient."""

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.rows, self.head = rows, keras.layers.Dense(1, name="head")

        def call(self, ids):
            x = tf.reduce_mean(self.rows(ids), 1)
            if stopped == "head":
                return tf.reduce_sum(x, 1, keepdims=True) + tf.stop_gradient(self.head(x))
            return self.head(tf.stop_gradient(x) if stopped == "rows" else x)

    model = Model()
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize(
    "layer, stopped", [("Table", "rows"), ("Embedding", "rows"), ("Table", "head"), ("Table", None)]
)
def test_fit_names_once_what_has_no_gradient_as_it_does_without_tables(keras, sk, layer, stopped):
    table = sk.Table("rows", DIM)
    model = model_with(keras, table if layer == "Table" else sk.Embedding(table), stopped)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")  # as Python shows them
        fit(model)
    found = [str(each.message) for each in said if "Gradients do not exist" in str(each.message)]
    names = {"rows": ["rows"], "head": ["head/kernel", "head/bias"], None: []}[stopped]
    assert len(found) == bool(names)
    assert all(f"{name}'" in found[0] or f"{name}:0'" in found[0] for name in names)
    if keras.__name__ == "keras" and found:  # tf_keras writes it to its log
        others = model_with(keras, keras.layers.Embedding(NUM_KEYS, DIM), stopped)
        with pytest.warns(UserWarning, match="Gradients do not exist") as theirs:
            fit(others)
        words = [str(each.message) for each in theirs]
        assert any(each.split("]")[1] == found[0].split("]")[1] for each in words if "]" in each)


def test_fit_refuses_a_model_that_no_gradient_reaches(keras, sk):
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.table = sk.Table("alone", DIM)

        def call(self, ids):
            return tf.stop_gradient(tf.reduce_sum(self.table(ids), [1, 2]))[:, None]

    model = Model()
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="no gradient of any of .*alone"):
        fit(model)
