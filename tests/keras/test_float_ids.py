"""Ids of another kind than a model takes: floats that are no ids, texts for integers."""

import numpy as np
import pytest
import tensorflow as tf

from tests.support.datasets import batched

FROM = 10**9
IDS = np.arange(FROM, FROM + 12).reshape(4, 3)
LABELS = np.ones((4, 1), np.float32)


def built(keras, sk, dtype="int64", inputs=("ids",)):
    """A model that sums the rows of its inputs."""
    taken = [keras.Input([3], dtype=dtype, name=name) for name in inputs]
    table = sk.Table("item", 4)
    rows = [keras.layers.Flatten()(table(each)) for each in taken]
    summed = rows[0] if len(rows) == 1 else keras.layers.Add()(rows)
    model = keras.Model(taken[0] if len(taken) == 1 else taken, keras.layers.Dense(1)(summed))
    model.compile("sgd", "mse")
    return model, table


def call(model, method, x):
    arguments = () if method == "predict" else (LABELS,)
    return getattr(model, method)(x, *arguments, verbose=0)


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_ids_of_floats_that_would_become_equal_are_refused(keras, sk, method):
    model, table = built(keras, sk)
    text = r"Ids of input 'ids' must be int64, or float64 that are whole and below 16,777,216.* "
    text += r"Received: 1000000000\."
    with pytest.raises(ValueError, match=text):
        call(model, method, IDS.astype(np.float64))
    assert len(table) == 0
    call(model, "fit", IDS)
    assert len(table) == IDS.size


def test_the_input_is_told_by_its_name_or_its_place(keras, sk):
    model, _ = built(keras, sk, inputs=("a", "b"))
    wrong = IDS.astype(np.float64)
    for x in ({"a": IDS, "b": wrong}, [IDS, wrong]):
        with pytest.raises(ValueError, match="Ids of input 'b' must be int64"):
            call(model, "fit", x)


WRONG = [np.nan, np.inf, 1.5, 2.0**24]


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_an_array_with_what_is_no_id_is_refused(keras, sk, dtype, wrong):
    model, table = built(keras, sk)
    ids = np.arange(12, dtype=dtype).reshape(4, 3)
    ids[1, 2] = wrong
    with pytest.raises(
        ValueError, match=f"{np.dtype(dtype)} that are whole.*Received: {wrong:.17g}"
    ):
        call(model, "fit", ids)
    assert len(table) == 0


def floats(wrong, dtype=np.float64):
    """Ids of one row with a number that is none."""
    return np.array([[1, wrong, 3]], dtype)


def dense(ids):
    return tf.constant(ids)


def ragged(ids):
    return tf.RaggedTensor.from_row_lengths(ids[0], [3])


def sparse(ids):
    return tf.sparse.from_dense(ids)


METHODS = {
    "fit": lambda model, x: model.fit(batched((x, [[1.0]]), 1), verbose=0),
    "evaluate": lambda model, x: model.evaluate(batched((x, [[1.0]]), 1), verbose=0),
    "predict": lambda model, x: model.predict(batched((x,), 1), verbose=0),
    "train_on_batch": lambda model, x: model.train_on_batch(x, np.ones([1, 1])),
    "call": lambda model, x: model(x),
}
REFUSED = (tf.errors.InvalidArgumentError, ValueError)


def refused(numbers, name="float64"):
    return pytest.raises(REFUSED, match=rf"(?s)must be int64, or {name} that.*Received:.*{numbers}")


@pytest.mark.parametrize("method", METHODS)
def test_a_tensor_with_a_missing_id_is_refused_by_each_method(keras, sk, method):
    model, table = built(keras, sk)
    with refused("nan"):
        METHODS[method](model, dense(floats(np.nan)))
    assert len(table) == 0


@pytest.mark.parametrize("method", ["fit", "call"])
@pytest.mark.parametrize("kind", [ragged, sparse])
def test_ragged_and_sparse_ids_are_looked_at(keras, sk, kind, method):
    ids = keras.Input([3], dtype="int64", **{kind.__name__: True})
    table = sk.Table("item", 4)
    model = keras.Model(ids, keras.layers.Dense(1)(sk.Embedding(table, "sum")(ids)))
    model.compile("sgd", "mse")
    with refused("nan"):
        METHODS[method](model, kind(floats(np.nan)))
    assert len(table) == 0
    METHODS[method](model, kind(floats(2)))
    assert sorted(table.export()[0].numpy()) == ([1, 2, 3] if method == "fit" else [])


@pytest.mark.parametrize("wrong", [np.inf, -np.inf, 1.5, 2.0**53])
def test_each_number_that_is_no_id_is_refused_in_a_graph(keras, sk, wrong):
    model, _ = built(keras, sk)
    with refused(re_of(wrong)):
        METHODS["fit"](model, dense(floats(wrong)))


def re_of(number):
    """How TensorFlow or Python writes a number."""
    return str(number).replace(".0", "").replace("+", r"\+")


def named(keras, sk):
    """A functional model that takes a dict whose keys are no names of its inputs."""
    inputs = {"a": keras.Input([3], dtype="int64"), "b": keras.Input([3], dtype="float32")}
    table = sk.Table("item", 4)
    rows = keras.layers.Flatten()(table(inputs["a"]))
    return keras.Model(
        inputs, keras.layers.Dense(1)(keras.layers.Concatenate()([rows, inputs["b"]]))
    )


def sequential(keras, sk):
    return keras.Sequential([keras.Input([3], dtype="int64"), *layers(keras, sk)])


def layers(keras, sk):
    return [sk.Table("item", 4), keras.layers.Flatten(), keras.layers.Dense(1)]


def nested(keras, sk):
    """A functional model in a class of the program's own."""
    inner = sequential(keras, sk)

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = inner

        def call(self, x):
            return self.inner(x)

    return Model()


@pytest.mark.parametrize("make", [named, sequential, nested])
def test_models_of_each_kind_look_at_floats(keras, sk, make):
    model = make(keras, sk)
    model.compile("sgd", "mse")

    def data(ids):
        return {"a": ids, "b": dense(floats(np.nan, np.float32))} if make is named else ids

    # A class of the program's own has its inputs made float32 by Keras.
    name = "float(32|64)" if make is nested else "float64"
    METHODS["predict"](model, data(dense(floats(7))))
    with refused("nan", name):
        METHODS["fit"](model, data(dense(floats(np.nan))))
    with refused("nan", name):
        METHODS["call"](model, data(dense(floats(np.nan))))


@pytest.mark.parametrize("whole", [False, True])
def test_layers_that_get_floats_refuse_them(keras, sk, whole):
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.parts = layers(keras, sk)

        def call(self, x):
            for each in self.parts:
                x = each(x)
            return x

    x = floats(2 if whole else np.nan)
    for model in (Model(), keras.Sequential(layers(keras, sk))):
        model.compile("sgd", "mse")
        for method in ("fit", "call"):
            with pytest.raises(TypeError, match="must be int64. Received: (an input of )?float"):
                METHODS[method](model, dense(x))


def test_floats_that_are_ids_keep_their_value(keras, sk):
    model, table = built(keras, sk)
    large = 2.0**53 - 1
    METHODS["train_on_batch"](model, dense(floats(-large)))
    METHODS["fit"](model, dense(floats(2.0**24 - 1, np.float32)))
    assert sorted(table.export()[0].numpy()) == [1 - 2**53, 1, 3, 2**24 - 1]


def test_a_graph_of_integers_has_no_check(keras, sk):
    model, _ = built(keras, sk)

    def checks(dtype):
        called = tf.function(lambda ids: model(ids)).get_concrete_function(
            tf.TensorSpec([None, 3], dtype)
        )
        return [each.name for each in called.graph.get_operations() if "Assert" in each.name]

    assert not checks(tf.int64) and not checks(tf.int32)
    assert checks(tf.float32)


def test_other_arrays_are_taken_as_before(keras, sk):
    model, table = built(keras, sk)
    call(model, "fit", np.arange(12, dtype=np.float64).reshape(4, 3))  # float32 holds these
    assert sorted(np.asarray(table.export()[0]).tolist()) == list(range(12))
    call(model, "predict", IDS.astype(np.int32))
    # Without a table they are Keras' own matter.
    ids = keras.Input([3], dtype="int64")
    cast = keras.layers.Embedding(2, 1)(ids * 0)
    other = keras.Model(ids, keras.layers.Flatten()(cast))
    assert other.predict(IDS.astype(np.float64), verbose=0).shape == (4, 3)


def text_model(keras, sk):
    """A model that takes texts."""
    taken = keras.Input([3], dtype="string", name="words")
    rows = keras.layers.Flatten()(sk.Table("of_words", 2, key_type=str)(taken))
    model = keras.Model(taken, keras.layers.Dense(1)(rows))
    model.compile("sgd", "mse")
    return model


TEXTS = np.array([["a", "b", "c"]] * 4)
TEXTS_GIVEN = {
    "objects": TEXTS.astype(object),
    "NumPy's texts": TEXTS,
    "bytes": TEXTS.astype("S"),
    "a tensor": tf.constant(TEXTS),
}


@pytest.mark.parametrize("given", TEXTS_GIVEN)
@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_texts_for_integers_are_refused(keras, sk, given, method):
    model, table = built(keras, sk)
    with pytest.raises(TypeError, match="input 'ids' must be int64. Received: texts.*key_type=str"):
        call(model, method, TEXTS_GIVEN[given])
    assert len(table) == 0


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_texts_of_a_dataset_are_refused_where_a_graph_is_traced(keras, sk, method):
    model, _ = built(keras, sk)
    dataset = batched((TEXTS, LABELS), 2)
    with pytest.raises(TypeError, match="input 'ids' must be int64. Received: texts.*key_type=str"):
        getattr(model, method)(dataset, verbose=0)


def test_texts_in_a_call_are_refused(keras, sk):
    model, _ = built(keras, sk, inputs=("a", "b"))
    ragged = tf.ragged.constant([["a"], ["b", "c"]])
    for given in (tf.constant(TEXTS), TEXTS.astype(object), ragged):
        with pytest.raises(TypeError, match="input 'b' must be int64. Received: texts"):
            model({"a": tf.constant(IDS), "b": given})


@pytest.mark.parametrize("ids", [IDS, IDS.astype(np.float32), tf.constant(IDS)])
def test_numbers_for_texts_are_refused(keras, sk, ids):
    model = text_model(keras, sk)
    text = "input 'words' must be texts. Received: numbers.*key_type='int64'"
    for given in (lambda: model(ids), lambda: call(model, "predict", ids)):
        with pytest.raises(TypeError, match=text):
            given()


def test_models_without_tables_are_left_to_keras(keras, sk):
    taken = keras.Input([3], dtype="int64")
    model = keras.Model(taken, keras.layers.Dense(1)(keras.layers.Rescaling(1.0)(taken)))
    with pytest.raises(Exception, match="(?i)cast|string|invalid|unsupported") as told:
        model.predict(tf.constant(TEXTS), verbose=0)
    assert "key_type" not in str(told.value)
