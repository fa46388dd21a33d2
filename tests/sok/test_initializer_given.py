"""What `initializer` may be beside words, and that `initializer_str` makes another table alike."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok

KEYS = [5, -7, 2**40]
GIVEN = {
    "none": None,
    "random": "random",
    "word": "ones",
    "number": 0.1,
    "small number": 1e-30,
    "integer": 3,
    "text": "13",
    "NumPy": np.float32(0.1),
    "array of one": np.array([2.7]),
    "array of one row": np.array([[2]]),
    "tensor": tf.constant(0.1),
    "tf.Variable": tf.Variable([[0.1, 0.1]]),
    "Keras variable": keras.Variable(0.1),
    "Keras": keras.initializers.RandomNormal(0.0, 2.0),
}


def rows_of(initializer, var_type):
    table = sok.DynamicVariable(3, initializer=initializer, var_type=var_type, name="alike")
    return table, tf.nn.embedding_lookup(table, KEYS).numpy()


@pytest.mark.cases("given")
@pytest.mark.parametrize("var_type", ["hbm", "hybrid"])
@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN.keys())
def test_a_table_made_by_initializer_str_begins_alike(given, var_type):
    table, rows = rows_of(given, var_type)
    _, again = rows_of(table.initializer_str, var_type)
    np.testing.assert_array_equal(again, rows)
    if not isinstance(given, keras.initializers.Initializer):
        assert isinstance(table.initializer_str, str)


@pytest.mark.cases("given")
@pytest.mark.parametrize("given", ["tensor", "tf.Variable", "Keras variable"])
def test_a_tensor_gives_its_number_with_all_digits(given):
    _, rows = rows_of(GIVEN[given], "hbm")
    np.testing.assert_array_equal(rows, np.full((3, 3), np.float32(0.1)))


@pytest.mark.cases("given")
@pytest.mark.parametrize(
    "given",
    [tf.constant([1.0, 2.0]), tf.constant([]), tf.Variable([[1.0], [2.0]])],
    ids=["tensor", "empty", "tf.Variable"],
)
def test_a_tensor_of_several_numbers_is_refused(given):
    with pytest.raises(ValueError, match="must hold one number"):
        rows_of(given, "hbm")


def test_a_tensor_of_a_graph_is_refused():
    with tf.Graph().as_default(), pytest.raises(ValueError, match="is known when the table"):
        rows_of(tf.constant(1.0), "hbm")
