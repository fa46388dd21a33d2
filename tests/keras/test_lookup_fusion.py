"""Layers of a functional model share a lookup where its graph says what they get."""

import gc
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
TOGETHER = [["t_a", "t_b", "t_c"]]
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


def rows_and_tables(keras, sk, rows_of=None):
    """Inputs, flat rows that a function makes of inputs and tables, and the tables."""
    inputs, tables = inputs_of(keras), {name: sk.Table(f"t_{name}", DIM) for name in X}
    rows = (rows_of or a_layer_each)(sk, inputs, tables)
    return inputs, [keras.layers.Flatten()(each) for each in rows], tables


def model_of(keras, sk, rows_of=None, run_eagerly=False):
    inputs, rows, tables = rows_and_tables(keras, sk, rows_of)
    x = keras.layers.Concatenate()(rows)
    model = keras.Model(inputs, keras.layers.Dense(1, kernel_initializer="ones")(x))
    model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=run_eagerly)
    return model, tables


def fit(model, x=X):
    SEEN.clear()  # what was looked up when the model was made
    options = {"batch_size": 5, "epochs": 2, "shuffle": False, "verbose": 0}
    return model.fit(x, Y, **options).history["loss"]


def a_layer_each(sk, inputs, tables):
    return [
        sk.Embedding(tables["a"])(inputs["a"]),
        sk.Embedding(tables["b"], "mean")(inputs["b"]),
        tables["c"](inputs["c"]),
    ]


def content(tables):
    return [part.numpy() for table in tables.values() for part in table.export()]


def test_a_step_is_one_lookup_and_trains_as_several_do(keras, sk, lookups, monkeypatch):
    found, expected = (model_of(keras, sk) for _ in range(2))
    loss = fit(found[0])
    assert lookups() == TOGETHER
    for call, data in ((found[0].evaluate, [X, Y]), (found[0].predict, [X])):
        SEEN.clear()
        call(*data, verbose=0, batch_size=5)
        assert lookups() == TOGETHER
    # Ids (n, 1) for an input of (n,): Keras drops the last dimension.
    assert fit(model_of(keras, sk)[0], {**X, "a": X["a"][:, None].astype(np.int32)}) == loss
    assert lookups() == TOGETHER
    monkeypatch.setattr(lookup_fusion, "_fused_layers", lambda model: [])
    assert fit(expected[0]) == loss
    assert lookups() == [["t_a"], ["t_b"], ["t_c"]]
    for one, other in zip(content(found[1]), content(expected[1]), strict=True):
        np.testing.assert_array_equal(one, other)


def of_several_features(keras, sk, inputs, tables):
    both = sk.Embeddings({"a": tables["a"], "b": (tables["b"], "sum")})
    return [*both(inputs).values(), sk.Embedding(tables["c"])(inputs["c"])]


def alone(made_of):
    """The other two layers, and a layer of the table of b that gets something else."""

    def rows_of(keras, sk, inputs, tables):
        own = made_of(keras, sk.Embedding(tables["b"], "mean"), inputs["b"])
        return [own, sk.Embedding(tables["a"])(inputs["a"]), tables["c"](inputs["c"])]

    return rows_of


def weighted(keras, layer, ids):
    if keras.__name__ == "tf_keras":  # which has no operations on inputs by that name
        return layer(ids, training=False)
    return layer(ids, weights=keras.ops.cast(keras.ops.ones_like(ids), "float32"))


def called_twice(keras, sk, inputs, tables):
    layer = tables["b"]
    rest = [sk.Embedding(tables["a"])(inputs["a"]), tables["c"](inputs["c"])]
    return [layer(inputs["b"]), layer(inputs["c"]), *rest]


APART = [["t_a", "t_c"], ["t_b"]]
CASES = {
    "layers of several features": (of_several_features, TOGETHER),
    "made by a layer": (alone(lambda k, layer, ids: layer(k.layers.Reshape([2])(ids))), APART),
    "with an argument": (alone(lambda k, layer, ids: layer(ids, training=False)), APART),
    "with weights": (alone(weighted), APART),
    "called twice": (called_twice, APART),
}


@pytest.mark.parametrize("case", CASES)
def test_which_layers_look_up_together(keras, sk, lookups, case):
    rows_of, expected = CASES[case]
    # At once, which is faster: when a step is traced the same is called.
    model, tables = model_of(keras, sk, lambda *args: rows_of(keras, *args), run_eagerly=True)
    fit(model)
    assert lookups() == expected
    if case == "called twice":
        assert len(tables["b"]) == len(np.unique([*X["b"].ravel(), *X["c"]]))


def test_a_part_of_a_model_looks_up_for_its_own_layers_alone(keras, sk, lookups):
    """All inputs of the whole are inputs of the part, which uses two of them."""
    inputs, rows, tables = rows_and_tables(keras, sk)
    whole = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()(rows)))
    whole.compile("sgd", "mse")
    fit(whole)
    used = {name: inputs[name] for name in "ab"}
    part = keras.Model(used, keras.layers.Concatenate()(rows[:2]))
    part.compile("sgd", "mse")
    SEEN.clear()
    before = len(tables["c"])
    part.predict({name: X[name] for name in used}, verbose=0)
    assert lookups() == [["t_a", "t_b"]] and len(tables["c"]) == before


def test_a_model_in_a_model_does_so_too(keras, sk, lookups):
    inputs, rows, _ = rows_and_tables(keras, sk)
    tower = keras.Model(inputs, keras.layers.Concatenate()(rows), name="tower")
    again = inputs_of(keras)
    model = keras.Model(again, keras.layers.Dense(1)(tower(again)))
    model.compile("sgd", "mse")
    fit(model)
    assert lookups() == TOGETHER


def test_frozen_tables_read_while_others_train(keras, sk, lookups):
    model, tables = model_of(keras, sk)
    tables["b"].trainable = False
    model.compile(keras.optimizers.SGD(0.1), "mse")
    fit(model)
    assert lookups() == APART
    assert [len(table) > 0 for table in tables.values()] == [True, False, True]


def test_sparse_ids_are_what_keras_makes_of_them(keras, sk, lookups):
    """A dense Input has dense ones made of them."""
    if keras.__name__ == "tf_keras":
        pytest.skip("its inputs stay sparse")
    inputs, rows, _ = rows_and_tables(keras, sk)
    model = keras.Model(inputs, rows)
    b = tf.sparse.from_dense(tf.constant(X["b"]))
    SEEN.clear()
    model({name: tf.constant(ids) for name, ids in X.items()} | {"b": b})
    assert lookups() == APART


def test_models_are_gone_with_what_was_noted_of_their_layers(keras, sk):
    def layers_of_a_model():
        """In a function: who looks at a frame's locals keeps what they were until it returns."""
        model, _ = model_of(keras, sk)
        fit(model)
        # Layers of other tests may be here as well, and go at any time.
        return [weakref.ref(layer) for layer in model.layers if layer in lookup_fusion._places]

    layers = layers_of_a_model()
    assert len(layers) == 3
    keras.backend.clear_session()
    tf.compat.v1.reset_default_graph()
    gc.collect()
    assert [layer() for layer in layers] == [None] * 3


# ---- each layer gives its own rows ---------------------------------------------------------------


def outputs_of(keras, sk, rows_of):
    """A model whose outputs are rows, of numbers that say table and key, after a `predict`."""
    inputs, tables = inputs_of(keras), {name: sk.Table(f"t_{name}", DIM) for name in X}
    for number, table in enumerate(tables.values()):
        keys = np.arange(30)
        table.assign(keys, np.repeat(100.0 * number + keys[:, None], DIM, 1).astype("f4"))
    model = keras.Model(inputs, rows_of(inputs, tables))
    model.predict(X, verbose=0)
    return model


def test_layers_that_others_call_or_that_are_of_other_classes_give_their_own_rows(keras, sk):
    class Tower(keras.layers.Layer):
        """Calls another layer on what it is called with."""

        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def call(self, ids):
            return self.inner(ids)

        def compute_output_shape(self, shape):
            return (*shape, DIM)

    class Modulo(sk.Embedding):
        def call(self, ids, weights=None, training=None):
            return super().call(ids % 4, weights, training)

    def with_a_tower(inputs, tables):
        shared = sk.Embedding(tables["a"])
        clicked = Tower(shared)(inputs["c"])
        return [clicked, shared(inputs["a"]), sk.Embedding(tables["c"])(inputs["c"])]

    def of_another_class(inputs, tables):
        more = [sk.Embedding(tables[name])(inputs[name]) for name in "bc"]
        return [Modulo(tables["a"])(inputs["a"]), *more]

    found = outputs_of(keras, sk, with_a_tower).predict(X, verbose=0)
    for rows, expected in zip(found, (X["c"], X["a"], 200 + X["c"]), strict=True):
        np.testing.assert_array_equal(rows[:, 0], expected)
    found = outputs_of(keras, sk, of_another_class).predict(X, verbose=0)
    np.testing.assert_array_equal(found[0][:, 0], X["a"] % 4)
    np.testing.assert_array_equal(found[2][:, 0], 200 + X["c"])


def test_a_model_is_called_as_before(keras, sk):
    model = outputs_of(keras, sk, lambda *args: a_layer_each(sk, *args))
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
