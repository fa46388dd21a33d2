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


def a_model(keras, sk, hold, table=None, is_compiled=True):
    """A model whose sub-layer holds a table in some way, and the table."""
    table = sk.Table("held", 2, initializer="ones") if table is None else table

    class Pooled(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.held = hold(table)

        def call(self, ids):
            return tf.reduce_mean(table(tf.cast(ids, tf.int64)), 1)

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.pooled, self.head = Pooled(), keras.layers.Dense(1)

        def call(self, ids):
            return self.head(self.pooled(ids))

    model = Model()
    model(X)
    if is_compiled:
        model.compile(keras.optimizers.Adagrad(0.1), "mse", run_eagerly=True)
    return model, table


def rows_of(table):
    return {int(k): tuple(row) for k, row in zip(*(e.numpy() for e in table.export()), strict=True)}


@pytest.mark.parametrize("hold", HOLDINGS.values(), ids=HOLDINGS.keys())
def test_a_table_held_by_hand_is_trained_and_saved(keras, sk, hold, tmp_path):
    model, table = a_model(keras, sk, hold)
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
        if not is_saved:
            continue
        assert rows_of(table) == trained
        other, fresh = a_model(keras, sk, hold)
        restore(other)
        assert rows_of(fresh) == trained


def test_a_table_where_keras_finds_none_is_refused(keras, sk, tmp_path):
    module = tf.Module()
    module.table = sk.Table("held", 2)
    model = a_model(keras, sk, lambda _: module, module.table, is_compiled=False)[0]
    if keras.__name__ == "tf_keras":  # which finds it, but does not save it
        model.compile("sgd", "mse", run_eagerly=True)
        model.fit(X, Y, verbose=0)
        assert len(model.get_weights()[0]) == 24
        with pytest.raises(RuntimeError, match="has left 'held:0' out"):
            model.save_weights(str(tmp_path / "m.weights.h5"))
        return
    with pytest.raises(NotImplementedError, match="'held:0' untrained"):
        model.compile("sgd", "mse")
    with pytest.raises(NotImplementedError, match="'held:0' out"):
        model.save_weights(str(tmp_path / "m.weights.h5"))
    with pytest.raises(NotImplementedError, match="'held:0' out"):
        model.get_weights()


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
    model, _ = a_model(keras, sk, lambda _: held, held.table)
    with pytest.raises(Exception, match="'beside:0' untrained"):
        model.fit(X, Y, verbose=0)


@pytest.mark.parametrize("hold", HOLDINGS.values(), ids=HOLDINGS.keys())
def test_a_dynamic_variable_held_by_hand_is_refused_before_training(keras, sk, hold, tmp_path):
    table = sok.DynamicVariable(2, "ones", name="dynamic")

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.held, self.rows = hold(table), sk.Embedding(sk.Table("ours", 2), "mean")

        def call(self, ids):
            rows = tf.nn.embedding_lookup(table, tf.cast(ids, tf.int64))
            return self.rows(ids) + tf.reduce_mean(rows, 1)

    model = Model()
    with pytest.raises(NotImplementedError, match="'dynamic:0' untrained"):
        model.compile("sgd", "mse")  # and has no weights yet
    model(X)
    with pytest.raises(NotImplementedError, match="'dynamic:0' untrained"):
        model.fit(X, Y, verbose=0)
    with pytest.raises(NotImplementedError, match="'dynamic:0' out"):
        model.save_weights(str(tmp_path / "m.weights.h5"))
    with pytest.raises(NotImplementedError, match="'dynamic:0' out"):
        model.get_weights()


def with_dynamic(keras, table, where):
    """A model that has a frozen layer with a table, and maybe more that holds it."""

    class Rows(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.held = {"rows": [table]}

        def call(self, ids):
            return tf.reduce_mean(tf.nn.embedding_lookup(table, tf.cast(ids, tf.int64)), 1)

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.rows, self.head = Rows(), keras.layers.Dense(1)
            if where == "in a layer that is not":
                self.other = Rows()
            if where == "in the model":
                self.beside = table

        def call(self, ids):
            return self.head(self.rows(ids))

    model = Model()
    model.rows.trainable = False
    return model


@pytest.mark.parametrize("is_eager", [False, True])
def test_a_frozen_layer_may_have_a_dynamic_variable(keras, sk, is_eager):
    sk.Table("ours", 2)  # whose Keras looks after tables
    table = sok.DynamicVariable(2, "ones", name="dynamic")
    sok.assign(table, [0, 1], [[3.0, 4.0], [5.0, 6.0]])
    model = with_dynamic(keras, table, None)
    model.compile("sgd", "mse", run_eagerly=is_eager)
    model.fit(X, Y, verbose=0)
    kernel = model.head.get_weights()[0]
    model.fit(X, Y, verbose=0)
    assert np.abs(model.head.get_weights()[0] - kernel).max() > 0
    np.testing.assert_array_equal(sok.export(table)[1][:3], [[3, 4], [5, 6], [1, 1]])


@pytest.mark.parametrize("where", ["in a layer that is not", "in the model"])
def test_a_dynamic_variable_that_is_not_in_frozen_layers_alone_is_refused(keras, sk, where):
    sk.Table("ours", 2)
    table = sok.DynamicVariable(2, "ones", name="dynamic")
    with pytest.raises(NotImplementedError, match="'dynamic:0' untrained"):
        with_dynamic(keras, table, where).compile("sgd", "mse")
    model = with_dynamic(keras, table, None)
    model.rows.trainable = True
    with pytest.raises(NotImplementedError, match="in a layer that is frozen"):
        model.compile("sgd", "mse")
