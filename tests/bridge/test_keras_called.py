"""What a model of Keras takes is what it was called with first."""

import numpy as np
import pytest
import tensorflow as tf

from sok_lite.bridge.keras import guard
from sok_lite.bridge.keras.called import first_call_specs, is_built_by_shapes


@pytest.fixture(params=["keras", "tf_keras"])
def keras(request):
    guard.watch()
    return pytest.importorskip(request.param)


def model_of(keras):
    class Model(keras.Model):
        def call(self, ids, weights=None):
            ids = getattr(ids, "values", ids)
            return tf.cast(ids, tf.float32)

    return Model()


def test_the_first_call_counts(keras):
    model = model_of(keras)
    assert first_call_specs(model) is None
    model(tf.constant([[1, 2]], tf.int64), weights=tf.ones([1, 2]))
    model(tf.constant([[1, 2, 3]], tf.int32))
    (ids,), named = first_call_specs(model)
    assert (ids.shape.as_list(), ids.dtype) == ([None, 2], tf.int64)
    assert set(named) == {"weights"} and named["weights"].shape.as_list() == [None, 2]


def test_a_model_may_have_an_argument_of_any_name(keras):
    class Model(keras.Model):
        def call(self, ids, call=None, check=None):
            return ids + call + check

    added = Model()(tf.constant([1]), call=tf.constant([2]), check=tf.constant([3]))
    assert np.asarray(added).tolist() == [6]


def test_inputs_of_each_kind(keras):
    ragged = tf.ragged.constant([[1, 2], [], [3]], tf.int64)
    for given, expected in (
        (ragged, tf.RaggedTensorSpec([None, None], tf.int64, 1, tf.int64)),
        (ragged.to_sparse(), tf.SparseTensorSpec([None, 2], tf.int64)),
        (np.ones([3, 1]), tf.TensorSpec([None, 1], tf.float32)),
    ):
        model = model_of(keras)
        model(given)
        (spec,), named = first_call_specs(model)
        assert type(spec) is type(expected) and named == {}
        assert spec.dtype == expected.dtype and spec.shape.as_list()[0] is None


def test_shapes_and_symbolic_inputs_say_nothing(keras):
    if keras.__name__ == "tf_keras":
        pytest.skip("it builds models by calls")
    for build in (lambda m: m.build((None, 2)), lambda m: m(keras.Input([2], dtype="int64"))):
        model = model_of(keras)
        build(model)
        assert first_call_specs(model) is None
        model(tf.constant([[1, 2]], tf.int64))
        assert first_call_specs(model)[0][0].dtype == tf.int64


@pytest.mark.cases("keras")
def test_a_build_by_shapes_is_known(keras):
    seen = []

    class Model(keras.Model):
        def call(self, inputs):
            seen.append(is_built_by_shapes())
            return inputs

    if keras.__name__ == "keras":
        Model().build_from_config({"input_shape": (None, 2)})
    else:
        Model().build((None, 2))
    assert seen == [True]
    Model()(tf.ones([1, 2]))
    assert not seen[-1]
    Model.call = tf.function(Model.call)
    Model()(tf.ones([1, 2]))
    assert not seen[-1]
    if keras.__name__ == "tf_keras":
        Model().build((None, 2))
        assert seen[-1]
