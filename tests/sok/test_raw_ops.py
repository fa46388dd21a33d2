"""sok.raw_ops: SOK's operations as functions of handles."""

import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite.bridge.variable import variable_of

v1 = tf.compat.v1
raw_ops = sok.raw_ops

DIM = 3
SMALL = '{"init_capacity": 128, "max_capacity": 128}'


def rows_of(keys):
    return (np.asarray(keys)[:, None] + np.arange(DIM) / 4).astype(np.float32)


def made(var_type="hbm", initializer="2", name="raw", config="{}", **types):
    handle = raw_ops.dummy_var_handle(shape=[None, DIM], **types)
    raw_ops.dummy_var_initialize(handle, initializer, var_type, name, config=config, **types)
    return handle


@pytest.fixture(params=["of a variable", "made"])
def handle(request):
    """A handle with the keys 0 to 9; whoever owns the table is kept by the fixture."""
    if request.param == "made":
        handle, owner = made(), None
    else:
        owner = sok.DynamicVariable(DIM, "2", name="owner")
        handle = owner.handle
    raw_ops.dummy_var_assign(handle, np.arange(10), rows_of(np.arange(10)))
    yield handle
    del owner


def test_rows_are_read_assigned_scattered_and_exported(handle, mode):
    keys = tf.constant([9, 3, 77, 3])

    @mode
    def use():
        read = raw_ops.dummy_var_sparse_read(handle, keys)
        raw_ops.dummy_var_assign(handle, [50], [[5.0] * DIM])
        raw_ops.dummy_var_scatter_add(handle, [3, 3, 1000], [[1.0] * DIM] * 3)
        raw_ops.dummy_var_scatter_update(handle, tf.constant([4, 1000]), tf.ones([2, DIM]))
        return read, raw_ops.dummy_var_export(handle), raw_ops.dummy_var_shape(handle)

    read, exported, shape = use()
    np.testing.assert_array_equal(read, [*rows_of([9, 3]), [2.0] * DIM, *rows_of([3])])
    np.testing.assert_array_equal(exported.indices, [*range(10), 50, 77])
    expected = rows_of(np.arange(12))
    expected[3] += 2.0
    expected[4] = 1.0
    expected[10:] = [[5.0] * DIM, [2.0] * DIM]
    np.testing.assert_array_equal(exported.values, expected)
    np.testing.assert_array_equal(shape, [12, DIM])
    assert shape.dtype == tf.int32
    assert raw_ops.dummy_var_shape(handle, out_type=tf.int64).dtype == tf.int64


def test_a_read_has_the_gradient_of_an_embedding_lookup(handle, mode):
    """By the handle, and by the variable that it is of."""
    keys, weights = tf.constant([9, 3, 9]), tf.constant([[1.0], [2.0], [3.0]])
    table = sok.DynamicVariable(DIM, "2")

    @mode
    def gradient():
        with tf.GradientTape() as tape:
            tape.watch(handle)
            loss = tf.reduce_sum(raw_ops.dummy_var_sparse_read(handle, keys) * weights)
            loss += tf.reduce_sum(raw_ops.dummy_var_sparse_read(table.handle, keys) * weights)
        return [(found.indices, found.values) for found in tape.gradient(loss, [handle, table])]

    for indices, values in gradient():
        np.testing.assert_array_equal(indices, keys)
        np.testing.assert_array_equal(values, np.tile(weights, DIM))


def test_export_if_takes_what_is_above_the_threshold(mode):
    table = sok.DynamicVariable(DIM, "2")
    for step in range(4):  # numbers of lookups from 1 on
        tf.nn.embedding_lookup(table, [10 * step])
    scores = table.scores([0, 10, 20, 30]).numpy()
    export = mode(lambda threshold: raw_ops.dummy_var_export_if(table.handle, threshold))
    for threshold in (scores[1], np.uint64(0), scores[3], np.uint64(2**64 - 1)):
        indices, values = export(tf.constant(threshold, tf.uint64))
        expected = [10 * i for i, score in enumerate(scores) if score > threshold]
        np.testing.assert_array_equal(indices, expected)
        assert values.shape == (len(expected), DIM)


def test_read_evict_gives_what_lost_its_place(mode):
    handle = made("hybrid", "2", config=SMALL)
    read = mode(lambda keys: raw_ops.dummy_var_sparse_read_evict(handle, keys))
    raw_ops.dummy_var_assign(handle, np.arange(100), rows_of(np.arange(100)))
    out, keys, rows = read(tf.range(1000, 1100, dtype=tf.int64))
    assert out.shape == (100, DIM) and len(keys) > 50
    np.testing.assert_array_equal(rows, rows_of(keys))
    found = [*keys.numpy(), *raw_ops.dummy_var_export(handle).indices.numpy()]
    missing = {*range(100), *range(1000, 1100)}.difference(found)
    # Whether a key finds no place, all of its bucket being in use, depends on which comes first.
    assert len(missing) == variable_of(handle).table.statistics().refused_total < 10
    assert len(found) == len({*found}) == 200 - len(missing)


def test_a_session_runs_the_operations():
    with tf.Graph().as_default(), v1.Session() as session:
        handle = raw_ops.dummy_var_handle(shared_name="t", shape=[None, DIM])
        init = raw_ops.dummy_var_initialize(handle, "2", "hbm", "t")
        keys = v1.placeholder(tf.int64, [None])
        rows = raw_ops.dummy_var_sparse_read(handle, keys)
        (gradient,) = v1.gradients(tf.reduce_sum(rows), [handle])
        add = raw_ops.dummy_var_scatter_add(handle, keys, tf.ones([2, DIM]))
        exported = raw_ops.dummy_var_export(handle)
        session.run(init)
        out, indices = session.run([rows, gradient.indices], {keys: [4, 6]})
        np.testing.assert_array_equal(out, np.full((2, DIM), 2.0))
        np.testing.assert_array_equal(indices, [4, 6])
        session.run(add, {keys: [4, 6]})
        found = session.run(exported)
    np.testing.assert_array_equal(found.indices, [4, 6])
    np.testing.assert_array_equal(found.values, np.full((2, DIM), 3.0))


@pytest.mark.cases("initializer")
@pytest.mark.parametrize(
    ("initializer", "row"),
    [
        ("13", 13.0),
        (tf.constant("ones"), 1.0),
        (tf.Variable([1e-7, 3.0]), np.float32(1e-7)),
        (np.float32(4.5), 4.5),
        ([2.7, 1.0], np.float32(2.7)),
        (["13"], 13.0),
        (np.zeros((0, 2), np.float32), None),
    ],
)
def test_the_first_of_an_initializer_counts(initializer, row):
    found = raw_ops.dummy_var_sparse_read(made("hbm", initializer), [8]).numpy()
    if row is None:
        assert np.abs(found).max() <= 0.05  # "random"
    else:
        np.testing.assert_array_equal(found, np.full((1, DIM), row, np.float32))


def test_types_are_those_of_the_handle_and_options_come_as_json():
    types = {"key_type": tf.int32, "dtype": tf.float16}
    handle = made(**types)
    rows = raw_ops.dummy_var_sparse_read(handle, [1], dtype=tf.float16)
    indices, values = raw_ops.dummy_var_export(handle, **types)
    assert (rows.dtype, indices.dtype, values.dtype) == (tf.float16, tf.int32, tf.float16)
    with pytest.raises(ValueError, match="`dtype` of 'raw:0' is float16.*Received: dtype"):
        raw_ops.dummy_var_sparse_read(handle, [1], dtype=tf.float32)
    other = raw_ops.dummy_var_handle(shape=[None, DIM])
    with pytest.raises(ValueError, match="keys of int64 and rows of float32.*int32 and float16"):
        raw_ops.dummy_var_initialize(other, "2", "hbm", "raw", **types)
    handle = made("hybrid", config=SMALL)
    raw_ops.dummy_var_sparse_read(handle, np.arange(1000))
    assert int(raw_ops.dummy_var_shape(handle)[0]) <= 128
    with pytest.raises(TypeError, match="unexpected keyword argument 'size'"):
        made("hybrid", config='{"size": 1}')


def test_a_handle_is_initialised_once():
    for handle in (made(), (table := sok.DynamicVariable(DIM)).handle):
        with pytest.raises(RuntimeError, match="DummyVar has already been initialized"):
            raw_ops.dummy_var_initialize(handle, "3", "hbm", "raw")
    del table


def test_handles_of_one_name_are_one():
    make = raw_ops.dummy_var_handle
    first = make(shared_name="shared", shape=[None, DIM])
    assert make(shared_name="shared", shape=[None, DIM]) is first
    assert make(shared_name="shared", container="other", shape=[None, DIM]) is not first
    assert make(shape=[None, DIM]) is not make(shape=[None, DIM])
    with pytest.raises(ValueError, match="The handle 'shared' of container.*another shared_name"):
        make(shared_name="shared", shape=[None, DIM + 1])
    del first
    gc.collect()
    make(shared_name="shared", shape=[None, DIM + 1])


def test_a_function_finds_a_handle_by_its_name_or_makes_one(tmp_path):
    # TensorFlow keeps the function, and so the handle: no other test may have its name.
    name = {"container": "c", "shared_name": str(tmp_path), "shape": [None, DIM]}
    made_inside = []

    @tf.function
    def read(keys):
        if not made_inside:
            made_inside.append(raw_ops.dummy_var_handle(shape=[None, DIM]))
        handle = raw_ops.dummy_var_handle(**name)
        return raw_ops.dummy_var_sparse_read(handle, keys)

    with pytest.raises(ValueError, match="Call dummy_var_initialize first"):
        read([1])
    handle = raw_ops.dummy_var_handle(**name)
    for each in (handle, made_inside[0]):
        raw_ops.dummy_var_initialize(each, "2", "hbm", "raw")
        raw_ops.dummy_var_assign(each, [7], rows_of([7]))
    for keys in ([7], [8, 7]):  # two traces
        expected = [rows_of([7])[0] if key == 7 else [2.0] * DIM for key in keys]
        np.testing.assert_array_equal(read(tf.constant(keys)), expected)
        found = raw_ops.dummy_var_sparse_read(made_inside[0], keys)
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(raw_ops.dummy_var_export(handle).indices, [7, 8])


def test_a_table_lives_as_long_as_its_handle():
    def used():
        handle = made()
        table = weakref.ref(variable_of(handle).table)
        raw_ops.dummy_var_sparse_read(handle, [1])
        shape = tf.function(lambda: raw_ops.dummy_var_shape(handle))
        np.testing.assert_array_equal(shape(), [1, DIM])
        gc.collect()
        assert table() is not None
        return table

    table = used()
    gc.collect()
    assert table() is None


def test_a_handle_does_not_keep_a_variable():
    table = sok.DynamicVariable(DIM)
    handle, variable = table.handle, weakref.ref(table)
    del table
    gc.collect()
    assert variable() is None
    with pytest.raises(ValueError, match="one that is gone"):
        raw_ops.dummy_var_sparse_read(handle, [1])


def test_what_is_no_handle_is_refused():
    dense = tf.Variable(rows_of([1]))
    with pytest.raises(TypeError, match="variable.handle.*Received: ResourceVariable"):
        raw_ops.dummy_var_export(dense)
    with pytest.raises(ValueError, match="that of no table"):
        raw_ops.dummy_var_export(dense.handle)
    with pytest.raises(ValueError, match="Call dummy_var_initialize first"):
        raw_ops.dummy_var_export(raw_ops.dummy_var_handle(shape=[None, DIM]))
    for shape in (None, [DIM], [None, None], [None, 0]):
        with pytest.raises(ValueError, match="shape of rank 2"):
            raw_ops.dummy_var_handle(shape=shape)
    with pytest.raises(ValueError, match="takes what dummy_var_handle gave"):
        raw_ops.dummy_var_initialize(dense.handle, "2", "hbm", "raw")


# ---------------------------------------------------------------- keys and rows alone


@pytest.mark.parametrize("dtype", [tf.int32, tf.int64, tf.uint64], ids=lambda d: d.name)
@pytest.mark.parametrize("n, num_splits", [(0, 2), (1, 1), (33, 7), (1000, 3)])
def test_dist_select_groups_keys_by_owner_in_their_order(n, num_splits, dtype, mode):
    rng = np.random.default_rng(n)
    low, high = np.iinfo(dtype.as_numpy_dtype).min, np.iinfo(dtype.as_numpy_dtype).max
    indices = rng.integers(low, high, n, dtype.as_numpy_dtype, endpoint=True)
    select = mode(lambda keys: raw_ops.dist_select(keys, num_splits=num_splits))
    keys, order, splits = select(tf.constant(indices))
    assert (order.dtype, splits.dtype) == (tf.int32, tf.int32)
    owners = [int(key) % num_splits for key in indices]
    expected = sorted(range(n), key=lambda i: owners[i])  # stable
    np.testing.assert_array_equal(order, expected)
    np.testing.assert_array_equal(keys, indices[expected])
    np.testing.assert_array_equal(splits, [owners.count(rank) for rank in range(num_splits)])
    with pytest.raises(TypeError, match="must be integers"):
        raw_ops.dist_select([0.5], num_splits=2)
    with pytest.raises(ValueError, match="Received: num_splits=0"):
        raw_ops.dist_select([1], num_splits=0)


@pytest.mark.parametrize("n", [0, 1, 33])
def test_reorder_and_gather_ex_undo_each_other(n, mode):
    rng = np.random.default_rng(n)
    rows = rng.normal(size=(n, DIM)).astype(np.float32)
    order = rng.permutation(n).astype(np.int32)
    expected = np.zeros_like(rows)
    expected[order] = rows
    moved = mode(lambda rows: raw_ops.reorder(rows, order))(tf.constant(rows))
    np.testing.assert_array_equal(moved, expected)
    gathered = mode(lambda rows: raw_ops.gather_ex(rows, order))
    np.testing.assert_array_equal(gathered(moved), rows)
    np.testing.assert_array_equal(gathered(tf.constant(rows)), rows[order])


def test_group_lookup_takes_handles_of_both_kinds(mode):
    table, dense = sok.DynamicVariable(DIM, "2"), tf.Variable(rows_of([0, 1, 2]))
    ids = [tf.constant([8, 8]), tf.constant([2, 0])]

    rows = mode(lambda: raw_ops.group_lookup([table.handle, dense.handle], ids, tf.float32))()
    np.testing.assert_array_equal(rows[0], np.full((2, DIM), 2.0))
    np.testing.assert_array_equal(rows[1], rows_of([2, 0]))
    (half,) = raw_ops.group_lookup([table.handle], [[8]], tf.float16)
    assert half.dtype == tf.float16
    with pytest.raises(ValueError, match="1 handles and 2 indices"):
        raw_ops.group_lookup([table.handle], ids)


@pytest.mark.parametrize("batch", [0, 1, 5])
def test_hotness_is_the_longest_row_of_each_lookup(batch, mode):
    lengths = np.random.default_rng(batch).integers(0, 9, (2, 3, batch)).astype(np.int32)
    calculate = mode(lambda x: raw_ops.hotness_calculate(x, num_gpus=2, num_lookups=3))
    found = calculate(tf.constant(lengths.reshape(-1)))
    assert found.dtype == tf.int32
    np.testing.assert_array_equal(found, lengths.max((0, 2), initial=0))


@pytest.mark.cases("name")
@pytest.mark.parametrize(
    "name",
    [
        *("preprocessing_forward", "preprocessing_forward_with_weight", "lookup_forward"),
        *("lookup_forward_variable", "lookup_forward_dynamic", "lookup_backward"),
        *("lookup_forward_embedding_var_gpu", "postprocessing_forward", "postprocessing_backward"),
    ],
)
def test_a_stage_of_soks_lookup_says_what_to_use(name):
    with pytest.raises(NotImplementedError, match=f"raw_ops.{name} is not there.*lookup_sparse"):
        getattr(raw_ops, name)([1], num_gpus=1)
