"""What layers give for dense, ragged and sparse ids, against rows that NumPy combines."""

import warnings

import numpy as np
import pytest
import tensorflow as tf

import sok_lite
from sok_lite.engine.table import hkv_options
from sok_lite.keras import Feature

DIM = 3
RNG = np.random.default_rng(0)
KEYS = np.array([*range(-3, 9), 2**62, -(2**63)])
ROWS = RNG.normal(size=(len(KEYS), DIM)).astype(np.float32)
ROW_OF = dict(zip(KEYS.tolist(), ROWS, strict=True))
UNKNOWN = 77

# Rows of different lengths, an empty one, repeated and unknown ids.
RAGGED = [[1, 1, -3], [], [2**62], [UNKNOWN, 4], [-(2**63), 5, 6, 7]]
DENSE = [[1, 2], [3, 3], [UNKNOWN, 0]]


def row(key):
    return ROW_OF.get(int(key), np.zeros(DIM, np.float32))


def pooled(ids, combiner, weights=None):
    """The rows of some ids, combined."""
    weights = np.ones(len(ids)) if weights is None else np.asarray(weights)
    total = sum((w * row(key) for w, key in zip(weights, ids, strict=True)), np.zeros(DIM))
    divisor = {"sum": 1, "mean": weights.sum(), "sqrtn": np.sqrt((weights**2).sum())}[combiner]
    return total / divisor if divisor else np.zeros(DIM)


@pytest.fixture
def table(sk):
    table = sk.Table("rows", DIM)
    table.assign(KEYS, ROWS)
    return table


def check(found, expected):
    np.testing.assert_allclose(found, np.array(expected), rtol=1e-5, atol=1e-6)


def test_dense_ids_give_a_row_each(sk, table):
    for ids in (5, [1, 2], DENSE, [DENSE, DENSE]):
        expected = np.vectorize(row, signature="()->(d)")(ids)
        check(table(tf.constant(ids, tf.int64)), expected)
        check(sk.Embedding(table)(tf.constant(ids, tf.int64)), expected)


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_ids_are_combined_over_the_last_dimension(sk, table, combiner):
    layer = sk.Embedding(table, combiner)
    one = [pooled(ids, combiner) for ids in DENSE]
    check(layer(np.array(DENSE)), one)
    check(layer(np.array([DENSE, DENSE])), [one, one])
    check(layer(np.array([1, UNKNOWN])), [row(1), row(UNKNOWN)])
    expected = [pooled(ids, combiner) for ids in RAGGED]
    ragged = tf.ragged.constant(RAGGED, tf.int64)
    check(layer(ragged), expected)
    check(layer(ragged.to_sparse()), expected)
    twice = tf.stack([ragged, ragged])  # (2, None, None)
    check(layer(twice).to_tensor(), [expected, expected])
    given = [RNG.normal(size=len(ids)).astype(np.float32) for ids in RAGGED]
    expected = [pooled(ids, combiner, own) for ids, own in zip(RAGGED, given, strict=True)]
    weights = ragged.with_values(tf.constant(np.concatenate(given)))
    check(layer(ragged, weights=weights), expected)
    check(layer(ragged.to_sparse(), weights=weights.to_sparse()), expected)
    dense = np.array([[0.5, 2.0], [1.0, -1.0], [3.0, 0.0]], np.float32)
    expected = [pooled(*each) for each in zip(DENSE, [combiner] * 3, dense, strict=True)]
    check(layer(np.array(DENSE), weights=tf.constant(dense)), expected)


def test_ragged_ids_give_ragged_rows(sk, table):
    ids = tf.ragged.constant(RAGGED, tf.int64)
    found = sk.Embedding(table)(ids)
    assert found.row_lengths().numpy().tolist() == [len(each) for each in RAGGED]
    check(found.flat_values, [row(key) for ids in RAGGED for key in ids])


@pytest.mark.parametrize("combiner", [None, "mean"])
@pytest.mark.parametrize("kind", ["dense", "ragged", "sparse"])
def test_an_id_that_is_masked_is_none(sk, table, kind, combiner):
    if kind == "sparse" and combiner is None:
        pytest.skip("sparse ids need a combiner")
    padded = np.array([[1, 0, 0], [0, 0, 0], [2, 0, 3]])
    layer = sk.Embedding(table, combiner, mask_value=0)
    ids = tf.constant(padded)
    ids = {"dense": ids, "ragged": tf.RaggedTensor.from_tensor(ids), "sparse": None}[kind]
    if kind == "sparse":
        places = tf.constant([[i, j] for i in range(3) for j in range(3)], tf.int64)
        ids = tf.SparseTensor(places, padded.reshape(-1), (3, 3))
    if combiner is None:
        expected = [[row(key) if key else np.zeros(DIM) for key in keys] for keys in padded]
        found = layer(ids)
        check(found if kind == "dense" else found.to_tensor(), expected)
    else:
        check(layer(ids), [pooled(keys[keys != 0], combiner) for keys in padded])
    layer(ids, training=True)
    assert len(table) == len(KEYS)  # 0 was there
    weights = {"dense": np.ones((3, 3), np.float32), "ragged": None, "sparse": None}[kind]
    if combiner and weights is not None:
        check(layer(ids, weights=weights), [pooled(keys[keys != 0], combiner) for keys in padded])


WRONG_MASKS = {
    "too large": ("int32", 2**40, ValueError, "must fit int32.*mask_value=1099511627776"),
    "negative": ("uint64", -1, ValueError, "must fit uint64.*mask_value=-1"),
    "a text": ("int64", "", TypeError, "must be an integer, as ids of int64 are.*''"),
    "a float": ("int64", 0.0, TypeError, "must be an integer"),
    "a bool": ("int64", False, TypeError, "must be an integer"),
    "several": ("int64", [0, 1], TypeError, "must be an integer"),
    "a number for a text": (str, 0, TypeError, "must be a text. Received: mask_value=0"),
}


def test_a_mask_that_is_no_id_is_refused(sk):
    for key_type, mask_value, error, text in WRONG_MASKS.values():
        table = sk.Table("t", 2, key_type=key_type)
        for make in (
            lambda table=table, mask=mask_value: sk.Embedding(table, "sum", mask),
            lambda table=table, mask=mask_value: sk.Embeddings({"x": Feature(table, None, mask)}),
        ):
            with pytest.raises(error, match=f"`mask_value` for table 't' {text}"):
                make()


def test_ids_that_cannot_hold_the_mask_are_all_ids(sk):
    for mask in (2**40, np.int64(-(2**40))):
        table = sk.Table("t", 2, "ones")
        ids = tf.constant([[0, 7]])  # int32: cut to it the mask would be 0
        assert sk.Embedding(table, "sum", mask)(ids, training=True).numpy().tolist() == [[2, 2]]
        assert 0 in table and 7 in table


def test_a_mask_reaches_the_layers_behind(keras, sk, table):
    ids = keras.Input([3], dtype="int64")
    rows = sk.Embedding(table, mask_value=0)(ids)
    model = keras.Model(ids, keras.layers.GlobalAveragePooling1D()(rows))
    padded = np.array([[1, 0, 0], [2, 3, 0]])
    check(model(padded), [row(1), (row(2) + row(3)) / 2])


def test_texts_are_keys_by_their_fingerprint(sk):
    table = sk.Table("city", DIM, key_type=str)
    texts = ["Oslo", "São Paulo", "", "x" * 100, "Oslo"]
    table(tf.constant(texts), training=True)
    assert len(table) == 4
    # What BigQuery's page of FARM_FINGERPRINT gives for these.
    table(tf.constant(["1footrue", "2applefalse", "3true"]), training=True)
    literal = {-1541654101129638711, 2794438866806483259, -4880158226897771312}
    assert literal <= set(table.export()[0].numpy().tolist())
    table(tf.constant(["foo", "bar"]), training=True)
    ragged = tf.ragged.constant([["foo"], ["bar", "foo"], []])
    pooled_rows = sk.Embedding(table, "sum")(ragged)
    foo, bar = table(tf.constant("foo")), table(tf.constant("bar"))
    check(pooled_rows, [foo, foo + bar, np.zeros(DIM)])
    check(sk.Embedding(table, "sum", mask_value="")(tf.constant([["foo", ""]])), [foo])


def test_texts_of_python_and_numpy_are_taken(sk):
    table, texts = sk.Table("city", DIM, key_type=str), ["Oslo", "São Paulo"]
    for look_up in (table, sk.Embedding(table)):
        expected = look_up(tf.constant(texts), training=True)
        for given in (texts, tuple(texts), np.array(texts), np.array(texts, object)):
            np.testing.assert_array_equal(look_up(given), expected)
        np.testing.assert_array_equal(look_up("Oslo"), expected[0])
        np.testing.assert_array_equal(look_up([texts, texts])[1], expected)
    both = sk.Embeddings({"one": table, "other": (table, "sum")})
    found = both({"one": np.array(texts), "other": [texts]})
    np.testing.assert_array_equal(found["one"], expected)
    np.testing.assert_allclose(found["other"][0], tf.reduce_sum(expected, 0), rtol=1e-6)
    assert table([]).shape == (0, DIM)


def test_features_share_tables_and_are_one_lookup(sk, table, monkeypatch):
    from sok_lite.keras import features

    calls = []
    look_up = features.look_up
    monkeypatch.setattr(features, "look_up", lambda *a: calls.append(len(a[1])) or look_up(*a))
    other = sk.Table("other", 2, initializer="ones")
    given = {"a": table, "b": (table, "mean"), "c": Feature(other, "sum"), "d": (table, None)}
    layer = sk.Embeddings(given)
    assert dict(layer.tables) == {"rows": table, "other": other}
    ids = {"d": [5], "a": [1], "b": tf.ragged.constant([[1, 2]], tf.int64), "c": [[8, 9]]}
    ids = {name: tf.convert_to_tensor(each) if name != "b" else each for name, each in ids.items()}
    ids = {name: tf.cast(each, tf.int64) for name, each in ids.items()}
    found = layer(ids, training=True)
    assert calls == [4]
    assert list(found) == list(given)
    check(found["a"], [row(1)])
    check(found["b"], [(row(1) + row(2)) / 2])
    check(found["c"], [[2, 2]])
    check(found["d"], [row(5)])
    listed = sk.Embeddings([table, (other, "sum")])
    assert [each.shape.as_list() for each in listed([ids["a"], ids["c"]])] == [[1, 3], [1, 2]]


def test_only_training_inserts(sk, table):
    new = tf.constant([100, 101], tf.int64)
    layer = sk.Embedding(table)
    check(layer(new), np.zeros((2, DIM)))
    check(layer(new, training=False), np.zeros((2, DIM)))
    assert len(table) == len(KEYS)
    assert np.abs(layer(new, training=True)).min() > 0
    assert len(table) == len(KEYS) + 2
    with tf.GradientTape() as tape:
        total = tf.reduce_sum(layer(tf.constant([200], tf.int64)) ** 2)
    assert len(table) == len(KEYS) + 3  # a tape is recording: it is training
    assert tape.gradient(total, table.variable).indices.numpy().tolist() == [200]
    table.trainable = False
    layer(tf.constant([300], tf.int64), training=True)
    assert len(table) == len(KEYS) + 3


def test_types_of_keys_and_rows(sk):
    table = sk.Table("small", 4, initializer=0.5, key_type="int32", row_dtype="bfloat16")
    rows = table(tf.constant([1, 2], tf.int32), training=True)
    assert rows.dtype == tf.float32
    check(rows, np.full((2, 4), 0.5))
    unsigned = sk.Table("unsigned", 2, initializer=1, key_type=tf.uint64)
    unsigned(tf.constant([2**64 - 1], tf.uint64), training=True)
    assert unsigned.export()[0].numpy().tolist() == [2**64 - 1]


REFUSED = {
    "no table": (lambda sk, t: sk.Embedding("item"), TypeError, "must be a sok_lite.keras.Table"),
    "a combiner": (lambda sk, t: sk.Embedding(t, "max"), ValueError, "'max'"),
    "no features": (lambda sk, t: sk.Embeddings({}), ValueError, "at least one"),
    "a table for features": (lambda sk, t: sk.Embeddings(t), TypeError, "dict or list"),
    "tables of one name": (
        lambda sk, t: sk.Embeddings([t, sk.Table("rows", 2)]),
        ValueError,
        "different names",
    ),
    "a missing feature": (
        lambda sk, t: sk.Embeddings({"a": t, "b": t})({"a": tf.constant([1])}),
        ValueError,
        "without b",
    ),
    "too few": (
        lambda sk, t: sk.Embeddings([t, t])([tf.constant([1])]),
        ValueError,
        "list with one entry for each feature, 2 in all. Received: 1",
    ),
    "weights without combiner": (
        lambda sk, t: sk.Embedding(t)(tf.constant([1]), weights=tf.constant([1.0])),
        ValueError,
        "need a combiner",
    ),
    "sparse without combiner": (
        lambda sk, t: sk.Embedding(t)(tf.sparse.from_dense([[1]])),
        ValueError,
        "Sparse ids need a combiner",
    ),
    "texts": (lambda sk, t: t(tf.constant(["a"])), TypeError, "key_type=str"),
    "numbers for texts": (
        lambda sk, t: sk.Table("t", 2, key_type=str)(tf.constant([1])),
        TypeError,
        "must be texts",
    ),
    "numbers for texts in a list": (
        lambda sk, t: sk.Table("words", 2, key_type=str)([1, 2]),
        TypeError,
        "must be texts: it was made with key_type=str",
    ),
    "floats": (lambda sk, t: t(tf.constant([1.5])), TypeError, "integer"),
    "dim": (lambda sk, t: sk.Table("t", 0), ValueError, "`dim` must be at least 1"),
    "a dim that is no number": (lambda sk, t: sk.Table("t", "4"), TypeError, "`dim`"),
    "a number of rows": (
        lambda sk, t: sk.Table("t", 1000, 16),
        TypeError,
        r"Received: Table\('t', 1000, 16\).*Write Table\('t', 16\).*initializer=16.0",
    ),
    "a number for a dtype": (lambda sk, t: sk.Table("t", 4, None, 9), ValueError, "key_type='9'"),
    "key_type": (lambda sk, t: sk.Table("t", 4, key_type="float"), ValueError, "`key_type`"),
    "row_dtype": (lambda sk, t: sk.Table("t", 4, row_dtype="int8"), ValueError, "`row_dtype`"),
    "an option of the other kind": (
        lambda sk, t: sk.Table("t", 4, max_capacity=1024),
        ValueError,
        "`max_capacity` is an option of var_type='hybrid'. Received: max_capacity=1024 .*'hbm'",
    ),
    "an option that there is not": (
        lambda sk, t: sk.Table("t", 4, max_capacities=8),
        TypeError,
        "has no option 'max_capacities'. Received: max_capacities=8. It has: init_capacity",
    ),
    "a layer for a table": (
        lambda sk, t: sk.Embedding(1000, 16),
        TypeError,
        r"Received: builtins.int. Make one: sok_lite.keras.Table\(name, dim\)",
    ),
    "a Feature and a combiner": (
        lambda sk, t: sk.Embedding(Feature(t), "sum"),
        ValueError,
        "has a combiner and a mask_value of its own",
    ),
}


def test_what_does_not_fit_is_refused_by_name(sk, table):
    for name, (call, error, text) in REFUSED.items():
        with pytest.raises(error, match=text):
            call(sk, table)
            pytest.fail(f"{name} was taken")


# Arguments of other classes, and what the error is to name.
OF_OTHERS = {
    "input_dim": r"no number of rows: Table\(",
    "output_dim": "`dim`",
    "dimension": "`dim`.*sok_lite.DynamicVariable",
    "embeddings_initializer": "`initializer`",
    "embeddings_regularizer": "docs/howto/regularization.md",
    "activity_regularizer": "ActivityRegularization",
    "embeddings_constraint": "tf.clip_by_norm",
    "constraint": "clip",
    "mask_zero": r"sok_lite.keras.Embedding\(table, mask_value=0\)",
    "mask_value": r"sok_lite.keras.Embedding\(table, mask_value=0\)",
    "combiner": r"sok_lite.keras.Embedding\(table, combiner=",
    "input_length": "leave it out",
    "weights": r"table.assign\(keys, rows\)",
    "sparse": "leave it out",
    "mode": "sok_lite.DynamicVariable",
    "gradient_dtype": "sok_lite.DynamicVariable",
}


def test_an_argument_of_another_class_says_what_to_write(sk, table):
    for name, text in OF_OTHERS.items():
        text = f"^Table has no argument `{name}`. Received: {name}=7. .*{text}"
        with pytest.raises(TypeError, match=text):
            sk.Table("t", 8, **{name: 7})
    for name in ("input_dim", "output_dim", "embeddings_initializer", "embeddings_regularizer"):
        with pytest.raises(TypeError, match=f"^Embedding has no argument `{name}`.*keras.Table"):
            sk.Embedding(table, **{name: 16})
    with pytest.raises(TypeError, match="`mask_zero`. Received: mask_zero=True. Write mask_value"):
        sk.Embedding(table, mask_zero=True)
    with pytest.raises(TypeError, match=r"layer\(ids, weights=weights\)"):
        sk.Embedding(table, weights=[ROWS])


def test_capacities_are_rounded_up_to_powers_of_two(sk, monkeypatch):
    monkeypatch.setattr(hkv_options, "_rounded", set())
    with pytest.warns(UserWarning, match="max_capacity=1000000 is rounded up to 1048576") as told:
        table = sk.Table("large", 2, var_type="hybrid", max_capacity=1_000_000)
    assert [each.filename for each in told] == [__file__]
    assert table.variable.table.options.max_capacity == 1 << 20
    monkeypatch.setattr(hkv_options, "_rounded", set())
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the config has what the table has
        again = type(table).from_config(table.get_config())
    assert again.variable.table.options == table.variable.table.options


def test_ids_of_python_are_taken(sk, table):
    check(table([1, 2, UNKNOWN]), [row(1), row(2), row(UNKNOWN)])
    check(table((1, 2**62)), [row(1), row(2**62)])
    check(table([[1, 2], [3, -3]]), [[row(1), row(2)], [row(3), row(-3)]])
    for one in (1, np.int64(1)):
        check(table(one), row(1))
    assert table([]).shape == (0, DIM) and table([[], []]).shape == (2, 0, DIM)
    check(sk.Embedding(table, "sum")([[1, 2], [3, 3]]), [pooled(ids, "sum") for ids in DENSE[:2]])
    named = sk.Embeddings({"a": table, "b": (table, "sum")})({"a": [1, 2], "b": [[1], [2]]})
    for found in named.values():
        check(found, [row(1), row(2)])
    (first, second) = sk.Embeddings([table, table])([[1, 2], 3])
    check(first, [row(1), row(2)])
    check(second, row(3))
    traced = tf.function(lambda: table([1, 2]))
    check(traced(), [row(1), row(2)])
    unsigned = sk.Table("unsigned", 2, "ones", key_type=tf.uint64, max_capacity=None)
    unsigned([2**64 - 1, 3], training=True)
    assert unsigned.export()[0].numpy().tolist() == [3, 2**64 - 1]
    table([5_000, 6_000], training=True)
    assert 5_000 in table and len(table) == len(KEYS) + 2


WRONG_IDS = {
    "floats": ([1.5, 2.0], TypeError, "The ids of table 'rows' must be integers .*float64"),
    "bools": ([True, False], TypeError, "The ids of table 'rows' must be integers .*bool"),
    "texts": (["a"], TypeError, "must be int64. Received: texts. .*key_type=str"),
    "too large": ([2**64], ValueError, "The ids of table 'rows' must"),
    "of several lengths": ([[1], [2, 3]], ValueError, "one length.*1, 2. Use tf.ragged.constant"),
}


def test_lists_that_are_no_ids_are_refused(sk, table):
    for ids, error, text in WRONG_IDS.values():
        for call in (table, sk.Embedding(table), lambda given: sk.Embeddings([table])([given])):
            with pytest.raises(error, match=text):
                call(ids)


def test_lookups_of_variables_name_the_layer_to_call(sk, table):
    ids = tf.ragged.constant(RAGGED, tf.int64)
    text = r"not supported in lookup.* is a layer.*sok_lite.keras.Embedding\(table, combiner="
    for layer in (table, sk.Embedding(table, "sum"), sk.Embeddings([table])):
        with pytest.raises(NotImplementedError, match=f"^{type(layer).__name__} is {text}"):
            sok_lite.lookup_sparse(layer, ids)
        with pytest.raises(NotImplementedError, match=text):
            sok_lite.lookup_sparse([layer], [ids])
        with pytest.raises(NotImplementedError, match=text):
            sok_lite.all2all_dense_embedding(layer, [1, 2])
    dense = tf.keras.layers.Dense(1)
    with pytest.raises(NotImplementedError, match="Dense is .*tf.nn.embedding_lookup_sparse"):
        sok_lite.lookup_sparse(dense, ids)


def test_the_weight_of_a_table_says_how_rows_are_written(sk, table):
    slices = tf.IndexedSlices(tf.ones([1, DIM]), tf.constant([1], tf.int64))
    weight = table.variable
    for write in (
        lambda: weight.assign(np.zeros((len(KEYS), DIM))),
        lambda: weight.assign_add(ROWS),
        lambda: weight.scatter_add(slices),
        lambda: weight.scatter_sub(slices),
        lambda: weight.scatter_update(slices),
    ):
        with pytest.raises(NotImplementedError, match=r"'rows:0'.* Use table.assign\(keys, rows\)"):
            write()
        with pytest.raises(NotImplementedError, match=r"Use table.assign\(keys, rows\)"):
            tf.function(write)()
    check(table(KEYS), ROWS)


def test_first_mistakes_with_a_table_teach(keras, sk):
    table = sk.Table("user", 4)
    with pytest.raises(TypeError, match=r"cannot be indexed.*table\[3\].*table\(tf.constant"):
        table[3]
    for take in (
        lambda: tf.nn.embedding_lookup(table, [3]),
        lambda: tf.gather(table, [3]),
        lambda: tf.matmul(table, table),
        lambda: tf.convert_to_tensor(table),
        tf.function(lambda: tf.gather(table, [3])),
    ):
        with pytest.raises(TypeError, match=r"Call it: table\(ids\) gives the rows of ids"):
            take()
    with pytest.raises(TypeError, match="name=100000. A table has a name and a dimension, and no"):
        sk.Table(100_000, 16)  # as a keras.layers.Embedding
    with pytest.raises(TypeError, match="`filter_ratio` is for .*Give `enter_threshold`"):
        sk.Table("t", 3, var_type="hybrid", filter_ratio=0.5)
    config = sk.Table("t", 3, var_type="hybrid").get_config()
    assert not {"filter_ratio", "keep_texts"} & set(config)
    assert sk.Table.from_config({**config, "filter_ratio": 0.5}).dim == 3  # as files of before have
    with pytest.raises(TypeError, match=r"^Table\.__init__\(\) missing .* 'dim'"):
        sk.Table("item")
    with pytest.raises(ValueError, match=r'same name, \'user\'.*sk.Table\("user_table"'):
        table(keras.Input([1], dtype="int64", name="user"))
    assert table(keras.Input([1], dtype="int64", name="user_id")).shape[1:] == (1, 4)
    assert table.variable.path == "user"
    with pytest.raises(tf.errors.FailedPreconditionError, match="this is a table"):
        tf.matmul(table.variable, tf.ones([4, 1]))


def test_keys_of_texts_are_texts_or_their_hashes(sk):
    words, hashes = sk.Table("words", 2, key_type=str), sok_lite.hash_strings(["Oslo", "Lima"])
    for keys in (
        *([1, 2], 1, np.array([1, 2], np.int32), tf.constant([1, 2]), np.array([1, 2], np.uint64)),
        [1.0, 2.0],
    ):
        for call in (
            *(words.contains, words.scores, words.erase),
            lambda k: words.assign(k, np.ones((2, 2))),
        ):
            with pytest.raises(TypeError, match="must be texts.*Received.*hashes.* int64 tensor"):
                call(keys)
    for missing in (None, float("nan")):
        for keys in (["Oslo", missing], np.array(["Oslo", missing], object)):
            with pytest.raises(TypeError, match=f"Received: {missing} among them. Give missing"):
                words.assign(keys, np.ones((2, 2)))
    assert len(words) == 0
    words.assign(tf.constant(hashes), np.ones((2, 2)))
    for keys in (hashes, tf.constant(hashes), list(hashes)):
        assert words.contains(keys).numpy().all()
    assert hashes[0] in words and tf.constant("Lima") in words and np.int64(5) not in words
    with pytest.raises(TypeError, match="must be texts"):
        _ = int(hashes[0]) in words
    assert words.contains([]).shape == [0] and int(words.erase(hashes[:1])) == 1

    @tf.function(input_signature=[tf.TensorSpec([None, None], tf.string)])
    def contains(texts):
        return words.contains(texts)

    assert contains([["Lima"], ["Oslo"]]).numpy().tolist() == [[True], [False]]


def test_a_table_has_the_methods_of_a_variable(sk):
    numbers, words = sk.Table("numbers", 2), sk.Table("words", 2, key_type=str)
    numbers.assign([3, -5, 2**62], [[1, 1], [1, 1], [0, 0]])
    words.assign(["Oslo", "東京", "Lima"], np.arange(6.0).reshape(3, 2))
    assert numbers.contains([[3, 4]]).numpy().tolist() == [[True, False]]
    assert 3 in numbers and 4 not in numbers
    assert "Oslo" in words and "東京".encode() in words and "Rome" not in words
    with pytest.raises(TypeError, match="one key, an integer. Received: '3'"):
        _ = "3" in numbers
    assert words.contains([["Oslo"], ["Rome"]]).numpy().tolist() == [[True], [False]]
    np.testing.assert_array_equal(words(tf.constant(["東京"])), [[2, 3]])
    keys, rows = sok_lite.export(numbers, cutoff=0.5)
    np.testing.assert_array_equal(keys, [-5, 3])
    np.testing.assert_array_equal(rows, np.ones((2, 2)))
    assert (words.scores(["Lima", "Rome"]).numpy() > 0).tolist() == [True, False]
    assert int(words.erase(np.array(["Oslo", "Rome"]))) == 1 and len(words) == 2
    assert int(numbers.erase([2**62, 7])) == 1 and len(numbers) == 2
    for _ in range(2):
        numbers(tf.constant([3]), training=True)
    assert int(numbers.expire(num_lookups=1)) == 1 and 3 in numbers
    for table, kind in ((numbers, "int64"), (words, "text, by its 64-bit hash")):
        html = table._repr_html_()
        assert f"<caption>sok_lite.keras.Table {table.name}</caption>" in html
        assert f"<th>key type</th><td>{kind}</td>" in html
        assert f"<th>keys</th><td>{len(table)}</td>" in html
    words.clear()
    assert len(words) == 0 and words.statistics().size == 0


def test_the_classes_of_a_keras_come_with_what_is_of_none(sk):
    for name in ("Feature", "shard", "equal_steps"):
        assert getattr(sk, name) is getattr(sok_lite.keras, name)


def test_a_layer_that_gets_floats_says_where_they_come_from(keras, sk):
    table = sk.Table("t", 4)

    class Looks(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.table = table

        def call(self, ids):
            return tf.reduce_mean(self.table(ids), 1)

    model = keras.Sequential([Looks(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    ids, y = np.arange(12).reshape(4, 3), np.ones((4, 1), np.float32)
    if keras.__name__ == "keras":
        with pytest.raises(TypeError, match=r"must be int64. Received: float32.*dtype='int64'\)"):
            model.fit(ids, y, verbose=0)
    else:
        model.fit(ids, y, verbose=0)
        assert len(table) == 12
    with pytest.raises(TypeError, match="'t' must be int64. Received: float32"):
        table(ids.astype(np.float32))
