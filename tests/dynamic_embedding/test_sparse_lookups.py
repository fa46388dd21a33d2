"""`embedding_lookup_sparse` and `safe_embedding_lookup_sparse` against tf.nn on a dense table.

What they share with the lookups of other APIs is in tests/bridge/test_lookup.py.
"""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from sok_lite import dynamic_embedding as de

DIM = 3
LOOKUPS = (de.embedding_lookup_sparse, de.safe_embedding_lookup_sparse)


def tables():
    """Returns a variable and a dense table with the same rows for keys 0 to 19."""
    rows = np.random.default_rng(0).normal(size=(20, DIM)).astype(np.float32)
    variable = de.Variable(dim=DIM)
    variable.upsert(np.arange(20), rows)
    return variable, tf.Variable(rows)


def batch():
    """Returns ids and weights of 5 rows, ragged; one of them empty, the last too."""
    ids = tf.ragged.constant([[3, 3, 7], [], [19], [0, 5, 5, 5], []], tf.int64)
    weights = np.random.default_rng(1).uniform(0.5, 2.0, 8).astype(np.float32)
    return ids, ids.with_values(tf.constant(weights))


def test_clipped_rows_have_the_gradient_of_a_dense_table():
    """By a norm of the lookup's or of the trainable's; default_id: of a row without ids."""
    variable, dense = tables()
    own = de.shadow_ops.ShadowVariable(variable, "own", max_norm=0.5)
    factor = np.random.default_rng(2).normal(size=(5, DIM)).astype(np.float32)
    ids, weights = batch()
    cases = itertools.product(LOOKUPS, ("mean", "sqrtn", "sum"), (None, 0.5), (None, weights))
    for lookup, combiner, max_norm, its in cases:
        shadow = own if max_norm is None else variable.get_trainable_by_name("t")
        more = {"default_id": 9} if lookup is de.safe_embedding_lookup_sparse else {}
        with tf.GradientTape() as tape:
            rows = lookup(shadow, ids, its, combiner=combiner, max_norm=max_norm, **more)
            loss = tf.reduce_sum(rows * factor)
        gradient = tape.gradient(loss, shadow)
        given = [None if each is None else each.to_sparse() for each in (ids, its)]
        with tf.GradientTape() as tape:
            expected = tf.nn.safe_embedding_lookup_sparse(
                dense, *given, combiner=combiner, max_norm=0.5, **more
            )
            loss = tf.reduce_sum(expected * factor)
        np.testing.assert_allclose(rows, expected, rtol=1e-5, atol=1e-5)
        got = tf.math.unsorted_segment_sum(gradient.values, gradient.indices, 20)
        expected = tf.convert_to_tensor(tape.gradient(loss, dense))
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("initialised")
def test_a_variable_of_all_ranks_may_be_looked_up():
    variable, dense = tables()
    shadow = de.shadow_ops.ShadowVariable(variable, "own")
    params = de.shadow_ops.HvdVariable("hvd", shadow, DIM)
    for ids, weights in (batch(), [each.to_sparse() for each in batch()]):
        sparse = [
            each.to_sparse() if isinstance(each, tf.RaggedTensor) else each
            for each in (ids, weights)
        ]
        for lookup, its in itertools.product(LOOKUPS, (None, weights)):
            given = sparse if its is not None else sparse[:1]
            expected = tf.nn.safe_embedding_lookup_sparse(dense, *given)
            with tf.GradientTape() as tape:
                rows = lookup(params, ids, its)
            np.testing.assert_allclose(rows, expected, rtol=1e-5, atol=1e-6)
            assert set(tape.gradient(rows, shadow).indices.numpy()) == {0, 3, 5, 7, 19}
    for lookup in (de.embedding_lookup, de.embedding_lookup_unique):
        rows = lookup(params, tf.constant([[3], [7]], tf.int64))
        np.testing.assert_array_equal(rows, tf.gather(dense, [[3], [7]]))
    _, trainable = de.embedding_lookup_sparse(params, *batch(), return_trainable=True)
    assert trainable is shadow and set(variable.trainable_store) == {"own"}
    with pytest.raises(TypeError, match="must be int64"):
        de.embedding_lookup_sparse(params, tf.cast(sparse[0], tf.int32), None)


def test_rows_of_other_dtypes_are_combined():
    """Of 16 bits, and as float32: see scenarios_of_lookups.py."""
    ids = tf.sparse.from_dense(tf.constant([[1, 2], [2, 0], [0, 0]], tf.int64))
    for dtype in (tf.float16, tf.float64, tf.int32):
        variable = de.Variable(value_dtype=dtype, dim=2)
        variable.upsert([1, 2], tf.cast([[1, 2], [3, 7]], dtype))
        for max_norm in (None, 100.0)[: 1 + dtype.is_floating]:
            rows = de.embedding_lookup_sparse(variable, ids, None, max_norm=max_norm)
            assert rows.dtype == (tf.float32 if dtype.size == 2 else dtype)
            half = 0 if dtype.is_integer else 0.5  # of integers, towards 0
            assert rows.numpy().tolist() == [[2, 4 + half], [3, 7], [0, 0]]
    variable = de.Variable(value_dtype=tf.int64, dim=1)
    variable.upsert([1, 2], [[2**60 + 1], [3]])
    rows = de.embedding_lookup_sparse(variable, ids, None, combiner="sum")
    assert rows.numpy().tolist() == [[2**60 + 4], [3], [0]]


def test_ids_of_rank_3():
    """A lookup combines by the first dimension, a safe one by all but the last."""
    variable, dense = tables()
    ids = tf.ragged.constant([[[4, 5], [], [6]], [], [[], [7]]], tf.int64)
    weights = ids.with_flat_values(tf.constant([1.0, 2.0, 3.0, 4.0]))
    flat = [tf.ragged.constant([[4, 5, 6], [], [7]], tf.int64), None]
    flat[1] = flat[0].with_values(weights.flat_values)
    for combiner, number in itertools.product(("mean", "sqrtn", "sum"), (1, 2)):
        given = [each.to_sparse() for each in flat[:number]]
        expected = tf.nn.safe_embedding_lookup_sparse(dense, *given, combiner=combiner)
        for pair in ((ids, weights), (ids.to_sparse(), weights.to_sparse())):
            its = pair[1] if number == 2 else None
            rows = de.embedding_lookup_sparse(variable, pair[0], its, combiner=combiner)
            assert rows.shape[-1] == DIM
            np.testing.assert_allclose(rows, expected, rtol=1e-6)
    for options, given in itertools.product(({}, {"default_id": 9}), ((ids,), (ids, weights))):
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
    ids, _ = batch()
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
    ragged, ragged_weights = batch()
    ids, weights = ragged.to_sparse(), ragged_weights.to_sparse()
    dense = (de.embedding_lookup, de.embedding_lookup_unique)
    cases = [
        *((lookup, (ids.values,)) for lookup in dense),
        *((each, (ids, weights)) for each in LOOKUPS),
    ]
    for lookup, given in cases:
        for params, error, text in (
            ([variable, variable], ValueError, "Only one params is allowed"),
            (tf.Variable([[1.0]]), TypeError, r"must be a de\.Variable"),
            ("v", TypeError, "ShadowVariable or HvdVariable"),
        ):
            with pytest.raises(error, match=text):
                lookup(params, *given, name="n")
        short = (tf.cast(given[0], tf.int32), *given[1:])
        with pytest.raises(TypeError, match="must be int64.*Received: int32"):
            lookup(variable, *short, name="n")
        rows, trainable = lookup(variable, *given, name="n", return_trainable=True)
        assert rows.shape[-1] == DIM and trainable is variable.get_trainable_by_name("n")
    for lookup in LOOKUPS:
        with pytest.raises(TypeError, match="SparseTensor or RaggedTensor. Received: EagerTensor"):
            lookup(variable, tf.constant([[1]]), None)
        with pytest.raises(TypeError, match="`sp_weights` must be None or a RaggedTensor"):
            lookup(variable, ragged, weights)
        with pytest.raises(ValueError, match="`combiner` must be one of.*'max'"):
            lookup(variable, ids, weights, combiner="max")
    one_axis = tf.SparseTensor([[0]], tf.constant([1], tf.int64), [3])
    with pytest.raises(ValueError, match="rank 2 or more"):
        de.safe_embedding_lookup_sparse(variable, one_axis)
    de.embedding_lookup_sparse(variable, ids, weights, combiner=None)
    verify = variable.verify_embedding_weights
    verify(ids, weights)
    for given, error, text in (
        ((None,), ValueError, "must be given"),
        ((tf.cast(ids, tf.int32),), TypeError, "int64"),
        ((ids, ids), TypeError, "floating-point"),
    ):
        with pytest.raises(error, match=text):
            verify(*given)
