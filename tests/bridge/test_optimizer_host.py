"""What the host is told of the keys of a gradient, and what it counts."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite.bridge.optimizers import host as optimizer_host

pytestmark = pytest.mark.usefixtures("initialised")

KEYS = [[5, 6, 5], [6, 7, 8]]
# Of what the loss is the sum: a row's gradient is how often its key comes.
ROWS = {5: 2, 6: 2, 7: 1, 8: 1}


def looked_up(tables):
    keys = tf.ragged.constant(KEYS, dtype=tf.int64)
    rows = sok.lookup_sparse(tables, [keys] * len(tables), combiners="sum")
    return tf.add_n([tf.reduce_sum(each) for each in rows])


def halved(grad):
    return tf.IndexedSlices(grad.values * 0.5, grad.indices, grad.dense_shape)


def filtered(grad):
    keep = grad.indices > 6
    values, keys = tf.boolean_mask(grad.values, keep), tf.boolean_mask(grad.indices, keep)
    return tf.IndexedSlices(values, keys, grad.dense_shape)


def doubled(grad):
    values, keys = tf.concat([grad.values] * 2, 0), tf.concat([grad.indices] * 2, 0)
    return tf.IndexedSlices(values, keys, grad.dense_shape)


def clipped(grad):
    return tf.clip_by_norm(grad, 1e9)


LIMITS = ("clipvalue", "clipnorm", "global_clipnorm")  # of an optimizer
# What is done to a gradient, whether its keys are then known, and how rows move.
CASES = {
    "as it is": (lambda grad: grad, True, ROWS),
    "halved": (halved, True, {key: n / 2 for key, n in ROWS.items()}),
    "clipped": (clipped, True, ROWS),
    **{limit: (lambda grad: grad, True, ROWS) for limit in LIMITS},
    "filtered": (filtered, False, {5: 0, 6: 0, 7: 1, 8: 1}),
    "doubled": (doubled, False, {key: n * 2 for key, n in ROWS.items()}),
}


@pytest.fixture
def promises(monkeypatch):
    """Of each step taken: of each table, whether its keys are said to be those of a gradient."""
    seen = []
    make_step = optimizer_host.make_step

    def noted(updates, options):
        seen.append([update.of_gradient for update in updates])
        return make_step(updates, options)

    monkeypatch.setattr(optimizer_host, "make_step", noted)
    return seen


def check_rows(table, before, steps):
    keys = list(steps)
    after = tf.nn.embedding_lookup(table, tf.constant(keys, table.key_type)).numpy()
    moved = np.array([[steps[key]] * table.dimension for key in keys])
    np.testing.assert_allclose(before - after, moved, atol=1e-5)


def rows_before(table):
    return tf.nn.embedding_lookup(table, tf.constant(list(ROWS), table.key_type)).numpy()


@pytest.mark.cases("case")
@pytest.mark.parametrize("key_type", [tf.int64, tf.int32, tf.uint64], ids=lambda t: t.name)
@pytest.mark.parametrize("case", CASES)
def test_the_keys_of_a_gradient_are_known_as_long_as_they_are_the_same_tensor(
    mode, promises, case, key_type
):
    change, promised, steps = CASES[case]
    if case == "filtered" and key_type == tf.uint64:
        pytest.skip("TensorFlow compares no uint64")
    tables = [sok.DynamicVariable(dim, key_type=key_type) for dim in (3, 4)]
    before = [rows_before(table) for table in tables]
    # Limits that nothing reaches: clipping leaves keys alone.
    limits = {case: 1e9} if case in LIMITS else {}
    optimizer = sok.OptimizerWrapper(keras.optimizers.SGD(1.0, **limits))

    def train():
        with tf.GradientTape() as tape:
            loss = looked_up(tables)
        grads = tape.gradient(loss, tables)
        optimizer.apply_gradients([(change(grads[0]), tables[0]), (grads[1], tables[1])])

    mode(train)()
    assert promises == [[promised, True]]
    check_rows(tables[0], before[0], steps)
    check_rows(tables[1], before[1], ROWS)


def test_keys_that_leave_a_function_are_looked_at(promises):
    """They are another tensor by then, of which nothing is known."""
    tables = [sok.DynamicVariable(3), sok.DynamicVariable(4)]
    before = [rows_before(table) for table in tables]
    optimizer = sok.OptimizerWrapper(keras.optimizers.SGD(1.0))
    function = tf.function(lambda: looked_up(tables))
    with tf.GradientTape() as tape:
        loss = function()
    optimizer.apply_gradients(zip(tape.gradient(loss, tables), tables, strict=True))
    assert promises == [[False, False]]
    for table, rows in zip(tables, before, strict=True):
        check_rows(table, rows, ROWS)


def by_itself(table):
    return tf.reduce_sum(tf.nn.embedding_lookup(table, tf.constant([5, 6, 5, 6, 7, 8], tf.int64)))


@pytest.mark.parametrize("how", ["by itself", "twice", "another table"])
def test_other_keys_may_repeat(mode, promises, how):
    """Those that a program looked up by itself, in two lookups, or in a table of another type."""
    table = sok.DynamicVariable(3)
    other = sok.DynamicVariable(3, key_type=tf.int32) if how == "another table" else table
    before = rows_before(other)
    optimizer = sok.SGD(1.0)

    def train():
        with tf.GradientTape() as tape:
            loss = by_itself(table) if how == "by itself" else looked_up([table])
            loss = loss + looked_up([table]) if how == "twice" else loss
        optimizer.apply_gradients([(tape.gradient(loss, table), other)])

    mode(train)()
    assert promises == [[False]]
    check_rows(other, before, {key: (1 + (how == "twice")) * n for key, n in ROWS.items()})


def test_keys_that_a_session_feeds_may_repeat():
    """A gradient of a TF1 graph can be given other keys than its own when it is applied."""
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        table = sok.DynamicVariable(dimension=2, initializer="0", name="fed")
        splits = tf.constant([0, 1, 2, 3], tf.int64)
        ids = tf.RaggedTensor.from_row_splits(tf.constant([1, 2, 3], tf.int64), splits)
        rows = sok.lookup_sparse(table, ids, combiners="sum")
        (gradient,) = tf.gradients(tf.reduce_sum(rows), [table])
        optimizer = sok.OptimizerWrapper(v1.train.AdagradOptimizer(1.0))
        train = optimizer.apply_gradients([(gradient, table)])
        session.run(v1.global_variables_initializer())
        session.run(rows)
        fed = {gradient.indices: np.array([1, 1, 1]), gradient.values: np.ones((3, 2), np.float32)}
        session.run(train, fed)
        (row,) = session.run(tf.nn.embedding_lookup(table, tf.constant([1], tf.int64)))
    # One step of Adagrad, whose sums begin with 0.1, by the sum of the three.
    np.testing.assert_allclose(row, np.full(2, -3 / np.sqrt(0.1 + 9)), rtol=1e-6)
