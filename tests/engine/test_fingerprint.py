"""Fingerprint64 of FarmHash: literal numbers, which no release may change, and TensorFlow's."""

import numpy as np
import pytest

from sok_lite.engine.fingerprint import fingerprints

# Of tf.fingerprint (TensorFlow 2.21), but the last four: of the pages of BigQuery and of Redshift.
LITERAL = {
    b"": -7286425919675154353,
    b"a": -5528939962900187677,
    b"abc": 2640714258260161385,
    b"hello": -5436999610281751320,
    b"Hello World!!": -1481705101030343684,
    b"x" * 17: -7140662122295251035,
    b"y" * 40: 276292113409495006,
    b"z" * 100: 9220849947163966073,
    b"1footrue": -1541654101129638711,
    b"2applefalse": 2794438866806483259,
    b"3true": -4880158226897771312,
    b"Amazon Redshift": 8085098817162212970,
}


def test_literal_numbers():
    assert fingerprints(list(LITERAL)).tolist() == list(LITERAL.values())
    for string, expected in LITERAL.items():
        assert fingerprints([string]).tolist() == [expected]


def test_no_strings_have_no_fingerprints():
    result = fingerprints([])
    assert (result.shape, result.dtype) == ((0,), np.int64)


@pytest.mark.full_only("makes an operation of TensorFlow for each length")
@pytest.mark.filterwarnings("error")
def test_every_length_is_as_tensorflow_has_it():
    tf = pytest.importorskip("tensorflow")
    random = np.random.default_rng(5)
    lengths = random.permutation([*range(400), *random.integers(400, 5000, 100)])
    strings = [random.bytes(length) for length in lengths.tolist()]
    expected = tf.fingerprint(tf.constant(strings)).numpy().view(np.int64).reshape(-1)
    np.testing.assert_array_equal(fingerprints(strings), expected)
