"""Variables over tables with rows of float64 and of integers: at once, traced, in checkpoints."""

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite.bridge import table_exports, writes
from sok_lite.bridge.variable import TableVariable, table_for_variable
from sok_lite.engine.initializer_spec import make_initializer
from sok_lite.engine.table import make_table

DTYPES = ["float64", "int32", "int64", "int8"]
INTEGERS = DTYPES[1:]
# float32 holds none of these.
ROWS = {
    "float64": [[0.1, 1e300], [1e-300, 1 + 2**-50], [0, 0]],
    "int32": [[2**31 - 1, -(2**31)], [2**24 + 1, -1], [0, 0]],
    "int64": [[2**63 - 1, -(2**63)], [2**53 + 1, -1], [0, 0]],
    "int8": [[127, -128], [1, -1], [0, 0]],
}


@pytest.fixture(params=DTYPES)
def dtype(request):
    return request.param


def make(dtype, first=0):
    initializer = make_initializer(first, 2)
    table = table_for_variable(
        "table",
        lambda backend: make_table("hbm", backend, 2, initializer=initializer, dtype=dtype),
    )
    return TableVariable(table, name=f"of_{dtype}", trainable=True)


def filled(dtype, **options):
    variable = make(dtype, **options)
    rows = np.array(ROWS[dtype], dtype)
    writes.insert_or_assign(variable, "assign", [3, 1, 2], tf.constant(rows))
    return variable, dict(zip([3, 1, 2], rows, strict=True))


def assert_holds(variable, expected):
    keys, rows = table_exports.export(variable)
    assert rows.dtype == variable.dtype and keys.numpy().tolist() == sorted(expected)
    for key, row in zip(keys.numpy().tolist(), rows.numpy(), strict=True):
        np.testing.assert_array_equal(row, expected[key])


def doing(function):
    def run(*arguments):
        function(*arguments)

    return run


def test_writes_keep_the_type(mode, dtype):
    variable, expected = filled(dtype)
    delta = np.array([[1, 2], [3, -4], [1, 2], [5, 5]], dtype)
    slices = tf.IndexedSlices(tf.constant(delta), tf.constant([1, 2, 1, 50]))
    mode(doing(lambda: writes.scatter_add(variable, slices)))()
    with np.errstate(over="ignore"):
        expected[1] = expected[1] + delta[0] + delta[2]
        expected[2] = expected[2] + delta[1]
    assert_holds(variable, expected)
    slices = tf.IndexedSlices(tf.constant(delta[:1]), tf.constant([3]))
    mode(doing(lambda: writes.scatter_sub(variable, slices)))()
    with np.errstate(over="ignore"):
        expected[3] = expected[3] - delta[0]
    assert_holds(variable, expected)
    large = np.array(ROWS[dtype][:2], dtype)
    slices = tf.IndexedSlices(tf.constant(large), tf.constant([2, 51]))
    mode(doing(lambda: writes.scatter_update(variable, slices)))()
    assert_holds(variable, expected | {2: large[0]})


@pytest.mark.cases("name")
@pytest.mark.parametrize("name", INTEGERS[1:])
def test_integers_take_no_floats_and_nothing_that_does_not_fit(name):
    variable, expected = filled(name)
    floats = tf.constant([[1.0, 2.0]])
    with pytest.raises(TypeError, match=f"`values` must be {name}. Received: dtype float32"):
        writes.insert_or_assign(variable, "assign", [1], floats)
    with pytest.raises(TypeError, match=f"`values` must be {name}. Received: dtype float32"):
        writes.scatter_add(variable, tf.IndexedSlices(floats, tf.constant([1])))
    large = tf.constant([[2**63, 0]], tf.uint64)
    with pytest.raises(ValueError, match=f"values must fit {name}"):
        writes.scatter_add(variable, tf.IndexedSlices(large, tf.constant([1])))
    writes.insert_or_assign(variable, "assign", [8], [[5, 6]])  # Python's numbers
    assert_holds(variable, expected | {8: [5, 6]})


def test_float64_takes_any_floats():
    variable = make("float64")
    for number, given in enumerate((tf.float16, tf.bfloat16, tf.float32, tf.float64)):
        writes.insert_or_assign(variable, "assign", [number], tf.cast([[0.1, 2]], given))
        slices = tf.IndexedSlices(tf.cast([[1.0, 1.0]], given), tf.constant([number]))
        writes.scatter_add(variable, slices)
        expected = tf.cast(tf.cast([[0.1, 2]], given), tf.float64) + 1
        np.testing.assert_array_equal(tf.nn.embedding_lookup(variable, [number]), expected)
    with pytest.raises(TypeError, match="`values` must be float64. Received: dtype int32"):
        writes.insert_or_assign(variable, "assign", [1], tf.constant([[1, 2]]))


# -------------------------------------------------------------------- training


def test_float64_tables_are_trained_and_pooled(mode, initialised):
    variable, narrow = make("float64", first=0.5), make("float32", first=0.5)
    ids = tf.RaggedTensor.from_row_lengths([1, 2, 1, 7], [3, 0, 1])
    weights = tf.RaggedTensor.from_row_lengths([1.0, 0.5, 2.0, 3.0], [3, 0, 1])

    def step(table):
        with tf.GradientTape() as tape:
            (pooled,) = sok.lookup_sparse([table], [ids], [weights], ["mean"])
            rows = tf.nn.embedding_lookup(table, [1, 9])
            loss = tf.reduce_sum(pooled**2) + tf.reduce_sum(rows**3)
        return pooled, tape.gradient(loss, table)

    results = []
    for table in (variable, narrow):
        optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(0.1))
        pooled, gradient = mode(lambda table=table: step(table))()
        assert pooled.dtype == table.dtype and gradient.values.dtype == tf.float32
        optimizer.apply_gradients([(gradient, table)])
        results.append((pooled, *table_exports.export(table)))
    assert results[0][2].dtype == tf.float64
    for wide, short in zip(*results, strict=True):
        np.testing.assert_array_equal(wide, short)
    assert (results[0][2].numpy() != 0.5).all()


@pytest.mark.parametrize("name", INTEGERS[:2])
def test_integers_are_neither_pooled_nor_trained(mode, initialised, name):
    variable, expected = filled(name)
    ids = tf.RaggedTensor.from_row_lengths([1, 2, 100], [3])
    with pytest.raises(TypeError, match=f"Rows of {name} cannot be pooled"):
        mode(lambda: sok.lookup_sparse([variable], [ids], combiners=["sum"]))()
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(0.1))
    gradient = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([1], tf.int64), tf.constant([3, 2]))
    # In a graph TensorFlow makes its own error of it.
    errors = (TypeError, tf.errors.InvalidArgumentError)
    with pytest.raises(errors, match=f"Rows of {name} cannot be trained"):
        mode(doing(lambda: optimizer.apply_gradients([(gradient, variable)])))()
    assert_holds(variable, expected)


@pytest.mark.parametrize("dtype", [tf.float64, tf.int32, "int64", np.int8], ids=str)
def test_soks_variables_have_the_three_formats_of_sok(initialised, dtype):
    with pytest.raises(ValueError, match="dtype must be one of float32, float16, bfloat16"):
        sok.DynamicVariable(2, dtype=dtype)
    with pytest.raises(TypeError, match="tf.float32, tf.float16 or tf.bfloat16"):
        sok.Variable(np.ones((2, 2)), dtype=dtype)


def test_soks_variable_begins_with_a_row_of_ones_own():
    row = np.array([1.5, -2.0], np.float32)
    for variable in (
        first := sok.DynamicVariable(2, row),
        sok.DynamicVariable(2, first.initializer_str),
    ):
        np.testing.assert_array_equal(tf.nn.embedding_lookup(variable, [4, 5]), [row, row])
    with pytest.raises(ValueError, match="or an array of its 2 elements"):
        sok.DynamicVariable(2, np.zeros(3))
