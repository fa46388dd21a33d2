"""Initializers of Keras 3, tf_keras, TensorFlow and TF1, mapped and compared with their own."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite import dynamic_embedding as de
from sok_lite.backend import get_backend
from sok_lite.engine.initializer import Initializer, RowInitializer
from sok_lite.engine.initializer_spec import make_initializer
from sok_lite.keras import Table
from tests.support.helpers import initial_values

tf_keras = pytest.importorskip("tf_keras")
PACKAGES = {
    "keras": keras.initializers,
    "tf_keras": tf_keras.initializers,
    "tf": tf.initializers,
}
TRUNCATED = "truncated_normal"

# (class in Keras 3, tf_keras and tf.initializers, options, what it must become)
NEW = [
    ("Zeros", {}, Initializer("constant", 0.0)),
    ("Ones", {}, Initializer("constant", 1.0)),
    ("Constant", {"value": 0.25}, Initializer("constant", 0.25)),
    ("RandomNormal", {}, Initializer("normal", 0.0, 0.05)),
    ("RandomNormal", {"mean": 1.0, "stddev": 2.0, "seed": 7}, Initializer("normal", 1.0, 2.0, 7)),
    ("RandomUniform", {}, Initializer("uniform", -0.05, 0.05)),
    ("RandomUniform", {"minval": 0.0, "maxval": 3.0, "seed": 0}, Initializer("uniform", 0, 3, 0)),
    ("TruncatedNormal", {}, Initializer(TRUNCATED, 0.0, 0.05)),
    ("TruncatedNormal", {"stddev": 2.0, "seed": 5}, Initializer(TRUNCATED, 0.0, 2.0, 5)),
]


@pytest.mark.parametrize("package", PACKAGES)
def test_initializers_that_depend_on_nothing(package):
    for name, options, expected in NEW:
        assert make_initializer(getattr(PACKAGES[package], name)(**options), 4) == expected, name


def test_initializers_of_tensorflow_itself():
    for spec, expected in (
        (tf.compat.v1.zeros_initializer, Initializer("constant", 0.0)),
        (tf.compat.v1.zeros_initializer(), Initializer("constant", 0.0)),
        (tf.compat.v1.ones_initializer(), Initializer("constant", 1.0)),
        (tf.compat.v1.constant_initializer(2.5), Initializer("constant", 2.5)),
        (tf.compat.v1.random_uniform_initializer(), Initializer("uniform", 0.0, 1.0)),
        (tf.compat.v1.random_uniform_initializer(-2, 1, 3), Initializer("uniform", -2, 1, 3)),
        (tf.compat.v1.random_normal_initializer(), Initializer("normal", 0.0, 1.0)),
        (tf.compat.v1.truncated_normal_initializer(1.0, 2.0), Initializer(TRUNCATED, 1.0, 2.0)),
        (tf.random_uniform_initializer(), Initializer("uniform", -0.05, 0.05)),
        (tf.random_normal_initializer(stddev=0.1), Initializer("normal", 0.0, 0.1)),
        (tf.constant_initializer(7), Initializer("constant", 7.0)),
        (keras.initializers.Zeros, Initializer("constant", 0.0)),
        (tf.constant_initializer([1.0, 2.0]), RowInitializer((1.0, 2.0))),
    ):
        assert make_initializer(spec, 2) == expected
    spec = keras.initializers.RandomNormal(seed=keras.random.SeedGenerator(11))
    assert make_initializer(spec, 4).seed == 11


FAN_BASED = ["Glorot", "He", "Lecun"]
SHAPE = (400, 300)


def same_distribution(spec):
    """Draws as many values as TensorFlow does and compares their quantiles."""
    backend = get_backend("cpu")
    initializer = make_initializer(spec, SHAPE[1], row_shape=SHAPE)
    keys = np.arange(SHAPE[0], dtype=np.int64)
    ours = np.sort(initial_values(initializer, backend, keys, SHAPE[1], 1).reshape(-1))
    theirs = np.sort(np.asarray(spec(SHAPE), np.float32).reshape(-1))
    # 120,000 values: a decile of either sample is good to 0.005 standard deviations or so.
    deciles = np.linspace(0, len(ours) - 1, 11).astype(int)[1:-1]
    np.testing.assert_allclose(ours[deciles], theirs[deciles], atol=0.03 * theirs.std())
    np.testing.assert_allclose([ours[0], ours[-1]], [theirs[0], theirs[-1]], rtol=0.01)


@pytest.mark.parametrize("name", FAN_BASED)
def test_fan_based_initializers_draw_what_tensorflow_draws(name):
    for shape in ("Uniform", "Normal"):
        same_distribution(getattr(keras.initializers, name + shape)(seed=1))


NAMES = [f"{name}_{kind}" for name in ("glorot", "he", "lecun") for kind in ("uniform", "normal")]
NAMES += ["random_uniform", "random_normal", "truncated_normal", "variance_scaling", "zeros"]


@pytest.mark.parametrize("package", ["keras", "tf_keras"])
@pytest.mark.parametrize("row_shape", [None, (7, 3)])
def test_a_name_of_keras_is_what_keras_gives_for_it(package, row_shape):
    for name in NAMES:
        theirs = PACKAGES[package].get(name)
        for text in (name, type(theirs).__name__):
            assert make_initializer(text, 4, row_shape) == make_initializer(theirs, 4, row_shape)


@pytest.mark.parametrize("name", FAN_BASED)
def test_without_a_row_shape_a_row_counts_as_a_vector(name):
    drawn = np.abs(getattr(keras.initializers, name + "Uniform")(seed=1)([10_000]))
    limit = make_initializer(f"{name.lower()}_uniform", 10_000).b
    assert 0.99 * limit < drawn.max() <= np.float32(limit)


@pytest.mark.parametrize(
    ("mode", "distribution"),
    [("fan_in", "uniform"), ("fan_out", "truncated_normal"), ("fan_avg", "uniform")],
)
def test_variance_scaling_draws_what_tensorflow_draws(mode, distribution):
    for scaling in (
        keras.initializers.VarianceScaling,
        tf_keras.initializers.VarianceScaling,
        tf.compat.v1.variance_scaling_initializer,
    ):
        same_distribution(scaling(2.0, mode, distribution, seed=1))


@pytest.mark.parametrize("package", ["keras", "tf_keras"])
def test_what_a_table_cannot_do_is_refused(package):
    with pytest.raises(ValueError, match="Received: Orthogonal"):
        make_initializer(PACKAGES[package].Orthogonal(), 4)
    with pytest.raises(ValueError, match="one number for all elements"):
        make_initializer(tf.constant_initializer([1.0, 2.0]), 3)


# A table of 12 columns of each API, and its rows of keys.
APIS = {
    "sok": (
        lambda initializer, **options: sok.DynamicVariable(
            12, initializer=initializer, name="fans", **options
        ),
        tf.nn.embedding_lookup,
    ),
    "TFRA": (
        lambda initializer, **options: de.Variable(
            dim=12, initializer=initializer, name="fans", **options
        ),
        lambda table, keys: table.lookup(keys),
    ),
    "Keras": (
        lambda initializer, **options: Table("fans", 12, initializer, **options),
        lambda table, keys: table(keys, training=True),
    ),
}


@pytest.mark.parametrize("name", ["glorot_normal", "he_normal", "lecun_uniform"])
@pytest.mark.parametrize("api", APIS)
def test_rows_begin_as_those_of_a_weight_and_without_its_shape_it_is_said(api, name, recwarn):
    (make, look_up), initializer = APIS[api], keras.initializers.get(name)

    def deviation(**options):
        return np.std(look_up(make(initializer, **options), np.arange(2000)))

    shape = (2000, 12)
    assert abs(deviation(row_shape=shape) / np.std(initializer(shape)) - 1) < 0.03
    for plain in (keras.initializers.VarianceScaling(mode="fan_out"), "uniform", 0.5):
        if isinstance(plain, float) or api != "TFRA":  # which knows no names
            make(plain)
    assert not [each for each in recwarn if "row_shape" in str(each.message)]
    for wrong in ((12,), (0, 12), 12):
        with pytest.raises(ValueError, match=r"`row_shape` must be \(fan_in, fan_out\), two numb"):
            make(initializer, row_shape=wrong)
    with pytest.warns(RuntimeWarning, match="of 'fans' depends on.*row_shape=") as told:
        make(initializer)
    assert told[0].filename == __file__
    said = re.search(r"deviation of ([0-9.]+)\. .*it is ([0-9.]+)\. ", str(told[0].message))
    here, there = map(float, said.groups())
    assert abs(deviation() / here - 1) < 0.03
    drawn = initializer((1024 if api == "TFRA" else 100_000, 12))
    assert abs(np.std(drawn) / there - 1) < 0.03
