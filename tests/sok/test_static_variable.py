"""sok.Variable on one rank: as a dense variable, and beside dynamic ones in one lookup."""

import copy
import gc
import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite.bridge import job
from tests.sok.test_lookup_sparse import a_batch, loss_of

NUM_ROWS = 60
pytestmark = pytest.mark.usefixtures("initialised")


def rows_of(seed, dim, num_rows=NUM_ROWS):
    return np.random.default_rng(seed).normal(size=(num_rows, dim)).astype(np.float32)


def dense_lookup(variable, ids, weights, combiner, batch):
    sparse = ids.to_sparse()
    if weights is not None:
        weights = tf.SparseTensor(sparse.indices, weights.values, sparse.dense_shape)
    out = tf.nn.embedding_lookup_sparse(variable, sparse, weights, combiner=combiner)
    # TensorFlow leaves empty rows at the end out.
    return tf.pad(out, [[0, batch - tf.shape(out)[0]], [0, 0]])


@pytest.fixture
def params():
    """Static and dynamic variables, and dense ones with the same rows."""
    static = sok.Variable(rows_of(0, 4))
    dynamic = sok.DynamicVariable(3)
    sok.assign(dynamic, np.arange(NUM_ROWS), rows_of(1, 3))
    local = sok.Variable(rows_of(2, 5), mode="localized:0")
    dense = [tf.Variable(rows_of(0, 4)), tf.Variable(rows_of(1, 3)), tf.Variable(rows_of(2, 5))]
    # The first comes twice.
    return [static, dynamic, local, static], [*dense, dense[0]]


def test_outputs_and_gradients_are_tensorflows(params, mode):
    """Of a call of both kinds; some tables have weights."""
    tables, variables = params
    combiners = ["sum", "mean", "sqrtn", "mean"]
    ids, weights = zip(*(a_batch(seed, 33) for seed in range(4)), strict=True)
    weights = [*weights[:2], None, weights[3]]
    flat = [w.values for w in weights if w is not None]

    def ours():
        with tf.GradientTape() as tape:
            tape.watch(flat)
            out = sok.lookup_sparse(tables, ids, weights, combiners)
            loss = loss_of(out)
        return out, *tape.gradient(loss, [tables[:3], flat])

    with tf.GradientTape() as tape:
        tape.watch(flat)
        asked = zip(variables, ids, weights, combiners, strict=True)
        expected = [dense_lookup(*each, 33) for each in asked]
        loss = loss_of(expected)
    out, grads, by_weights = mode(ours)()
    dense, dense_by_weights = tape.gradient(loss, [variables[:3], flat])
    for mine, other in zip(out, expected, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)
    for mine, other in zip(grads, dense, strict=True):
        total, other = np.zeros(other.dense_shape, np.float32), tf.convert_to_tensor(other)
        np.add.at(total, mine.indices.numpy(), mine.values.numpy())
        np.testing.assert_allclose(total, other, rtol=1e-4, atol=1e-5)
    for mine, other in zip(by_weights, dense_by_weights, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5)


def test_a_rank_that_others_may_join_gives_the_same(params, mode, monkeypatch):
    """By the operations of several ranks, as in an elastic job; rows of 16 bits too."""
    tables = [params[0][0], sok.Variable(rows_of(5, 3), dtype=tf.bfloat16), params[0][2]]
    ids, weights = zip(*(a_batch(seed, 33) for seed in range(3)), strict=True)

    def run():
        with tf.GradientTape() as tape:
            tape.watch(weights[0].values)
            out = sok.lookup_sparse(tables, list(ids), [weights[0], None, None], "mean")
            loss = loss_of([tf.cast(each, tf.float32) for each in out])
        grads = tape.gradient(loss, [*tables, weights[0].values])
        return *out, *(tf.convert_to_tensor(each) for each in grads)

    expected = run()
    monkeypatch.setattr(type(job.communicator()), "is_alone", False)
    for mine, other in zip(mode(run)(), expected, strict=True):
        mine, other = (tf.cast(each, tf.float32) for each in (mine, other))
        np.testing.assert_allclose(mine, other, rtol=1e-6, atol=1e-6)


def test_the_gradient_has_each_row_once(mode):
    table = sok.Variable(rows_of(0, 4))
    ids = tf.ragged.constant([[5, 5, 1], [], [1, 59]], dtype=tf.int32)

    def run():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(sok.lookup_sparse(table, ids, combiners="sum"))
        return tape.gradient(loss, table)

    grads = mode(run)()
    assert grads.indices.numpy().tolist() == [5, 1, 59]
    assert grads.values.numpy().tolist() == [[2.0] * 4, [2.0] * 4, [1.0] * 4]
    assert tf.convert_to_tensor(grads).shape == (NUM_ROWS, 4)


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16])
def test_rows_of_16_bits(mode, dtype):
    table = sok.Variable(rows_of(0, 4), dtype=dtype)
    ids, _ = a_batch(1, 20)

    def run():
        with tf.GradientTape() as tape:
            out = sok.lookup_sparse(table, ids)
            loss = tf.reduce_sum(tf.cast(out, tf.float32) ** 2)
        return out, tape.gradient(loss, table)

    out, grads = mode(run)()
    assert out.dtype == dtype and grads.dtype == dtype
    exact = tf.Variable(tf.cast(table, tf.float32))
    expected = tf.cast(dense_lookup(exact, ids, None, "mean", 20), dtype)
    np.testing.assert_array_equal(tf.cast(out, tf.float32), tf.cast(expected, tf.float32))


OPTIMIZERS = {
    "Keras 3": lambda: tf.keras.optimizers.SGD(0.5, momentum=0.9),
    "Keras 3, Adam": lambda: tf.keras.optimizers.Adam(0.1),
    "v1": lambda: tf.compat.v1.train.AdagradOptimizer(0.5),
    "sok": lambda: sok.SGD(0.5),
}


@pytest.mark.parametrize("wrapped", [False, True], ids=["by itself", "wrapped"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_any_optimizer_trains_it_as_a_dense_variable(make, wrapped, mode):
    """Also in the wrapper, which gives its dense variables to the optimizer that it wraps."""
    if wrapped and isinstance(make(), sok.SGD):
        pytest.skip("it takes no wrapper")
    mine, dense = sok.Variable(rows_of(0, 4)), tf.Variable(rows_of(0, 4))
    dynamic = sok.DynamicVariable(4)
    sok.assign(dynamic, np.arange(NUM_ROWS), rows_of(0, 4))
    ours = sok.OptimizerWrapper(make()) if wrapped else make()
    theirs = tf.keras.optimizers.SGD(0.5) if isinstance(ours, sok.SGD) else make()
    params = [mine, dynamic] if wrapped else [mine]

    def step(ids):
        with tf.GradientTape() as tape:
            out = sok.lookup_sparse(params, [ids] * len(params))
            loss = loss_of(out)
        pairs = zip(tape.gradient(loss, params), params, strict=True)
        ours.apply_gradients(list(pairs))

    step = mode(step)
    for number in range(3):
        ids, _ = a_batch(number, 16)
        step(ids)
        with tf.GradientTape() as tape:
            loss = loss_of([dense_lookup(dense, ids, None, "mean", 16)])
        theirs.apply_gradients([(tape.gradient(loss, dense), dense)])
    np.testing.assert_allclose(mine, dense, rtol=1e-5, atol=1e-5)
    assert not np.allclose(mine, rows_of(0, 4))
    if wrapped:
        assert not np.allclose(sok.export(dynamic)[1], rows_of(0, 4))


def test_second_derivatives_are_tensorflows(mode):
    variable, dense = sok.Variable(rows_of(0, 4)), tf.Variable(rows_of(0, 4))
    ids, weights = a_batch(3, 9)
    flat = weights.values

    def second(watched, look_up):
        with tf.GradientTape() as outer:
            outer.watch(flat)
            with tf.GradientTape() as inner:
                inner.watch(flat)
                loss = tf.reduce_sum(look_up() ** 3)
            number = tf.reduce_sum(inner.gradient(loss, flat) ** 2)
        by_rows, by_weights = outer.gradient(number, [watched, flat])
        return tf.convert_to_tensor(by_rows), by_weights

    mine = mode(lambda: second(variable, lambda: sok.lookup_sparse(variable, ids, weights)))()
    theirs = second(dense, lambda: dense_lookup(dense, ids, weights, "mean", 9))
    for number, expected in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(number, expected, rtol=1e-4, atol=1e-4)


def test_a_function_takes_it_as_an_argument_and_knows_which():
    """Two of one shape: a function that was traced for one is not called with the other's rows."""
    traces = []

    @tf.function
    def run(params, ids):
        traces.append(len(params))
        return sok.lookup_sparse(params, [ids] * len(params))

    first, second = sok.Variable(rows_of(0, 4)), sok.Variable(rows_of(1, 4))
    ids = tf.ragged.constant([[7]])
    for variable, seed in ((first, 0), (second, 1), (first, 0)):
        np.testing.assert_array_equal(run([variable], ids)[0][0], rows_of(seed, 4)[7])
    assert len(traces) == 2


def test_a_loop_around_a_lookup(mode):
    """The gradient leaves it: TensorFlow adds dense gradients there, and this one has any."""
    table = sok.Variable(rows_of(0, 4))
    ids = tf.constant([[3, 9], [9, 1]], tf.int64)

    def run():
        with tf.GradientTape() as tape:

            def body(i, total):
                ragged = tf.RaggedTensor.from_row_splits(ids[i], tf.constant([0, 2], tf.int64))
                return i + 1, total + tf.reduce_sum(sok.lookup_sparse(table, ragged))

            _, total = tf.while_loop(lambda i, _: i < 2, body, (0, 0.0))
        return total, tf.convert_to_tensor(tape.gradient(total, table))

    total, grads = mode(run)()
    rows = rows_of(0, 4)
    np.testing.assert_allclose(total, (rows[3] + 2 * rows[9] + rows[1]).sum() / 2, rtol=1e-5)
    expected = np.zeros((NUM_ROWS, 4))
    expected[[3, 1]], expected[9] = 0.5, 1.0
    np.testing.assert_allclose(grads, expected)


def test_nothing_is_asked_of_inference(mode):
    """Static rows are there whatever becomes of missing keys."""
    table, ids = sok.Variable(rows_of(0, 4)), tf.ragged.constant([[7], [8, 9]], dtype=tf.int64)
    with sok.inference_mode(missing="zeros"):
        found = mode(lambda: sok.lookup_sparse(table, ids, combiners="sum"))()
    expected = [rows_of(0, 4)[7], rows_of(0, 4)[8] + rows_of(0, 4)[9]]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_it_is_made_once_in_the_build_of_a_layer():
    class Layer(tf.Module):
        variable = None

        @tf.function
        def __call__(self, ids):
            if self.variable is None:
                self.variable = sok.Variable(rows_of(0, 4))
            return sok.lookup_sparse(self.variable, ids)

    layer, ids = Layer(), tf.ragged.constant([[3], [1]])
    for _ in range(2):
        np.testing.assert_array_equal(layer(ids), rows_of(0, 4)[[3, 1]])


def test_a_graph_does_not_keep_its_rows():
    """TensorFlow never drops the graph of a function that a gradient was defined in."""
    tables, ids = [sok.Variable(rows_of(0, 4))], tf.ragged.constant([[3], [1]])
    handle = tables[0].handle
    run = tf.function(lambda: sok.lookup_sparse(tables[0], ids))
    np.testing.assert_array_equal(run(), rows_of(0, 4)[[3, 1]])
    shape = [NUM_ROWS, 4]
    assert tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32).shape == shape
    tables.clear()
    gc.collect()
    assert tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32).shape == [0, 4]


def test_a_saved_model_has_its_rows_but_no_lookup(tmp_path):
    module = tf.Module()
    module.table = sok.Variable(rows_of(0, 4), name="saved")
    module.read = tf.function(lambda: module.table * 2.0, input_signature=[])
    tf.saved_model.save(module, str(tmp_path / "rows"))
    loaded = tf.saved_model.load(str(tmp_path / "rows"))
    np.testing.assert_array_equal(loaded.read(), rows_of(0, 4) * 2)
    ids = tf.ragged.constant([[3]])
    module.look_up = tf.function(lambda: sok.lookup_sparse(module.table, ids), input_signature=[])
    module.look_up()
    with pytest.raises(NotImplementedError, match="a function looks rows of 'saved:0' up"):
        tf.saved_model.save(module, str(tmp_path / "lookup"))


def test_a_copy_is_refused():
    table = sok.Variable(rows_of(0, 4), name="original")
    for make in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(NotImplementedError, match="'original:0' is a sok.DistributedVariable"):
            make(table)


class OneTable(keras.layers.Layer):
    def __init__(self, held):
        super().__init__()
        self.held = held

    def call(self, ids):
        ragged = tf.RaggedTensor.from_tensor(ids)
        return sok.lookup_sparse(tf.nest.flatten(self.held)[0], ragged, combiners="sum")


@pytest.mark.parametrize("hold", [lambda v: v, lambda v: [v], lambda v: {"a": v}])
def test_keras_3_leaves_no_table_untrained_or_unsaved_without_a_word(hold, tmp_path):
    table = sok.Variable(rows_of(0, 4), name="held")
    model = keras.Sequential([OneTable(hold(table)), keras.layers.Dense(1)])
    ids, labels = np.arange(12).reshape(6, 2), np.ones((6, 1), np.float32)
    with pytest.raises(NotImplementedError, match="leave 'held:0' untrained"):
        model.compile("sgd", "mse")
    with pytest.raises(NotImplementedError, match="leave 'held:0' untrained"):
        model.fit(ids, labels, verbose=0)
    with pytest.raises(NotImplementedError, match="leave the rows of 'held:0' out"):
        model.save_weights(str(tmp_path / "m.weights.h5"))
    np.testing.assert_array_equal(table, rows_of(0, 4))


def test_keras_3_refuses_a_step_with_a_table_that_the_model_does_not_hold():
    table = sok.Variable(rows_of(0, 4), name="elsewhere")
    ids, labels = np.arange(12).reshape(6, 2), np.ones((6, 1), np.float32)

    class Model(keras.Model):
        def call(self, ids):
            ragged = tf.RaggedTensor.from_tensor(ids)
            return sok.lookup_sparse(table, ragged, combiners="sum")

    model = Model()
    model.compile("sgd", "mse")
    with pytest.raises(NotImplementedError, match="leave 'elsewhere:0' untrained"):
        model.fit(ids, labels, verbose=0)


def test_tf_keras_trains_and_saves_it(tmp_path):
    tf_keras = pytest.importorskip("tf_keras")
    table = sok.Variable(rows_of(0, 4))

    class Model(tf_keras.Model):
        def __init__(self):
            super().__init__()
            self.table = table

        def call(self, ids):
            return sok.lookup_sparse(self.table, tf.RaggedTensor.from_tensor(ids), combiners="sum")

    model = Model()
    model.compile("sgd", "mse")
    model.fit(np.arange(12).reshape(6, 2), np.ones((6, 4), np.float32), verbose=0)
    trained = table.numpy()
    assert (trained[:12] != rows_of(0, 4)[:12]).all()
    np.testing.assert_array_equal(trained[12:], rows_of(0, 4)[12:])
    model.save_weights(str(tmp_path / "weights"), save_format="tf")
    table.assign(tf.zeros_like(table))
    model.load_weights(str(tmp_path / "weights"))
    np.testing.assert_array_equal(table, trained)


def test_values_of_every_kind():
    rows = rows_of(0, 3, 5)
    for value in (rows, rows.tolist(), tf.constant(rows), lambda: rows, tf.Variable(rows)):
        variable = sok.Variable(value)
        assert variable.dtype == tf.float32 and variable.shape == (5, 3)
        np.testing.assert_array_equal(variable, rows)
    assert sok.Variable([[1, 2]]).dtype == tf.float32
    assert sok.Variable(rows.astype(np.float64), dtype=tf.float16).dtype == tf.float16
    for make in (sok.DistributedVariable, sok.LocalizedVariable):
        np.testing.assert_array_equal(make([1.0, 2.0]), [[1.0, 2.0]])
    made = sok.Variable(shape=[4, 2], dtype=tf.float32, initializer=tf.ones_initializer())
    np.testing.assert_array_equal(made, np.ones((4, 2)))


def test_what_is_known_of_it():
    spread, local = sok.Variable(rows_of(0, 4)), sok.Variable(rows_of(0, 4), mode="localized:0")
    assert type(spread) is sok.DistributedVariable and type(local) is sok.LocalizedVariable
    assert sok.Variable([[1.0]], mode="distributed").target_gpu == -1
    assert (spread.target_gpu, local.target_gpu) == (-1, 0)
    for variable in (spread, local):
        assert variable.global_shape == (NUM_ROWS, 4)
        assert (variable.num_gpus, variable.global_gpu_id) == (1, 0)
        assert np.array_equal(variable.key_map(np.array([3, 4])), [3, 4])
        assert variable.trainable and isinstance(variable, tf.Variable)
    assert not sok.Variable([[1.0]], trainable=False).trainable
    assert sok.Variable([[1.0]], name="mine").name == "mine:0"
    first, second = sok.Variable([[1.0]]), sok.Variable([[1.0]])
    assert first.name.startswith("sok_static_Variable_") and first.name != second.name
    dynamic, dense = sok.DynamicVariable(2), tf.Variable(1.0)
    ours, others = sok.filter_variables([dense, local, dynamic, spread])
    assert [ours[0] is local, ours[1] is dynamic, ours[2] is spread] == [True] * 3
    assert others[0] is dense


@pytest.mark.cases("arguments")
@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({}, ValueError, "takes `initial_value`, or `shape` and `initializer`"),
        ({"shape": [2, 2]}, ValueError, "takes `initial_value`, or `shape` and"),
        ({"initial_value": tf.ragged.constant([[1.0]])}, TypeError, "must be a dense matrix"),
        ({"initial_value": 1.0}, RuntimeError, r"initial_value shape is \(\) please input a one-"),
        ({"initial_value": np.ones((2, 2, 2))}, RuntimeError, r"shape is \(2, 2, 2\) please"),
        ({"initial_value": np.ones((0, 2))}, RuntimeError, r"shape is \(0, 2\) please"),
        ({"initial_value": np.ones((2, 2))}, TypeError, "Received: float64. Give dtype=tf.flo"),
        ({"initial_value": [[1.0]], "dtype": tf.int32}, TypeError, "Received: int32"),
        ({"initial_value": [[1.0]], "shape": [2, 1]}, ValueError, "must have the shape of `shape`"),
        ({"initial_value": [[1.0]], "mode": "everywhere"}, RuntimeError, "Not supported mode: ev"),
        ({"initial_value": [[1.0]], "mode": "localized:1"}, RuntimeError, "only 1 GPU.* on 1th"),
        ({"initial_value": [[1.0]], "import_scope": "x"}, NotImplementedError, "`import_scope`"),
        ({"shape": [None, 2], "initializer": tf.ones}, ValueError, "both at least 1"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else None,
)
def test_arguments_that_do_not_fit(arguments, error, text):
    with pytest.raises(error, match=text):
        sok.Variable(**arguments)


def test_a_rank_is_a_number_and_several_ranks_need_init(two_launched):
    for target in (-1, 1.0, "0"):
        with pytest.raises(ValueError, match="`target_gpu` must be the number of a rank"):
            sok.LocalizedVariable([[1.0]], target_gpu=target)
    with pytest.raises(RuntimeError, match="Communication tool is not set"):
        sok.Variable([[1.0]])


@pytest.mark.parametrize("row", [-1, NUM_ROWS, 2**62])
def test_a_row_that_there_is_not_is_refused_before_anything_happens(row, mode):
    static, dynamic = sok.Variable(rows_of(0, 4), name="few"), sok.DynamicVariable(2)
    ids = tf.ragged.constant([[1, row]], dtype=tf.int64)
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError)) as caught:
        mode(lambda: sok.lookup_sparse([dynamic, static], [ids, ids]))()
    assert (
        f"row numbers of table 'few' must be from 0 to 59: it has 60 rows. Received: {row}."
        in str(caught.value)
    )
    assert dynamic.table.size == 0
