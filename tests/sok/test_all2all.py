"""What sok.all2all_dense_embedding takes; rows and gradients: tests/bridge/test_lookup.py."""

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok

pytestmark = pytest.mark.usefixtures("initialised")

DIM = 3


def test_new_keys_are_inserted_and_rows_have_the_dtype_of_the_table():
    table = sok.DynamicVariable(DIM, "7", key_type=tf.int32, dtype=tf.float16)
    rows = sok.lookup.all2all_dense_embedding(table, [5, -1, 5])
    assert rows.dtype == tf.float16
    np.testing.assert_array_equal(rows, np.full((3, DIM), 7.0))
    np.testing.assert_array_equal(sok.export(table)[0], [-1, 5])
    assert sok.all2all_dense_embedding(table, []).shape == (0, DIM)


def test_the_number_of_keys_may_change_from_call_to_call():
    table, traces = sok.DynamicVariable(DIM, "7"), []

    @tf.function(input_signature=[tf.TensorSpec(None, tf.int64)])
    def look_up(keys):
        traces.append(keys.shape)
        rows = sok.all2all_dense_embedding(table, keys)
        assert rows.shape.as_list() == [None, DIM]
        return rows

    for n in (4, 0, 7):
        np.testing.assert_array_equal(look_up(tf.range(n, dtype=tf.int64)), np.full((n, DIM), 7.0))
    assert len(traces) == 1
    with pytest.raises(tf.errors.InvalidArgumentError):
        look_up(tf.constant([[99]], tf.int64))
    assert table.table.size == 7


@pytest.mark.cases("error")
@pytest.mark.parametrize(
    ("indices", "error", "text"),
    [
        ([[1, 2]], ValueError, r"shape \(n,\).*Received: shape \(1, 2\).*tf.reshape"),
        (3, ValueError, r"shape \(n,\).*Received: shape \(\)"),
        ([1.0], TypeError, "must be integers.*Received: float"),
        (["a"], TypeError, "must be integers"),
        (tf.ragged.constant([[1]]), TypeError, "dense tensor of keys.*RaggedTensor"),
        (tf.sparse.from_dense([[1]]), TypeError, "dense tensor of keys.*SparseTensor"),
        ([2**40], ValueError, str(2**40)),
    ],
)
def test_keys_of_another_kind_are_refused(indices, error, text):
    table = sok.DynamicVariable(DIM, key_type=tf.int32)
    with pytest.raises(error, match=text):
        sok.all2all_dense_embedding(table, indices)
    assert table.table.size == 0


def test_only_one_variable_of_a_table_is_taken():
    table = sok.DynamicVariable(DIM)
    with pytest.raises(TypeError, match="takes one variable.*a list of 2.*sok.lookup_sparse"):
        sok.all2all_dense_embedding([table, table], [1])
    with pytest.raises(NotImplementedError, match="is not supported in lookup"):
        sok.all2all_dense_embedding(tf.Variable(tf.ones([4, DIM])), [1])


def test_before_init_it_says_so(two_launched):
    with pytest.raises(RuntimeError, match="Did you forget to call sok.init"):
        sok.all2all_dense_embedding(sok.DynamicVariable(DIM), [1])
