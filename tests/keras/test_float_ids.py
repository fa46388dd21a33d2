"""Ids of another kind than a model takes: floats that are no ids, texts for integers."""

import re

import numpy as np
import pytest
import tensorflow as tf

from tests.support.datasets import batched

IDS = np.arange(10**9, 10**9 + 12).reshape(4, 3)
LABELS = np.ones((4, 1), np.float32)
REFUSED = (tf.errors.InvalidArgumentError, ValueError)


def built(keras, sk, dtype="int64", inputs=("ids",), **kind):
    """A model that sums the rows of its inputs."""
    taken = [keras.Input([3], dtype=dtype, name=name, **kind) for name in inputs]
    table = sk.Table("item", 4, key_type=str if dtype == "string" else dtype)
    rows = [sk.Embedding(table, "sum")(each) for each in taken]
    summed = rows[0] if len(rows) == 1 else keras.layers.Add()(rows)
    model = keras.Model(taken[0] if len(taken) == 1 else taken, keras.layers.Dense(1)(summed))
    model.compile("sgd", "mse")
    return model, table


def call(model, method, x):
    arguments = () if method == "predict" else (LABELS,)
    return getattr(model, method)(x, *arguments, verbose=0)


METHODS = {
    "fit": lambda model, x: model.fit(batched((x, [[1.0]]), 1), verbose=0),
    "evaluate": lambda model, x: model.evaluate(batched((x, [[1.0]]), 1), verbose=0),
    "predict": lambda model, x: model.predict(batched((x,), 1), verbose=0),
    "train_on_batch": lambda model, x: model.train_on_batch(x, np.ones([1, 1])),
    "call": lambda model, x: model(x),
}


def floats(wrong, dtype=np.float64):
    """Ids of one row with a number that is none."""
    return np.array([[1, wrong, 3]], dtype)


def refused(number, name="float64"):
    """That an error has a number as TensorFlow or Python writes it."""
    number = re.escape(str(number).replace(".0", ""))
    return pytest.raises(REFUSED, match=rf"(?s)must be int64, or {name} that.*Received:.*{number}")


def test_ids_in_arrays_that_would_become_equal_are_refused(keras, sk):
    model, table = built(keras, sk)
    text = r"Ids of input 'ids' must be int64, or float64 that are whole and below 16,777,216.* "
    text += r"Received: 1000000000\."
    for method in ("fit", "evaluate", "predict"):
        with pytest.raises(ValueError, match=text):
            call(model, method, IDS.astype(np.float64))
    for wrong in (np.nan, np.inf, 1.5, 2.0**24):
        for dtype in (np.float64, np.float32):
            ids = np.arange(12, dtype=dtype).reshape(4, 3)
            ids[1, 2] = wrong
            text = f"{np.dtype(dtype)} that are whole.*Received: {wrong:.17g}"
            with pytest.raises(ValueError, match=text):
                call(model, "fit", ids)
    assert len(table) == 0
    call(model, "fit", IDS)
    call(model, "predict", IDS.astype(np.int32))
    assert len(table) == IDS.size
    call(model, "fit", np.arange(12, dtype=np.float64).reshape(4, 3))  # float32 holds these
    assert len(table) == 2 * IDS.size and 11 in table


def test_the_input_is_told_by_its_name_or_its_place(keras, sk):
    model, _ = built(keras, sk, inputs=("a", "b"))
    wrong = IDS.astype(np.float64)
    for x in ({"a": IDS, "b": wrong}, [IDS, wrong]):
        with pytest.raises(ValueError, match="Ids of input 'b' must be int64"):
            call(model, "fit", x)


def test_each_number_that_is_no_id_is_refused_in_a_graph(keras, sk):
    model, table = built(keras, sk)
    for method in METHODS:
        with refused("nan"):
            METHODS[method](model, tf.constant(floats(np.nan)))
    for wrong in (np.inf, -np.inf, 1.5, 2.0**53):
        with refused(wrong):
            METHODS["fit"](model, tf.constant(floats(wrong)))
    assert len(table) == 0
    large = 2.0**53 - 1  # keeps its value
    METHODS["train_on_batch"](model, tf.constant(floats(-large)))
    METHODS["fit"](model, tf.constant(floats(2.0**24 - 1, np.float32)))
    assert sorted(table.export()[0].numpy()) == [1 - 2**53, 1, 3, 2**24 - 1]


@pytest.mark.parametrize("kind", ["ragged", "sparse"])
def test_ragged_and_sparse_ids_are_looked_at(keras, sk, kind):
    def ids(number):
        given = floats(number)
        if kind == "sparse":
            return tf.sparse.from_dense(given)
        return tf.RaggedTensor.from_row_lengths(given[0], [3])

    model, table = built(keras, sk, **{kind: True})
    for method in ("fit", "call"):
        with refused("nan"):
            METHODS[method](model, ids(np.nan))
    METHODS["call"](model, ids(2))
    assert len(table) == 0
    METHODS["fit"](model, ids(2))
    assert sorted(table.export()[0].numpy()) == [1, 2, 3]


def layers(keras, sk):
    return [sk.Table("item", 4), keras.layers.Flatten(), keras.layers.Dense(1)]


def named(keras, sk):
    """A functional model that takes a dict whose keys are no names of its inputs."""
    inputs = {"a": keras.Input([3], dtype="int64"), "b": keras.Input([3], dtype="float32")}
    rows = keras.layers.Flatten()(sk.Table("item", 4)(inputs["a"]))
    both = keras.layers.Concatenate()([rows, inputs["b"]])
    return keras.Model(inputs, keras.layers.Dense(1)(both))


def sequential(keras, sk):
    return keras.Sequential([keras.Input([3], dtype="int64"), *layers(keras, sk)])


def subclassed(keras, parts):
    """A model of a class of the program's own, which calls some layers one after the other."""

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.parts = parts

        def call(self, x):
            for each in self.parts:
                x = each(x)
            return x

    return Model()


def nested(keras, sk):
    return subclassed(keras, [sequential(keras, sk)])


@pytest.mark.parametrize("make", [named, sequential, nested])
def test_models_of_each_kind_look_at_floats(keras, sk, make):
    model = make(keras, sk)
    model.compile("sgd", "mse")

    def data(ids):
        ids, beside = tf.constant(ids), tf.constant(floats(np.nan, np.float32))
        return {"a": ids, "b": beside} if make is named else ids

    # A class of the program's own has its inputs made float32 by Keras.
    name = "float(32|64)" if make is nested else "float64"
    METHODS["predict"](model, data(floats(7)))
    for method in ("fit", "call"):
        with refused("nan", name):
            METHODS[method](model, data(floats(np.nan)))


@pytest.mark.parametrize("number", [2, np.nan])
def test_layers_that_get_floats_refuse_them(keras, sk, number):
    for model in (subclassed(keras, layers(keras, sk)), keras.Sequential(layers(keras, sk))):
        model.compile("sgd", "mse")
        for method in ("fit", "call"):
            with pytest.raises(TypeError, match="must be int64. Received: (an input of )?floa"):
                METHODS[method](model, tf.constant(floats(number)))


def test_a_graph_of_integers_has_no_check(keras, sk):
    model, _ = built(keras, sk)

    def has_checks(dtype):
        spec = tf.TensorSpec([None, 3], dtype)
        traced = tf.function(lambda ids: model(ids)).get_concrete_function(spec)
        return any("Assert" in each.name for each in traced.graph.get_operations())

    assert [has_checks(each) for each in (tf.int64, tf.int32, tf.float32)] == [False, False, True]


TEXTS = np.array([["a", "b", "c"]] * 4)


def test_texts_for_integers_are_refused(keras, sk):
    model, table = built(keras, sk)
    wrong = "input 'ids' must be int64. Received: texts.*key_type=str"
    for method in ("fit", "evaluate", "predict"):
        for given in (TEXTS.astype(object), TEXTS, TEXTS.astype("S"), tf.constant(TEXTS)):
            with pytest.raises(TypeError, match=wrong):
                call(model, method, given)
        with pytest.raises(TypeError, match=wrong):  # where a graph is traced
            getattr(model, method)(batched((TEXTS, LABELS), 2), verbose=0)
    assert len(table) == 0
    model, _ = built(keras, sk, inputs=("a", "b"))
    ragged = tf.ragged.constant([["a"], ["b", "c"]])
    for given in (tf.constant(TEXTS), TEXTS.astype(object), ragged):
        with pytest.raises(TypeError, match="input 'b' must be int64. Received: texts"):
            model({"a": tf.constant(IDS), "b": given})


def test_numbers_for_texts_are_refused(keras, sk):
    model, _ = built(keras, sk, "string", ("words",))
    text = "input 'words' must be texts. Received: numbers.*key_type='int64'"
    for ids in (IDS, IDS.astype(np.float32), tf.constant(IDS)):
        for given in (lambda ids=ids: model(ids), lambda ids=ids: call(model, "predict", ids)):
            with pytest.raises(TypeError, match=text):
                given()


def test_models_without_tables_are_left_to_keras(keras):
    ids = keras.Input([3], dtype="int64")
    cast = keras.layers.Flatten()(keras.layers.Embedding(2, 1)(ids * 0))
    model = keras.Model(ids, cast)
    assert model.predict(IDS.astype(np.float64), verbose=0).shape == (4, 3)
    ids = keras.Input([3], dtype="int64")
    model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Rescaling(1.0)(ids)))
    with pytest.raises(Exception, match="(?i)cast|string|invalid|unsupported") as told:
        model.predict(tf.constant(TEXTS), verbose=0)
    assert "key_type" not in str(told.value)
