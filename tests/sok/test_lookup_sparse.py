"""sok.lookup_sparse on one rank: forms of ids, graphs, errors; pooling: bridge/test_lookup.py."""

import gc
from collections import Counter
from functools import partial

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite.engine.work_counters import GRADIENTS

NUM_ROWS = 60
COMBINERS = ("sum", "mean", "sqrtn")

pytestmark = pytest.mark.usefixtures("initialised")


@pytest.fixture
def table():
    """A table with rows for the keys 0 to NUM_ROWS - 1."""
    table = sok.DynamicVariable(4)
    rows = np.random.default_rng(0).normal(size=(NUM_ROWS, 4)).astype(np.float32)
    sok.assign(table, np.arange(NUM_ROWS), rows)
    return table


def a_batch(seed, batch, most=5):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, most + 1, batch)
    ids = tf.constant(rng.integers(0, NUM_ROWS, lengths.sum()))
    weights = tf.constant(rng.uniform(0.5, 2, lengths.sum()), tf.float32)
    ragged = tf.RaggedTensor.from_row_lengths(ids, lengths)
    return ragged, ragged.with_flat_values(weights)


def loss_of(outputs):
    return tf.add_n([tf.reduce_sum(tf.sin(out) * (i + 1)) for i, out in enumerate(outputs)])


def types_of(function):
    """How often each type of operation is in the graph of a function."""
    graph = function.get_concrete_function().graph
    return Counter(operation.type for operation in graph.get_operations())


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("count", [1, 5])
def test_a_lookup_and_its_gradient_are_two_operations_that_join_and_cut_nothing(count, weighted):
    tables = [sok.DynamicVariable(dim) for dim in (3, 16, 5, 1, 8)[:count]]
    ids, weights = zip(*(a_batch(seed, 5) for seed in range(count)), strict=True)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = loss_of(sok.lookup_sparse(tables, ids, weights if weighted else None))
        return tape.gradient(loss, tables)

    types = types_of(step)
    assert (types["SokLookup"], types["SokLookupGradient"]) == (1, 1)
    for name in ("EagerPyFunc", "PyFunc", "ConcatV2", "Split", "SplitV", "Slice", "Pack"):
        assert types[name] == 0, name


def test_a_gradient_that_nobody_asks_for_is_not_run(table):
    ids, _ = a_batch(0, 5)
    factor = tf.Variable(2.0)

    @tf.function
    def only_dense():
        with tf.GradientTape() as tape:
            loss = factor * loss_of(sok.lookup_sparse([table], [ids]))
        return tape.gradient(loss, [table, factor])[1]

    assert types_of(only_dense)["SokLookupGradient"] == 1
    done = GRADIENTS.number
    only_dense()
    assert GRADIENTS.number == done


def with_gaps(rows):
    sparse = rows.to_sparse()
    shape = sparse.dense_shape * tf.constant([1, 3], tf.int64)
    return tf.SparseTensor(sparse.indices * tf.constant([1, 3], tf.int64), sparse.values, shape)


def of_unknown_shape(tensor):
    if tf.executing_eagerly():
        return tensor
    return tf.compat.v1.placeholder_with_default(tensor, [None] * tensor.shape.rank)


# Rows of a RaggedTensor in the forms that a lookup takes; those of the last three are equally long.
FORMS = {
    "ragged": lambda rows, _: rows,
    "splits of int32": lambda rows, _: rows.with_row_splits_dtype(tf.int32),
    "sparse": lambda rows, _: rows.to_sparse(),
    "sparse with gaps": lambda rows, _: with_gaps(rows),
    "dense": lambda rows, width: tf.reshape(rows.flat_values, [-1, width]),
    "unknown": lambda rows, width: of_unknown_shape(tf.reshape(rows.flat_values, [-1, width])),
    "one each": lambda rows, _: rows.flat_values,
}


@pytest.mark.parametrize("count", [1, 42])
@pytest.mark.parametrize("batch", [0, 5])
def test_tables_of_a_call_give_what_each_gives_by_itself(count, batch, mode):
    """In any form of ids and weights, bit by bit what ragged ones give."""
    rng, tables, given = np.random.default_rng(count), [], []
    for i in range(count):
        form, key_type = [*FORMS][i % 7], (tf.int64, tf.int32, tf.uint64)[i % 3]
        dim, dtype = (16, 3, 7, 32, 1)[i % 5], (tf.float32, tf.float16)[i % 2]
        tables.append(sok.DynamicVariable(dim, key_type=key_type, dtype=dtype))
        width = 1 if form == "one each" else 1 + i % 3
        lengths = rng.integers(0, 4, batch) if i % 7 < 4 else np.full(batch, width)
        ids = tf.RaggedTensor.from_row_lengths(rng.integers(0, 9, lengths.sum()), lengths)
        ids = tf.cast(ids, key_type if i % 4 else tf.int32)
        of_weights = None
        if i % 3:
            of_weights = form if i % 2 else [*FORMS][i // 7 % 4]
        weights = tf.constant(rng.uniform(0.5, 2, lengths.sum()), tf.float32)
        given.append((ids, weights, form, of_weights, width, COMBINERS[i // 3 % 3]))

    def look_up(tables, given):
        flat = [weights for _, weights, _, of_weights, *_ in given if of_weights is not None]
        with tf.GradientTape() as tape:
            tape.watch(flat)
            all_ids = [FORMS[form](ids, width) for ids, _, form, _, width, _ in given]
            all_weights = [
                None if form is None else FORMS[form](ids.with_flat_values(weights), width)
                for ids, weights, _, form, width, _ in given
            ]
            outputs = sok.lookup_sparse(tables, all_ids, all_weights, [each[-1] for each in given])
            loss = tf.add_n([tf.reduce_sum(tf.sin(tf.cast(out, tf.float32))) for out in outputs])
        return outputs, *tape.gradient(loss, [tables, flat])

    together, alone = mode(lambda: look_up(tables, given))(), ([], [], [])
    for table, (ids, weights, _, form, *others) in zip(tables, given, strict=True):
        form = form and "ragged"
        for all_of, found in zip(
            alone, look_up([table], [(ids, weights, "ragged", form, *others)]), strict=True
        ):
            all_of.extend(found)
    assert [out.shape for out in together[0]] == [(batch, table.dimension) for table in tables]
    together, alone = (tf.nest.flatten(each, expand_composites=True) for each in (together, alone))
    for one, other in zip(together, alone, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        np.testing.assert_array_equal(one, other)


def test_shapes_and_combiners_of_a_call(table):
    """One variable gives one tensor, lists give lists; the mean is the default."""
    ids, _ = a_batch(0, 5)
    one = sok.lookup_sparse(table, ids)
    assert tf.is_tensor(one)
    for some, combiners in (([ids], "mean"), ((ids,), ["Average"]), ([ids], ["MEAN"])):
        found = sok.lookup_sparse([table], some, combiners=combiners)
        assert isinstance(found, list)
        np.testing.assert_array_equal(found[0], one)
    for each in sok.lookup_sparse([table] * 2, [ids, ids], combiners="average"):
        np.testing.assert_array_equal(each, one)
    assert sok.lookup_sparse([], []) == []


def test_empty_rows_and_zero_weights_give_zeros(table, mode):
    ids = tf.ragged.constant([[], [1, 2], []], dtype=tf.int64)
    zero = ids.with_flat_values(tf.zeros([2]))

    @mode
    def run():
        with tf.GradientTape() as tape:
            outputs = sok.lookup_sparse([table] * 2, [ids, ids], [None, zero])
            loss = tf.reduce_sum(outputs[1])
        return outputs, tape.gradient(loss, table)

    (plain, weighted), gradient = run()
    np.testing.assert_array_equal(plain.numpy()[[0, 2]], np.zeros((2, 4)))
    np.testing.assert_array_equal(weighted, np.zeros((3, 4)))
    np.testing.assert_array_equal(gradient.values, np.zeros((4, 4)))


def test_a_graph_makes_no_row_splits_of_dense_ids(table):
    @tf.function(input_signature=[tf.TensorSpec([None, 3], tf.int64)])
    def look_up(ids):
        return sok.lookup_sparse([table] * 3, [ids, ids[:, 0], ids], combiners="sum")

    assert not types_of(look_up).keys() & {"Range", "Shape"}


def test_static_shapes(table):
    shapes = []

    @tf.function(
        input_signature=[
            *[tf.TensorSpec([None], tf.int64), tf.TensorSpec([7, None], tf.int32)],
            tf.RaggedTensorSpec([None, None], tf.int64),
            tf.SparseTensorSpec([7, None], tf.int64),
        ]
    )
    def look_up(*ids):
        shapes.extend(out.shape.as_list() for out in sok.lookup_sparse([table] * 4, ids))

    look_up.get_concrete_function()
    assert shapes == [[None, 4], [7, 4]] * 2
    with pytest.raises(ValueError, match="Received: shape <unknown>"):
        tf.function(
            lambda ids: sok.lookup_sparse(table, ids),
            input_signature=[tf.TensorSpec(None, tf.int64)],
        )(tf.constant([1], tf.int64))


@pytest.mark.parametrize("key_type", [tf.int32, tf.uint64], ids=lambda d: d.name)
@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16], ids=lambda d: d.name)
def test_keys_and_rows_of_other_types(key_type, dtype, mode):
    """Rows of 16 bits are combined in float32, and have gradients of it."""
    table = sok.DynamicVariable(2, "1.5", key_type=key_type, dtype=dtype)
    top = np.iinfo(key_type.as_numpy_dtype).max
    keys = tf.constant(np.array([top, 0, top, 3], key_type.as_numpy_dtype))
    ids = tf.RaggedTensor.from_row_lengths(keys, [3, 1])

    @mode
    def run():
        with tf.GradientTape() as tape:
            out = sok.lookup_sparse(table, ids, combiners="sum")
            loss = tf.reduce_sum(out)
        return out, tape.gradient(loss, table)

    out, gradient = run()
    assert out.dtype == dtype and gradient.indices.dtype == key_type
    np.testing.assert_array_equal(tf.cast(out, tf.float32), [[4.5, 4.5], [1.5, 1.5]])
    assert gradient.values.dtype == tf.float32
    np.testing.assert_array_equal(gradient.indices, [top, 0, 3])
    np.testing.assert_array_equal(gradient.values, [[2.0, 2.0], [1.0, 1.0], [1.0, 1.0]])


# ---- bad input ---------------------------------------------------------------------------------

IDS = tf.ragged.constant([[1, 2], [3]], dtype=tf.int64)
DENSE = tf.Variable(tf.zeros([3, 4]))
LOCALIZED = sok.DynamicVariable(4, mode="localized:3")


def of_unknown_length(vector):
    if tf.executing_eagerly():
        return tf.constant(vector)
    return tf.identity(tf.compat.v1.placeholder_with_default(vector, [None]))


def ragged_of(keys, splits):
    """Returns what TensorFlow has not checked."""
    splits = of_unknown_length(np.array(splits, np.int64))
    keys = tf.constant(keys, tf.int64)
    return tf.RaggedTensor.from_row_splits(keys, splits, validate=False)


def one_weight(variable):
    ids = ragged_of([1, 2], [0, 2])
    weights = of_unknown_length([1.0])
    weights = tf.RaggedTensor.from_row_splits(weights, ids.row_splits, validate=False)
    return sok.lookup_sparse(variable, ids, weights)


BAD_CALLS = {
    "unknown combiner": (
        lambda v: sok.lookup_sparse(v, IDS, combiners="max"),
        ValueError,
        "'sum', 'mean' \\(or 'average'\\) or 'sqrtn'. Received: combiner='max'",
    ),
    "float ids": (
        lambda v: sok.lookup_sparse(v, tf.cast(IDS, tf.float32)),
        TypeError,
        "must be integers",
    ),
    "dense ids of rank 3": (
        lambda v: sok.lookup_sparse(v, tf.constant([[[1, 2]]])),
        ValueError,
        r"shape \(batch, k\), or \(batch,\) with one to a row. Received: shape \(1, 1, 2\)",
    ),
    "one key": (
        lambda v: sok.lookup_sparse(v, tf.constant(1)),
        ValueError,
        r"sp_ids\[0\] must be a ragged, sparse or dense.*Received: shape \(\)",
    ),
    "dense floats": (
        lambda v: sok.lookup_sparse(v, np.array([[1.0]])),
        TypeError,
        r"sp_ids\[0\] must be integers \(ragged, sparse or dense: int64 or int32\)",
    ),
    "strings": (
        lambda v: sok.lookup_sparse(v, tf.constant(["a"])),
        TypeError,
        "must be integers.*Received: string. .*hash_strings",
    ),
    "dense weights of another shape": (
        lambda v: sok.lookup_sparse(v, tf.constant([[1, 2]]), tf.constant([[1.0], [2.0]])),
        (ValueError, tf.errors.InvalidArgumentError),
        r"rows of sp_weights\[0\] must be as long as those of sp_ids\[0\]",
    ),
    "rank 3": (
        lambda v: sok.lookup_sparse(v, tf.ragged.constant([[[1], [2]]], dtype=tf.int64)),
        ValueError,
        "rank 2 with one ragged dimension",
    ),
    "sparse of rank 1": (
        lambda v: sok.lookup_sparse(v, tf.sparse.from_dense(tf.constant([1, 2], tf.int64))),
        ValueError,
        "must have rank 2",
    ),
    "more ids than variables": (
        lambda v: sok.lookup_sparse([v], [IDS, IDS]),
        ValueError,
        "equally long.*1 params, 2 sp_ids.*one table as an array",
    ),
    "more weights than ids": (
        lambda v: sok.lookup_sparse([v], [IDS], [None, None]),
        ValueError,
        "equally long.*2 sp_weights",
    ),
    "more combiners than ids": (
        lambda v: sok.lookup_sparse([v], [IDS], combiners=["sum", "sum"]),
        ValueError,
        "equally long.*2 combiners",
    ),
    "a tf.Variable": (
        lambda v: sok.lookup_sparse(DENSE, IDS),
        NotImplementedError,
        "ResourceVariable is not supported in lookup",
    ),
    "the filter": (
        lambda v: sok.lookup_sparse(v, IDS, use_low_frequency_filter=True),
        NotImplementedError,
        "`use_low_frequency_filter` needs tables of var_type 'hybrid'",
    ),
    "text weights": (
        lambda v: sok.lookup_sparse(v, IDS, IDS.with_values(tf.constant(["a", "b", "c"]))),
        TypeError,
        "sp_weights\\[0\\] must be float32, or cast to it. Received: string",
    ),
    "too few weights": (
        lambda v: sok.lookup_sparse(v, IDS, tf.ragged.constant([[1.0], [2.0]])),
        ValueError,
        "one weight for each key",
    ),
    "one weight": (
        one_weight,
        (ValueError, tf.errors.InvalidArgumentError),
        "one weight for each key",
    ),
    "weights of other rows": (
        lambda v: sok.lookup_sparse(v, IDS, tf.ragged.constant([[1.0], [2.0, 3.0]])),
        (ValueError, tf.errors.InvalidArgumentError),
        "rows of sp_weights\\[0\\] must be as long as those of sp_ids\\[0\\]",
    ),
    "sparse ids out of order": (
        lambda v: sok.lookup_sparse(
            v, tf.SparseTensor([[1, 0], [0, 0]], tf.constant([1, 2], tf.int64), [2, 1])
        ),
        (ValueError, tf.errors.InvalidArgumentError),
        "row-major order.*tf.sparse.reorder",
    ),
    "sparse ids of rows that there are not": (
        lambda v: sok.lookup_sparse(
            v, tf.SparseTensor([[0, 0], [2, 0]], tf.constant([1, 2], tf.int64), [2, 1])
        ),
        (ValueError, tf.errors.InvalidArgumentError),
        r"rows of a SparseTensor must be in \[0, 2\).*Received: rows 0 to 2",
    ),
    "row splits that fall": (
        lambda v: sok.lookup_sparse(v, ragged_of([1, 2], [0, 2, 1, 2])),
        (ValueError, tf.errors.InvalidArgumentError),
        "must rise from 0 to the number of its keys, 2.*with a fall between",
    ),
    "row splits of fewer keys": (
        lambda v: sok.lookup_sparse(v, ragged_of([1, 2], [0, 1])),
        (ValueError, tf.errors.InvalidArgumentError),
        "must rise from 0 to the number of its keys, 2. Received: 0 to 1",
    ),
    "row splits of no length": (
        lambda v: sok.lookup_sparse(v, ragged_of([1, 2], [])),
        (ValueError, tf.errors.InvalidArgumentError),
        "Received: row splits of length 0",
    ),
    "a rank that there is not": (
        lambda v: sok.lookup_sparse(LOCALIZED, IDS),
        RuntimeError,
        "There are only 1 GPU",
    ),
}


@pytest.mark.parametrize(("call", "error", "text"), BAD_CALLS.values(), ids=BAD_CALLS.keys())
def test_bad_calls_are_refused_before_anything_changes(call, error, text, mode):
    table = sok.DynamicVariable(4)
    for variable in (table, sok.Variable(tf.zeros([4, 4]))):
        with pytest.raises(error, match=text):
            mode(partial(call, variable))()
    assert table.table.size == 0


def test_a_key_out_of_range_changes_no_table(mode):
    good = sok.DynamicVariable(4)
    narrow = sok.DynamicVariable(4, key_type=tf.int32, name="narrow")
    far = tf.ragged.constant([[1, 2**31], [3]], dtype=tf.int64)
    with pytest.raises(
        (ValueError, tf.errors.InvalidArgumentError), match="keys of table 'narrow' must fit int32"
    ):
        mode(lambda: sok.lookup_sparse([good, narrow], [IDS, far]))()
    assert good.table.size == narrow.table.size == 0


def test_it_needs_init_where_there_are_ranks(two_launched):
    with pytest.raises(RuntimeError, match="Did you forget to call sok.init"):
        sok.lookup_sparse(sok.DynamicVariable(4), IDS)


def test_an_eager_lookup_leaves_nothing_for_the_garbage_collector():
    table = sok.DynamicVariable(4)
    ids = tf.constant([[1, 2], [3, 4]], tf.int64)

    def step():
        with tf.GradientTape() as tape:
            out = sok.lookup_sparse(table, ids, None, "sum")
        tape.gradient(out, table)
        sok.lookup_sparse(table, ids, None, "sum")

    step()
    gc.collect()
    gc.disable()
    try:
        step()
        assert gc.collect() == 0
    finally:
        gc.enable()
