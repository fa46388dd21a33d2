"""`embedding_lookup_sparse` and `safe_embedding_lookup_sparse` against tf.nn on a dense table."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from sok_lite import dynamic_embedding as de

DIM = 3


def tables(dtype=tf.float32, seed=0):
    """Returns a variable and a dense table with the same rows for keys 0 to 19."""
    rows = np.random.default_rng(seed).normal(size=(20, DIM)).astype(np.float32)
    dense = tf.Variable(tf.cast(rows, dtype))
    variable = de.Variable(value_dtype=dtype, dim=DIM)
    variable.upsert(np.arange(20), tf.cast(rows, dtype))
    return variable, dense


def batch(ragged, weighted, lowest=0.5):
    """Returns ids and weights of 5 rows, one of them empty, the last too."""
    ids = tf.ragged.constant([[3, 3, 7], [], [19], [0, 5, 5, 5], []], tf.int64)
    weights = None
    if weighted:
        values = np.random.default_rng(1).uniform(lowest, 2.0, 8).astype(np.float32)
        weights = ids.with_values(tf.constant(values))
    if ragged:
        return ids, weights
    return ids.to_sparse(), None if weights is None else weights.to_sparse()


def cases():
    """Yields combiner, whether weighted, ragged and safe, max_norm, default_id."""
    both = (False, True)
    for combiner, weighted, ragged in itertools.product(("mean", "sqrtn", "sum"), both, both):
        for max_norm in (None, 1.0):
            yield combiner, weighted, ragged, False, max_norm, None
            for default_id in (None, 9):
                yield combiner, weighted, ragged, True, max_norm, default_id


def test_as_on_a_dense_table_with_gradient(tables_on):
    variable, dense = tables()
    shadow = variable.get_trainable_by_name("t")
    factor = np.random.default_rng(2).normal(size=(5, DIM)).astype(np.float32)
    for combiner, weighted, ragged, safe, max_norm, default_id in cases():
        options = {"combiner": combiner, "max_norm": max_norm}
        defaults = {"default_id": default_id} if safe else {}
        lookup = de.safe_embedding_lookup_sparse if safe else de.embedding_lookup_sparse
        # A safe lookup leaves out what has no weight above 0, but of a sum.
        ids, weights = batch(ragged, weighted, lowest=-1.0 if safe else 0.5)
        with tf.GradientTape() as tape:
            rows = lookup(variable, ids, weights, name="t", **options, **defaults)
            loss = tf.reduce_sum(rows * factor)
        gradient = tape.gradient(loss, shadow)
        sparse = batch(False, weighted, lowest=-1.0 if safe else 0.5)
        with tf.GradientTape() as tape:
            expected = tf.nn.safe_embedding_lookup_sparse(dense, *sparse, **options, **defaults)
            loss = tf.reduce_sum(expected * factor)
        np.testing.assert_allclose(rows, expected, rtol=1e-5, atol=1e-5)
        assert rows.shape == (5, DIM) and (default_id or not rows.numpy()[[1, 4]].any())
        got = tf.math.unsorted_segment_sum(gradient.values, gradient.indices, 20)
        expected = tf.convert_to_tensor(tape.gradient(loss, dense))
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("initialised")
def test_a_trainable_may_be_looked_up():
    for weighted, ragged in itertools.product((False, True), (False, True)):
        variable, dense = tables()
        shadow = de.shadow_ops.ShadowVariable(variable, "own")
        ids, weights = batch(ragged, weighted)
        lookups = [de.embedding_lookup_sparse, de.safe_embedding_lookup_sparse]
        if ragged:
            ours = de.ragged_embedding_ops
            lookups += [ours.embedding_lookup_sparse, ours.safe_embedding_lookup_sparse]
        sparse, sparse_weights = batch(False, weighted)
        expected = tf.nn.safe_embedding_lookup_sparse(dense, sparse, sparse_weights)
        for params in (shadow, [shadow], de.shadow_ops.HvdVariable("hvd", shadow, DIM)):
            for lookup in lookups:
                with tf.GradientTape() as tape:
                    rows = lookup(params, ids, weights)
                np.testing.assert_allclose(rows, expected, rtol=1e-5, atol=1e-6)
                assert set(tape.gradient(rows, shadow).indices.numpy()) == {0, 3, 5, 7, 19}
            for lookup in (de.embedding_lookup, de.embedding_lookup_unique):
                rows = lookup(params, tf.constant([[3], [7]], tf.int64))
                np.testing.assert_array_equal(rows, tf.gather(dense, [[3], [7]]))
            _, trainable = de.embedding_lookup_sparse(params, ids, weights, return_trainable=True)
            assert trainable is shadow and set(variable.trainable_store) == {"own"}
            with pytest.raises(TypeError, match="must be int64"):
                de.embedding_lookup_sparse(params, tf.cast(sparse, tf.int32), None)


def test_a_trainable_clips_as_it_was_made():
    variable, dense = tables()
    shadow = de.shadow_ops.ShadowVariable(variable, "own", max_norm=0.5)
    ids, _ = batch(False, False)
    expected = tf.nn.safe_embedding_lookup_sparse(dense, ids, max_norm=0.5)
    for params, name in ((shadow, None), (variable, "own")):
        rows = de.embedding_lookup_sparse(params, ids, None, name=name)
        np.testing.assert_allclose(rows, expected, rtol=1e-5, atol=1e-6)


def test_rows_of_other_dtypes_are_combined(tables_on):
    ids = tf.sparse.from_dense(tf.constant([[1, 2], [2, 0], [0, 0]], tf.int64))
    for dtype in (tf.float16, tf.bfloat16, tf.float64, tf.int32):
        variable = de.Variable(value_dtype=dtype, dim=2)
        variable.upsert([1, 2], tf.cast([[1, 2], [3, 7]], dtype))
        for max_norm in (None, 100.0)[: 1 + dtype.is_floating]:
            rows = de.embedding_lookup_sparse(variable, ids, None, max_norm=max_norm)
            # As TFRA: half rows are combined in float32, and stay so. Of integers, towards 0.
            assert rows.dtype == (tf.float32 if dtype.size == 2 else dtype)
            half = 0 if dtype.is_integer else 0.5
            assert rows.numpy().tolist() == [[2, 4 + half], [3, 7], [0, 0]]
    variable = de.Variable(value_dtype=tf.int64, dim=1)
    variable.upsert([1, 2], [[2**60 + 1], [3]])
    rows = de.embedding_lookup_sparse(variable, ids, None, combiner="sum")
    assert rows.numpy().tolist() == [[2**60 + 4], [3], [0]]


def test_ids_of_rank_3():
    """A lookup combines by the first dimension, a safe one by all but the last."""
    variable, dense = tables()
    indices = [[0, 0, 0], [0, 0, 2], [0, 2, 1], [2, 1, 0]]
    numbers, values = tf.constant([4, 5, 6, 7], tf.int64), tf.constant([1.0, 2.0, 3.0, 4.0])
    ids, weights = (tf.SparseTensor(indices, each, [3, 3, 4]) for each in (numbers, values))
    flat = [[0, 0], [0, 1], [0, 2], [2, 0]]
    matrix = [tf.SparseTensor(flat, each, [3, 3]) for each in (numbers, values)]
    ragged = tf.ragged.constant([[[4, 5], [], [6]], [], [[], [7]]], tf.int64)
    ragged_weights = ragged.with_flat_values(values)
    for combiner, is_weighted in itertools.product(("mean", "sqrtn", "sum"), (False, True)):
        given = matrix if is_weighted else matrix[:1]
        expected = tf.nn.safe_embedding_lookup_sparse(dense, *given, combiner=combiner)
        for pair in ((ids, weights), (ragged, ragged_weights)):
            its = pair[1] if is_weighted else None
            rows = de.embedding_lookup_sparse(variable, pair[0], its, combiner=combiner)
            assert rows.shape[-1] == DIM
            np.testing.assert_allclose(rows, expected, rtol=1e-6)
    for options in ({}, {"default_id": 9}):
        for given in ((ragged,), (ragged, ragged_weights)):
            inner = [each.values.to_sparse() for each in given]
            oracle = tf.nn.safe_embedding_lookup_sparse(dense, *inner, **options)
            rows = de.safe_embedding_lookup_sparse(variable, *given, **options)
            assert rows.row_lengths().numpy().tolist() == [3, 0, 2] and rows.shape[-1] == DIM
            np.testing.assert_allclose(rows.flat_values, oracle, rtol=1e-6)
    uniform = tf.RaggedTensor.from_row_lengths(tf.constant([[4, 5], [6, 7]], tf.int64), [2, 0])
    rows = de.safe_embedding_lookup_sparse(variable, uniform)
    oracle = tf.reduce_mean(tf.gather(dense, [[4, 5], [6, 7]]), 1)
    np.testing.assert_allclose(rows.flat_values, oracle, rtol=1e-6)


def test_an_empty_row_looks_no_key_up():
    variable = de.Variable(dim=1, initializer=5.0)
    ids = tf.sparse.from_dense(tf.constant([[0, 0], [3, 0]], tf.int64))
    optimizer = de.DynamicEmbeddingOptimizer(keras.optimizers.SGD(1.0))
    with tf.GradientTape() as tape:
        rows = de.safe_embedding_lookup_sparse(variable, ids, name="t")
        loss = tf.reduce_sum(rows)
    assert rows.numpy().tolist() == [[0.0], [5.0]]
    shadow = variable.get_trainable_by_name("t")
    optimizer.apply_gradients([(tape.gradient(loss, shadow), shadow)])
    assert variable.export()[0].numpy().tolist() == [3]


def test_the_trainable_has_the_name_of_tfra_and_the_short_one():
    variable, _ = tables()
    ids, _ = batch(False, False)
    # Whoever asks first.
    by_name = variable.get_trainable_by_name
    asked_before = by_name("a/embedding_lookup"), by_name("b")
    de.embedding_lookup_sparse(variable, ids, None, name="a")
    de.safe_embedding_lookup_sparse(variable, ids, None, name="b")
    assert by_name("a") is by_name("a/embedding_lookup") is asked_before[0]
    assert by_name("b/embedding_lookup_sparse/embedding_lookup") is by_name("b") is asked_before[1]


def test_keys_of_texts():
    variable = de.Variable(tf.string, dim=1)
    variable.upsert(["a", "b"], [[1.0], [3.0]])
    ids = tf.ragged.constant([["a", "b"], ["zz"]])
    assert de.embedding_lookup_sparse(variable, ids, None).numpy().tolist() == [[2.0], [0.0]]


def test_arguments_that_do_not_fit():
    variable, _ = tables()
    ids, weights = batch(False, True)
    ragged, _ = batch(True, False)
    for lookup in (de.embedding_lookup_sparse, de.safe_embedding_lookup_sparse):
        with pytest.raises(ValueError, match="`combiner` must be one of.*'max'"):
            lookup(variable, ids, weights, combiner="max")
        with pytest.raises(TypeError, match="SparseTensor or RaggedTensor. Received: EagerTensor"):
            lookup(variable, tf.constant([[1]]), None)
        with pytest.raises(TypeError, match="`sp_weights` must be None or a RaggedTensor"):
            lookup(variable, ragged, weights)
        with pytest.raises(ValueError, match="Only one params"):
            lookup([variable, variable], ids, None)
        with pytest.raises(TypeError, match="must be int64"):
            lookup(variable, tf.cast(ids, tf.int32), None)
        with pytest.raises(TypeError, match=r"de\.Variable"):
            lookup(tf.Variable([[1.0]]), ids, None)
        rows, trainable = lookup(variable, ids, weights, name="n", return_trainable=True)
        assert rows.shape == (5, DIM) and trainable is variable.get_trainable_by_name("n")
    with pytest.raises(TypeError, match="ShadowVariable or HvdVariable"):
        de.embedding_lookup_sparse("v", ids, None)
    one_axis = tf.SparseTensor([[0]], tf.constant([1], tf.int64), [3])
    with pytest.raises(ValueError, match="rank 2 or more"):
        de.safe_embedding_lookup_sparse(variable, one_axis)
    de.embedding_lookup_sparse(variable, ids, weights, combiner=None)
    variable.verify_embedding_weights(ids, weights)
    with pytest.raises(ValueError, match="must be given"):
        variable.verify_embedding_weights(None)
    with pytest.raises(TypeError, match="int64"):
        variable.verify_embedding_weights(tf.cast(ids, tf.int32))
    with pytest.raises(TypeError, match="floating-point"):
        variable.verify_embedding_weights(ids, ids)
