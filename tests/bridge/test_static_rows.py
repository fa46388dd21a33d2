"""to_static and to_dynamic: rows of some keys as a dense variable, against a plain tf.Variable."""

import contextlib
import functools
import gc
import importlib.util
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from tests.support.tripwire import Tripwire

v1 = tf.compat.v1

pytestmark = pytest.mark.usefixtures("initialised")

DIM = 3
SMALL = {"init_capacity": 128, "max_capacity": 128}
KINDS = pytest.mark.parametrize("kind", ["hbm", "hybrid"])


def new_table(kind="hbm", num_keys=20, **options):
    """A table in which key k has the row (k, k + 0.25, k + 0.5)."""
    options = (SMALL if kind == "hybrid" else {}) | options
    table = sok.DynamicVariable(DIM, "0", kind, "table", **options)
    sok.assign(table, np.arange(num_keys), tf.cast(rows_of(np.arange(num_keys)), table.dtype))
    return table


def rows_of(keys):
    return (np.asarray(keys)[:, None] + np.arange(DIM) / 4).astype(np.float32)


def held(table):
    keys, rows = sok.export(table)
    return dict(zip(keys.numpy().tolist(), tf.cast(rows, tf.float32).numpy().tolist(), strict=True))


@KINDS
@pytest.mark.parametrize("n", [0, 1, 33])
def test_rows_go_there_and_back(kind, n):
    table = new_table(kind)
    keys = np.random.default_rng(n).permutation(40)[:n]
    expected = held(table) | {int(key): [0.0] * DIM for key in keys if key >= 20}
    table.to_static(keys)
    assert table.is_static() and table.shape == (n, DIM)
    np.testing.assert_array_equal(table.size, [n, DIM])
    np.testing.assert_array_equal(table.indices, keys)
    found = np.array([expected[int(key)] for key in keys], "f4").reshape(-1, DIM)
    np.testing.assert_array_equal(table.numpy(), found)
    assert table.to_dynamic() is None
    assert table._unique_id != new_table()._unique_id
    assert not table.is_static() and table.indices is None
    assert table.shape.as_list() == [None, DIM]
    assert held(table) == expected


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16], ids=lambda d: d.name)
@pytest.mark.parametrize("key_type", [tf.int32, tf.uint64], ids=lambda d: d.name)
def test_rows_and_keys_of_other_types(dtype, key_type, mode):
    table = new_table(dtype=dtype, key_type=key_type)
    top = key_type.max
    keys = tf.constant(np.array([7, top], key_type.as_numpy_dtype))

    @mode
    def change():
        table.to_static(keys)
        assert table.value().dtype == dtype
        table.assign_add(tf.constant([[1.0] * DIM, [2.0] * DIM], dtype))
        table.to_dynamic()

    change()
    assert held(table)[7] == [8.0, 8.25, 8.5] and held(table)[top] == [2.0] * DIM


USES = {
    "value": lambda v: v.value(),
    "read_value": lambda v: v.read_value(),
    "operator": lambda v: v * 2.0 + tf.ones([1, DIM]),
    "of tf": lambda v: tf.reduce_sum(tf.square(v), 1),
    "slice": lambda v: v[1:, 0],
    "gather": lambda v: tf.gather(v, [[2, 0], [0, 0]]),
    "gather_nd": lambda v: v.gather_nd([[1, 2], [0, 0]]),
    "sparse_read": lambda v: v.sparse_read(tf.constant([2, 2], tf.int64)),
    "assign": lambda v: v.assign(tf.ones([3, DIM])),
    "assign_add": lambda v: v.assign_add(tf.ones([3, DIM])),
    "assign_sub": lambda v: v.assign_sub(tf.ones([3, DIM])),
    "scatter_add": lambda v: v.scatter_add(slices()),
    "scatter_sub": lambda v: v.scatter_sub(slices()),
    "scatter_update": lambda v: v.scatter_update(slices()),
    "scatter_max": lambda v: v.scatter_max(slices()),
    "scatter_min": lambda v: v.scatter_min(slices()),
    "scatter_mul": lambda v: v.scatter_mul(slices()),
    "scatter_div": lambda v: v.scatter_div(slices()),
    "scatter_nd_add": lambda v: v.scatter_nd_add([[0, 1]], [2.0]),
    "scatter_nd_sub": lambda v: v.scatter_nd_sub([[0, 1]], [2.0]),
    "scatter_nd_update": lambda v: v.scatter_nd_update([[0, 1]], [2.0]),
    "slice assign": lambda v: v[1].assign([9.0] * DIM),
}


def slices():
    return tf.IndexedSlices(tf.constant([[2.0] * DIM, [5.0] * DIM]), tf.constant([2, 0]))


@pytest.mark.parametrize("use", USES)
def test_a_static_variable_does_what_a_dense_one_does(use, mode):
    table, dense = new_table(), tf.Variable(rows_of([4, 11, 2]))

    @mode
    def of_table():
        table.to_static([4, 11, 2])
        result = USES[use](table)
        after = table.value()
        if isinstance(result, tf.Variable):
            result = result.value()
        table.to_dynamic()
        return result, after

    result, after = of_table()
    np.testing.assert_array_equal(result, USES[use](dense))
    np.testing.assert_array_equal(after, dense)
    np.testing.assert_array_equal(tf.nn.embedding_lookup(table, [4, 11, 2]), dense)


def test_numpy_reads_it():
    table = sok.DynamicVariable(1, "3.75")
    table.to_static([8])
    np.testing.assert_array_equal(np.asarray(table), [[3.75]])


OPTIMIZERS = {
    "keras sgd": lambda: keras.optimizers.SGD(0.1),
    "keras adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "legacy sgd": lambda: legacy().SGD(0.1),
    "legacy momentum": lambda: legacy().SGD(0.1, 0.9),
    "legacy adagrad": lambda: legacy().Adagrad(0.1),
    "legacy adam": lambda: legacy().Adam(0.1),
    "v1 sgd": lambda: v1.train.GradientDescentOptimizer(0.1),
    "v1 adagrad": lambda: v1.train.AdagradOptimizer(0.1),
}


def legacy():
    if importlib.util.find_spec("tf_keras") is None:
        pytest.skip("no tf_keras")
    return importlib.import_module("tf_keras").optimizers.legacy


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_optimizer_of_tensorflow_trains_the_rows(optimizer):
    table, dense = new_table(), tf.Variable(rows_of([4, 11, 2]))
    weights = tf.constant([[1.0], [-2.0]])
    expected = held(table)
    table.to_static([4, 11, 2])
    for variable in (table, dense):
        inner = OPTIMIZERS[optimizer]()
        for _ in range(3):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.gather(variable, [2, 0]) * weights)
            inner.apply_gradients([(tape.gradient(loss, variable), variable)])
    expected |= dict(zip([4, 11, 2], dense.numpy().tolist(), strict=True))
    table.to_dynamic()
    assert held(table) == expected
    assert held(table)[4] != rows_of([4])[0].tolist()


def test_a_function_trains_in_each_call():
    table = new_table()

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def step(ids):
        keys, rows = tf.unique(ids)
        table.to_static(keys)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, rows))
        gradient = tape.gradient(loss, table)
        table.scatter_sub(tf.IndexedSlices(0.5 * gradient.values, gradient.indices))
        table.to_dynamic()
        return loss

    expected = held(table)
    for ids in ([3, 3, 5], [], [30, 5]):
        assert float(step(tf.constant(ids, tf.int64))) == sum(
            sum(expected.setdefault(key, [0.0] * DIM)) for key in ids
        )
        for key in ids:
            expected[key] = [value - 0.5 for value in expected[key]]
        assert held(table) == expected and not table.is_static()


def test_a_session_trains():
    with tf.Graph().as_default(), v1.Session() as session:
        table = sok.DynamicVariable(DIM, "2", name="table")
        keys = v1.placeholder(tf.int64, [None])
        with tf.control_dependencies([table.to_static(keys)]):
            gradient = tf.IndexedSlices(tf.ones([2, DIM]), tf.constant([1, 1]))
            train = v1.train.GradientDescentOptimizer(0.25).apply_gradients([(gradient, table)])
        with tf.control_dependencies([train]):
            done = table.to_dynamic()
        indices, values = sok.export(table)
        assert not [v for v in v1.trainable_variables() if v is not table]
        session.run(v1.global_variables_initializer())
        for _ in range(2):
            session.run(done, {keys: [7, 8]})
        found_keys, found = session.run([indices, values])
    np.testing.assert_array_equal(found_keys, [7, 8])
    np.testing.assert_array_equal(found[:, 0], [2.0, 1.0])


@KINDS
def test_keys_that_were_removed_meanwhile_are_inserted_again(kind):
    table = new_table(kind)
    table.to_static([4, 30])
    table.assign_add(tf.ones([2, DIM]))
    table._table.erase(np.array([4, 30]))
    table.to_dynamic()
    assert held(table)[4] == [5.0, 5.25, 5.5] and held(table)[30] == [1.0] * DIM


def test_keys_that_were_evicted_meanwhile_are_inserted_again():
    table = new_table("hybrid")
    table.to_static([4, 5])
    table.assign_add(tf.ones([2, DIM]))
    table._table.lookup(np.arange(1000, 1128))
    table._table.lookup(np.arange(2000, 2128))
    assert not table._table.contains(np.array([4, 5])).any()
    table.to_dynamic()
    np.testing.assert_array_equal(tf.nn.embedding_lookup(table, [4, 5]), rows_of([5, 6]))


REFUSED_WHILE_STATIC = {
    "embedding_lookup": lambda t: tf.nn.embedding_lookup(t, [1]),
    "sparse_read for inference": lambda t: t.sparse_read([1], training=False),
    "lookup_sparse": lambda t: sok.lookup_sparse(t, tf.ragged.constant([[1]])),
    "all2all": lambda t: sok.all2all_dense_embedding(t, [1]),
    "read and evict": lambda t: sok.sparse_read_and_evict(t, [1]),
    "export": lambda t: sok.export(t),
    "assign": lambda t: sok.assign(t, [1], tf.ones([1, DIM])),
    "erase": lambda t: t.erase([1]),
    "contains": lambda t: t.contains([1]),
    "OptimizerWrapper": lambda t: wrapper().apply_gradients([(slices(), t)]),
    "SGD": lambda t: sgd().apply_gradients([(slices(), t)]),
}


@functools.cache
def wrapper():
    return sok.OptimizerWrapper(keras.optimizers.SGD(0.1))


@functools.cache
def sgd():
    return sok.SGD(0.1)


@pytest.mark.parametrize("use", REFUSED_WHILE_STATIC)
def test_what_goes_by_key_is_refused_meanwhile(use, mode):
    table = new_table()
    expected = held(table)
    wrapper(), sgd()  # a function must not make variables of theirs

    @mode
    def attempt():
        table.to_static([1, 0])
        try:
            with pytest.raises(RuntimeError, match=r"'table:0' is in static mode.*to_dynamic\(\)"):
                REFUSED_WHILE_STATIC[use](table)
        finally:
            table.to_dynamic()

    attempt()
    assert held(table) == expected


def test_a_function_that_was_traced_before_is_refused_meanwhile():
    table = new_table()
    look_up = tf.function(lambda: tf.nn.embedding_lookup(table, [1]))
    np.testing.assert_array_equal(look_up(), rows_of([1]))
    table.to_static([1])
    with pytest.raises(tf.errors.OpError, match="is in static mode"):
        look_up()
    table.to_dynamic()
    np.testing.assert_array_equal(look_up(), rows_of([1]))


def test_a_function_that_read_static_rows_fails_when_they_are_gone():
    table = new_table()
    table.to_static([1])
    read = tf.function(lambda: tf.gather(table, [0]))
    np.testing.assert_array_equal(read(), rows_of([1]))
    table.to_dynamic()
    with pytest.raises(tf.errors.InvalidArgumentError, match="indices"):
        read()


def test_a_checkpoint_is_refused_meanwhile(tmp_path):
    table = new_table()
    table.to_static([1])
    with pytest.raises(RuntimeError, match="is in static mode"):
        tf.train.Checkpoint(table=table).save(str(tmp_path / "checkpoint"))


def test_a_mode_is_entered_and_left_once(mode):
    table = new_table()
    with pytest.raises(RuntimeError, match=r"to_dynamic\(\) must be called in static mode\."):
        mode(table.to_dynamic)()

    @mode
    def twice():
        table.to_static([1])
        with pytest.raises(RuntimeError, match=r"to_static\(\) must be called in dynamic mode\."):
            table.to_static([2])
        np.testing.assert_array_equal(table.indices.shape, [1])
        table.to_dynamic()

    twice()


def test_a_mode_of_eager_mode_is_not_left_in_a_function():
    table = new_table()
    table.to_static([1])
    with pytest.raises(RuntimeError, match="both in eager mode or both in the same tf.function"):
        tf.function(table.to_dynamic)()
    table.to_dynamic()


@pytest.mark.parametrize(
    ("keys", "error", "text"),
    [
        ([3, 4, 3], ValueError, "takes each key once.*3 keys, of which 2 are distinct.*tf.unique"),
        ([[3]], ValueError, r"keys of shape \(n,\).*Received: shape \(1, 1\)"),
        ([0.5], TypeError, "must be integers"),
        ([2**40], ValueError, str(2**40)),
    ],
)
def test_keys_that_do_not_fit_are_refused(keys, error, text, mode):
    table = new_table(key_type=tf.int32)
    before = held(table)
    in_graph = (tf.errors.InvalidArgumentError, error)
    with pytest.raises(in_graph, match=text):
        mode(lambda: [table.to_static(keys), table.to_dynamic()][:0])()
    assert not table.is_static() and held(table) == before


def test_a_trace_that_fails_leaves_no_mode_behind():
    table = new_table()

    @tf.function
    def fail():
        table.to_static([1])
        raise ZeroDivisionError("here")

    with pytest.raises(Exception, match="ZeroDivisionError"):
        fail()
    assert not table.is_static()
    np.testing.assert_array_equal(tf.nn.embedding_lookup(table, [1]), rows_of([1]))


def test_an_interrupt_leaves_one_mode_or_the_other_and_loses_nothing():
    table = new_table(num_keys=3)

    def rounds():
        table.to_static([1, 2])
        table.to_dynamic()

    whole = Tripwire()
    whole.run(rounds)
    assert whole.count > 100
    for at in range(1, whole.count + 1):
        with contextlib.suppress(KeyboardInterrupt):
            Tripwire(at, KeyboardInterrupt).run(rounds)
        if table.is_static():
            np.testing.assert_array_equal(table.numpy(), rows_of([1, 2]))
            np.testing.assert_array_equal(table + 0.0, rows_of([1, 2]))
            table.to_dynamic()
        with pytest.raises(NotImplementedError):
            table.numpy()
        assert held(table) == dict(enumerate(rows_of([0, 1, 2]).tolist()))


def test_within_inference_mode_no_key_is_inserted_before_it_is_written():
    table = new_table()
    with sok.inference_mode("zeros"):
        table.to_static([30])
        assert table._table.size == 20
        table.to_dynamic()
    assert held(table)[30] == [0.0] * DIM


def test_no_graph_keeps_the_table_and_the_table_no_graph():
    def traced():
        table = new_table()

        def change():
            table.to_static([1])
            table.to_dynamic()

        function = tf.function(change)
        function()
        graph = weakref.ref(function.get_concrete_function().graph)
        del function, change
        gc.collect()
        assert graph() is None
        return weakref.ref(table)

    variable = traced()
    gc.collect()
    assert variable() is None


def test_gradients_of_tapes_that_are_still_open():
    table = new_table()
    table.to_static([1, 2])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.gather(table, [1]) ** 2)
    gradient = tape.gradient(loss, table)
    np.testing.assert_array_equal(gradient.values, 2 * rows_of([2]))
    np.testing.assert_array_equal(gradient.indices, [1])
    table.to_dynamic()
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.nn.embedding_lookup(table, [7]))
    np.testing.assert_array_equal(tape.gradient(loss, table).indices, [7])
