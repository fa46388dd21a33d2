"""DynamicVariable: facts about it, export, assign, scatter, and life inside functions."""

import gc
import warnings
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok


def rows_of(variable):
    keys, values = sok.export(variable)
    return dict(zip(keys.numpy().tolist(), values.numpy(), strict=True))


def slices(keys, values):
    return tf.IndexedSlices(tf.constant(values, tf.float32), tf.constant(keys, tf.int64))


def test_a_variable_tells_what_it_was_made_with():
    v = sok.DynamicVariable(3, initializer="13", name="user", init_capacity=1000)
    assert v.name == "user:0"
    assert v.shape.as_list() == [None, 3]
    assert (v.dimension, v.key_type, v.dtype) == (3, tf.int64, tf.float32)
    assert v.handle_dtype == tf.float32
    assert (v.backend_type, v.initializer_str, v.mode, v.target_gpu) == ("hbm", "13", None, -1)
    assert v.config_dict == {"init_capacity": 1000}
    assert v.trainable
    assert v.size.dtype == tf.int32
    np.testing.assert_array_equal(v.size, [0, 3])
    np.testing.assert_array_equal(v.key_map([4, 5]), [4, 5])
    assert v.table.capacity >= 1000
    assert sok.DynamicVariable(3, mode="localized:2").target_gpu == 2
    v = sok.DynamicVariable(3, "ones", "hybrid", "by_place", trainable=False)
    assert (v.dimension, v.backend_type, v.trainable) == (3, "hybrid", False)
    assert v.name.startswith("by_place")
    (same,) = tf.nest.map_structure(lambda x: x, [v], expand_composites=True)
    assert same is v


@pytest.mark.parametrize("var_type", [None, ""])
def test_no_var_type_is_the_usual_one(var_type):
    usual, variable = sok.DynamicVariable(2, name="t"), sok.DynamicVariable(2, None, var_type, "t")
    assert variable.backend_type == usual.backend_type == "hbm"
    np.testing.assert_array_equal(variable.sparse_read([5]), usual.sparse_read([5]))


def test_num_gpus_is_the_number_of_ranks(uninitialised, monkeypatch):
    table = sok.DynamicVariable(3, initializer="ones")
    assert table.num_gpus == 1  # one process needs no init
    rows = sok.lookup_sparse(table, tf.ragged.constant([[1, 2], [3]]), combiners="sum")
    np.testing.assert_array_equal(rows, [[2.0] * 3, [1.0] * 3])
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    with pytest.raises(RuntimeError, match="Did you forget to call sok.init.*2 ranks were launch"):
        _ = table.num_gpus


def test_names_count_up_and_keep_their_zeros():
    names = {sok.DynamicVariable(2).name for _ in range(12)}
    assert len(names) == 12
    assert sok.DynamicVariable(2, name="table_100").name == "table_100:0"
    with tf.name_scope("outer"):
        assert sok.DynamicVariable(2, name="inner").name == "outer/inner:0"


def test_the_repr_tells_keys_fill_and_memory():
    v = sok.DynamicVariable(3, name="user")
    sok.assign(v, [1, 2], np.zeros((2, 3), np.float32))
    text = repr(v)
    for part in ("'user:0'", "(None, 3)", "float32", "keys=2", "fill=", "memory="):
        assert part in text
    for part in ("<table>", "user:0", "<th>keys</th><td>2</td>", "optimizer states"):
        assert part in v._repr_html_()
    html = sok.DynamicVariable(2, name="<b>&'\"")._repr_html_()
    assert "<caption>sok.DynamicVariable &lt;b&gt;&amp;&#x27;&quot;" in html and "<b>" not in html


@pytest.mark.parametrize(
    ("n", "dtype", "key_type"),
    [
        *[(0, "float32", "int64"), (1, "float16", "int64"), (1000, "bfloat16", "int64")],
        *[(1000, "float32", "int64"), (33, "float32", "int32"), (33, "float16", "uint64")],
    ],
)
def test_export_gives_what_assign_took(n, dtype, key_type, mode):
    v, other = (sok.DynamicVariable(4, dtype=dtype, key_type=key_type, name="same") for _ in "ab")
    rng, limits = np.random.default_rng(n), np.iinfo(key_type)
    edges = dict.fromkeys([limits.min, limits.min + 1, 0, 7, limits.max - 1, limits.max])
    drawn = rng.integers(limits.min, limits.max, 1000, key_type)
    keys = np.concatenate([np.array([*edges], key_type), drawn])[:n]
    values = rng.normal(size=(n, 4)).astype(v.dtype.as_numpy_dtype)

    @mode
    def round_trip(k, x):
        # Of a repeated key the last one counts.
        k, x = tf.concat([k, k], 0), tf.concat([x * 2, x], 0)
        with tf.control_dependencies([] if tf.executing_eagerly() else [sok.assign(v, k, x)]):
            if tf.executing_eagerly():
                assert sok.assign(v, k, x) is v.assign(k, x) is v
            return sok.export(v)

    out_keys, out_values = round_trip(tf.constant(keys), tf.constant(values))
    assert (out_keys.dtype, out_values.dtype) == (key_type, dtype)
    order = np.argsort(keys)
    np.testing.assert_array_equal(out_keys, keys[order])
    np.testing.assert_array_equal(out_values, values[order])
    np.testing.assert_array_equal(tf.nn.embedding_lookup(v, tf.constant(keys)), values)
    np.testing.assert_array_equal(v.size, [n, 4])
    assert rows_of(other) == {}  # of one name, and nothing else


def test_scatter_changes_existing_keys_and_sums_repeated_ones(mode):
    v = sok.DynamicVariable(2)
    sok.assign(v, [1, 2], [[1.0, 1.0], [2.0, 2.0]])

    @mode
    def run(how):
        keys, values = [1, 1, 9], [[1.0, 2.0], [10.0, 20.0], [5.0, 5.0]]
        getattr(v, how)(slices(keys, values))
        return tf.constant(0)

    run("scatter_add")
    np.testing.assert_array_equal(rows_of(v)[1], [12.0, 23.0])
    run("scatter_sub")
    np.testing.assert_array_equal(rows_of(v)[1], [1.0, 1.0])
    run("scatter_update")
    np.testing.assert_array_equal(rows_of(v)[1], [10.0, 20.0])
    assert sorted(rows_of(v)) == [1, 2], "a scatter must not insert"


def test_the_seed_and_the_name_make_the_first_rows():
    def first(**options):
        return tf.nn.embedding_lookup(sok.DynamicVariable(4, **options), [1, 2]).numpy()

    start = first(name="a", seed=1)
    np.testing.assert_array_equal(first(name="a", seed=1), start)
    assert not np.array_equal(first(name="a", seed=2), start)
    assert not np.array_equal(first(name="b", seed=1), start)


def test_a_variable_equals_itself_only():
    a, b = sok.DynamicVariable(2, name="same"), sok.DynamicVariable(2, name="same")
    assert a == a and a != b
    assert [a, b].index(b) == 1
    assert {a: "a", b: "b"}[b] == "b"
    assert {a.ref(): "a"}[a.ref()] == "a"


def test_modules_and_tapes_know_it():
    module = tf.Module()
    module.trained = sok.DynamicVariable(2)
    module.frozen = sok.DynamicVariable(2, trainable=False)
    assert module.trainable_variables == (module.trained,)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.nn.embedding_lookup(module.frozen, [1]))
    assert tape.gradient(loss, module.frozen) is None


def test_filter_variables_keeps_the_order():
    a, b = sok.DynamicVariable(2), sok.DynamicVariable(2)
    x, y = tf.Variable(1.0), tf.Variable(2.0)
    ours, others = sok.filter_variables([x, a, y, b])
    assert [id(v) for v in ours] == [id(a), id(b)]
    assert [id(v) for v in others] == [id(x), id(y)]


class InAModel(keras.Model):
    """Looks up in a table that Keras 3 does not list among its variables."""

    def __init__(self, make=sok.DynamicVariable, **options):
        super().__init__()
        self.tables = [make(2, initializer="ones", **options)]
        self.head = keras.layers.Dense(1)

    def call(self, ids):
        return self.head(tf.nn.embedding_lookup(self.tables[0], ids))


def test_filter_variables_misses_a_table_that_keras_3_does_not_list():
    model = InAModel(lambda dim, **_: sok.Variable(tf.ones([3, dim])))
    model(tf.constant([1, 2]))
    with pytest.raises(NotImplementedError, match="leave .* out"):
        sok.filter_variables(model.trainable_variables)
    model = InAModel(name="missed")
    model(tf.constant([1, 2]))
    (table,) = model.tables
    with pytest.raises(NotImplementedError, match=f"leave '{table.name}' out.*sok.DynamicVariable"):
        sok.filter_variables(model.trainable_variables)
    # The way out of a program that names the table where it trains it.
    with pytest.raises(NotImplementedError, match="Name it beside .*elsewhere.*second list alone"):
        sok.filter_variables(iter(model.trainable_variables))
    ours, others = sok.filter_variables([*model.trainable_variables, table])
    assert ours == [table]
    assert [id(each) for each in others] == [id(each) for each in model.trainable_variables]


def test_filter_variables_misses_no_table_that_is_not_to_be_trained():
    models = [InAModel(trainable=False), InAModel(), InAModel()]
    for model in models:
        model(tf.constant([1, 2]))
    models[1].trainable = False
    for model in models[:2]:
        assert sok.filter_variables(model.trainable_variables)[0] == []
    # A part of a model's variables may be all that a program wants to split.
    kernel, _ = models[2].trainable_variables
    assert sok.filter_variables([kernel]) == ([], [kernel])


def test_a_wrapped_step_of_all_that_keras_3_lists_warns_of_the_table():
    model = InAModel()
    model(tf.constant([1, 2]))
    optimizer = sok.OptimizerWrapper(keras.optimizers.SGD(0.1))
    gradients = [tf.ones(each.shape) for each in model.trainable_variables]
    with pytest.warns(UserWarning, match=f"leave '{model.tables[0].name}' out"):
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([1], tf.int64))
    pairs = [*zip(gradients, model.trainable_variables, strict=True), (slices, model.tables[0])]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*leave")
        optimizer.apply_gradients(pairs)


def test_a_function_does_not_keep_a_table_alive_and_says_that_it_is_gone():
    v = sok.DynamicVariable(2, name="gone")
    reference, table = weakref.ref(v), weakref.ref(v.table)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def read(keys):
        return tf.nn.embedding_lookup(reference(), keys)

    call = read.get_concrete_function()
    call(tf.constant([1], tf.int64))
    del v
    gc.collect()
    assert table() is None
    with pytest.raises(tf.errors.InvalidArgumentError, match="was deleted"):
        call(tf.constant([1], tf.int64))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_keras_variables_are_keys_rows_and_scores(mode, dtype):
    keys = keras.Variable([1, 2], dtype="int64")
    rows = keras.Variable([[1.0, 2.0], [3.0, 4.0]], dtype=dtype)
    v = sok.DynamicVariable(2, None, "hybrid", dtype=dtype, evict_strategy="kCustomized")

    def write():
        sok.assign(v, keys, rows, keys)
        v.scatter_add(tf.IndexedSlices(rows, keys))
        v.assign_scores(keys, keys)

    mode(write)()
    assert mode(lambda: v.contains(keys))().numpy().all()
    read = [v.sparse_read(keys), tf.nn.embedding_lookup(v, keys), v.export()[1]]
    read.append(sok.sparse_read_and_evict(v, keys)[0])
    for rows_read in read:
        np.testing.assert_array_equal(tf.cast(rows_read, tf.float32), [[2.0, 4.0], [6.0, 8.0]])
    np.testing.assert_array_equal(v.scores(keys), [1, 2])
    assert int(v.erase(keys)) == 2
    with pytest.raises(TypeError, match="must be integers"):
        sok.assign(v, keras.Variable([1.0, 2.0]), [[1.0, 1.0]] * 2)
    with pytest.raises(TypeError, match=f"must be {dtype}. Received: dtype int64"):
        sok.assign(v, [1], keras.Variable([[1, 1]], dtype="int64"))


def test_a_function_is_traced_for_each_table_and_takes_others_when_one_is_gone():
    """TensorFlow keeps the types of what it traced a function for in a dict."""

    @tf.function
    def look_up(tables):
        return tf.nn.embedding_lookup(tables[0], [1])

    kept = sok.DynamicVariable(1, initializer="9")
    for value in ("1", "2", "3"):
        table = sok.DynamicVariable(1, initializer=value)
        assert float(look_up([table])[0, 0]) == float(value)
        assert float(look_up([kept])[0, 0]) == 9.0
        gone = weakref.ref(table)
        del table
        gc.collect()
        assert gone() is None
    assert look_up.experimental_get_tracing_count() == 4


def test_there_is_no_static_mode():
    v = sok.DynamicVariable(2)
    assert v.is_static() is False and v.indices is None
    for call in (lambda: v.to_static([1]), v.to_dynamic):
        with pytest.raises(NotImplementedError, match=r"take sok\.export.*sok\.assign"):
            call()
