"""The three lookups of `tf.nn`, TensorFlow's own names and ours, against NumPy."""

import numpy as np
import pytest
import tensorflow as tf

from sok_lite import kv_variable as kv
from sok_lite.kv_variable import get_kv_variable

tf1 = tf.compat.v1
DIM = 3
SMALLEST, LARGEST = -(2**63), 2**63 - 1
KEYS = np.array([0, 1, -1, 5, -7, 40, SMALLEST, LARGEST])
ROWS = np.random.default_rng(3).normal(size=(len(KEYS), DIM)).astype(np.float32)

PLAIN = [tf.nn.embedding_lookup, tf1.nn.embedding_lookup, kv.embedding_lookup]
PLAIN += [kv.embedding_lookup_unique]
SPARSE = [
    tf.nn.embedding_lookup_sparse,
    tf1.nn.embedding_lookup_sparse,
    kv.embedding_lookup_sparse,
]
SAFE = [
    tf.nn.safe_embedding_lookup_sparse,
    tf1.nn.safe_embedding_lookup_sparse,
    kv.safe_embedding_lookup_sparse,
]


def name_of(function):
    return f"{function.__module__.split('.')[0]} {function.__name__}"


def row_of(key):
    (place,) = np.flatnonzero(key == KEYS)
    return np.float64(ROWS[place])


def clipped(row, max_norm):
    norm = np.linalg.norm(row)
    return row if max_norm is None or norm <= max_norm else row * (max_norm / norm)


def combined(lists, weights, combiner, max_norm=None):
    """Returns a row for each list of keys, zeros for an empty one."""
    out = np.zeros((len(lists), DIM))
    for i, (keys, each) in enumerate(zip(lists, weights, strict=True)):
        each = np.float64(each)
        divisor = {"sum": 1.0, "mean": each.sum(), "sqrtn": np.sqrt((each**2).sum())}
        rows = [clipped(row_of(key), max_norm) * w for key, w in zip(keys, each, strict=True)]
        if rows and divisor[combiner]:
            out[i] = np.sum(rows, axis=0) / divisor[combiner]
    return out


@pytest.fixture
def filled(here, made):
    """Makes a variable with the rows."""

    def make(**arguments):
        variable = made(embedding_dim=DIM, **arguments)
        here.run(lambda keys, rows: kv.insert_kv_embedding(variable, keys, rows), KEYS, ROWS)
        return variable

    return make


def forms(variable):
    """The variable, and what else stands for it."""
    return (
        [variable, list(variable)]
        if isinstance(variable, kv.PartitionedKvVariable)
        else [
            variable,
            [variable],
            (variable,),
        ]
    )


# ---- embedding_lookup ----------------------------------------------------------------------------


@pytest.mark.parametrize("lookup", PLAIN, ids=name_of)
def test_keys_of_any_shape(here, filled, lookup):
    variable = filled()
    for shape in [(), (0,), (1,), (8,), (2, 4), (4, 1, 2), (0, 3)]:
        keys = KEYS[: int(np.prod(shape))].reshape(shape)
        rows = here.run(lambda ids: lookup(variable, ids), keys)
        np.testing.assert_array_equal(rows, ROWS[: keys.size].reshape(*shape, DIM))
    for params in forms(variable):
        rows = here.run(lambda ids, p=params: lookup(p, ids), KEYS)
        np.testing.assert_array_equal(rows, ROWS)


def test_a_key_may_be_repeated_and_of_a_smaller_type(here, filled):
    variable = filled()
    for dtype in (np.int64, np.int32, np.int8):
        keys = np.array([5, -7, 5, 5], dtype)
        rows = here.run(lambda ids: tf.nn.embedding_lookup(variable, ids), keys)
        np.testing.assert_array_equal(rows, ROWS[[3, 4, 3, 3]])


def test_python_numbers_and_lists_are_keys(here, filled):
    variable = filled()
    for keys, places in ((5, 3), ([5, -7], [3, 4]), ([[0], [-1]], [[0], [2]])):
        rows = here.run(lambda k=keys: tf.nn.embedding_lookup(variable, k))
        np.testing.assert_array_equal(rows, ROWS[places])


@pytest.mark.parametrize("lookup", PLAIN, ids=name_of)
def test_ragged_keys_give_ragged_rows(filled, here, lookup):
    variable = filled()

    def look_up(keys):
        ids = tf.RaggedTensor.from_row_lengths(keys, [2, 0, 1])
        out = lookup(variable, ids)
        assert isinstance(out, tf.RaggedTensor)
        return out.flat_values, out.row_lengths()

    rows, lengths = here.run(look_up, np.array([5, 0, -1]))
    np.testing.assert_array_equal(rows, ROWS[[3, 0, 2]])
    assert lengths.tolist() == [2, 0, 1]


def test_max_norm_clips_what_is_read(here, filled):
    variable = filled()
    for lookup in (tf.nn.embedding_lookup, kv.embedding_lookup):
        rows = here.run(lambda ids, f=lookup: f(variable, ids, max_norm=0.5), KEYS.reshape(2, 4))
        wanted = [clipped(row, 0.5) for row in np.float64(ROWS)]
        np.testing.assert_allclose(rows, np.reshape(wanted, (2, 4, DIM)), rtol=1e-6)
    np.testing.assert_array_equal(
        here.run(lambda ids: kv.embedding_lookup(variable, ids), KEYS), ROWS
    )


def test_the_result_has_the_name():
    with tf.Graph().as_default():
        variable = get_kv_variable("kv", 2)
        assert tf.nn.embedding_lookup(variable, [1], name="rows").name == "rows:0"
        ids = tf.SparseTensor([[0, 0]], tf.constant([1], tf.int64), [1, 1])
        assert tf.nn.embedding_lookup_sparse(variable, ids, None, name="mean").name == "mean:0"
        found = tf1.nn.safe_embedding_lookup_sparse(variable, ids, name="safe")
        assert found.name == "safe:0"


@pytest.mark.parametrize("ids", [tf.constant([1.0]), tf.constant(["a"]), [0.5], tf.constant(True)])
def test_ids_that_are_no_integers(ids):
    variable = get_kv_variable("kv", 2)
    for lookup in PLAIN:
        with pytest.raises(TypeError, match="integers"):
            lookup(variable, ids)


def test_keys_beyond_the_key_type():
    variable = get_kv_variable("kv", 2, key_dtype=tf.int32)
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="int32"):
        tf.nn.embedding_lookup(variable, tf.constant([2**40]))
    assert variable.export()[0].shape == (0,)


def test_lists_that_are_not_one_variable():
    one, other = get_kv_variable("one", 2), get_kv_variable("other", 2)
    split = get_kv_variable("split", 2, partitioner=tf1.fixed_size_partitioner(3))
    first, second, third = split
    wrong = [[one, other], [second, first, third], [first, second], [first, first, third]]
    wrong += [[split, one], [*split, first]]
    for params in wrong:
        for lookup in PLAIN:
            with pytest.raises(ValueError, match="all partitions of one"):
                lookup(params, tf.constant([1]))
    dense = tf.Variable(tf.ones([4, 2]))
    for params in ([one, dense], [dense, one]):
        with pytest.raises(ValueError, match="takes one KvVariable|[Ll]ook each up"):
            tf.nn.embedding_lookup(params, tf.constant([1]))
        with pytest.raises(TypeError, match="must be a KvVariable"):
            kv.embedding_lookup(params, tf.constant([1]))
    with pytest.raises(TypeError, match="must be a KvVariable"):
        kv.embedding_lookup(dense, tf.constant([1]))
    assert all(variable.export()[0].shape == (0,) for variable in (one, other, split))


# ---- sparse lookups ------------------------------------------------------------------------------

LISTS = [[5, -7], [], [SMALLEST], [LARGEST, 0, 0, -1], []]
WEIGHTS = [[2.0, 0.5], [], [-1.0], [1.0, 0.25, 4.0, 3.0], []]
ALL_KEYS = np.array([key for keys in LISTS for key in keys])
WITHOUT = [[1.0] * len(keys) for keys in LISTS]


def ragged(values, dtype, lists=LISTS):
    """Returns a RaggedTensor of a tensor of values."""
    return tf.RaggedTensor.from_row_lengths(tf.cast(values, dtype), [len(row) for row in lists])


def looked_up(here, lookup, params, form, weights, **arguments):
    """Returns what a sparse lookup of LISTS gives."""

    def run(keys, numbers):
        ids, given = ragged(keys, tf.int64), ragged(numbers, tf.float32)
        if form == "sparse":
            ids, given = ids.to_sparse(), given.to_sparse()
        return lookup(params, ids, None if weights is None else given, **arguments)

    numbers = np.concatenate(WITHOUT if weights is None else weights).astype(np.float32)
    return here.run(run, ALL_KEYS, numbers)


@pytest.mark.pairs
@pytest.mark.parametrize("combiner", ["mean", "sum", "sqrtn", None])
@pytest.mark.parametrize(
    ("weights", "form"),
    [(None, "sparse"), (WEIGHTS, "ragged"), (WEIGHTS, "sparse")],
    ids=["plain sparse", "weighted ragged", "weighted sparse"],
)
def test_rows_are_combined(here, filled, combiner, weights, form):
    variable = filled()
    wanted = combined(LISTS, weights or WITHOUT, combiner or "mean")
    # Each function once, and each form of the variable.
    for lookup, params in zip(SPARSE, [*forms(variable), variable], strict=False):
        found = looked_up(here, lookup, params, form, weights, combiner=combiner)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.pairs
@pytest.mark.parametrize("lookup", [*SPARSE, *SAFE], ids=name_of)
def test_rows_are_clipped_before_they_are_combined(here, filled, lookup):
    variable = filled()
    found = looked_up(here, lookup, variable, "sparse", None, combiner="sum", max_norm=0.5)
    np.testing.assert_allclose(found, combined(LISTS, WITHOUT, "sum", 0.5), rtol=1e-5, atol=1e-6)


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16])
@pytest.mark.parametrize("lookup", [*SPARSE, *SAFE], ids=name_of)
def test_halves_are_combined_as_floats(here, made, lookup, dtype):
    variable = made(embedding_dim=DIM, value_dtype=dtype)
    rows = ROWS.astype(dtype.as_numpy_dtype)
    here.run(lambda keys, values: kv.insert_kv_embedding(variable, keys, values), KEYS, rows)
    found = looked_up(here, lookup, variable, "sparse", None, combiner="sum")
    exact = dict(zip(KEYS.tolist(), np.float64(rows), strict=True))
    wanted = [np.sum([exact[key] for key in keys] or [np.zeros(DIM)], axis=0) for keys in LISTS]
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.pairs
@pytest.mark.parametrize("combiner", ["mean", "sum", "sqrtn"])
@pytest.mark.parametrize("default_id", [None, -7])
@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["plain", "weighted"])
def test_safe_lookups_leave_bad_weights_out_and_fill_empty_rows(
    here, filled, combiner, default_id, weights
):
    variable = filled()
    lists, numbers = [], []
    for keys, each in zip(LISTS, weights or WITHOUT, strict=True):
        kept = [(k, w) for k, w in zip(keys, each, strict=True) if w > 0 or combiner == "sum"]
        if not kept and default_id is not None:
            kept = [(default_id, 1.0)]
        lists.append([key for key, _ in kept])
        numbers.append([weight for _, weight in kept])
    wanted = combined(lists, numbers, combiner)
    arguments = {"combiner": combiner, "default_id": default_id}
    for lookup in SAFE:
        found = looked_up(here, lookup, variable, "sparse", weights, **arguments)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("lookup", SAFE, ids=name_of)
def test_safe_lookups_of_a_higher_rank(here, filled, lookup):
    variable = filled()
    places = [[0, 0, 1], [1, 2, 0], [1, 2, 3]]

    def run(keys):
        return lookup(variable, tf.SparseTensor(places, keys, [2, 3, 4]), combiner="sum")

    wanted = np.zeros((2, 3, DIM))
    wanted[0, 0], wanted[1, 2] = row_of(-7), row_of(5) + row_of(-1)
    np.testing.assert_allclose(here.run(run, np.array([-7, 5, -1])), wanted, rtol=1e-5)


@pytest.mark.parametrize("lookup", SPARSE, ids=name_of)
def test_sparse_arguments_that_do_not_fit(lookup):
    variable = get_kv_variable("kv", 2)
    ids = tf.SparseTensor([[0, 0]], tf.constant([1], tf.int64), [1, 1])
    with pytest.raises(ValueError, match="`combiner`.*'max'"):
        lookup(variable, ids, None, combiner="max")
    with pytest.raises(TypeError, match="SparseTensor or RaggedTensor"):
        lookup(variable, tf.constant([1]), None)
    with pytest.raises(TypeError, match="as `sp_ids` is"):
        lookup(variable, ids, tf.ragged.constant([[1.0]]))
    with pytest.raises(TypeError, match="integers"):
        lookup(variable, tf.SparseTensor([[0, 0]], [1.0], [1, 1]), None)
    with pytest.raises(ValueError, match="all partitions of one"):
        lookup([variable, variable], ids, None)
    assert variable.export()[0].shape == (0,)


# ---- gradients -----------------------------------------------------------------------------------


def gradient_of(here, variable, loss_of, *arrays):
    """Returns the summed gradient of each key, from all of a variable's parts."""
    sources = list(variable) if isinstance(variable, kv.PartitionedKvVariable) else [variable]

    def run(*tensors):
        if here.is_graph:
            gradients = tf.gradients(loss_of(*tensors), sources)
        else:
            with tf.GradientTape() as tape:
                loss = loss_of(*tensors)
            gradients = tape.gradient(loss, sources)
        assert all(isinstance(each, tf.IndexedSlices) for each in gradients)
        return [(each.indices, each.values) for each in gradients]

    sums = {}
    for part, (keys, values) in enumerate(here.run(run, *arrays)):
        for key, value in zip(keys.tolist(), np.float64(values), strict=True):
            assert key % len(sources) == part
            sums[key] = sums.get(key, 0) + value
    return sums


@pytest.mark.parametrize("lookup", PLAIN, ids=name_of)
def test_gradients_of_a_plain_lookup(here, filled, lookup):
    variable = filled()
    keys = np.array([[5, -7, 5], [SMALLEST, LARGEST, 77]])  # 77 is new
    factors = np.random.default_rng(1).normal(size=(2, 3, DIM)).astype(np.float32)
    found = gradient_of(
        here, variable, lambda ids, f: tf.reduce_sum(lookup(variable, ids) * f), keys, factors
    )
    wanted = {}
    for key, factor in zip(keys.ravel().tolist(), factors.reshape(-1, DIM), strict=True):
        wanted[key] = wanted.get(key, 0) + np.float64(factor)
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        np.testing.assert_allclose(found[key], value, rtol=1e-6)


@pytest.mark.pairs
@pytest.mark.parametrize("lookup", [SPARSE[0], SAFE[1], SAFE[2]], ids=name_of)
@pytest.mark.parametrize("combiner", ["mean", "sum", "sqrtn"])
def test_gradients_of_a_sparse_lookup(here, filled, lookup, combiner):
    variable = filled()
    factors = np.random.default_rng(2).normal(size=(len(LISTS), DIM)).astype(np.float32)

    def loss_of(keys, f):
        rows = lookup(variable, ragged(keys, tf.int64).to_sparse(), None, combiner=combiner)
        return tf.reduce_sum(rows * f)

    found = gradient_of(here, variable, loss_of, ALL_KEYS, factors)
    wanted = {}
    for row, factor in zip(LISTS, np.float64(factors), strict=True):
        for key in row:
            by = {"sum": 1, "mean": len(row), "sqrtn": np.sqrt(len(row))}[combiner]
            wanted[key] = wanted.get(key, 0) + factor / by
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        np.testing.assert_allclose(found[key], value, rtol=1e-5, atol=1e-6)


def test_two_lookups_of_a_step_both_count(here, filled):
    variable = filled()

    def loss_of(a, b):
        rows = tf.nn.embedding_lookup(variable, a), tf.nn.embedding_lookup(variable, b)
        return tf.reduce_sum(rows[0]) + 2.0 * tf.reduce_sum(rows[1])

    found = gradient_of(here, variable, loss_of, [5, 0], [5, -1])
    assert {key: value[0] for key, value in found.items()} == {5: 3.0, 0: 1.0, -1: 2.0}


# ---- what is not ours ----------------------------------------------------------------------------


def test_ordinary_variables_are_looked_up_as_ever(here):
    with tf.init_scope():
        pass
    whole = np.arange(24, dtype=np.float32).reshape(8, 3)
    ids = tf.SparseTensor([[0, 0], [0, 1]], np.array([1, 6]), [1, 2])

    def run():
        tensor = tf.constant(whole)
        split = [tensor[0::2], tensor[1::2]]
        return (
            tf.nn.embedding_lookup(tensor, [1, 6]),
            tf1.nn.embedding_lookup(split, [1, 6]),
            tf.nn.embedding_lookup_sparse(tensor, ids, None, combiner="sum"),
            tf1.nn.safe_embedding_lookup_sparse(split, ids, partition_strategy="mod"),
        )

    first, second, total, mean = here.run(run)
    np.testing.assert_array_equal(first, whole[[1, 6]])
    np.testing.assert_array_equal(second, whole[[1, 6]])
    np.testing.assert_array_equal(total, whole[[1, 6]].sum(axis=0, keepdims=True))
    np.testing.assert_array_equal(mean, whole[[1, 6]].mean(axis=0, keepdims=True))


def test_a_list_of_ordinary_variables_is_still_partitions():
    parts = [tf.Variable(np.full((2, 3), number, np.float32)) for number in range(2)]
    rows = tf1.nn.embedding_lookup(parts, [0, 1, 2, 3])
    assert rows.numpy()[:, 0].tolist() == [0.0, 1.0, 0.0, 1.0]
    rows = tf.nn.embedding_lookup(parts[1], tf.ragged.constant([[1], [0, 1]]))
    assert rows.shape.as_list() == [2, None, 3]


def test_tensorflows_own_lookups_may_be_had_back():
    variable = get_kv_variable("kv", 2, initializer=tf1.ones_initializer())
    split = get_kv_variable("split", 2, partitioner=tf1.fixed_size_partitioner(2))
    ids = tf.SparseTensor([[0, 0]], tf.constant([-1], tf.int64), [1, 1])
    kv.use_tf_embedding_ops()
    try:
        kv.use_tf_embedding_ops()
        safe = tf.nn.safe_embedding_lookup_sparse(variable, ids)
        assert safe.numpy().tolist() == [[0.0, 0.0]]  # a negative key is left out
        with pytest.raises(ValueError):
            tf.nn.embedding_lookup(list(split), [1])
    finally:
        kv.use_tfplus_embedding_ops()
        kv.use_tfplus_embedding_ops()
    assert tf.nn.safe_embedding_lookup_sparse(variable, ids).numpy().tolist() == [[1.0, 1.0]]
    assert tf.nn.embedding_lookup(list(split), [1]).shape == (1, 2)


def test_rows_of_ones_own_are_inserted(here, made):
    variable = made(embedding_dim=2)
    for params in forms(variable):
        here.run(
            lambda ids, rows, p=params: kv.insert_kv_embedding(p, ids, rows),
            [[4, -5], [4, 6]],
            [[[1.0, 1.0], [2.0, 2.0]], [[3.0, 3.0], [4.0, 4.0]]],
        )
    keys, rows = here.run(variable.export)
    assert keys.tolist() == [-5, 4, 6]  # of a repeated key the last row counts
    assert rows[:, 0].tolist() == [2.0, 3.0, 4.0]
    for wrong in ([[1.0, 1.0]], [[1.0] * 4], [1.0] * 4, [[[1.0, 1.0]] * 2]):
        with pytest.raises(ValueError, match=r"insert_kv_embedding.*\(2, 2\).*Received"):
            kv.insert_kv_embedding(variable, [1, 2], wrong)
