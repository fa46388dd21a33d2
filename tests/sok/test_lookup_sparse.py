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


# ---- bad input ---------------------------------------------------------------------------------

IDS = tf.ragged.constant([[1, 2], [3]], dtype=tf.int64)
DENSE = tf.Variable(tf.zeros([3, 4]))


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
}


@pytest.mark.parametrize(("call", "error", "text"), BAD_CALLS.values(), ids=BAD_CALLS.keys())
def test_bad_calls_are_refused_before_anything_changes(call, error, text, mode):
    table = sok.DynamicVariable(4)
    for variable in (table, sok.Variable(tf.zeros([4, 4]))):
        with pytest.raises(error, match=text):
            mode(partial(call, variable))()
    assert table.table.size == 0


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
