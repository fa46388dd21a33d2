"""sok.all2all_dense_embedding on one rank, against tf.gather of all rows."""

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok

pytestmark = pytest.mark.usefixtures("initialised")

DIM = 3
ROWS = np.random.default_rng(0).normal(size=(40, DIM)).astype(np.float32)


def new_table(**options):
    table = sok.DynamicVariable(DIM, name="table", **options)
    sok.assign(table, np.arange(len(ROWS)), tf.cast(ROWS, table.dtype))
    return table


@pytest.mark.parametrize("mode_of_table", [None, "localized:0"])
@pytest.mark.parametrize("n", [0, 1, 33, 1000])
@pytest.mark.parametrize("dtype", [tf.int32, tf.int64], ids=lambda d: d.name)
def test_rows_and_gradients_are_those_of_a_gather(mode, n, dtype, mode_of_table):
    table = new_table(mode=mode_of_table)
    rng = np.random.default_rng(n)
    keys = tf.constant(rng.integers(0, len(ROWS), n), dtype)
    out_grads = rng.normal(size=(n, DIM)).astype(np.float32)

    def step(keys):
        with tf.GradientTape() as tape:
            rows = sok.all2all_dense_embedding(table, keys)
            loss = tf.reduce_sum(rows * out_grads)
        return rows, tape.gradient(loss, table)

    rows, gradient = mode(step)(keys)
    assert rows.shape == (n, DIM)
    np.testing.assert_array_equal(rows, tf.gather(ROWS, keys))
    found = np.zeros_like(ROWS)
    np.add.at(found, gradient.indices.numpy(), gradient.values.numpy())
    dense = tf.Variable(ROWS)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.gather(dense, keys) * out_grads)
    expected = tf.convert_to_tensor(tape.gradient(loss, dense))
    # Sums of some 25 numbers, in another order.
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


def test_the_number_of_keys_may_change_from_call_to_call():
    table = new_table()
    traces = []

    @tf.function(input_signature=[tf.TensorSpec(None, tf.int64)])
    def look_up(keys):
        traces.append(keys.shape)
        rows = sok.all2all_dense_embedding(table, keys)
        assert rows.shape.as_list() == [None, DIM]
        return rows

    for n in (4, 0, 7):
        np.testing.assert_array_equal(look_up(tf.range(n, dtype=tf.int64)), ROWS[:n])
    assert len(traces) == 1


def test_new_keys_are_inserted():
    table = sok.DynamicVariable(DIM, "7", key_type=tf.int32)
    rows = sok.all2all_dense_embedding(table, [5, -1, 5])
    np.testing.assert_array_equal(rows, np.full((3, DIM), 7.0))
    np.testing.assert_array_equal(sok.export(table)[0], [-1, 5])
    assert sok.all2all_dense_embedding(table, []).shape == (0, DIM)


def test_rows_have_the_dtype_of_the_table():
    table = new_table(dtype=tf.float16)
    rows = sok.lookup.all2all_dense_embedding(table, tf.constant([3, 4]))
    assert rows.dtype == tf.float16
    np.testing.assert_array_equal(rows, ROWS[3:5].astype(np.float16))


def test_a_session_looks_up():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        table = sok.DynamicVariable(DIM, "2", name="in_a_graph")
        keys = tf.compat.v1.placeholder(tf.int64, [None])
        rows = sok.all2all_dense_embedding(table, keys)
        (gradient,) = tf.compat.v1.gradients(tf.reduce_sum(rows), [table])
        session.run(tf.compat.v1.global_variables_initializer())
        out, indices = session.run([rows, gradient.indices], {keys: [4, 4, 9]})
    np.testing.assert_array_equal(out, np.full((3, DIM), 2.0))
    assert sorted(indices) == [4, 9]


@pytest.mark.parametrize(
    ("indices", "error", "text"),
    [
        ([[1, 2]], ValueError, r"shape \(n,\).*Received: shape \(1, 2\).*tf.reshape"),
        (3, ValueError, r"shape \(n,\).*Received: shape \(\)"),
        ([1.0], TypeError, "must be integers.*Received: float"),
        (["a"], TypeError, "must be integers"),
        (tf.ragged.constant([[1]]), TypeError, "dense tensor of keys.*RaggedTensor"),
        (tf.sparse.from_dense([[1]]), TypeError, "dense tensor of keys.*SparseTensor"),
    ],
)
def test_keys_of_another_kind_are_refused(indices, error, text):
    table = sok.DynamicVariable(DIM)
    with pytest.raises(error, match=text):
        sok.all2all_dense_embedding(table, indices)
    assert table.table.size == 0


def test_keys_of_an_unknown_shape_are_checked_when_they_come():
    table = sok.DynamicVariable(DIM)

    @tf.function(input_signature=[tf.TensorSpec(None, tf.int64)])
    def look_up(keys):
        return sok.all2all_dense_embedding(table, keys)

    with pytest.raises(tf.errors.InvalidArgumentError):
        look_up(tf.constant([[1]], tf.int64))
    assert table.table.size == 0


def test_only_one_variable_of_a_table_is_taken():
    table = sok.DynamicVariable(DIM)
    with pytest.raises(TypeError, match="takes one variable.*a list of 2.*sok.lookup_sparse"):
        sok.all2all_dense_embedding([table, table], [1])
    with pytest.raises(NotImplementedError, match="is not supported in lookup"):
        sok.all2all_dense_embedding(tf.Variable(ROWS), [1])


def test_a_key_that_does_not_fit_is_refused():
    table = sok.DynamicVariable(DIM, key_type=tf.int32)
    with pytest.raises(ValueError, match=str(2**40)):
        sok.all2all_dense_embedding(table, [2**40])


def test_before_init_it_says_so(two_launched):
    with pytest.raises(RuntimeError, match="Did you forget to call sok.init"):
        sok.all2all_dense_embedding(sok.DynamicVariable(DIM), [1])
