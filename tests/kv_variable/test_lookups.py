"""What TFPlus' lookups take and refuse; rows and gradients: tests/bridge/test_lookup.py."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from sok_lite import kv_variable as kv
from sok_lite.kv_variable import get_kv_variable

tf1 = tf.compat.v1
DIM = 3
SMALLEST, LARGEST = -(2**63), 2**63 - 1
KEYS = np.array([0, 1, -1, 5, -7, 40, SMALLEST, LARGEST])
ROWS = np.random.default_rng(3).normal(size=(len(KEYS), DIM)).astype(np.float32)

PLAIN = [tf.nn.embedding_lookup, tf1.nn.embedding_lookup, kv.embedding_lookup]
PLAIN += [kv.embedding_lookup_unique]
SPARSE = [
    tf.nn.embedding_lookup_sparse,
    tf1.nn.embedding_lookup_sparse,
    kv.embedding_lookup_sparse,
]
SAFE = [
    tf.nn.safe_embedding_lookup_sparse,
    tf1.nn.safe_embedding_lookup_sparse,
    kv.safe_embedding_lookup_sparse,
]


def name_of(function):
    return f"{function.__module__.split('.')[0]} {function.__name__}"


@pytest.fixture
def filled(here, made):
    """Makes a variable with the rows."""

    def make(**arguments):
        variable = made(embedding_dim=DIM, **arguments)
        here.run(lambda keys, rows: kv.insert_kv_embedding(variable, keys, rows), KEYS, ROWS)
        return variable

    return make


def forms(variable):
    """The variable, and what else stands for it."""
    if isinstance(variable, kv.PartitionedKvVariable):
        return [variable, list(variable)]
    return [variable, [variable], (variable,)]


# ---- embedding_lookup ----------------------------------------------------------------------------


def test_keys_may_be_of_a_smaller_type_repeated_and_of_python(here, filled):
    variable = filled()
    for dtype in (np.int64, np.int32, np.int8):
        rows = here.run(
            lambda ids: tf.nn.embedding_lookup(variable, ids), np.array([5, -7, 5, 5], dtype)
        )
        np.testing.assert_array_equal(rows, ROWS[[3, 4, 3, 3]])
    for keys, places in ((5, 3), ([5, -7], [3, 4]), ([[0], [-1]], [[0], [2]])):
        for params in forms(variable):
            rows = here.run(lambda k=keys, p=params: tf.nn.embedding_lookup(p, k))
            np.testing.assert_array_equal(rows, ROWS[places])


def test_the_result_has_the_name():
    with tf.Graph().as_default():
        variable = get_kv_variable("kv", 2)
        assert tf.nn.embedding_lookup(variable, [1], name="rows").name == "rows:0"
        ids = tf.SparseTensor([[0, 0]], tf.constant([1], tf.int64), [1, 1])
        assert tf.nn.embedding_lookup_sparse(variable, ids, None, name="mean").name == "mean:0"
        found = tf1.nn.safe_embedding_lookup_sparse(variable, ids, name="safe")
        assert found.name == "safe:0"


@pytest.mark.cases("ids")
@pytest.mark.parametrize("ids", [tf.constant([1.0]), tf.constant(["a"]), [0.5], tf.constant(True)])
def test_ids_that_are_no_integers(ids):
    variable = get_kv_variable("kv", 2)
    for lookup in PLAIN:
        with pytest.raises(TypeError, match="integers"):
            lookup(variable, ids)


def test_keys_beyond_the_key_type():
    variable = get_kv_variable("kv", 2, key_dtype=tf.int32)
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="int32"):
        tf.nn.embedding_lookup(variable, tf.constant([2**40]))
    assert variable.export()[0].shape == (0,)


def test_lists_that_are_not_one_variable():
    one, other = get_kv_variable("one", 2), get_kv_variable("other", 2)
    split = get_kv_variable("split", 2, partitioner=tf1.fixed_size_partitioner(3))
    first, second, third = split
    wrong = [[one, other], [second, first, third], [first, second], [first, first, third]]
    wrong += [[split, one], [*split, first]]
    for params in wrong:
        for lookup in PLAIN:
            with pytest.raises(ValueError, match="all partitions of one"):
                lookup(params, tf.constant([1]))
    dense = tf.Variable(tf.ones([4, 2]))
    for params in ([one, dense], [dense, one]):
        with pytest.raises(ValueError, match="takes one KvVariable|[Ll]ook each up"):
            tf.nn.embedding_lookup(params, tf.constant([1]))
        with pytest.raises(TypeError, match="must be a KvVariable"):
            kv.embedding_lookup(params, tf.constant([1]))
    with pytest.raises(TypeError, match="must be a KvVariable"):
        kv.embedding_lookup(dense, tf.constant([1]))
    assert all(variable.export()[0].shape == (0,) for variable in (one, other, split))


# ---- sparse lookups ------------------------------------------------------------------------------


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16])
@pytest.mark.parametrize("lookup", [*SPARSE, *SAFE], ids=name_of)
def test_halves_are_combined_as_floats(here, made, lookup, dtype):
    variable, lengths = made(embedding_dim=DIM, value_dtype=dtype), [2, 0, 1, 4, 0]
    rows, places = ROWS.astype(dtype.as_numpy_dtype), [3, 4, 6, 7, 0, 0, 2]
    here.run(lambda keys, values: kv.insert_kv_embedding(variable, keys, values), KEYS, rows)

    def look_up(keys):
        ids = tf.RaggedTensor.from_row_lengths(keys, lengths).to_sparse()
        return lookup(variable, ids, None, combiner="sum")

    found = here.run(look_up, KEYS[places])
    wanted = np.zeros((5, DIM))
    np.add.at(wanted, np.repeat(range(5), lengths), np.float64(rows)[places])
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("lookup", SPARSE, ids=name_of)
def test_sparse_arguments_that_do_not_fit(lookup):
    variable = get_kv_variable("kv", 2)
    ids = tf.SparseTensor([[0, 0]], tf.constant([1], tf.int64), [1, 1])
    with pytest.raises(ValueError, match="`combiner`.*'max'"):
        lookup(variable, ids, None, combiner="max")
    with pytest.raises(TypeError, match="SparseTensor or RaggedTensor"):
        lookup(variable, tf.constant([1]), None)
    with pytest.raises(TypeError, match="as `sp_ids` is"):
        lookup(variable, ids, tf.ragged.constant([[1.0]]))
    with pytest.raises(TypeError, match="integers"):
        lookup(variable, tf.SparseTensor([[0, 0]], [1.0], [1, 1]), None)
    with pytest.raises(ValueError, match="all partitions of one"):
        lookup([variable, variable], ids, None)
    assert variable.export()[0].shape == (0,)


# ---- what is not ours ----------------------------------------------------------------------------


def test_ordinary_variables_are_looked_up_as_ever(here):
    whole = np.arange(24, dtype=np.float32).reshape(8, 3)
    ids = tf.SparseTensor([[0, 0], [0, 1]], np.array([1, 6]), [1, 2])

    def run():
        tensor = tf.constant(whole)
        split = [tensor[0::2], tensor[1::2]]
        return (
            tf.nn.embedding_lookup(tensor, [1, 6]),
            tf1.nn.embedding_lookup(split, [1, 6]),
            tf.nn.embedding_lookup_sparse(tensor, ids, None, combiner="sum"),
            tf1.nn.safe_embedding_lookup_sparse(split, ids, partition_strategy="mod"),
        )

    first, second, total, mean = here.run(run)
    np.testing.assert_array_equal(first, whole[[1, 6]])
    np.testing.assert_array_equal(second, whole[[1, 6]])
    np.testing.assert_array_equal(total, whole[[1, 6]].sum(axis=0, keepdims=True))
    np.testing.assert_array_equal(mean, whole[[1, 6]].mean(axis=0, keepdims=True))


def test_a_list_of_ordinary_variables_is_still_partitions():
    parts = [tf.Variable(np.full((2, 3), number, np.float32)) for number in range(2)]
    rows = tf1.nn.embedding_lookup(parts, [0, 1, 2, 3])
    assert rows.numpy()[:, 0].tolist() == [0.0, 1.0, 0.0, 1.0]
    rows = tf.nn.embedding_lookup(parts[1], tf.ragged.constant([[1], [0, 1]]))
    assert rows.shape.as_list() == [2, None, 3]


def test_tensorflows_own_lookups_may_be_had_back():
    variable = get_kv_variable("kv", 2, initializer=tf1.ones_initializer())
    split = get_kv_variable("split", 2, partitioner=tf1.fixed_size_partitioner(2))
    ids = tf.SparseTensor([[0, 0]], tf.constant([-1], tf.int64), [1, 1])
    kv.use_tf_embedding_ops()
    try:
        kv.use_tf_embedding_ops()
        safe = tf.nn.safe_embedding_lookup_sparse(variable, ids)
        assert safe.numpy().tolist() == [[0.0, 0.0]]  # a negative key is left out
        with pytest.raises(ValueError):
            tf.nn.embedding_lookup(list(split), [1])
    finally:
        kv.use_tfplus_embedding_ops()
        kv.use_tfplus_embedding_ops()
    assert tf.nn.safe_embedding_lookup_sparse(variable, ids).numpy().tolist() == [[1.0, 1.0]]
    assert tf.nn.embedding_lookup(list(split), [1]).shape == (1, 2)


def test_rows_of_ones_own_are_inserted(here, made):
    variable = made(embedding_dim=2)
    for params in forms(variable):
        here.run(
            lambda ids, rows, p=params: kv.insert_kv_embedding(p, ids, rows),
            [[4, -5], [4, 6]],
            [[[1.0, 1.0], [2.0, 2.0]], [[3.0, 3.0], [4.0, 4.0]]],
        )
    keys, rows = here.run(variable.export)
    assert keys.tolist() == [-5, 4, 6]  # of a repeated key the last row counts
    assert rows[:, 0].tolist() == [2.0, 3.0, 4.0]
    for wrong in ([[1.0, 1.0]], [[1.0] * 4], [1.0] * 4, [[[1.0, 1.0]] * 2]):
        with pytest.raises(ValueError, match=r"insert_kv_embedding.*\(2, 2\).*Received"):
            kv.insert_kv_embedding(variable, [1, 2], wrong)


def test_a_keras_layer_that_lists_one_is_trained_by_fit():
    class Layer(keras.layers.Layer):
        def __init__(self, rows):
            super().__init__()
            self.rows = rows

        @property
        def trainable_variables(self):
            return [self.rows]

        trainable_weights = weights = variables = trainable_variables

        def call(self, ids):
            return tf.nn.embedding_lookup(self.rows, ids)

    rows = get_kv_variable("listed", 2, initializer=tf.zeros_initializer())
    model = keras.Sequential([keras.Input([], dtype="int64"), Layer(rows)])
    model.compile(keras.optimizers.SGD(0.5), "mse")
    model.fit(np.arange(2), np.ones((2, 2)), batch_size=2, verbose=0)
    # The mean of 4 squares: each row moves by 0.5 * 2 / 4.
    np.testing.assert_allclose(tf.nn.embedding_lookup(rows, [0, 1]), np.full((2, 2), 0.25))
