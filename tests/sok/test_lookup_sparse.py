"""sok.lookup_sparse on one rank, against tf.nn.embedding_lookup_sparse on dense variables."""

import gc
from collections import Counter
from functools import partial

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite.engine.work_counters import GRADIENTS

NUM_ROWS = 60
DIMS = (4, 3, 1)
COMBINERS = ("sum", "mean", "sqrtn")

pytestmark = pytest.mark.usefixtures("initialised")


@pytest.fixture
def pairs():
    """Tables and dense variables with the same rows for the keys 0 to NUM_ROWS - 1."""
    tables, variables = [], []
    for i, dim in enumerate(DIMS):
        rows = np.random.default_rng(i).normal(size=(NUM_ROWS, dim)).astype(np.float32)
        tables.append(sok.DynamicVariable(dim))
        sok.assign(tables[-1], np.arange(NUM_ROWS), rows)
        variables.append(tf.Variable(rows))
    return tables, variables


def a_batch(seed, batch, most=5):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, most + 1, batch)
    ids = tf.constant(rng.integers(0, NUM_ROWS, lengths.sum()))
    weights = tf.constant(rng.uniform(0.5, 2, lengths.sum()), tf.float32)
    ragged = tf.RaggedTensor.from_row_lengths(ids, lengths)
    return ragged, ragged.with_flat_values(weights)


def dense_lookup(variable, ids, weights, combiner, batch):
    sparse = ids if isinstance(ids, tf.SparseTensor) else ids.to_sparse()
    values = weights if weights is None else tf.sparse.map_values(lambda x: x, sparse)
    if weights is not None:
        flat = weights.values
        values = tf.SparseTensor(sparse.indices, flat, sparse.dense_shape)
    out = tf.nn.embedding_lookup_sparse(variable, sparse, values, combiner=combiner)
    # TensorFlow leaves empty rows at the end out.
    return tf.pad(out, [[0, batch - tf.shape(out)[0]], [0, 0]])


def as_dense(gradient, shape):
    total = np.zeros(shape, np.float32)
    np.add.at(total, gradient.indices.numpy(), gradient.values.numpy())
    return total


def tape_inside(run):
    return tf.function(run)()


def tape_eager(run):
    return run()


def loss_of(outputs):
    return tf.add_n([tf.reduce_sum(tf.sin(out) * (i + 1)) for i, out in enumerate(outputs)])


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("kind", ["ragged", "sparse"])
@pytest.mark.parametrize("tape", [tape_eager, tape_inside], ids=lambda f: f.__name__)
def test_outputs_and_gradients_are_tensorflows(pairs, tape, kind, weighted):
    tables, variables = pairs
    batch = 33
    ids, weights = zip(*(a_batch(seed, batch) for seed in range(3)), strict=True)
    if kind == "sparse":
        ids = [x.to_sparse() for x in ids]
    weights = weights if weighted else [None] * 3
    flat_weights = [w.values for w in weights if w is not None]

    def ours():
        with tf.GradientTape() as tape:
            tape.watch(flat_weights)
            outputs = sok.lookup_sparse(tables, list(ids), list(weights), list(COMBINERS))
            loss = loss_of(outputs)
        return outputs, *tape.gradient(loss, [tables, flat_weights])

    with tf.GradientTape() as dense_tape:
        dense_tape.watch(flat_weights)
        dense = [
            dense_lookup(*x, batch) for x in zip(variables, ids, weights, COMBINERS, strict=True)
        ]
        dense_loss = loss_of(dense)
    dense_gradients, dense_weight_gradients = dense_tape.gradient(
        dense_loss, [variables, flat_weights]
    )
    outputs, gradients, weight_gradients = tape(ours)
    for out, expected in zip(outputs, dense, strict=True):
        assert out.shape == expected.shape
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)  # sums of 5 float32
    for gradient, expected, dim in zip(gradients, dense_gradients, DIMS, strict=True):
        keys = gradient.indices.numpy()
        assert len(np.unique(keys)) == len(keys), "keys of the gradient are distinct"
        shape = (NUM_ROWS, dim)
        np.testing.assert_allclose(
            as_dense(gradient, shape), as_dense(expected, shape), rtol=1e-5, atol=1e-6
        )
    for gradient, expected in zip(weight_gradients, dense_weight_gradients, strict=True):
        np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-5)


def test_a_tape_outside_the_function_sees_the_gradient(pairs):
    tables, _ = pairs
    ids, _ = a_batch(0, 9)

    def run(function):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(function() ** 2)
        return tape.gradient(loss, tables[0])

    eager = run(lambda: sok.lookup_sparse(tables[0], ids))
    traced = run(tf.function(lambda: sok.lookup_sparse(tables[0], ids)))
    np.testing.assert_array_equal(traced.indices, eager.indices)
    np.testing.assert_array_equal(traced.values, eager.values)
    np.testing.assert_array_equal(traced.dense_shape, [-1, DIMS[0]])


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


def test_a_gradient_that_nobody_asks_for_is_not_run(pairs):
    tables, _ = pairs
    ids, _ = a_batch(0, 5)
    factor = tf.Variable(2.0)

    @tf.function
    def only_dense():
        with tf.GradientTape() as tape:
            loss = factor * loss_of(sok.lookup_sparse(tables[:1], [ids]))
        return tape.gradient(loss, [tables[0], factor])[1]

    assert types_of(only_dense)["SokLookupGradient"] == 1
    done = GRADIENTS.number
    only_dense()
    assert GRADIENTS.number == done


def mixed_tables(count):
    """Tables of many kinds, and a batch of many kinds of ids for them, with weights for a few."""
    rng = np.random.default_rng(count)
    tables, all_ids, all_weights, combiners = [], [], [], []
    for i in range(count):
        key_type = (tf.int64, tf.int32, tf.uint64)[i % 3]
        dtype = (tf.float32, tf.float16)[i % 2]
        tables.append(sok.DynamicVariable((16, 3, 7, 32, 1)[i % 5], key_type=key_type, dtype=dtype))
        lengths = rng.integers(0, 4, rng.integers(0, 9))
        id_type = key_type if i % 4 else tf.int32
        ids = tf.cast(tf.constant(rng.integers(0, 9, lengths.sum())), id_type)
        ids = tf.RaggedTensor.from_row_lengths(
            ids, lengths.astype((np.int64, np.int32)[i % 7 == 0])
        )
        weights = None
        if i % 3 == 1:
            values = rng.uniform(0.5, 2, lengths.sum()).astype(np.float32)
            weights = ids.with_flat_values(tf.constant(values))
        if i % 2:
            ids = ids.to_sparse()
            weights = weights if weights is None or i % 5 else weights.to_sparse()
        all_ids.append(ids)
        all_weights.append(weights)
        combiners.append(COMBINERS[i % 3])
    return tables, all_ids, all_weights, combiners


@pytest.mark.parametrize("count", [2, 23])
def test_tables_of_a_call_give_what_each_gives_by_itself(count, mode):
    tables, ids, weights, combiners = mixed_tables(count)
    flat_weights = [each.values for each in weights if each is not None]

    def together():
        with tf.GradientTape() as tape:
            tape.watch(flat_weights)
            outputs = sok.lookup_sparse(tables, ids, weights, combiners)
            loss = tf.add_n([tf.reduce_sum(tf.sin(tf.cast(out, tf.float32))) for out in outputs])
        return outputs, *tape.gradient(loss, [tables, flat_weights])

    def one_by_one():
        results = ([], [], [])
        for each in zip(tables, ids, weights, combiners, strict=True):
            watched = [] if each[2] is None else [each[2].values]
            with tf.GradientTape() as tape:
                tape.watch(watched)
                output = sok.lookup_sparse(*each)
                loss = tf.reduce_sum(tf.sin(tf.cast(output, tf.float32)))
            gradient, weight_gradient = tape.gradient(loss, [each[0], watched])
            for result, more in zip(results, ([output], [gradient], weight_gradient), strict=True):
                result.extend(more)
        return results

    ours, expected = mode(together)(), one_by_one()
    for out, alone in zip(ours[0], expected[0], strict=True):
        assert (out.dtype, out.shape) == (alone.dtype, alone.shape)
        np.testing.assert_array_equal(out, alone)
    for gradient, alone in zip(ours[1], expected[1], strict=True):
        assert gradient.indices.dtype == alone.indices.dtype
        np.testing.assert_array_equal(gradient.indices, alone.indices)
        np.testing.assert_array_equal(gradient.values, alone.values)
        np.testing.assert_array_equal(gradient.dense_shape, alone.dense_shape)
    for gradient, alone in zip(ours[2], expected[2], strict=True):
        np.testing.assert_array_equal(gradient, alone)


def test_batches_of_any_size_pass_through_one_graph(pairs):
    tables, variables = pairs
    ragged = tf.RaggedTensorSpec([None, None], tf.int64)

    @tf.function(input_signature=[ragged, tf.SparseTensorSpec([None, None], tf.int64), ragged])
    def look_up(*ids):
        with tf.GradientTape() as tape:
            outputs = sok.lookup_sparse(tables, ids, combiners="sum")
            loss = loss_of(outputs)
        return outputs, tape.gradient(loss, tables)

    for seed, batches in enumerate([(5, 0, 16), (16, 16, 16), (1, 7, 3), (0, 0, 0), (33, 2, 40)]):
        ids = [a_batch(seed, batch)[0] for batch in batches]
        sparse = [ids[0], ids[1].to_sparse(), ids[2]]
        if not ids[1].flat_values.shape[0]:
            sparse[1] = tf.SparseTensor(tf.zeros([0, 2], tf.int64), ids[1].values, [batches[1], 0])
        outputs, gradients = look_up(*sparse)
        for i, (variable, batch) in enumerate(zip(variables, batches, strict=True)):
            assert outputs[i].shape == (batch, DIMS[i])
            rows = variable.numpy()[ids[i].values.numpy()]
            expected = np.zeros((batch, DIMS[i]), np.float32)
            np.add.at(expected, ids[i].value_rowids().numpy(), rows)
            np.testing.assert_allclose(outputs[i], expected, rtol=1e-5, atol=1e-6)
            by_items = (i + 1) * np.cos(expected)[ids[i].value_rowids().numpy()]
            by_rows = np.zeros((NUM_ROWS, DIMS[i]), np.float32)
            np.add.at(by_rows, ids[i].values.numpy(), by_items)
            found = as_dense(gradients[i], by_rows.shape)
            np.testing.assert_allclose(found, by_rows, rtol=1e-5, atol=1e-5)


def test_one_variable_gives_one_tensor_and_lists_give_lists(pairs):
    tables, _ = pairs
    ids, _ = a_batch(0, 5)
    one = sok.lookup_sparse(tables[0], ids)
    assert tf.is_tensor(one)
    for some in ([ids], (ids,)):
        (same,) = sok.lookup_sparse([tables[0]], some)
        np.testing.assert_array_equal(same, one)
    assert isinstance(sok.lookup_sparse([tables[0]], [ids]), list)
    assert sok.lookup_sparse([], []) == []


def test_mean_is_the_default_and_one_combiner_serves_all(pairs):
    tables, _ = pairs
    ids, _ = a_batch(0, 5)
    mean = sok.lookup_sparse(tables[:2], [ids, ids])
    for combiners in ("mean", ["Average", "MEAN"]):
        for a, b in zip(
            sok.lookup_sparse(tables[:2], [ids, ids], combiners=combiners), mean, strict=True
        ):
            np.testing.assert_array_equal(a, b)


def test_the_same_variable_may_come_several_times(pairs, mode):
    tables, variables = pairs
    (a, _), (b, _) = a_batch(0, 5), a_batch(1, 5)

    @mode
    def gradient():
        with tf.GradientTape() as tape:
            x, y = sok.lookup_sparse([tables[0]] * 2, [a, b], combiners=["sum", "mean"])
            loss = tf.reduce_sum(x * y)
        return tape.gradient(loss, tables[0])

    with tf.GradientTape() as tape:
        x = dense_lookup(variables[0], a, None, "sum", 5)
        y = dense_lookup(variables[0], b, None, "mean", 5)
        loss = tf.reduce_sum(x * y)
    shape = (NUM_ROWS, DIMS[0])
    expected = as_dense(tape.gradient(loss, variables[0]), shape)
    np.testing.assert_allclose(as_dense(gradient(), shape), expected, rtol=1e-5, atol=1e-6)


def test_empty_rows_and_zero_weights_give_zeros(pairs, mode):
    tables, _ = pairs
    ids = tf.ragged.constant([[], [1, 2], []], dtype=tf.int64)
    zero = ids.with_flat_values(tf.zeros([2]))

    @mode
    def run():
        with tf.GradientTape() as tape:
            outputs = sok.lookup_sparse([tables[0]] * 2, [ids, ids], [None, zero])
            loss = tf.reduce_sum(outputs[1])
        return outputs, tape.gradient(loss, tables[0])

    (plain, weighted), gradient = run()
    np.testing.assert_array_equal(plain[0], np.zeros(4))
    np.testing.assert_array_equal(plain[2], np.zeros(4))
    np.testing.assert_array_equal(weighted, np.zeros((3, 4)))
    assert np.isfinite(gradient.values).all()


def test_a_batch_without_a_key(pairs, mode):
    tables, _ = pairs
    ids = tf.RaggedTensor.from_row_splits(tf.zeros([0], tf.int64), [0, 0, 0])
    np.testing.assert_array_equal(
        mode(lambda: sok.lookup_sparse(tables[0], ids))(), np.zeros((2, 4))
    )
    no_rows = tf.RaggedTensor.from_row_splits(tf.zeros([0], tf.int64), [0])
    assert mode(lambda: sok.lookup_sparse(tables[0], no_rows))().shape == (0, 4)


def test_ragged_and_sparse_may_meet(pairs, mode):
    tables, _ = pairs
    ids, weights = a_batch(3, 7)
    expected = sok.lookup_sparse(tables[0], ids, weights)
    mixed = [
        (ids.to_sparse(), weights.to_sparse()),
        (ids, weights.to_sparse()),
        (ids.to_sparse(), weights),
        (tf.cast(ids, tf.int32), tf.cast(weights, tf.float64)),
        (ids, tf.RaggedTensor.from_row_lengths(weights.values, weights.row_lengths())),
    ]
    for some_ids, some_weights in mixed:
        out = mode(lambda i=some_ids, w=some_weights: sok.lookup_sparse(tables[0], i, w))()
        np.testing.assert_array_equal(out, expected)


def as_ragged(dense):
    dense = dense[:, np.newaxis] if dense.ndim == 1 else dense
    return tf.RaggedTensor.from_tensor(tf.constant(dense))


@pytest.mark.pairs
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("known", [True, False], ids=["static", "unknown"])
@pytest.mark.parametrize("shape", [(5,), (5, 3), (1, 1), (0,), (0, 3), (4, 0)], ids=str)
def test_dense_ids_are_those_of_rows_of_one_length(pairs, mode, shape, known, weighted):
    rng = np.random.default_rng(7)
    ids, factors = rng.integers(0, NUM_ROWS, shape), rng.uniform(0.5, 2, shape).astype(np.float32)
    tables = pairs[0]
    for table, combiner in zip(tables, COMBINERS, strict=True):

        def run(ids, factors, table=table, combiner=combiner):
            with tf.GradientTape() as tape:
                tape.watch(factors)
                given = factors if weighted else None
                out = sok.lookup_sparse(table, ids, given, combiner)
                loss = tf.reduce_sum(out * out)
            grad, of_factors = tape.gradient(loss, [table, factors])
            return out, grad.indices, grad.values, of_factors

        run = mode(run)
        if not known and hasattr(run, "get_concrete_function"):
            unknown = [None] * len(shape)
            run = tf.function(
                run.python_function,
                input_signature=[tf.TensorSpec(unknown, tf.int64), tf.TensorSpec(unknown)],
            )
        dense = run(tf.constant(ids), tf.constant(factors))
        ragged_factors = as_ragged(factors)
        with tf.GradientTape() as tape:
            tape.watch(ragged_factors.flat_values)
            given = ragged_factors if weighted else None
            out = sok.lookup_sparse(table, as_ragged(ids), given, combiner)
            loss = tf.reduce_sum(out * out)
        grad, of_factors = tape.gradient(loss, [table, ragged_factors.flat_values])
        assert dense[0].shape == (shape[0], table.dimension)
        for ours, expected in zip(dense, [out, grad.indices, grad.values], strict=False):
            np.testing.assert_array_equal(ours, expected)
        if weighted:
            np.testing.assert_array_equal(np.reshape(dense[3], -1), of_factors)


def test_dense_ids_of_every_kind_meet_others(pairs):
    tables = pairs[0]
    ragged, _ = a_batch(3, 4)
    given = [np.array([1, 2, 1, 3], np.int32), [[5, 6], [6, 7], [5, 5], [8, 8]], ragged]
    alone = [
        sok.lookup_sparse(table, tf.ragged.constant(ids, dtype=tf.int64), combiners="sum")
        for table, ids in zip(
            tables[:2], [[[1], [2], [1], [3]], [[5, 6], [6, 7], [5, 5], [8, 8]]], strict=True
        )
    ]
    alone.append(sok.lookup_sparse(tables[2], ragged, combiners="sum"))
    together = sok.lookup_sparse(tables, given, combiners="sum")
    for ours, expected in zip(together, alone, strict=True):
        np.testing.assert_array_equal(ours, expected)


def test_dense_ids_of_any_batch_meet_rows_of_every_kind_in_one_graph(pairs):
    """Dense ids and weights beside ragged and sparse ones, against all of them as ragged ones."""
    tables = [pairs[0][i % 3] for i in range(6)]
    rng = np.random.default_rng(11)

    def given(batch):
        ids = [rng.integers(0, NUM_ROWS, (batch, width)) for width in (2, 3, 1, 2, 4, 2)]
        factors = [rng.uniform(0.5, 2, each.shape).astype(np.float32) for each in ids]
        return [tf.constant(each) for each in ids], [tf.constant(each) for each in factors]

    def run(ids, factors, of_ids, of_factors):
        with tf.GradientTape() as tape:
            tape.watch(factors)
            ids = [make(each) for make, each in zip(of_ids, ids, strict=True)]
            weights = [make(each) for make, each in zip(of_factors, factors, strict=True)]
            combiners = ["mean", "sum", "sqrtn", "mean", "sum", "mean"]
            outputs = sok.lookup_sparse(tables, ids, weights, combiners)
            loss = tf.add_n([tf.reduce_sum(each * each) for each in outputs])
        gradients = tape.gradient(loss, [*pairs[0], *factors], unconnected_gradients="zero")
        return outputs, gradients

    def same(tensor):
        return tensor

    def ragged(tensor):
        return tf.RaggedTensor.from_tensor(tensor)

    def sparse(tensor):
        # Not `tf.sparse.from_dense`, which leaves zeros out.
        return ragged(tensor).to_sparse()

    def nothing(_):
        return None

    def unknown(tensor):
        return tf.compat.v1.placeholder_with_default(tensor, [None, None])

    @tf.function(
        input_signature=[
            [tf.TensorSpec([None, width], dtype) for width in (2, 3, 1, 2, 4, 2)]
            for dtype in (tf.int64, tf.float32)
        ]
    )
    def mixed(ids, factors):
        of_ids = [same, ragged, same, sparse, unknown, same]
        of_factors = [same, same, ragged, sparse, same, nothing]
        return run(ids, factors, of_ids, of_factors)

    for batch in (3, 0, 5):
        ids, factors = given(batch)
        ours = tf.nest.flatten(mixed(ids, factors), expand_composites=True)
        all_ragged = run(ids, factors, [ragged] * 6, [ragged] * 5 + [nothing])
        theirs = tf.nest.flatten(all_ragged, expand_composites=True)
        for each, expected in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(each, expected)


def test_a_graph_makes_no_row_splits_of_dense_ids(pairs):
    @tf.function(input_signature=[tf.TensorSpec([None, 3], tf.int64)])
    def look_up(ids):
        return sok.lookup_sparse(pairs[0], [ids, ids[:, 0], ids], combiners="sum")

    graph = look_up.get_concrete_function().graph
    assert {each.type for each in graph.get_operations()} & {"Range", "Shape"} == set()


def test_dense_ids_have_static_shapes(pairs):
    shapes = []

    @tf.function(
        input_signature=[tf.TensorSpec([None], tf.int64), tf.TensorSpec([7, None], tf.int32)]
    )
    def look_up(one, many):
        shapes.extend(out.shape.as_list() for out in sok.lookup_sparse(pairs[0][:2], [one, many]))

    look_up(tf.constant([1, 2], tf.int64), tf.ones([7, 2], tf.int32))
    assert shapes == [[None, 4], [7, 3]]
    with pytest.raises(ValueError, match="Received: shape <unknown>"):
        tf.function(
            lambda ids: sok.lookup_sparse(pairs[0][0], ids),
            input_signature=[tf.TensorSpec(None, tf.int64)],
        )(tf.constant([1], tf.int64))


def test_sparse_ids_may_have_gaps(pairs):
    tables, _ = pairs
    gaps = tf.SparseTensor([[0, 5], [2, 0], [2, 9]], tf.constant([4, 5, 6], tf.int64), [3, 10])
    dense_rows = tf.ragged.constant([[4], [], [5, 6]], dtype=tf.int64)
    np.testing.assert_array_equal(
        sok.lookup_sparse(tables[0], gaps), sok.lookup_sparse(tables[0], dense_rows)
    )


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16], ids=lambda d: d.name)
def test_half_precision_rows_are_combined_in_float32(dtype, mode):
    table = sok.DynamicVariable(2, initializer="1.5", dtype=dtype)
    ids = tf.ragged.constant([[1, 2, 3], [4]], dtype=tf.int64)

    @mode
    def run():
        with tf.GradientTape() as tape:
            out = sok.lookup_sparse(table, ids, combiners="sum")
            loss = tf.reduce_sum(out)
        return out, tape.gradient(loss, table)

    out, gradient = run()
    assert out.dtype == dtype
    np.testing.assert_array_equal(tf.cast(out, tf.float32), [[4.5, 4.5], [1.5, 1.5]])
    assert gradient.values.dtype == tf.float32


@pytest.mark.parametrize("key_type", [tf.int32, tf.uint64], ids=lambda d: d.name)
def test_keys_of_other_types(key_type, mode):
    table = sok.DynamicVariable(2, initializer="ones", key_type=key_type)
    top = np.iinfo(key_type.as_numpy_dtype).max
    keys = tf.constant(np.array([top, 0, top], key_type.as_numpy_dtype))
    ids = tf.RaggedTensor.from_row_lengths(keys, [2, 1])

    @mode
    def run():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(sok.lookup_sparse(table, ids, combiners="sum"))
        return tape.gradient(loss, table)

    gradient = run()
    assert gradient.indices.dtype == key_type
    np.testing.assert_array_equal(gradient.indices, [top, 0])
    np.testing.assert_array_equal(gradient.values, [[2.0, 2.0], [1.0, 1.0]])


def test_static_shapes_are_kept(pairs):
    tables, _ = pairs
    shapes = []

    @tf.function(
        input_signature=[
            tf.RaggedTensorSpec([None, None], tf.int64),
            tf.SparseTensorSpec([7, None], tf.int64),
        ]
    )
    def look_up(ragged, sparse):
        shapes.extend(
            out.shape.as_list() for out in sok.lookup_sparse(tables[:2], [ragged, sparse])
        )

    look_up(a_batch(0, 3)[0], a_batch(1, 7)[0].to_sparse())
    assert shapes == [[None, 4], [7, 3]]


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


@pytest.mark.parametrize("run", [lambda f: f(), lambda f: tf.function(f)()], ids=["eager", "graph"])
def test_row_splits_of_no_length_are_refused_before_anything_is_looked_up(run):
    tables = [sok.DynamicVariable(128, name="a"), sok.DynamicVariable(16, name="b")]
    ids = ([], [0, 2])
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="length 0"):
        run(lambda: sok.lookup_sparse(tables, [ragged_of([1, 2], each) for each in ids]))
    assert [table.table.size for table in tables] == [0, 0]


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
