"""tf.nn.embedding_lookup and its kin on a table, against a dense variable of the same rows."""

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok

NUM_ROWS, DIM = 50, 3


@pytest.fixture
def pair():
    """A table and a dense variable with the same rows for the keys 0 to NUM_ROWS - 1."""
    rows = np.random.default_rng(0).normal(size=(NUM_ROWS, DIM)).astype(np.float32)
    table = sok.DynamicVariable(DIM)
    sok.assign(table, np.arange(NUM_ROWS), rows)
    return table, tf.Variable(rows)


def dense(gradient):
    """A gradient of either kind as a dense array."""
    if isinstance(gradient, tf.IndexedSlices):
        total = np.zeros((NUM_ROWS, DIM), np.float32)
        np.add.at(total, gradient.indices.numpy(), gradient.values.numpy())
        return total
    return gradient.numpy()


def tape_inside(function, variable):
    @tf.function
    def run():
        with tf.GradientTape() as tape:
            out = function(variable)
        return out, tape.gradient(out, variable)

    return run()


def tape_outside(function, variable):
    with tf.GradientTape() as tape:
        out = tf.function(lambda: function(variable))()
    return out, tape.gradient(out, variable)


def tape_eager(function, variable):
    with tf.GradientTape() as tape:
        out = function(variable)
    return out, tape.gradient(out, variable)


def tf_gradients(function, variable):
    @tf.function
    def run():
        out = function(variable)
        (gradient,) = tf.gradients(out, [variable])
        return out, gradient

    return run()


RAGGED = tf.ragged.constant([[1, 2, 2], [], [49], [3, 1]], dtype=tf.int64)
SPARSE = RAGGED.to_sparse()
WEIGHTS = SPARSE.with_values(tf.constant([0.5, 2.0, 1.0, 3.0, 1.5, 0.25]))
LOOKUPS = {
    "list of ids": lambda v: tf.nn.embedding_lookup(v, [3, 1, 3, 7]),
    "scalar id": lambda v: tf.nn.embedding_lookup(v, 5),
    "int32 ids": lambda v: tf.nn.embedding_lookup(v, tf.constant([3, 1, 3], tf.int32)),
    "no ids": lambda v: tf.nn.embedding_lookup(v, tf.zeros([0], tf.int64)),
    "matrix of ids": lambda v: tf.nn.embedding_lookup(v, [[1, 2], [2, 1], [3, 3]]),
    "rank 3": lambda v: tf.nn.embedding_lookup(v, tf.reshape(tf.range(24), [2, 3, 4])),
    "ragged ids": lambda v: tf.nn.embedding_lookup(v, RAGGED).to_tensor(),
    "max_norm": lambda v: tf.nn.embedding_lookup(v, [3, 1, 3], max_norm=0.5),
    "twice": lambda v: tf.nn.embedding_lookup(v, [1, 2]) * tf.nn.embedding_lookup(v, [2, 3]),
    "gather": lambda v: tf.gather(v, [3, 1, 3]),
    "many": lambda v: tf.nn.embedding_lookup(v, tf.range(1000, dtype=tf.int64) % NUM_ROWS),
    "sparse sum": lambda v: tf.nn.embedding_lookup_sparse(v, SPARSE, None, combiner="sum"),
    "sparse mean": lambda v: tf.nn.embedding_lookup_sparse(v, SPARSE, None, combiner="mean"),
    "sparse sqrtn": lambda v: tf.nn.embedding_lookup_sparse(v, SPARSE, None, combiner="sqrtn"),
    "weighted": lambda v: tf.nn.embedding_lookup_sparse(v, SPARSE, WEIGHTS, combiner="mean"),
    "safe": lambda v: tf.nn.safe_embedding_lookup_sparse(v, SPARSE, combiner="mean"),
    "safe weighted": lambda v: tf.nn.safe_embedding_lookup_sparse(v, SPARSE, WEIGHTS),
}
TAPES = [tape_eager, tape_inside, tape_outside, tf_gradients]


@pytest.mark.pairs
@pytest.mark.parametrize("tape", TAPES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("look_up", LOOKUPS.values(), ids=LOOKUPS.keys())
def test_rows_and_gradients_are_those_of_a_dense_variable(pair, look_up, tape):
    table, variable = pair

    def squares(v):
        return tf.reduce_sum(look_up(v) ** 2)

    np.testing.assert_array_equal(look_up(table), look_up(variable))
    (out, gradient), (dense_out, dense_gradient) = tape(squares, table), tape(squares, variable)
    np.testing.assert_allclose(out, dense_out, rtol=1e-6)
    assert isinstance(gradient, tf.IndexedSlices)
    # 1000 sums in another order; the others are exact or one float32 rounding off.
    np.testing.assert_allclose(dense(gradient), dense(dense_gradient), rtol=1e-5, atol=1e-6)


def test_the_gradient_has_the_keys_as_given_and_the_size(mode):
    table = sok.DynamicVariable(2, initializer="ones")

    @mode
    def gradient():
        with tf.GradientTape() as tape:
            rows = tf.nn.embedding_lookup(table, [[5, -7], [5, 2**40]])
        return tape.gradient(rows, table)

    slices = gradient()
    assert slices.indices.dtype == tf.int64
    np.testing.assert_array_equal(slices.indices, [5, -7, 5, 2**40])
    np.testing.assert_array_equal(slices.values, np.ones((4, 2)))
    np.testing.assert_array_equal(slices.dense_shape, [-1, 2])


def test_a_tape_gives_zeros_of_no_rows_for_a_table_that_is_not_connected(mode):
    used, other = sok.DynamicVariable(2, initializer="ones"), sok.DynamicVariable(3)
    dense = tf.Variable(tf.ones([4, 2]))

    @mode
    def gradients():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.embedding_lookup(used, [5]) * 2.0)
        return tape.gradient(loss, [used, other, dense], unconnected_gradients="zero")

    of_used, of_other, of_dense = gradients()
    np.testing.assert_array_equal(of_used.values, [[2.0, 2.0]])
    assert isinstance(of_other, tf.IndexedSlices)
    assert (of_other.values.shape, of_other.indices.dtype) == ((0, 3), tf.int64)
    np.testing.assert_array_equal(of_dense, np.zeros([4, 2]))
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.1))
    optimizer.apply_gradients([(of_used, used), (of_other, other)])
    assert (used.table.size, other.table.size) == (1, 0)


@pytest.mark.parametrize("zeros_like", [tf.zeros_like, tf.compat.v1.zeros_like])
def test_zeros_like_a_table_are_refused_elsewhere(zeros_like):
    table = sok.DynamicVariable(2)
    errors = (tf.errors.FailedPreconditionError, NotImplementedError)
    with pytest.raises(errors, match="this is a table|has no dense tensor"):
        zeros_like(table)


def test_static_shapes_are_kept():
    table = sok.DynamicVariable(2)
    shapes = []

    @tf.function(input_signature=[tf.TensorSpec([None, 7], tf.int64)])
    def read(keys):
        shapes.append(tf.nn.embedding_lookup(table, keys).shape.as_list())

    read(tf.zeros([3, 7], tf.int64))
    assert shapes == [[None, 7, 2]]


def test_new_keys_are_inserted_once(mode):
    table = sok.DynamicVariable(2, initializer="uniform")
    read = mode(lambda keys: tf.nn.embedding_lookup(table, keys))
    first = read(tf.constant([9, 9, 4], tf.int64))
    np.testing.assert_array_equal(first[0], first[1])
    assert table.table.size == 2
    np.testing.assert_array_equal(read(tf.constant([4, 9, 9], tf.int64)), first[::-1])


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16], ids=lambda d: d.name)
def test_half_precision_rows_have_float32_gradients(dtype, mode):
    table = sok.DynamicVariable(2, initializer="1.5", dtype=dtype)

    @mode
    def run():
        with tf.GradientTape() as tape:
            rows = tf.nn.embedding_lookup(table, [1, 1])
            loss = tf.reduce_sum(rows * 2)
        return rows, tape.gradient(loss, table)

    rows, gradient = run()
    assert rows.dtype == dtype
    np.testing.assert_array_equal(tf.cast(rows, tf.float32), np.full((2, 2), 1.5))
    assert gradient.values.dtype == tf.float32
    np.testing.assert_array_equal(gradient.values, np.full((2, 2), 2.0))


@pytest.mark.parametrize("ids", [[1.0], tf.constant([1.5]), [True], ["a"]], ids=str)
def test_ids_that_are_no_integers_are_refused(ids, mode):
    table = sok.DynamicVariable(2)
    with pytest.raises(TypeError, match=r"must be integers \(int64\)"):
        mode(lambda: tf.nn.embedding_lookup(table, ids))()
    assert table.table.size == 0


def test_negative_ids_are_ordinary_keys():
    table = sok.DynamicVariable(1)
    sok.assign(table, [-1, -(2**63)], [[1.0], [2.0]])
    np.testing.assert_array_equal(tf.nn.embedding_lookup(table, [-(2**63), -1]), [[2.0], [1.0]])


def test_a_branch_of_a_condition_may_look_up():
    table = sok.DynamicVariable(2, initializer="ones")

    @tf.function
    def gradient(flag):
        with tf.GradientTape() as tape:
            loss = tf.cond(
                flag,
                lambda: tf.reduce_sum(tf.nn.embedding_lookup(table, [1])),
                lambda: tf.reduce_sum(tf.nn.embedding_lookup(table, [2]) * 3),
            )
        return tape.gradient(loss, table)

    for flag, key, value in ((True, 1, 1.0), (False, 2, 3.0)):
        slices = gradient(tf.constant(flag))
        np.testing.assert_array_equal(slices.indices, [key])
        np.testing.assert_array_equal(slices.values, [[value, value]])


@pytest.mark.parametrize("key_type", [tf.int64, tf.int32])
@pytest.mark.parametrize("kind", ["local", "lookup_sparse"])
def test_only_one_branch_of_a_condition_may_look_up(kind, key_type, initialised):
    table = sok.DynamicVariable(2, initializer="ones", key_type=key_type)

    def look_up():
        if kind == "local":
            return tf.nn.embedding_lookup(table, [1, -7])
        ids = tf.RaggedTensor.from_row_splits([1, -7], [0, 1, 2])
        return sok.lookup_sparse(table, ids, combiners="sum")

    @tf.function
    def gradient(flag):
        with tf.GradientTape() as tape:
            loss = tf.cond(flag, lambda: tf.reduce_sum(look_up() * 3), lambda: 0.0)
        return tape.gradient(loss, table)

    slices = gradient(tf.constant(True))
    assert sorted(slices.indices.numpy().tolist()) == [-7, 1]
    np.testing.assert_array_equal(slices.values, np.full((2, 2), 3.0))
    assert gradient(tf.constant(False)).values.shape == (0, 2)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dtype": tf.float16}, "tf.float32, tf.int64.*tf.float16, tf.int64"),
        ({"key_type": tf.uint64}, "must be int32 or int64. Found: .tf.uint64"),
    ],
    ids=["float16", "uint64"],
)
def test_what_tensorflow_makes_for_the_other_branch_fits_no_other_types(options, text):
    table = sok.DynamicVariable(2, initializer="ones", **options)

    def look_up():
        return tf.cast(tf.nn.embedding_lookup(table, tf.constant([1], table.key_type)), tf.float32)

    @tf.function
    def gradient(flag, before):
        with tf.GradientTape() as tape:
            rows = look_up() if before else None
            loss = tf.cond(flag, lambda: tf.reduce_sum(rows if before else look_up()), lambda: 0.0)
        return tape.gradient(loss, table)

    with pytest.raises(TypeError, match=f"(?s){text}"):
        gradient(tf.constant(True), False)
    # As docs/concepts/lookups-and-gradients.md says.
    for flag, value in ((True, 1.0), (False, 0.0)):
        np.testing.assert_array_equal(gradient(tf.constant(flag), True).values, [[value, value]])


def test_a_loop_may_look_up():
    table = sok.DynamicVariable(2, initializer="2")

    @tf.function
    def total(n):
        out = tf.zeros([2])
        for i in tf.range(n):
            out += tf.nn.embedding_lookup(table, i)
        return out

    np.testing.assert_array_equal(total(tf.constant(5, tf.int64)), [10.0, 10.0])
    assert table.table.size == 5


def test_the_gradient_of_a_table_cannot_leave_a_loop_but_others_can(mode):
    table = sok.DynamicVariable(2, initializer="2", name="looped")
    scale = tf.Variable(3.0)

    @tf.function
    def gradients(sources):
        with tf.GradientTape() as tape:
            loss = tf.constant(0.0)
            for i in tf.range(4):
                loss += tf.reduce_sum(scale * tf.nn.embedding_lookup(table, [i]))
        return tape.gradient(loss, sources)

    assert float(mode(lambda: gradients([scale]))()[0]) == 16.0
    with pytest.raises(tf.errors.UnimplementedError, match="'looped:0' cannot leave the loop"):
        mode(lambda: gradients([table]))()


def test_an_attribute_error_inside_does_not_become_a_dense_read(monkeypatch):
    table = sok.DynamicVariable(2)

    def broken(*args, **kwargs):
        raise AttributeError("broken inside")

    monkeypatch.setattr(table.table, "lookup", broken)
    with pytest.raises(RuntimeError, match="broken inside"):
        tf.gather(table, [1])


def test_lookups_from_several_threads(initialised):
    from concurrent.futures import ThreadPoolExecutor

    table = sok.DynamicVariable(4, initializer="uniform")
    keys = tf.constant(np.random.default_rng(1).integers(0, 500, (8, 2000)))
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda k: tf.nn.embedding_lookup(table, k).numpy(), keys))
    assert table.table.size == len(np.unique(keys))
    for k, rows in zip(keys, results, strict=True):
        np.testing.assert_array_equal(tf.nn.embedding_lookup(table, k), rows)


KEYS_IN_A_LIST = {
    "vector": (lambda key: [key, 5], [7, 5]),
    "matrix": (lambda key: [[5, key], (key, 2)], [[5, 7], [7, 2]]),
    "rows": (lambda key: [tf.stack([key, key]), np.array([3, 2])], [[7, 7], [3, 2]]),
}


@pytest.mark.parametrize("dtype", [tf.int32, tf.int64], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("keys, expected", KEYS_IN_A_LIST.values(), ids=KEYS_IN_A_LIST.keys())
def test_tensors_in_a_list_of_keys(mode, keys, expected, dtype):
    table = sok.DynamicVariable(1)
    sok.assign(table, np.arange(8), np.arange(8.0)[:, None])
    found = mode(lambda: table.sparse_read(keys(tf.constant(7, dtype))))()
    np.testing.assert_array_equal(found, np.expand_dims(expected, -1))


def test_a_key_in_a_list_must_fit_the_tensor_beside_it():
    table = sok.DynamicVariable(1)

    @tf.function
    def look_up(key):
        return table.sparse_read([key, 2**40])

    with pytest.raises(ValueError, match="fit int32.*Received: 1099511627776"):
        look_up(tf.constant(7))
    assert look_up(tf.constant(7, tf.int64)).shape == (2, 1)
    with pytest.raises(TypeError, match=r"must be integers \(int64\).*Received: float32"):
        look_up(tf.constant(7.0))
