"""TF1 graphs and sessions: lookups, gradients, optimizers, export and assign as operations."""

import contextlib

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite import dynamic_embedding as de
from sok_lite.bridge.tf_private import eager_mode

v1 = tf.compat.v1

pytestmark = pytest.mark.usefixtures("initialised")


@pytest.fixture
def session():
    with tf.Graph().as_default(), v1.Session() as session:
        yield session


def adam(family):
    if family == "v1":
        return v1.train.AdamOptimizer(0.1)
    return pytest.importorskip("tf_keras").optimizers.legacy.Adam(0.1)


@pytest.mark.parametrize("family", ["v1", "legacy"])
@pytest.mark.parametrize("with_dense", [False, True], ids=["rows only", "with dense"])
def test_adam_counts_its_steps(session, with_dense, family):
    table = sok.DynamicVariable(2, initializer="1")
    dense = v1.get_variable("dense", [3, 2], initializer=v1.ones_initializer(), use_resource=True)
    weights = tf.constant([[1.0, 2.0], [3.0, -1.0], [0.5, 0.1]])
    rows = tf.nn.embedding_lookup(table, tf.constant([1, 2, 3], tf.int64))
    (slices,) = v1.gradients(tf.reduce_sum(tf.sin(rows) * weights), [table])
    (gradient,) = v1.gradients(tf.reduce_sum(tf.sin(dense) * weights), [dense])
    optimizer = sok.OptimizerWrapper(adam(family))
    pairs = [(slices, table), (gradient, dense)]
    global_step = v1.train.get_or_create_global_step()
    counted = {"global_step": global_step} if family == "v1" else {}
    train = optimizer.apply_gradients(pairs[: 1 + with_dense], **counted)
    if not with_dense:
        train = tf.group(train, adam(family).apply_gradients(pairs[1:]))
    session.run(v1.global_variables_initializer())
    for _ in range(4):
        session.run(train)
    np.testing.assert_allclose(*session.run([rows, dense]), rtol=1e-5, atol=5e-6)
    assert session.run(optimizer.iterations) == 4
    assert session.run(global_step) == 4 * len(counted)


def test_export_assign_scatter_and_size(session):
    table = sok.DynamicVariable(2)
    assign = sok.assign(table, tf.constant([3, 1]), tf.constant([[3.0, 3.0], [1.0, 1.0]]))
    delta = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([3], tf.int64))
    scatter = table.scatter_add(delta)
    exported, size = sok.export(table), table.size
    assert isinstance(assign, tf.Operation)
    session.run(v1.global_variables_initializer())
    session.run(assign)
    session.run(scatter)
    keys, rows = session.run(exported)
    np.testing.assert_array_equal(keys, [1, 3])
    np.testing.assert_array_equal(rows, [[1.0, 1.0], [4.0, 4.0]])
    np.testing.assert_array_equal(session.run(size), [2, 2])


def test_variables_are_in_the_collections(session):
    table = sok.DynamicVariable(2, name="table")
    frozen = sok.DynamicVariable(2, name="table", trainable=False)
    assert [v.name for v in v1.global_variables()] == ["table:0", "table_1:0"]
    assert v1.trainable_variables() == [table]
    session.run(v1.global_variables_initializer())
    assert session.run(v1.report_uninitialized_variables()).size == 0
    assert frozen.table is not table.table


def test_running_the_variable_itself_gives_no_row_of_it(session):
    table = sok.DynamicVariable(2, name="table", initializer="ones")
    other = de.get_variable("other", dim=2)
    session.run(v1.global_variables_initializer())
    session.run(tf.nn.embedding_lookup(table, [7]))
    np.testing.assert_array_equal(session.run(table), np.zeros((1, 2)))  # as SOK does
    with pytest.raises(tf.errors.InvalidArgumentError, match="has no dense value"):
        session.run(other.rows)


def test_a_tf1_saver_saves_dense_variables_and_refuses_tables(session, tmp_path):
    refused = "cannot save '{}:0'.*train.Checkpoint"
    with eager_mode(), pytest.raises(NotImplementedError, match=refused.format("eager")):
        saver = v1.train.Saver([sok.DynamicVariable(2, name="eager")])
        saver.save(None, str(tmp_path / "c"))
    table = sok.DynamicVariable(2, name="table")
    dense = v1.get_variable("dense", [2], initializer=v1.ones_initializer(), use_resource=True)
    session.run(v1.global_variables_initializer())
    for given in (None, [table, dense], {"a": table}):
        with pytest.raises(NotImplementedError, match=refused.format("table")):
            v1.train.Saver(given)
    saver = v1.train.Saver(sok.filter_variables([table, dense])[1])
    path = saver.save(session, str(tmp_path / "dense"))
    session.run(dense.assign([5.0, 5.0]))
    saver.restore(session, path)
    np.testing.assert_array_equal(session.run(dense), [1.0, 1.0])


@pytest.mark.parametrize("of", ["table", "dense", "both"])
def test_a_step_in_a_branch_is_an_operation(session, of):
    table = sok.DynamicVariable(2, initializer="1", name="table")
    dense = v1.get_variable("dense", [2], initializer=v1.ones_initializer(), use_resource=True)
    rows = tf.nn.embedding_lookup(table, tf.constant([7], tf.int64))
    variables = {"table": [table], "dense": [dense], "both": [table, dense]}[of]
    loss = tf.reduce_sum(rows) + tf.reduce_sum(dense)
    pairs = list(zip(v1.gradients(loss, variables), variables, strict=True))
    optimizer = sok.OptimizerWrapper(v1.train.GradientDescentOptimizer(0.25))
    is_taken = v1.placeholder(tf.bool, [])
    were_v2 = v1.control_flow_v2_enabled()
    v1.enable_control_flow_v2()
    try:
        train = tf.cond(is_taken, lambda: optimizer.apply_gradients(pairs), tf.no_op)
    finally:
        if not were_v2:
            v1.disable_control_flow_v2()
    session.run(v1.global_variables_initializer())
    session.run(rows)
    for taken, steps in [(True, 1), (False, 1), (True, 2)]:
        session.run(train, {is_taken: taken})
        values = session.run({"table": rows[0], "dense": dense})
        for kind, value in values.items():
            expected = 1 - 0.25 * steps if of in (kind, "both") else 1.0
            np.testing.assert_array_equal(value, np.full(2, expected))


@pytest.mark.parametrize(
    ("made", "used"),
    [
        ("eager mode", "a graph of TF1"),
        ("a graph of TF1", "eager mode"),
        ("a graph of TF1", "another graph"),
    ],
)
def test_a_wrapper_takes_its_steps_where_it_was_made(made, used):
    def place(where):
        return contextlib.nullcontext() if where == "eager mode" else tf.Graph().as_default()

    with place(made):
        optimizer = sok.OptimizerWrapper(v1.train.GradientDescentOptimizer(0.1))
    with place(used):
        table = sok.DynamicVariable(1, initializer="0")
        slices = tf.IndexedSlices(tf.ones([1, 1]), tf.constant([1], tf.int64))
        with pytest.raises(RuntimeError, match=f"made in {made}.*a step in {used}"):
            optimizer.apply_gradients([(slices, table)])
