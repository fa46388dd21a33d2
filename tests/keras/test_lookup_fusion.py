"""Layers of a functional model share a lookup where its graph says what they get."""

import weakref

import numpy as np
import pytest
import tensorflow as tf

from sok_lite.keras import features as features_module
from sok_lite.keras import lookup_fusion

N, DIM = 20, 3
RNG = np.random.default_rng(0)
X = {"a": RNG.integers(0, 9, N), "b": RNG.integers(0, 9, (N, 2)), "c": RNG.integers(0, 9, N)}
Y = RNG.normal(size=(N, 1)).astype(np.float32)
SEEN = []


@pytest.fixture
def lookups(monkeypatch):
    """Gives the tables of each lookup that the last `fit`, or what came after it, has traced.

    tf_keras traces a step twice: the first one makes the states of the optimizer.
    """
    looked_up = features_module.look_up

    def noted(comm, arguments, policy):
        SEEN.append(sorted(each.spec.name.removesuffix(":0") for each in arguments))
        return looked_up(comm, arguments, policy)

    monkeypatch.setattr(features_module, "look_up", noted)
    return lambda: sorted(map(list, set(map(tuple, SEEN))))


def inputs_of(keras):
    shapes = {"a": [], "b": [2], "c": []}
    return {name: keras.Input(shapes[name], dtype="int64", name=name) for name in X}


def model_of(keras, sk, rows_of):
    """A model of the rows that a function makes of inputs and tables."""
    inputs = inputs_of(keras)
    tables = {name: sk.Table(f"t_{name}", DIM) for name in X}
    rows = [keras.layers.Flatten()(each) for each in rows_of(inputs, tables)]
    x = keras.layers.Concatenate()(rows)
    model = keras.Model(inputs, keras.layers.Dense(1, kernel_initializer="ones")(x))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model, tables


def fit(model, x=X):
    SEEN.clear()  # what was looked up when the model was made
    options = {"batch_size": 5, "epochs": 2, "shuffle": False, "verbose": 0}
    return model.fit(x, Y, **options).history["loss"]


def a_layer_each(sk):
    def rows_of(inputs, tables):
        return [
            sk.Embedding(tables["a"])(inputs["a"]),
            sk.Embedding(tables["b"], "mean")(inputs["b"]),
            tables["c"](inputs["c"]),
        ]

    return rows_of


def content(tables):
    return [part.numpy() for table in tables.values() for part in table.export()]


def test_a_step_is_one_lookup_and_trains_as_several_do(keras, sk, lookups, monkeypatch):
    found, expected = (model_of(keras, sk, a_layer_each(sk)) for _ in range(2))
    loss = fit(found[0])
    assert lookups() == [["t_a", "t_b", "t_c"]]
    for call, data in ((found[0].evaluate, [X, Y]), (found[0].predict, [X])):
        SEEN.clear()
        call(*data, verbose=0, batch_size=5)
        assert lookups() == [["t_a", "t_b", "t_c"]]
    monkeypatch.setattr(lookup_fusion, "_fused_layers", lambda model: [])
    assert fit(expected[0]) == loss
    assert lookups() == [["t_a"], ["t_b"], ["t_c"]]
    for one, other in zip(content(found[1]), content(expected[1]), strict=True):
        np.testing.assert_array_equal(one, other)


def test_layers_of_several_features_are_in_it(keras, sk, lookups):
    def rows_of(inputs, tables):
        both = sk.Embeddings({"a": tables["a"], "b": (tables["b"], "sum")})
        return [*both(inputs).values(), sk.Embedding(tables["c"])(inputs["c"])]

    model, _ = model_of(keras, sk, rows_of)
    fit(model)
    assert lookups() == [["t_a", "t_b", "t_c"]]


def weighted(sk, keras, inputs, tables):
    weights = keras.ops.ones_like(inputs["b"]) if keras.__name__ == "keras" else None
    more = {} if weights is None else {"weights": keras.ops.cast(weights, "float32")}
    return sk.Embedding(tables["b"], "mean")(inputs["b"], **more)


ALONE = {
    "made by a layer": lambda sk, keras, inputs, tables: sk.Embedding(tables["b"], "mean")(
        keras.layers.Reshape([2])(inputs["b"])
    ),
    "with an argument": lambda sk, keras, inputs, tables: sk.Embedding(tables["b"], "mean")(
        inputs["b"], training=False
    ),
    "with weights": weighted,
}


@pytest.mark.parametrize("how", ALONE)
def test_a_layer_that_gets_something_else_looks_up_by_itself(keras, sk, lookups, how):
    if how == "with weights" and keras.__name__ == "tf_keras":
        pytest.skip("tf_keras has no operations on inputs by that name")

    def rows_of(inputs, tables):
        alone = ALONE[how](sk, keras, inputs, tables)
        return [alone, sk.Embedding(tables["a"])(inputs["a"]), tables["c"](inputs["c"])]

    model, _ = model_of(keras, sk, rows_of)
    fit(model)
    assert lookups() == [["t_a", "t_c"], ["t_b"]]


def test_a_layer_that_is_called_twice_looks_up_by_itself(keras, sk, lookups):
    def rows_of(inputs, tables):
        layer = tables["a"]
        rest = [sk.Embedding(tables["b"], "sum")(inputs["b"]), tables["c"](inputs["c"])]
        return [layer(inputs["a"]), layer(inputs["c"]), *rest]

    model, tables = model_of(keras, sk, rows_of)
    fit(model)
    assert lookups() == [["t_a"], ["t_b", "t_c"]]
    assert len(tables["a"]) == len(np.unique(np.concatenate([X["a"], X["c"]])))


def test_a_part_of_a_model_looks_up_for_its_own_layers_alone(keras, sk, lookups):
    """All inputs of the whole are inputs of the part, which uses two of them."""
    inputs = inputs_of(keras)
    tables = {name: sk.Table(f"t_{name}", DIM) for name in X}
    rows = [keras.layers.Flatten()(each) for each in a_layer_each(sk)(inputs, tables)]
    whole = keras.Model(inputs, keras.layers.Concatenate()(rows))
    fit_of_whole = keras.layers.Dense(1)(whole.output)
    trained = keras.Model(inputs, fit_of_whole)
    trained.compile("sgd", "mse")
    fit(trained)
    used = {name: inputs[name] for name in "ab"}
    part = keras.Model(used, keras.layers.Concatenate()(rows[:2]))
    part.compile("sgd", "mse")
    SEEN.clear()
    before = len(tables["c"])
    part.predict({name: X[name] for name in used}, verbose=0)
    assert lookups() == [["t_a", "t_b"]] and len(tables["c"]) == before


def test_a_model_in_a_model_does_so_too(keras, sk, lookups):
    inputs = inputs_of(keras)
    tables = {name: sk.Table(f"t_{name}", DIM) for name in X}
    rows = [keras.layers.Flatten()(each) for each in a_layer_each(sk)(inputs, tables)]
    tower = keras.Model(inputs, keras.layers.Concatenate()(rows), name="tower")
    again = inputs_of(keras)
    model = keras.Model(again, keras.layers.Dense(1)(tower(again)))
    model.compile("sgd", "mse")
    fit(model)
    assert lookups() == [["t_a", "t_b", "t_c"]]


def test_frozen_tables_read_while_others_train(keras, sk, lookups):
    model, tables = model_of(keras, sk, a_layer_each(sk))
    tables["b"].trainable = False
    model.compile(keras.optimizers.SGD(0.1), "mse")
    fit(model)
    assert lookups() == [["t_a", "t_c"], ["t_b"]]
    assert [len(table) > 0 for table in tables.values()] == [True, False, True]


def test_a_column_of_ids_is_what_the_input_says(keras, sk, lookups):
    """Ids (n, 1) for an input of (n,): Keras drops the last dimension."""
    model, _ = model_of(keras, sk, a_layer_each(sk))
    columns = {**X, "a": X["a"][:, None].astype(np.int32)}
    losses = fit(model, columns)
    assert lookups() == [["t_a", "t_b", "t_c"]]
    other, _ = model_of(keras, sk, a_layer_each(sk))
    assert fit(other) == losses


def test_models_are_gone_with_what_was_noted_of_their_layers(keras, sk):
    import gc

    def layers_of_a_model():
        """In a function: who looks at a frame's locals keeps what they were until it returns."""
        model, _ = model_of(keras, sk, a_layer_each(sk))
        fit(model)
        # Layers of other tests may be here as well, and go at any time.
        return [weakref.ref(layer) for layer in model.layers if layer in lookup_fusion._places]

    layers = layers_of_a_model()
    assert len(layers) == 3
    keras.backend.clear_session()
    tf.compat.v1.reset_default_graph()
    gc.collect()
    assert [layer() for layer in layers] == [None] * 3


class Within:
    """A layer that calls another, on what it is called with."""

    @staticmethod
    def made(keras, inner):
        class Tower(keras.layers.Layer):
            def __init__(self):
                super().__init__()
                self.inner = inner

            def call(self, ids):
                return self.inner(ids)

            def compute_output_shape(self, shape):
                return (*shape, DIM)

        return Tower()


def outputs_of(keras, sk, rows_of):
    """A model whose outputs are rows, after a `predict`."""
    inputs = inputs_of(keras)
    tables = {name: sk.Table(f"t_{name}", DIM) for name in X}
    for number, table in enumerate(tables.values()):
        keys = np.arange(30)
        table.assign(keys, np.repeat(100.0 * number + keys[:, None], DIM, 1).astype("f4"))
    model = keras.Model(inputs, rows_of(inputs, tables))
    model.predict(X, verbose=0)
    return model, tables


def test_a_layer_that_another_one_calls_too_gives_each_its_own_rows(keras, sk):
    def rows_of(inputs, tables):
        shared = sk.Embedding(tables["a"])
        clicked = Within.made(keras, shared)(inputs["c"])
        return [clicked, shared(inputs["a"]), sk.Embedding(tables["c"])(inputs["c"])]

    model, _ = outputs_of(keras, sk, rows_of)
    clicked, own, other = model.predict(X, verbose=0)
    np.testing.assert_array_equal(clicked[:, 0], X["c"])
    np.testing.assert_array_equal(own[:, 0], X["a"])
    np.testing.assert_array_equal(other[:, 0], 200 + X["c"])


def test_a_layer_of_a_class_of_a_programs_own_looks_up_what_it_says(keras, sk):
    class Modulo(sk.Embedding):
        def call(self, ids, weights=None, training=None):
            return super().call(ids % 4, weights, training)

    def rows_of(inputs, tables):
        more = [sk.Embedding(tables[name])(inputs[name]) for name in "bc"]
        return [Modulo(tables["a"])(inputs["a"]), *more]

    model, _ = outputs_of(keras, sk, rows_of)
    found = model.predict(X, verbose=0)
    np.testing.assert_array_equal(found[0][:, 0], X["a"] % 4)
    np.testing.assert_array_equal(found[2][:, 0], 200 + X["c"])


def test_a_model_is_called_as_before(keras, sk):
    model, _ = outputs_of(keras, sk, lambda inputs, tables: a_layer_each(sk)(inputs, tables))
    tensors = {name: tf.constant(ids) for name, ids in X.items()}
    expected = model(tensors)
    calls = [model(inputs=tensors), model(tensors, training=False)]
    if keras.__name__ == "tf_keras":  # Keras 3 takes it by name alone
        calls.append(model(tensors, False))
    for found in calls:
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, other)
    ids = keras.Input([3])
    plain = keras.Model(ids, keras.layers.Dense(1, kernel_initializer="ones")(ids))
    np.testing.assert_array_equal(plain(inputs=tf.ones([2, 3])), [[3.0], [3.0]])
    np.testing.assert_array_equal(plain(tf.ones([2, 3]), training=True), [[3.0], [3.0]])


def test_sparse_ids_are_what_keras_makes_of_them(keras, sk, lookups):
    """A dense Input has dense ones made of them."""
    if keras.__name__ == "tf_keras":
        pytest.skip("its inputs stay sparse")
    inputs = inputs_of(keras)
    tables = {name: sk.Table(f"t_{name}", DIM) for name in X}
    rows = [keras.layers.Flatten()(each) for each in a_layer_each(sk)(inputs, tables)]
    model = keras.Model(inputs, rows)
    b = tf.sparse.from_dense(tf.constant(X["b"]))
    SEEN.clear()
    model({name: tf.constant(ids) for name, ids in X.items()} | {"b": b})
    assert lookups() == [["t_a", "t_c"], ["t_b"]]
