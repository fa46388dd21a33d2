"""All that a user may give as an initializer, and what is refused."""

import numpy as np
import pytest

from sok_lite.engine.initializer import Initializer, RowInitializer
from sok_lite.engine.initializer_spec import make_initializer


class _Object:
    """What a Keras or TensorFlow initializer looks like from outside."""

    def __init__(self, **config):
        self._config = config

    def get_config(self):
        return self._config


def keras_like(name, **config):
    return type(name, (_Object,), {})(**config)


@pytest.mark.cases("spec")
@pytest.mark.parametrize(
    "spec, expected",
    [
        (None, Initializer("uniform", -0.05, 0.05)),
        ("", Initializer("uniform", -0.05, 0.05)),
        ("random", Initializer("uniform", -0.05, 0.05)),
        ("normal", Initializer("normal", 0.0, 1.0)),
        ("uniform", Initializer("uniform", 0.0, 1.0)),
        ("ones", Initializer("constant", 1.0)),
        ("zeros", Initializer("constant", 0.0)),
        ("13", Initializer("constant", 13.0)),
        ("-1e-7", Initializer("constant", -1e-7)),
        (13, Initializer("constant", 13.0)),
        (0.5, Initializer("constant", 0.5)),
        (np.float32(0.5), Initializer("constant", 0.5)),
        (np.array([0.5]), Initializer("constant", 0.5)),
        (Initializer("normal", 1.0, 2.0, seed=4), Initializer("normal", 1.0, 2.0, seed=4)),
        (np.array([[7]], np.int8), Initializer("constant", 7)),
        (np.array([1, 2, 3, 4]), RowInitializer((1, 2, 3, 4))),
        (np.array([0.5, 2, 3, 4], np.float32), RowInitializer((0.5, 2.0, 3.0, 4.0))),
        (RowInitializer((1, 2)), RowInitializer((1, 2))),
        ("glorot_uniform", Initializer("uniform", -(0.75**0.5), 0.75**0.5)),
        ("HeUniform", Initializer("uniform", -(1.5**0.5), 1.5**0.5)),
        ("random_uniform", Initializer("uniform", -0.05, 0.05)),
        ("RandomNormal", Initializer("normal", 0.0, 0.05)),
        ("Zeros", Initializer("constant", 0.0)),
        (keras_like("Zeros"), Initializer("constant", 0.0)),
        (type("Zeros", (_Object,), {}), Initializer("constant", 0.0)),
        (keras_like("Ones", dtype="float32"), Initializer("constant", 1.0)),
        (keras_like("Constant", value=0.25), Initializer("constant", 0.25)),
        (keras_like("Constant", value=np.arange(4)), RowInitializer((0, 1, 2, 3))),
        (
            keras_like("RandomNormal", mean=0.0, stddev=0.05, seed=None),
            Initializer("normal", 0.0, 0.05),
        ),
        (
            keras_like("RandomNormal", mean=1.0, stddev=0.5, seed=7),
            Initializer("normal", 1.0, 0.5, seed=7),
        ),
        (
            keras_like("RandomUniform", minval=-0.05, maxval=0.05, seed=0),
            Initializer("uniform", -0.05, 0.05, seed=0),
        ),
        (keras_like("RandomUniform", minval=0, maxval=None), Initializer("uniform", 0.0, 1.0)),
        (
            keras_like("TruncatedNormal", mean=0.0, stddev=0.1),
            Initializer("truncated_normal", 0.0, 0.1),
        ),
    ],
)
def test_words_numbers_and_objects(spec, expected):
    assert make_initializer(spec, 4) == expected


def test_random_is_normal_in_a_hybrid_table():
    for spec in (None, "", "random"):
        assert make_initializer(spec, 4, var_type="hybrid") == Initializer("normal", 0.0, 1.0)


@pytest.mark.cases("spec")
@pytest.mark.parametrize(
    "spec, error, message",
    [
        ("glorot", ValueError, "'random', 'normal', 'uniform', 'ones', 'zeros', a number"),
        ("orthogonal", ValueError, "Keras' names RandomNormal, .*LecunNormal, also written as"),
        ("nan", ValueError, "must be finite. Received: nan"),
        (float("inf"), ValueError, "must be finite"),
        (1e39, ValueError, "finite float32"),
        (-(10**400), ValueError, "must be finite. Received: -inf"),
        (np.zeros(3), ValueError, "one number for all elements of a row, or an array of its 4"),
        (np.zeros((1, 4)), ValueError, "one number for all elements"),
        (np.array(["1"] * 4), ValueError, "one number for all elements"),
        (np.array([0, 0, np.inf, 0]), ValueError, "must be finite. Received: inf"),
        (True, TypeError, "must be a string, a number or a Keras"),
        (["zeros"], TypeError, "must be a string, a number or a Keras"),
        (lambda shape: 0, TypeError, "must be a string, a number or a Keras"),
        (keras_like("Orthogonal", gain=1.0), ValueError, "Received: Orthogonal"),
    ],
)
def test_what_is_no_initializer_is_refused(spec, error, message):
    with pytest.raises(error, match=message):
        make_initializer(spec, 4)


def test_fan_based_initializers_count_with_the_row_shape():
    glorot = keras_like("GlorotUniform", seed=3)
    limit = (6 / (16 + 16)) ** 0.5
    assert make_initializer(glorot, 16) == Initializer("uniform", -limit, limit, seed=3)
    limit = (6 / (1000 + 16)) ** 0.5
    assert make_initializer(glorot, 16, row_shape=(1000, 16)) == Initializer(
        "uniform", -limit, limit, seed=3
    )
    he = make_initializer(keras_like("HeNormal"), 16, row_shape=(50, 16))
    assert he.kind == "truncated_normal"
    np.testing.assert_allclose(he.b, (2 / 50) ** 0.5 / 0.87962566103423978)
    plain = keras_like(
        "VarianceScaling", scale=3.0, mode="fan_out", distribution="untruncated_normal"
    )
    assert make_initializer(plain, 4, row_shape=(9, 3)) == Initializer("normal", 0.0, 1.0)
    with pytest.raises(ValueError, match="two numbers above 0"):
        make_initializer(glorot, 16, row_shape=(0, 16))
