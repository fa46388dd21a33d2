"""After `tf.compat.v1.disable_v2_behavior()`: there a static dimension is no number."""

import textwrap

from tests.support.own_process import run_with_tensorflow

BEFORE = """
import numpy as np
import tensorflow as tf

tf1 = tf.compat.v1
tf1.disable_v2_behavior()

import sok_lite as sok

sok.init()

def check(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-6)

def matrix(*rows):
    indices = [(i, j) for i, row in enumerate(rows) for j in range(len(row))]
    values = np.array(sum(rows, []), np.int64)
    return tf1.SparseTensorValue(np.reshape(indices, [-1, 2]), values, [len(rows), 3])
"""

KV = """
from sok_lite.kv_variable import get_kv_variable

ids = tf1.placeholder(tf.int64, [None])
batch = tf1.sparse_placeholder(tf.int64)
strings = tf1.placeholder(tf.string, [None])
parsed = tf1.parse_example(strings, {"ids": tf.io.VarLenFeature(tf.int64)})["ids"]
table = get_kv_variable("table", 2, initializer=tf1.ones_initializer())

dense = tf.nn.embedding_lookup(table, ids)
sparse = tf.nn.embedding_lookup_sparse(table, batch, None, combiner="sum")
of_parsed = tf.nn.embedding_lookup_sparse(table, parsed, None, combiner="sum")
safe = tf.nn.safe_embedding_lookup_sparse(table, parsed, combiner="sum")
ragged = tf.RaggedTensor.from_sparse(parsed)
of_ragged = tf.nn.embedding_lookup_sparse(table, ragged, None, combiner="sum")
for rows in (dense, sparse, of_parsed, safe, of_ragged):
    assert rows.shape.as_list() == [None, 2], rows
total = tf.reduce_sum(dense) + tf.reduce_sum(sparse) + tf.reduce_sum(of_parsed)
train = tf1.train.GradientDescentOptimizer(0.5).minimize(total)
saver = tf1.train.Saver()

def example(*ids):
    feature = tf.train.Feature(int64_list=tf.train.Int64List(value=ids))
    feature = {"ids": feature}
    return tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString()

feed = {ids: [7, 8, 7], batch: matrix([7], [], [9, 8]), strings: [example(5, 6, 5), example()]}
with tf1.Session() as session:
    session.run(tf1.global_variables_initializer())
    sums = session.run([dense, sparse, of_parsed, safe, of_ragged], feed)
    for rows, numbers in zip(sums, [[1, 1, 1], [1, 0, 2], [3, 0], [3, 0], [3, 0]]):
        check(rows, np.repeat(numbers, 2).reshape(-1, 2))
    session.run(train, feed)
    expected = np.repeat([0.0, 0.5, -0.5, 0.0, 0.5], 2).reshape(-1, 2)
    check(session.run(dense, {ids: [5, 6, 7, 8, 9]}), expected)
    path = saver.save(session, "saved")
    session.run(train, feed)
    saver.restore(session, path)
    check(session.run(dense, {ids: [5, 6, 7, 8, 9]}), expected)
"""

SOK = """
from sok_lite.sok import raw_ops

table = sok.DynamicVariable(2, "ones")
batch = tf1.sparse_placeholder(tf.int64)
of_known = tf1.sparse_placeholder(tf.int64, [2, 3])
values, splits = tf1.placeholder(tf.int64, [None]), tf1.placeholder(tf.int64, [None])
ragged = tf.RaggedTensor.from_row_splits(values, splits)
weights = ragged.with_values(tf1.placeholder(tf.float32, [None]))
sums = sok.lookup_sparse(
    [table] * 3, [batch, ragged, of_known], [None, weights, None], combiners=["sum"] * 3
)
assert [each.shape.as_list() for each in sums] == [[None, 2], [None, 2], [2, 2]], sums
each = [sok.all2all_dense_embedding(table, keys) for keys in (values, tf.constant([1, 4]))]
assert [rows.shape.as_list() for rows in each] == [[None, 2], [2, 2]], each
train = tf1.train.GradientDescentOptimizer(0.5)
train = sok.OptimizerWrapper(train).minimize(tf.add_n([tf.reduce_sum(some) for some in sums]))
try:
    raw_ops.dummy_var_handle(shape=[None, None])
except ValueError as error:
    assert "with a known dimension" in str(error), error
else:
    raise AssertionError("no dimension was refused")
handle = raw_ops.dummy_var_handle(shape=[None, 3])

feed = {
    batch: matrix([1, 2], []),
    of_known: matrix([3], [3]),
    values: [1, 4, 1],
    splits: [0, 1, 1, 3],
    weights.values: [1.0, 2.0, 3.0],
}
with tf1.Session() as session:
    session.run(tf1.global_variables_initializer())
    by_batch, by_splits, known = session.run(sums, feed)
    check(by_batch, [[2, 2], [0, 0]])
    check(by_splits, [[1, 1], [0, 0], [5, 5]])
    check(known, [[1, 1], [1, 1]])
    check(session.run(each[0], feed), np.ones([3, 2]))
    session.run(train, feed)
    check(session.run(each, feed)[0], np.repeat([-1.5, 0.0, -1.5], 2).reshape(-1, 2))
"""

# Rows have no rule for it: copies of it step them, and their states are found by their shapes.
OWN = """
class Heavy(tf1.train.Optimizer):
    def __init__(self):
        super().__init__(False, "Heavy")

    def _create_slots(self, variables):
        for variable in variables:
            self._zeros_slot(variable, "sum", self._name)

    def _resource_apply_dense(self, grad, variable):
        total = self.get_slot(variable, "sum").assign_add(grad)
        with tf.control_dependencies([total]):
            return variable.assign_sub(0.5 * self.get_slot(variable, "sum").read_value())

table = sok.DynamicVariable(2, "ones")
rows = tf.nn.embedding_lookup(table, tf.constant([1, 2], tf.int64))
train = sok.OptimizerWrapper(Heavy()).minimize(tf.reduce_sum(rows))
with tf1.Session() as session:
    session.run(tf1.global_variables_initializer())
    for expected in (1.0, 0.5, -0.5):
        check(session.run(rows), np.full([2, 2], expected))
        session.run(train)
"""

LOOPS = """
table = sok.DynamicVariable(2, "ones")
scale = tf1.get_variable("scale", [], initializer=tf1.constant_initializer(2.0))
keys = tf.constant([[1, 2], [3, 3]], tf.int64)

def gradients(look_up):
    def thrice(loss):
        return tf.while_loop(lambda i, _: i < 3, lambda i, sum: (i + 1, sum + loss()), (0, 0.0))[1]

    before = look_up()
    outside = tf.gradients(thrice(lambda: scale * tf.reduce_sum(before)), [table, scale])
    within = tf.gradients(thrice(lambda: scale * tf.reduce_sum(look_up())), [table, scale])
    chosen = tf.cond(scale > 0, lambda: scale * tf.reduce_sum(look_up()), lambda: 0.0 * scale)
    chosen = tf.gradients(chosen, [table, scale])
    by_rows = [tf.reduce_sum(each[0].values) for each in (outside, chosen)]
    return [*by_rows, outside[1], within[1], chosen[1]]

found = [
    gradients(lambda: tf.nn.embedding_lookup(table, keys)),
    gradients(lambda: sok.lookup_sparse(table, keys, combiners="sum")),
]
with tf1.Session() as session:
    session.run(tf1.global_variables_initializer())
    # Of 8 numbers, each of which is 1, times a scale of 2.
    check(session.run(found), [[48.0, 16.0, 24.0, 24.0, 8.0]] * 2)
"""


def test_programs_of_tf1(tmp_path):
    program = BEFORE
    for each in (KV, SOK, OWN, LOOPS):
        program += "with tf.Graph().as_default():\n" + textwrap.indent(each, "    ")
    run_with_tensorflow(program, tmp_path)
