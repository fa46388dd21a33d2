"""`tf.nn.safe_embedding_lookup_sparse` of a table, against NumPy: every id is a key."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite import dynamic_embedding as de
from sok_lite.keras import Table

KEYS = [-7, 0, 5, 2**40]
ROWS = np.array([[1.0, 2.0], [3.0, 5.0], [7.0, 11.0], [13.0, 17.0]], np.float32)
# An empty row in the middle, one at the end, one whose only weight does not count.
IDS = [[-7, 2**40, -7], [], [5], [5, -7], []]
WEIGHTS = [[0.5, 2.0, 1.0], [], [-1.0], [0.25, 4.0], []]
FUNCTIONS = {
    "now": tf.nn.safe_embedding_lookup_sparse,
    "TF1": tf.compat.v1.nn.safe_embedding_lookup_sparse,
}


def dynamic():
    table = sok.DynamicVariable(2, initializer=9.0)
    sok.assign(table, KEYS, ROWS)
    return table


def weight():
    layer = Table("item", 2, initializer=9.0)
    layer.assign(KEYS, ROWS)
    return layer.variable


def trainable():
    variable = de.Variable(dim=2, initializer=9.0)
    variable.upsert(KEYS, ROWS)
    return variable.get_trainable_by_name("name")


def combined(lists, weights, combiner):
    """Returns the rows of lists of keys combined as TensorFlow's page says, in NumPy."""
    out = np.zeros((len(lists), 2))
    for i, (keys, each) in enumerate(zip(lists, weights, strict=True)):
        kept = [(k, w) for k, w in zip(keys, each, strict=True) if combiner == "sum" or w > 0]
        total = sum((w * ROWS[KEYS.index(k)] for k, w in kept), np.zeros(2))
        used = np.array([w for _, w in kept])
        by = {"sum": 1.0, "mean": used.sum(), "sqrtn": np.sqrt((used**2).sum())}[combiner]
        out[i] = total / by if kept else 0
    return out


def matrices(kind, weighted):
    ids, weights = tf.ragged.constant(IDS, tf.int64), tf.ragged.constant(WEIGHTS, tf.float32)
    given = [ids, weights if weighted else None]
    return (
        given
        if kind == "ragged"
        else [None if each is None else each.to_sparse() for each in given]
    )


@pytest.mark.pairs
@pytest.mark.parametrize("make", [dynamic, weight, trainable], ids=lambda f: f.__name__)
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("kind", ["ragged", "sparse"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("combiner", ["mean", "sqrtn", "sum"])
@pytest.mark.parametrize("in_list", [False, True])
def test_every_id_is_a_key(make, function, kind, weighted, combiner, in_list, mode):
    table = make()
    ids, weights = matrices(kind, weighted)
    params = [table] if in_list else table
    rows = mode(lambda: FUNCTIONS[function](params, ids, weights, combiner=combiner))()
    ones = [[1.0] * len(keys) for keys in IDS]
    expected = combined(IDS, WEIGHTS if weighted else ones, combiner)
    np.testing.assert_allclose(rows, expected, rtol=1e-6)
    assert rows.shape == expected.shape


@pytest.mark.parametrize("function", FUNCTIONS)
def test_an_empty_row_looks_no_key_up_and_trains_none(function, mode):
    table = sok.DynamicVariable(1, initializer="ones")
    ids = tf.sparse.from_dense(tf.constant([[0, 0], [-3, 0]], tf.int64))

    @mode
    def run():
        with tf.GradientTape() as tape:
            rows = FUNCTIONS[function](table, ids, combiner="sum")
        return rows, tape.gradient(rows, table)

    rows, gradient = run()
    assert rows.numpy().tolist() == [[0.0], [1.0]]
    assert gradient.indices.numpy().tolist() == [-3]
    assert sok.export(table)[0].numpy().tolist() == [-3]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_default_key_norm_name_and_rank(function):
    table = dynamic()
    indices = [[0, 0, 0], [0, 2, 1], [1, 1, 0]]
    ids = tf.SparseTensor(indices, tf.constant([-7, 5, 2**40], tf.int64), [2, 3, 4])
    rows = FUNCTIONS[function](table, ids, default_id=-7, max_norm=1.0, name="named")
    found = {(0, 0): 0, (0, 2): 2, (1, 1): 3}
    expected = [[ROWS[found.get((i, j), 0)] for j in range(3)] for i in range(2)]
    expected /= np.linalg.norm(expected, axis=-1, keepdims=True)
    np.testing.assert_allclose(rows, expected, rtol=1e-6)


def test_no_ids_at_all(mode):
    table = dynamic()
    nothing = tf.SparseTensor(tf.zeros([0, 2], tf.int64), tf.zeros([0], tf.int64), [3, 4])
    rows = mode(lambda: tf.nn.safe_embedding_lookup_sparse(table, nothing))()
    assert rows.numpy().tolist() == [[0.0, 0.0]] * 3


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16], ids=lambda d: d.name)
def test_the_result_has_the_dtype_of_the_rows(dtype):
    table = sok.DynamicVariable(2, initializer="1.5", dtype=dtype)
    rows = tf.nn.safe_embedding_lookup_sparse(table, matrices("sparse", False)[0])
    assert rows.dtype == dtype
    assert tf.cast(rows, tf.float32).numpy()[:, 0].tolist() == [1.5, 0.0, 1.5, 1.5, 0.0]


def test_a_session_of_tf1_knows_every_id_as_a_key():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        table = sok.DynamicVariable(1, initializer="ones")
        ids = tf.compat.v1.sparse_placeholder(tf.int64, [None, None])
        rows = tf.compat.v1.nn.safe_embedding_lookup_sparse(table, ids, combiner="sum")
        session.run(tf.compat.v1.global_variables_initializer())
        given = tf.compat.v1.SparseTensorValue([[0, 0], [2, 0], [2, 1]], [-1, -2, 3], [4, 2])
        assert session.run(rows, {ids: given}).tolist() == [[1.0], [0.0], [2.0], [0.0]]


@pytest.mark.parametrize("kind", ["ragged", "sparse"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_variables_of_tensorflow_are_looked_up_as_ever(function, kind):
    dynamic()
    dense = tf.Variable(ROWS)
    ids = tf.ragged.constant([[1, -1, 3], [], [2]], tf.int64)
    ids = ids if kind == "ragged" else ids.to_sparse()
    rows = FUNCTIONS[function](dense, ids, combiner="sum")
    # TensorFlow leaves a number below 0 out.
    np.testing.assert_array_equal(rows, [ROWS[1] + ROWS[3], [0.0, 0.0], ROWS[2]])


def test_a_layer_that_looks_up_so_trains_negative_keys():
    table = sok.DynamicVariable(1, initializer="ones")
    optimizer = sok.OptimizerWrapper(keras.optimizers.SGD(0.5))
    with tf.GradientTape() as tape:
        rows = tf.nn.safe_embedding_lookup_sparse(
            table, tf.ragged.constant([[-4], [], [6]], tf.int64)
        )
        loss = tf.reduce_sum(rows)
    optimizer.apply_gradients([(tape.gradient(loss, table), table)])
    keys, rows = sok.export(table)
    assert (keys.numpy().tolist(), rows.numpy().ravel().tolist()) == ([-4, 6], [0.5, 0.5])
