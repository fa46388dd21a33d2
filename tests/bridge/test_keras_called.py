"""What a model of Keras takes is what it was called with first."""

import importlib

import numpy as np
import pytest
import tensorflow as tf

from sok_lite.bridge.keras import guard
from sok_lite.bridge.keras.called import first_call_specs

KERAS = ["keras", "tf_keras"]


def model_of(package):
    keras = importlib.import_module(package)
    guard.watch()

    class Model(keras.Model):
        def call(self, ids, weights=None):
            ids = getattr(ids, "values", ids)
            return tf.cast(ids, tf.float32)

    return Model()


@pytest.mark.parametrize("package", KERAS)
def test_the_first_call_counts(package):
    model = model_of(package)
    assert first_call_specs(model) is None
    model(tf.constant([[1, 2]], tf.int64), weights=tf.ones([1, 2]))
    model(tf.constant([[1, 2, 3]], tf.int32))
    (ids,), named = first_call_specs(model)
    assert (ids.shape.as_list(), ids.dtype) == ([None, 2], tf.int64)
    assert set(named) == {"weights"} and named["weights"].shape.as_list() == [None, 2]


@pytest.mark.parametrize("package", KERAS)
def test_a_model_may_have_an_argument_of_any_name(package):
    keras = importlib.import_module(package)
    guard.watch()

    class Model(keras.Model):
        def call(self, ids, call=None, check=None):
            return ids + call + check

    added = Model()(tf.constant([1]), call=tf.constant([2]), check=tf.constant([3]))
    assert np.asarray(added).tolist() == [6]


@pytest.mark.parametrize("package", KERAS)
@pytest.mark.parametrize("kind", ["ragged", "sparse", "array"])
def test_inputs_of_each_kind(package, kind):
    model = model_of(package)
    ragged = tf.ragged.constant([[1, 2], [], [3]], tf.int64)
    model({"ragged": ragged, "sparse": ragged.to_sparse(), "array": np.ones([3, 1])}[kind])
    (spec,), named = first_call_specs(model)
    expected = {
        "ragged": tf.RaggedTensorSpec([None, None], tf.int64, 1, tf.int64),
        "sparse": tf.SparseTensorSpec([None, 2], tf.int64),
        "array": tf.TensorSpec([None, 1], tf.float32),
    }[kind]
    assert type(spec) is type(expected) and named == {}
    assert spec.dtype == expected.dtype and spec.shape.as_list()[0] is None


@pytest.mark.parametrize("package", KERAS)
def test_a_build_by_shapes_says_nothing(package):
    model = model_of(package)
    model.build((None, 2))
    assert package == "tf_keras" or first_call_specs(model) is None
    if package == "keras":
        model(tf.constant([[1, 2]], tf.int64))
        assert first_call_specs(model)[0][0].dtype == tf.int64


def test_inputs_of_a_functional_model_say_nothing():
    keras = importlib.import_module("keras")
    model = model_of("keras")
    model(keras.Input([2], dtype="int64"))
    assert first_call_specs(model) is None
    model(tf.constant([[1, 2]], tf.int64))
    assert first_call_specs(model)[0][0].dtype == tf.int64
