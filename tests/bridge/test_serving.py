"""Exported functions and models give in a process without sok_lite what they give here."""

import contextlib
import functools

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite.bridge.serving import files
from sok_lite.bridge.serving.files import WrittenVariable
from sok_lite.bridge.serving.tables import KeyIndex
from tests.support.fresh_process import FreshProcess

pytestmark = pytest.mark.usefixtures("initialised")

RNG = np.random.default_rng(0)
LOADERS = ["tf2", "tf1"]
INT64 = np.iinfo(np.int64)
KEYS = np.array([5, 1, -3, INT64.max, 0, INT64.min, 2**40])
IDS = [tf.TensorSpec([None], tf.int64, "ids")]


@pytest.fixture(scope="module")
def fresh():
    with FreshProcess() as process:
        yield process


def rows_like(keys, dim):
    return RNG.normal(size=(len(keys), dim)).astype(np.float32)


def filled(keys=KEYS, dim=3, **arguments):
    table = sok.DynamicVariable(dim, **({"initializer": "0.5"} | arguments))
    rows = rows_like(keys, dim)
    sok.assign(table, keys, rows)
    return table, rows


def lookup_of(table, **arguments):
    return tf.function(lambda ids: table.sparse_read(ids, **arguments))


def live(function, *arguments):
    with sok.inference_mode():
        return function(*arguments)


# ---------------------------------------------------------------- what is looked up


class Model(tf.Module):
    """Lookups of every kind, and dense layers around them."""

    def __init__(self):
        self.user, _ = filled(name="user")
        self.item, _ = filled(np.arange(40), 2, key_type=tf.int32, dtype=tf.bfloat16, name="item")
        self.word, _ = filled(np.array([1, 2**64 - 1], np.uint64), 2, key_type=tf.uint64, name="w")
        self.static = sok.Variable(rows_like(range(10), 4), name="static")
        self.dense = tf.Variable(rows_like(range(3), 2))

    @tf.function
    def hidden(self, ids):
        return tf.nn.relu(tf.nn.embedding_lookup(self.user, ids) @ self.dense)

    @tf.function
    def __call__(self, ids, ragged, sparse, words):
        weights = ragged.with_values(tf.cast(ragged.values, tf.float32) / 7)
        sums = sok.lookup_sparse([self.user, self.item], [ragged, sparse], [weights, None], "sum")
        means = sok.lookup_sparse([self.item, self.static], [ragged, ragged])
        roots = sok.lookup_sparse(self.user, ragged, weights, combiners="sqrtn")
        rows = {"hidden": self.hidden(ids), "word": tf.nn.embedding_lookup(self.word, words)}
        rows |= {"sum_0": sums[0], "sum_1": sums[1], "mean_0": means[0], "mean_1": means[1]}
        one, two = sok.lookup_sparse([self.user, self.word], [ids, words], combiners="mean")
        rows |= {"one_a_row": one, "two_a_row": two}
        return rows | {"root": roots, "tf": tf.nn.embedding_lookup_sparse(self.user, sparse, None)}


def assert_close(rows, expected, name):
    """As close as sums of float32 in another order, or a rounding to bfloat16, are."""
    tolerance = 1e-2 if expected.dtype == tf.bfloat16 else 1e-6
    plain = tf.cast(expected, tf.float32)  # NumPy of the oldest TensorFlow compares no bfloat16
    np.testing.assert_allclose(rows, plain, rtol=tolerance, atol=1e-7, err_msg=name)


SPECS = [
    tf.TensorSpec([None], tf.int64),
    tf.RaggedTensorSpec([None, None], tf.int64),
    tf.SparseTensorSpec([None, None], tf.int32),
    tf.TensorSpec([None, 2], tf.uint64),
]


@pytest.mark.parametrize("loader", LOADERS)
def test_lookups_of_every_kind_give_what_they_give_here(fresh, loader, tmp_path):
    model = Model()
    ids = np.concatenate([KEYS, [99, -99, INT64.max - 1]])
    ragged = tf.RaggedTensor.from_row_lengths(np.array([3, 9, 1, 0, 1]), [2, 0, 2, 1])
    sparse = tf.SparseTensor([[0, 0], [2, 1], [2, 2]], np.array([5, 39, 77], np.int32), [4, 3])
    words = np.array([[1, 2**64 - 1], [7, 2**63]], np.uint64)
    arguments = tf.constant(ids), ragged, sparse, tf.constant(words)
    expected = live(model, *arguments)  # traced before the export
    sok.export_serving(model, tmp_path / "m", SPECS)
    inputs = {"ids": ids, "words": words}
    inputs |= {"ragged_values": ragged.values.numpy(), "ragged_row_splits": [0, 2, 2, 4, 5]}
    inputs |= {"sparse_indices": sparse.indices.numpy(), "sparse_values": sparse.values.numpy()}
    inputs |= {"sparse_dense_shape": [4, 3]}
    found = fresh.run(tmp_path / "m", inputs, loader)
    assert set(found) == set(expected)
    for name, rows in expected.items():
        assert_close(found[name], rows, name)
    loaded = tf.saved_model.load(str(tmp_path / "m"))  # called as the function is
    for name, rows in loaded(*arguments).items():
        assert_close(tf.cast(rows, tf.float32), expected[name], name)
    # Neither function has changed.
    again = live(model, *arguments)
    np.testing.assert_array_equal(again["hidden"], expected["hidden"])
    assert model.user.size.numpy().tolist() == [len(KEYS), 3]


def served(path, function, ids, key_type=tf.int64, **options):
    """What an export of a function of ids gives in this process."""
    sok.export_serving(function, path, [tf.TensorSpec([None], key_type, "ids")], **options)
    return tf.saved_model.load(str(path))(tf.constant(ids, key_type)).numpy()


@pytest.mark.parametrize(
    ("table", "lookup", "expected"),
    [
        ({"initializer": "0.5"}, {}, 0.5),
        ({"initializer": np.array([1.0, 2.0, 3.0])}, {}, [1, 2, 3]),
        ({"initializer": "0.5"}, {"missing": "zeros"}, 0),
        ({"initializer": "normal"}, {}, 0),
        ({"initializer": "normal"}, {"missing": "initial", "training": False}, 0),
        ({}, "inference_mode", 0),
        ({"var_type": "hybrid", "init_capacity": 1024}, "use_low_frequency_filter", 0),
        ({"keys": KEYS[:0]}, {}, 0.5),
    ],
    ids=str,
)
def test_keys_without_a_row(table, lookup, expected, tmp_path):
    variable, rows = filled(**table)

    def filtered(ids):
        ragged = tf.RaggedTensor.from_tensor(ids[:, None])
        return sok.lookup_sparse(variable, ragged, use_low_frequency_filter=True)

    function = lookup_of(variable, **({} if isinstance(lookup, str) else lookup))
    if lookup == "use_low_frequency_filter":
        function = filtered
    keys = table.get("keys", KEYS)
    is_asked = lookup == "inference_mode"
    with sok.inference_mode(missing="zeros") if is_asked else contextlib.nullcontext():
        found = served(tmp_path / "m", function, np.append(keys, [6, 7]))
    np.testing.assert_array_equal(found[:-2], rows)
    np.testing.assert_array_equal(found[-2:], np.broadcast_to(np.float32(expected), (2, 3)))
    # An export has the rows of its moment, which ours go on from.
    sok.assign(variable, [6], np.full((1, 3), 9, np.float32))
    loaded = tf.saved_model.load(str(tmp_path / "m"))
    np.testing.assert_array_equal(loaded(tf.constant([6], tf.int64))[0], found[-2])
    again = served(tmp_path / "again", function, [6])
    np.testing.assert_array_equal(again, np.full((1, 3), 9))


@pytest.mark.parametrize(("keys", "ids"), [(tf.int64, tf.uint64), (tf.uint64, tf.int64)])
def test_a_number_that_the_key_type_has_not_is_no_key(keys, ids, tmp_path):
    """Its bits are those of a key."""
    largest = np.array([-1]) if keys == tf.int64 else np.array([2**64 - 1], np.uint64)
    table, _ = filled(largest, key_type=keys)
    found = served(
        tmp_path / "m", lookup_of(table), [2**64 - 1 if ids == tf.uint64 else -1], key_type=ids
    )
    np.testing.assert_array_equal(found, np.full((1, 3), 0.5))


def test_results_within_others_have_names_of_their_own(fresh, tmp_path):
    table, rows = filled()

    def function(ids):
        own = tf.nn.embedding_lookup(table, ids)
        return {"user": {"score": own, "more": [own * 2, {"score": own * 3}]}, "score": own * 4}

    sok.export_serving(function, tmp_path / "m", IDS)
    served = fresh.run(tmp_path / "m", {"ids": KEYS})
    factors = {"user_score": 1, "user_more_0": 2, "user_more_1_score": 3, "score": 4}
    assert served.keys() == factors.keys()
    for name, factor in factors.items():
        np.testing.assert_array_equal(served[name], rows * np.float32(factor))
    for outputs in (
        lambda ids: {"a b": ids, "a_b": ids},
        lambda ids: {"a": {"b": ids}, "a_b": ids},
        lambda ids: {"a": tf.RaggedTensor.from_tensor(ids[:, None]), "a_values": ids},
    ):
        with pytest.raises(ValueError, match=r"Two tensors of the signature are named 'a_"):
            sok.export_serving(outputs, tmp_path / "two", IDS)
    assert not (tmp_path / "two").exists()


def test_branches_and_loops(fresh, tmp_path):
    table, _ = filled()

    @tf.function
    def function(ids):
        total = tf.zeros([3])
        for i in tf.range(tf.size(ids)):
            if ids[i] > 0:
                total += tf.nn.embedding_lookup(table, ids[i])
        mapped = tf.map_fn(
            lambda key: tf.nn.embedding_lookup(table, key), ids, fn_output_signature=tf.float32
        )
        ragged = tf.RaggedTensor.from_tensor(ids[:, None])
        return total, mapped, sok.lookup_sparse(table, ragged)

    expected = live(function, tf.constant(KEYS))
    sok.export_serving(function, tmp_path / "m", IDS)
    served = fresh.run(tmp_path / "m", {"ids": KEYS})
    for i, rows in enumerate(expected):
        np.testing.assert_allclose(served[f"output_{i}"], rows, rtol=1e-6)


class Words(tf.Module):
    """A table of words, and methods that read it."""

    def __init__(self):
        self.table, self.rows = filled()
        names = tf.lookup.KeyValueTensorInitializer(["a", "b"], tf.constant([5, 1], tf.int64))
        self.numbers = tf.lookup.StaticHashTable(names, -1)

    def plain(self, words):
        return tf.nn.embedding_lookup(self.table, self.numbers.lookup(words))

    def __call__(self, given):
        return self.plain(given)

    @tf.function
    def traced(self, words):
        return self.plain(words)


FUNCTIONS = {
    "module": lambda words: words,
    "method": lambda words: words.plain,
    "traced method": lambda words: words.traced,
    "function around": lambda words: lambda given: words.plain(given),
    "traced around": lambda words: tf.function(lambda given: words.traced(given)),
    "partial": lambda words: functools.partial(lambda own, given: own.plain(given), words),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_a_function_has_from_outside_comes_along(fresh, name, tmp_path):
    words = Words()
    given = tf.TensorSpec([None], tf.string, "given")
    sok.export_serving(FUNCTIONS[name](words), tmp_path / "m", [given])
    found = fresh.run(tmp_path / "m", {"given": np.array([b"b", b"a"], object)})
    np.testing.assert_array_equal(found["output_0"], words.rows[[1, 0]])
    hidden = [{"words": words}]  # where it is not found
    with pytest.raises(NotImplementedError, match=r"an attribute of a tf.Module with __call__"):
        sok.export_serving(lambda x: hidden[0]["words"].plain(x), tmp_path / "no", [given])
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("package", ["keras", "tf_keras"])
def test_a_model_of_keras_is_called_without_training(fresh, package, tmp_path):
    keras = pytest.importorskip(package)
    table, _ = filled(np.arange(50))

    class Rows(keras.layers.Layer):
        def call(self, ids):
            return sok.lookup_sparse(table, tf.RaggedTensor.from_tensor(ids))

        def compute_output_shape(self, shape):
            return (shape[0], 3)

    user = keras.Input([2], dtype="int64", name="user")
    price = keras.Input([1], name="price")
    hidden = keras.layers.Concatenate()([Rows()(user), price])
    outputs = keras.layers.Dense(2)(keras.layers.Dropout(0.5)(hidden))
    model = keras.Model({"user": user, "price": price}, {"score": outputs})
    inputs = {"user": np.arange(8).reshape(4, 2) * 7, "price": rows_like(range(4), 1)}
    expected = live(model, {name: tf.constant(array) for name, array in inputs.items()})
    sok.export_serving(model, tmp_path / "m")
    served = fresh.run(tmp_path / "m", inputs)
    np.testing.assert_allclose(served["score"], expected["score"], rtol=1e-6)


# ---------------------------------------------------------------- the index

FACTOR = 0x9E3779B97F4A7C15
_STRIDE = np.arange(1000, dtype=np.int64)
PATTERNS = {
    "none": _STRIDE[:0],
    "one": _STRIDE[7:8],
    "counting": _STRIDE,
    "multiples": _STRIDE << np.int64(50),
    "negative": -_STRIDE * 3,
    "random": np.unique(RNG.integers(INT64.min, INT64.max, 100_000)),
    # Their products with the index' factor are neighbours: all in one bucket.
    "one bucket": (_STRIDE.view(np.uint64) * np.uint64(pow(FACTOR, -1, 2**64))).view(np.int64),
    "edges": np.array([INT64.min, INT64.min + 1, -1, 0, 1, INT64.max - 1, INT64.max]),
}


class Held:
    """A variable that is in memory, in place of one in files."""

    def __init__(self, name, shape, dtype):
        self.variable = tf.Variable(tf.zeros(shape, dtype))

    def write(self, rows, first=0):
        self.variable[first : first + len(rows)].assign(rows)


def index_of(keys):
    """Returns an index, and which key has which place."""
    products = (keys.view(np.uint64) * np.uint64(FACTOR)).view(np.int64)
    order = np.argsort(products)
    index = KeyIndex(len(keys), np.array_split(products[order], 3), Held)
    index.write(products[order], 0)
    return index, order


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_index_finds_every_key_and_no_other(pattern):
    keys = RNG.permutation(PATTERNS[pattern])
    index, order = index_of(keys)
    held = dict(zip(keys.tolist(), range(len(keys)), strict=True))
    # Its product is the largest number, which stands behind the last key.
    last = np.array([pow(FACTOR, -1, 2**64) * INT64.max % 2**64], np.uint64).view(np.int64)
    asked = np.concatenate([keys, keys + 1, last, RNG.integers(INT64.min, INT64.max, 500)])
    places, is_found = (each.numpy() for each in index.find(tf.constant(asked)))
    assert is_found.tolist() == [key in held for key in asked.tolist()]
    found = order[places[is_found]] if len(keys) else []
    assert list(found) == [held[key] for key in asked[is_found].tolist()]


def test_another_rounding_of_products_finds_the_same():
    """Some processors round int64 to float32 by way of float64; one bucket off is in the search."""
    keys = PATTERNS["random"]
    index, _ = index_of(keys)
    products = (keys.view(np.uint64) * np.uint64(FACTOR)).view(np.int64)
    # Not of the first or the last bucket, beside which there is none.
    inside = tf.constant(keys[(products > -(2**62)) & (products < 2**62)])
    for off in (-1, 1):
        index._first += off
        is_found = index.find(inside)[1]
        index._first -= off
        assert bool(tf.reduce_all(is_found))


@pytest.mark.parametrize("piece_bytes", [0, 10**9])
def test_a_model_of_many_pieces_has_few_files(tmp_path, monkeypatch, piece_bytes):
    """A server has them all open, and may open 1,024."""
    monkeypatch.setattr(files, "PIECE_BYTES", piece_bytes)
    rows = RNG.standard_normal((20_000, 2)).astype(np.float32)
    (tmp_path / "m").mkdir()
    with files.beside(str(tmp_path / "m" / "part")) as written:
        held = WrittenVariable(tf.Variable(rows), "rows", written)
        for first in range(0, len(rows), 20):
            held.write(rows[first : first + 20], first)
        written.merge_into(str(tmp_path / "m" / "variables"))
    assert len(list((tmp_path / "m").iterdir())) <= (2 if piece_bytes else 400)
    np.testing.assert_array_equal(
        tf.train.load_variable(str(tmp_path / "m" / "variables"), "rows"), rows
    )


# ---------------------------------------------------------------- options


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_quantized_rows_are_as_near_and_as_small_as_it_says(scale, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "PIECE_BYTES", 1000)  # a dozen rows a piece
    keys = np.arange(300)
    table, rows = filled(keys, 32)
    sok.assign(table, keys, rows * scale)
    rows = (rows * np.float32(scale)).astype(np.float64)
    found, sizes = {}, {}
    for quantize in (None, "float16", "int8"):
        path = tmp_path / str(quantize)
        found[quantize] = served(path, lookup_of(table), keys, quantize=quantize)
        assert found[quantize].dtype == np.float32
        sizes[quantize] = size_of(path / "variables")
    error = np.abs(found["float16"] - rows)
    assert (error <= np.maximum(np.abs(rows) * 2.0**-11, 2.0**-25)).all()
    largest = np.abs(rows).max(axis=1, keepdims=True)
    # The product of a byte and its scale is rounded to float32.
    assert (np.abs(found["int8"] - rows) <= largest * (1 / 254 + 2.0**-23)).all()
    # 128, 64 and 36 bytes a row.
    assert sizes[None] - sizes["float16"] == pytest.approx(64 * 300, rel=0.2)
    assert sizes[None] - sizes["int8"] == pytest.approx(92 * 300, rel=0.2)


def test_bytes_of_rows_of_any_size(tmp_path):
    sizes = np.array([0.0, 1e-38, 1e-42, 3e38])
    table, rows = filled(np.arange(4), 2), np.float32(sizes[:, None] * [1, -1 / 3])
    sok.assign(table[0], np.arange(4), rows)
    found = served(tmp_path / "m", lookup_of(table[0]), np.arange(4), quantize="int8")
    bounds = np.maximum(sizes / 254 * (1 + 1e-5), 2e-36)
    assert (np.abs(found.astype(np.float64) - rows) <= bounds[:, None]).all()


def test_a_cutoff_leaves_rows_of_zeros_out_and_changes_none(tmp_path):
    keys = np.arange(4000)
    table, rows = filled(keys, 8, initializer="0")
    rows[::2] = 0
    sok.assign(table, keys, rows)
    function = lookup_of(table)
    for name, cutoff in (("all", None), ("some", 1e-20)):
        found = served(tmp_path / name, function, keys, cutoff=cutoff)
        np.testing.assert_array_equal(found, rows)
    assert size_of(tmp_path / "some") < 0.62 * size_of(tmp_path / "all")
    with pytest.raises(ValueError, match="initial value, which is not below the cutoff"):
        sok.export_serving(lookup_of(filled()[0]), tmp_path, IDS, cutoff=1e-20)
    with pytest.raises(ValueError, match="`cutoff` must be above 0"):
        sok.export_serving(function, tmp_path, IDS, cutoff=0.0)


def test_rows_that_cannot_be_quantized_are_refused(tmp_path):
    table, _ = filled(np.array([1]))
    sok.assign(table, [1], [[1e5, 0.0, 0.0]])
    with pytest.raises(ValueError, match=r"at most 65504 in size. Received: 100000"):
        sok.export_serving(lookup_of(table), tmp_path, IDS, quantize="float16")
    sok.assign(table, [1], [[np.nan, 0.0, 0.0]])
    with pytest.raises(ValueError, match="cannot be quantized"):
        sok.export_serving(lookup_of(table), tmp_path, IDS, quantize="int8")
    with pytest.raises(ValueError, match="`quantize` must be None, 'float16' or 'int8'"):
        sok.export_serving(lookup_of(table), tmp_path, IDS, quantize="int4")


def size_of(path):
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


@pytest.mark.parametrize("quantize", [None, "float16"])
def test_tensorflow_lite_needs_no_operation_of_others(tmp_path, quantize):
    table, rows = filled()
    sok.export_serving(lookup_of(table), tmp_path / "m", IDS, quantize=quantize)
    rows = rows.astype(quantize).astype(np.float32)  # None: float64, which holds them
    converter = tf.lite.TFLiteConverter.from_saved_model(str(tmp_path / "m"))
    # Of builtin operations alone, which is the default: others raise.
    interpreter = tf.lite.Interpreter(model_content=converter.convert())
    (given,), (result,) = interpreter.get_input_details(), interpreter.get_output_details()
    interpreter.resize_tensor_input(given["index"], [len(KEYS) + 1])
    interpreter.allocate_tensors()
    interpreter.set_tensor(given["index"], np.append(KEYS, 77))
    interpreter.invoke()
    expected = np.append(rows, np.full((1, 3), np.float32(0.5)), 0)
    np.testing.assert_array_equal(interpreter.get_tensor(result["index"]), expected)


@pytest.mark.parametrize("combiner", [None, "mean"])
def test_tensorflow_lite_takes_words_of_a_vocabulary(tmp_path, combiner):
    """TensorFlow Lite does not know the shape of what a table of words gives."""
    keras = pytest.importorskip("keras")
    import sok_lite.keras as sk

    table = sk.Table("words", 3)
    rows = np.arange(9, dtype=np.float32).reshape(3, 3)
    table.assign([0, 1, 2], rows)
    shape = [] if combiner is None else [2]
    inputs = keras.Input(shape, dtype="string", name="city")
    numbers = keras.layers.StringLookup(vocabulary=["Oslo", "Lima"])(inputs)
    model = keras.Model(inputs, sk.Embedding(table, combiner)(numbers))
    sok.export_serving(model, tmp_path / "m")
    converter = tf.lite.TFLiteConverter.from_saved_model(str(tmp_path / "m"))
    runner = tf.lite.Interpreter(model_content=converter.convert()).get_signature_runner()
    words = ["Lima", "Oslo", "Rome", "Lima"]
    (found,) = runner(city=np.array(words).reshape(-1, *shape)).values()
    expected = rows[[2, 1, 0, 2]]
    np.testing.assert_allclose(
        found, expected if combiner is None else expected.reshape(2, 2, 3).mean(1)
    )


# ---------------------------------------------------------------- what is refused


def test_what_is_no_lookup_is_refused(tmp_path):
    table, _ = filled(name="table")
    optimizer = sok.SGD(1.0)

    def update(ids):
        optimizer.apply_gradients([(tf.IndexedSlices(tf.ones([tf.size(ids), 3]), ids), table)])
        return ids

    for what, function in {
        "The update of 'table:0' cannot be exported": update,
        "sok.assign": lambda ids: sok.assign(table, ids, tf.zeros([tf.size(ids), 3])).key_type.name,
        "contains": lambda ids: table.contains(ids),
        "calls a function of Python": lambda ids: tf.py_function(lambda x: x, [ids], tf.int64),
        "training=True": lambda ids: table.sparse_read(ids, training=True),
        "A lookup in": lambda ids: sok.sparse_read_and_evict(table, ids)[0],
    }.items():
        with pytest.raises(NotImplementedError, match=what):
            sok.export_serving(function, tmp_path / "m", IDS)
        assert not (tmp_path / "m").exists()
        # Nothing is left of it.
        assert live(lookup_of(table), tf.constant([5], tf.int64)).shape == (1, 3)
    module = tf.Module()
    module.table = table
    with pytest.raises(NotImplementedError, match="sok.export_serving"):
        tf.saved_model.save(module, str(tmp_path))


def test_arguments_that_do_not_fit(tmp_path):
    dense = tf.Variable([2.0, 3.0])  # a model without tables
    found = served(tmp_path / "m", lambda x: tf.cast(x, tf.float32) * dense, [1, 2])
    assert found.tolist() == [2, 6]
    table, _ = filled()
    function, same = lookup_of(table), [tf.TensorSpec([], tf.int64, "x")] * 2
    for arguments, error, text in (
        ((table, tmp_path, IDS), TypeError, "model_or_fn"),
        ((function, tmp_path), ValueError, "`signature` must say"),
        ((function, tmp_path, [3]), TypeError, r"made of tf.TensorSpec.*Received: 3"),
        (
            (lambda a, b: a + b, tmp_path, same),
            ValueError,
            "Two tensors of the signature are named",
        ),
        ((lambda ids: None, tmp_path, IDS), TypeError, "must give tensors"),
    ):
        with pytest.raises(error, match=text):
            sok.export_serving(*arguments)
    with tf.Graph().as_default(), pytest.raises(RuntimeError, match="export_serving_graph"):
        sok.export_serving(lookup_of(table), tmp_path, IDS)
