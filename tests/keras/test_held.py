"""Tables that a program puts into a layer or model by hand: trained, saved, restored the same."""

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok

X = np.arange(24).reshape(12, 2)
Y = np.linspace(0, 1, 12, dtype=np.float32)[:, None]


class Beside:
    """An object that Keras does not look into."""

    def __init__(self, table):
        self.table = table


HOLDINGS = {
    "attribute": lambda table: table,
    "list": lambda table: [table],
    "dict": lambda table: {"a": table},
    "tuple": lambda table: (table,),
    "nested": lambda table: {"a": [{"b": (table,)}]},
}
holding = pytest.mark.parametrize("hold", HOLDINGS.values(), ids=HOLDINGS.keys())


def pooling(keras, table, hold):
    """A layer that holds a table in some way, and gives means of its rows."""
    look_up = table if hasattr(table, "dim") else (lambda ids: tf.nn.embedding_lookup(table, ids))

    class Pooled(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.held = hold(table)

        def call(self, ids):
            return tf.reduce_mean(look_up(tf.cast(ids, tf.int64)), 1)

    return Pooled()


def a_model(keras, table, hold, is_built=True, **more):
    """A model with such a layer, that is not compiled, and with other attributes."""

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.pooled, self.head = pooling(keras, table, hold), keras.layers.Dense(1)
            for name, value in more.items():
                setattr(self, name, value)

        def call(self, ids):
            return self.head(self.pooled(ids))

    model = Model()
    if is_built:
        model(X)
    return model


def with_table(keras, sk, hold):
    table = sk.Table("held", 2, initializer="ones")
    model = a_model(keras, table, hold)
    model.compile(keras.optimizers.Adagrad(0.1), "mse", run_eagerly=True)
    return model, table


def rows_of(table):
    return {int(k): tuple(row) for k, row in zip(*(e.numpy() for e in table.export()), strict=True)}


@holding
def test_a_table_held_by_hand_is_trained_and_saved(keras, sk, hold, tmp_path):
    model, table = with_table(keras, sk, hold)
    model.fit(X, Y, verbose=0)
    trained = rows_of(table)
    assert sorted(trained) == list(range(24))
    assert all(row != (1.0, 1.0) for row in trained.values())
    weights = model.get_weights()
    path = tf.train.Checkpoint(model=model).write(str(tmp_path / "checkpoint"))
    is_saved = True
    try:
        model.save_weights(str(tmp_path / "m.weights.h5"))
    except RuntimeError as error:
        # A Keras that saves nothing of what is in containers within containers says so.
        assert "has left 'held:0' out" in str(error)
        is_saved = False
    for restore in (
        lambda other: tf.train.Checkpoint(model=other).read(path),
        lambda other: other.set_weights(weights),
        lambda other: other.load_weights(str(tmp_path / "m.weights.h5")) if is_saved else None,
    ):
        table.assign([3, 99], [[7.0, 7.0], [8.0, 8.0]])
        restore(model)
        if is_saved:
            assert rows_of(table) == trained
            other, fresh = with_table(keras, sk, hold)
            restore(other)
            assert rows_of(fresh) == trained


def test_a_table_where_keras_finds_none_is_refused(keras, sk, tmp_path):
    module, path = tf.Module(), str(tmp_path / "m.weights.h5")
    module.table = sk.Table("held", 2)
    model = a_model(keras, module.table, lambda _: module)
    if keras.__name__ == "tf_keras":  # which finds it, but does not save it
        model.compile("sgd", "mse", run_eagerly=True)
        model.fit(X, Y, verbose=0)
        assert len(model.get_weights()[0]) == 24
        with pytest.raises(RuntimeError, match="has left 'held:0' out"):
            model.save_weights(path)
        return
    with pytest.raises(NotImplementedError, match="'held:0' untrained"):
        model.compile("sgd", "mse")
    for save in (lambda: model.save_weights(path), model.get_weights):
        with pytest.raises(NotImplementedError, match="'held:0' out"):
            save()


def test_a_tree_of_dense_values_is_refused(keras, sk):
    if not hasattr(keras.Model, "get_state_tree"):
        pytest.skip("this Keras has no state trees")
    inputs = keras.Input((2,), dtype="int64")
    hidden = keras.layers.Flatten()(sk.Embedding(sk.Table("t", 2))(inputs))
    model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    for method, arguments in (("get_state_tree", ()), ("set_state_tree", ({},))):
        with pytest.raises(NotImplementedError, match=rf"{method}\(\).*keys of 't:0'.*get_weights"):
            getattr(model, method)(*arguments)
    layer = keras.layers.Dense(1)
    layer.table = sok.DynamicVariable(2, name="plain")
    with pytest.raises(NotImplementedError, match="rows of 'plain:0' out"):
        keras.Sequential([keras.Input((2,)), layer]).get_state_tree()
    dense = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    dense.compile("sgd", "mse")
    dense.set_state_tree(dense.get_state_tree())


def test_a_table_that_a_call_uses_and_no_layer_holds_is_refused(keras, sk):
    held = Beside(sk.Table("beside", 2))
    model = a_model(keras, held.table, lambda _: held)
    model.compile("sgd", "mse")
    with pytest.raises(Exception, match="'beside:0' untrained"):
        model.fit(X, Y, verbose=0)


# ---- dynamic variables beside tables; without any: tests/bridge/test_keras_guard.py --------------


@pytest.fixture
def dynamic(sk):
    sk.Table("ours", 2)  # whose Keras looks after tables
    return sok.DynamicVariable(2, "ones", name="dynamic")


@pytest.mark.parametrize("is_eager", [False, True])
def test_a_frozen_layer_may_have_a_dynamic_variable(keras, dynamic, is_eager):
    sok.assign(dynamic, [0, 1], [[3.0, 4.0], [5.0, 6.0]])
    model = a_model(keras, dynamic, HOLDINGS["nested"])
    model.pooled.trainable = False
    model.compile("sgd", "mse", run_eagerly=is_eager)
    model.fit(X, Y, verbose=0)
    kernel = model.head.get_weights()[0]
    model.fit(X, Y, verbose=0)
    assert np.abs(model.head.get_weights()[0] - kernel).max() > 0
    np.testing.assert_array_equal(sok.export(dynamic)[1][:3], [[3, 4], [5, 6], [1, 1]])


@holding
def test_a_dynamic_variable_beside_frozen_layers_is_refused(keras, sk, dynamic, hold, tmp_path):
    with pytest.raises(NotImplementedError, match="in a layer that is frozen"):
        a_model(keras, dynamic, hold, is_built=False).compile("sgd", "mse")
    for more in (
        {"other": pooling(keras, dynamic, hold)},
        {"beside": hold(dynamic), "rows": sk.Embedding(sk.Table("own", 2), "mean")},
    ):
        model = a_model(keras, dynamic, hold, **more)
        model.pooled.trainable = False
        for train in (lambda m: m.compile("sgd", "mse"), lambda m: m.fit(X, Y, verbose=0)):
            with pytest.raises(NotImplementedError, match="'dynamic:0' untrained"):
                train(model)
        for save in (model.get_weights, lambda m=model: m.save_weights(tmp_path / "m.weights.h5")):
            with pytest.raises(NotImplementedError, match="'dynamic:0' out"):
                save()
