"""`sok.hash_strings`: the same keys in eager mode, functions, tf.data, NumPy and pandas."""

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok

STRINGS = ["", "Berlin", "São Paulo", "東京", "x" * 63, "x" * 64, "x" * 65, "y" * 1000]
# FARM_FINGERPRINT of "alphabet" in BigQuery.
ALPHABET = -2427165924636348523


@pytest.fixture
def expected():
    prints = tf.fingerprint(tf.constant(STRINGS)).numpy()
    return prints.view("<i8").reshape(-1)


def test_tensors_hash_alike_in_every_mode(mode, expected):
    keys = mode(lambda: sok.hash_strings(tf.reshape(tf.constant(STRINGS), [4, 2])))()
    assert keys.dtype == tf.int64
    np.testing.assert_array_equal(keys, expected.reshape(4, 2))
    empty = mode(lambda: sok.hash_strings(tf.zeros([0, 3], tf.string)))()
    assert empty.shape == (0, 3)
    with pytest.raises(TypeError, match="Received: a tensor of int32"):
        mode(lambda: sok.hash_strings(tf.constant([1])))()


def test_a_data_set_hashes_alike(expected):
    data = tf.data.Dataset.from_tensor_slices(STRINGS).batch(3).map(sok.hash_strings)
    assert data.element_spec == tf.TensorSpec([None], tf.int64)
    np.testing.assert_array_equal(np.concatenate([*data.as_numpy_iterator()]), expected)


def test_ragged_and_sparse_strings_keep_their_rows(expected):
    ragged = tf.RaggedTensor.from_row_lengths(STRINGS, [3, 0, 5])
    keys = sok.hash_strings(ragged)
    np.testing.assert_array_equal(keys.row_splits, ragged.row_splits)
    np.testing.assert_array_equal(keys.flat_values, expected)
    sparse = ragged.to_sparse()
    keys = sok.hash_strings(sparse)
    np.testing.assert_array_equal(keys.indices, sparse.indices)
    np.testing.assert_array_equal(keys.values, expected)


def test_arrays_and_lists_hash_alike(expected):
    encoded = [string.encode() for string in STRINGS]
    given = [
        *(STRINGS, tuple(encoded), np.array(STRINGS), np.array(encoded)),
        *(np.array(STRINGS, object), np.array([*encoded[:4], *STRINGS[4:]], object)),
    ]
    for strings in given:
        keys = sok.hash_strings(strings)
        assert isinstance(keys, np.ndarray) and keys.dtype == np.int64
        np.testing.assert_array_equal(keys, expected)
    np.testing.assert_array_equal(
        sok.hash_strings(np.array(STRINGS).reshape(2, 4).T), expected.reshape(2, 4).T
    )
    assert sok.hash_strings(np.empty((0, 2), "U3")).shape == (0, 2)
    assert sok.hash_strings([]).shape == (0,)
    for one in ("alphabet", tf.constant("alphabet"), b"alphabet"):
        assert int(sok.hash_strings(one)) == ALPHABET and sok.hash_strings(one).shape == ()


@pytest.mark.parametrize("strings", [["a\0", "b"], [b"a\0", b"\xff"], ["a", b"\xff"]], ids=str)
def test_every_byte_of_a_list_counts(strings):
    expected = sok.hash_strings(tf.constant(strings))
    np.testing.assert_array_equal(sok.hash_strings(strings), expected)
    assert sok.hash_strings(strings[0]) == expected[0]


def test_columns_of_pandas_hash_alike(expected):
    pandas = pytest.importorskip("pandas")
    column = pandas.Series(STRINGS)
    for strings in (column, column.astype("string"), column.astype("category"), column[::-1][::-1]):
        np.testing.assert_array_equal(sok.hash_strings(strings), expected)
    with pytest.raises(TypeError, match="takes strings. Received: .*missing values"):
        sok.hash_strings(pandas.Series(["a", None]))


@pytest.mark.parametrize(
    "strings",
    [
        *([1, 2], ["a", None], [float("nan")], 3, np.array([b"a", 1], object)),
        *(["a", float("nan")], ["a", 1], [["a"], ["b", "c"]]),
    ],
    ids=str,
)
def test_what_is_no_string_is_refused(strings):
    with pytest.raises(TypeError, match="hash_strings takes strings. Received: "):
        sok.hash_strings(strings)


@pytest.mark.parametrize("name", ["keras", "tf_keras"])
def test_inputs_of_keras_models_are_refused_with_what_takes_them(initialised, name):
    keras = pytest.importorskip(name)
    with pytest.raises(TypeError, match="Received: a KerasTensor.*key_type=str"):
        sok.hash_strings(keras.Input([], dtype="string"))
    table = sok.DynamicVariable(3, name="cities")
    with pytest.raises(TypeError, match="cannot be a KerasTensor: .*sok_lite.keras.Embeddings"):
        sok.lookup_sparse(table, keras.Input([], dtype="int64"))
