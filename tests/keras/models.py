"""A small model with every kind of feature, its data, and what its tables hold."""

import numpy as np
import tensorflow as tf

from tests.support.datasets import batched

N = 48
RNG = np.random.default_rng(5)
LENGTHS = RNG.integers(0, 4, N)
CITIES = np.array(["Oslo", "Rome", "Lima", "Perth"])
DATA = {
    "user": RNG.integers(-20, 20, N),
    "item": RNG.integers(0, 30, N),
    "hist": tf.RaggedTensor.from_row_lengths(RNG.integers(0, 30, LENGTHS.sum()), LENGTHS),
    "city": tf.constant(RNG.choice(CITIES, N)),
}
Y = (RNG.normal(size=(N, 1)) > 0).astype(np.float32)


def batches(size=16):
    return batched((DATA, Y), size)


def inputs_of(keras):
    return {
        "user": keras.Input([], dtype="int64", name="user"),
        "item": keras.Input([], dtype="int64", name="item"),
        "hist": keras.Input([None], dtype="int64", ragged=True, name="hist"),
        "city": keras.Input([], dtype="string", name="city"),
    }


def features_of(sk):
    item = sk.Table("item", 4)
    return {
        "user": sk.Table("user", 3),
        "item": item,
        "hist": (item, "mean"),
        "city": sk.Table("city", 2, key_type=str),
    }


def functional(keras, sk):
    inputs = inputs_of(keras)
    rows = sk.Embeddings(features_of(sk), name="rows")(inputs)
    x = keras.layers.Concatenate()(list(rows.values()))
    return keras.Model(inputs, keras.layers.Dense(1, "sigmoid")(x))


def compiled(keras, sk, optimizer="adam"):
    keras.utils.set_random_seed(1)
    model = functional(keras, sk)
    model.compile(optimizer, "binary_crossentropy", metrics=["AUC"], run_eagerly=True)
    return model


def tables_of(model):
    return dict(model.get_layer("rows").tables)


def content(model):
    """All that the tables of a model hold, but for when it was."""
    return _parts(model, ("keys", "values", "states"))


def rows_in(model):
    """The same without states, which a model has that a new optimizer is to train."""
    return _parts(model, ("keys", "values"))


def _parts(model, parts):
    return {
        f"{name}/{part}": tensor.numpy()
        for name, table in tables_of(model).items()
        for part, tensor in table.variable.saved_tensors().items()
        if part in parts
    }


def check_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
