"""`get_kv_variable`: arguments, scopes, initializers, collections, where a variable may be made."""

import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from sok_lite import kv_variable as kv
from sok_lite.engine.table import hkv_options
from sok_lite.kv_variable import get_kv_variable

tf1 = tf.compat.v1
KEYS = np.array([0, -1, 7, 2**63 - 1, -(2**63)])

# ---- scopes --------------------------------------------------------------------------------------


@pytest.fixture(params=["eager", "graph"])
def mode(request):
    from tests.support import modes

    with modes.MODES[request.param]() as mode:
        yield mode


def plain_name(variable):
    return variable.name.split(":")[0]


def test_the_name_is_that_of_the_open_scopes(mode):
    with tf1.variable_scope("a"):
        with tf1.variable_scope("b"), tf1.name_scope("c"):
            inner = get_kv_variable("kv", 2)
        outer = get_kv_variable("kv", 2)
    assert (plain_name(inner), plain_name(outer)) == ("a/b/kv", "a/kv")
    split = get_kv_variable("kv", 2, partitioner=tf1.fixed_size_partitioner(2))
    assert [plain_name(split), *map(plain_name, split)] == ["kv", "kv/part_0", "kv/part_1"]


@pytest.mark.parametrize("reuse", [True, tf1.AUTO_REUSE])
def test_a_scope_that_reuses_finds_the_variable(mode, reuse, parts, made):
    with tf1.variable_scope("a"), tf1.variable_scope("b"):
        first = made(key_dtype=tf.int32)
    with tf1.variable_scope("a", reuse=reuse), tf1.variable_scope("b"):  # inherited
        again = get_kv_variable("kv", key_dtype=tf.int32)  # dim is known
        assert made(key_dtype=tf.int32) is first is again
    assert len(first) == (parts or 1) if parts else isinstance(first, kv.KvVariable)


def test_a_name_is_made_once_and_reused_where_the_scope_says_so(mode):
    with tf1.variable_scope("a", reuse=tf1.AUTO_REUSE):
        assert get_kv_variable("new", 2) is get_kv_variable("new", 2)
    with tf.Graph().as_default():
        get_kv_variable("kv", 2)
        with pytest.raises(ValueError, match="kv already exists"):
            get_kv_variable("kv", 2)
        with tf1.variable_scope("a", reuse=True):
            with pytest.raises(ValueError, match="a/other does not exist"):
                get_kv_variable("other", 2)


def occupy_name_scope():
    with tf1.name_scope("user"):
        tf.constant(1)


def occupy_placeholder():
    tf1.placeholder(tf.int64, [None], name="user")


def occupy_variable_scope():
    with tf1.variable_scope("user"):
        get_kv_variable("inner", 2)


@pytest.mark.parametrize("occupy", [occupy_name_scope, occupy_placeholder, occupy_variable_scope])
def test_a_name_is_the_variables_where_an_operation_has_it_as_well(occupy, parts, made, tmp_path):
    path = str(tmp_path / "model")

    def built(session_of):
        with tf.Graph().as_default():
            if session_of == "saved":
                occupy()
            variable = made("user", 2)
            with pytest.raises(ValueError, match="user already exists"):
                made("user", 2)
            for reuse in (True, tf1.AUTO_REUSE):
                with tf1.variable_scope("", reuse=reuse):
                    assert get_kv_variable("user") is variable
            rows = tf.nn.embedding_lookup(variable, KEYS)
            saver = tf1.train.Saver([variable] if parts is None else list(variable))
            with tf1.Session() as session:
                if session_of == "saved":
                    session.run(tf1.global_variables_initializer())
                    found = session.run(rows)
                    saver.save(session, path)
                    return found
                saver.restore(session, path)  # of a graph whose operations have other names
                return session.run(rows)

    np.testing.assert_array_equal(built("saved"), built("restored"))
    prefix = "user" if parts is None else "user/part_0"
    assert f"{prefix}:0-keys" in dict(tf.train.list_variables(path))


@pytest.mark.parametrize("shards", [None, 2])
def test_a_name_that_a_dense_variable_has_is_refused(shards):
    with tf.Graph().as_default():
        partitioner = None if shards is None else tf1.fixed_size_partitioner(shards)
        tf1.get_variable("user", [4, 2], partitioner=partitioner)
        with pytest.raises(ValueError, match="user already exists and is no KvVariable"):
            get_kv_variable("user", 2)
        assert get_kv_variable("user_of_keys", 2).name == "user_of_keys:0"


def test_what_a_scope_reuses_admits_and_parts_its_keys_alike(mode):
    three = tf1.fixed_size_partitioner(3)
    plain = get_kv_variable("plain", 2, enter_threshold=1)
    split = get_kv_variable("split", 2, partitioner=three, enter_threshold=3)
    with tf1.variable_scope("", reuse=True):
        assert get_kv_variable("plain") is get_kv_variable("plain", enter_threshold=1) is plain
        assert get_kv_variable("split", partitioner=three, enter_threshold=3) is split
        for name, arguments, words in (
            ("plain", {"enter_threshold": 2}, "enter_threshold=1.*Received: enter_threshold=2"),
            ("split", {"enter_threshold": 1}, "enter_threshold=3.*Received: enter_threshold=1"),
            ("plain", {"partitioner": three}, "no partitions.*gives 3"),
            ("split", {"partitioner": tf1.fixed_size_partitioner(2)}, "3 partitions.*gives 2"),
        ):
            with pytest.raises(ValueError, match=words):
                get_kv_variable(name, **arguments)
        with pytest.raises(NotImplementedError, match="constraint"):
            get_kv_variable("plain", constraint=tf.nn.relu)


def test_in_eager_mode_a_name_is_of_what_the_program_keeps():
    # TensorFlow has every scope reuse there.
    first = get_kv_variable("twice", 2)
    assert get_kv_variable("twice", 2) is first
    with tf1.variable_scope("a"):
        assert get_kv_variable("twice", 5) is not first
    del first
    gc.collect()
    assert get_kv_variable("twice", 4).embedding_dim == 4


def test_another_form_is_refused(mode):
    kept = get_kv_variable("kv", 4)
    with tf1.variable_scope("", reuse=True):
        for form in (
            {"embedding_dim": 5},
            {"embedding_dim": 4, "key_dtype": tf.int32},
            {"embedding_dim": 4, "value_dtype": tf.float16},
        ):
            with pytest.raises(ValueError, match=r"Trying to share variable kv.*Received"):
                get_kv_variable("kv", **form)
            assert get_kv_variable("kv") is kept


def test_the_scopes_initializer_partitioner_and_constraint_hold(mode):
    with tf1.variable_scope(
        "a",
        initializer=tf1.constant_initializer(3.0),
        partitioner=tf1.fixed_size_partitioner(4),
    ):
        scoped = get_kv_variable("kv", 2)
        own = get_kv_variable(
            "own",
            2,
            initializer=tf1.zeros_initializer(),
            partitioner=tf1.fixed_size_partitioner(2),
        )
    assert (len(scoped), len(own)) == (4, 2)
    assert mode.run(lambda: tf.nn.embedding_lookup(scoped, [1])).tolist() == [[3.0, 3.0]]
    assert mode.run(lambda: tf.nn.embedding_lookup(own, [1])).tolist() == [[0.0, 0.0]]
    if mode.is_graph:  # TensorFlow refuses it in eager mode
        with tf1.variable_scope("b", constraint=tf.nn.relu), pytest.raises(NotImplementedError):
            get_kv_variable("kv", 2)


def test_the_scopes_regularizer_holds():
    with tf.Graph().as_default():
        with tf1.variable_scope("a", regularizer=lambda v: 2.0 * tf.reduce_sum(v)):
            get_kv_variable("kv", 2)
            get_kv_variable("none", 2, regularizer=lambda v: None)
            get_kv_variable("own", 2, regularizer=lambda v: tf.reduce_max(v))
        names = [loss.op.type for loss in tf1.losses.get_regularization_losses()]
        assert names == ["Mul", "Max"]
    with pytest.raises(NotImplementedError, match="TF1 graph"):  # where nothing collects it
        get_kv_variable("kv", 2, regularizer=tf.reduce_sum)


def test_a_regularizer_that_fails_leaves_no_variable(parts, made):
    def fails(variable):
        raise RuntimeError("of the regularizer")

    with tf.Graph().as_default() as graph:
        with pytest.raises(RuntimeError, match="of the regularizer"):
            made(regularizer=fails, collections=["own", tf1.GraphKeys.GLOBAL_VARIABLES])
        assert not any(graph.get_collection(key) for key in graph.get_all_collection_keys())
        variable = made(regularizer=lambda v: tf.reduce_sum(v))
        with tf1.variable_scope("", reuse=True):
            assert get_kv_variable("kv") is variable


# ---- collections, trainable ----------------------------------------------------------------------


@pytest.mark.parametrize("trainable", [None, True, False])
@pytest.mark.parametrize("collections", [None, [], ["own", tf1.GraphKeys.GLOBAL_VARIABLES]])
def test_collections_have_the_partitions(trainable, collections, parts, made):
    with tf.Graph().as_default() as graph:
        variable = made(trainable=trainable, collections=collections)
        own = [variable] if parts is None else list(variable)
        wanted = {tf1.GraphKeys.GLOBAL_VARIABLES} if collections is None else set(collections)
        if trainable is not False:
            wanted.add(tf1.GraphKeys.TRAINABLE_VARIABLES)
        for name in ["variables", "trainable_variables", "local_variables", "own"]:
            found = graph.get_collection(name)
            assert [id(v) for v in found] == ([id(v) for v in own] if name in wanted else [])
        assert variable.trainable is (trainable is not False)


def test_a_variable_that_is_not_trainable_has_no_gradient(parts, made):
    variable = made(trainable=False)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.nn.embedding_lookup(variable, [1, 2]))
    sources = [variable] if parts is None else list(variable)
    assert tape.gradient(loss, sources) == [None] * len(sources)
    assert tape.watched_variables() == ()


# ---- arguments -----------------------------------------------------------------------------------


WRONG = [
    ({"embedding_dim": None}, TypeError, "`embedding_dim` must be an integer.*None"),
    *(({"embedding_dim": dim}, TypeError, "`embedding_dim`") for dim in (2.0, [2, 3], True, "2")),
    ({"embedding_dim": 0}, ValueError, "at least 1"),
    ({"key_dtype": tf.string}, ValueError, "to_hash_bucket_fast"),
    ({"key_dtype": tf.uint64}, ValueError, "`key_dtype`.*uint64"),
    ({"key_dtype": tf.float32}, ValueError, "`key_dtype`.*float32"),
    ({"embedding_dim": 1000, "key_dtype": 16}, TypeError, "key_dtype=16. A table has a dim"),
    ({"value_dtype": 1}, TypeError, "`value_dtype`.*value_dtype=1"),
    ({"value_dtype": tf.int32}, ValueError, "`value_dtype`.*int32"),
    ({"value_dtype": tf.float64}, ValueError, "`value_dtype`.*float64"),
    ({"value_dtype": tf.complex64}, ValueError, "`value_dtype`.*complex64"),
    ({"constraint": tf.nn.relu}, NotImplementedError, "constraint"),
    ({"constraint": lambda row: row}, NotImplementedError, "max_norm"),
    ({"enter_threshold": -1}, ValueError, "negative"),
    ({"enter_threshold": 1.5}, TypeError, "integer"),
    ({"kv_options": {}}, TypeError, "KvOptions"),
    ({"partitioner": lambda **_: [2, 2]}, NotImplementedError, "axis 0"),
    ({"partitioner": lambda **_: [0]}, ValueError, "number of partitions"),
    ({"partitioner": 3}, TypeError, "`partitioner` must be callable.*3"),
    ({"regularizer": 0.1}, TypeError, "`regularizer` must be callable"),
    ({"trainable": "no"}, TypeError, "`trainable` must be.*'no'"),
    ({"trainable": 1}, TypeError, "`trainable` must be True, False"),
    ({"collections": "own"}, TypeError, "`collections` must be.*'own'"),
    ({"collections": [1]}, TypeError, "`collections` must be a list"),
    ({"initializer": tf.ones([3])}, ValueError, r"\(2,\).*\(3,\)"),
    ({"initializer": np.eye(3)}, ValueError, r"\(n, 2\)"),
    *(({"name": name}, TypeError, "`name` must.*Received: name=") for name in (None, 3, b"kv")),
    ({"name": ""}, ValueError, "`name` must.*Received: name="),
]


def test_arguments_that_do_not_fit(mode):
    for number, (arguments, error, words) in enumerate(WRONG):
        name = f"wrong{number}"
        with pytest.raises(error, match=words):
            get_kv_variable(**{"name": name, "embedding_dim": 2} | arguments)
            pytest.fail(f"{arguments} were taken")
        assert get_kv_variable(name, 7).embedding_dim == 7  # nothing was made


def test_the_dimension_may_be_a_shape_of_one():
    for number, dim in enumerate([3, np.int64(3), [3], tf.TensorShape([3]), tf1.Dimension(3)]):
        assert get_kv_variable(f"kv{number}", dim).embedding_dim == 3


@pytest.mark.pairs
@pytest.mark.parametrize("key_dtype", [int, tf.int64, tf.int32, np.int32, "int64"])
@pytest.mark.parametrize("value_dtype", [tf.float32, tf.float16, tf.bfloat16])
def test_every_dtype(here, key_dtype, value_dtype, made):
    variable = made(
        key_dtype=key_dtype, value_dtype=value_dtype, initializer=tf1.ones_initializer()
    )
    assert variable.key_dtype == (tf.int64 if key_dtype is int else tf.as_dtype(key_dtype))
    assert variable.dtype == value_dtype
    limits = np.iinfo(variable.key_dtype.as_numpy_dtype)
    keys = np.array([3, limits.min, limits.max, -3], variable.key_dtype.as_numpy_dtype)
    rows = here.run(lambda ids: tf.nn.embedding_lookup(variable, ids), keys)
    assert rows.dtype == value_dtype.as_numpy_dtype and (rows == 1).all()
    found, rows = here.run(variable.export)
    assert found.dtype == keys.dtype and sorted(found) == sorted(keys) and rows.shape == (4, 3)


# ---- initializers --------------------------------------------------------------------------------

ONES = [
    tf1.ones_initializer(),
    tf1.ones_initializer,
    keras.initializers.Ones(),
    tf_keras.initializers.Ones(),
    "ones",
    1.0,
    np.ones(3),
    np.ones((4, 3)),
    lambda shape, dtype, partition_info=None: tf.ones(shape, dtype),
    lambda: np.ones(3),
]


@pytest.mark.pairs
@pytest.mark.parametrize("initializer", ONES, ids=range(len(ONES)))
def test_initializers_of_all_kinds(here, initializer, made):
    variable = made(initializer=initializer)
    rows = here.run(lambda ids: tf.nn.embedding_lookup(variable, ids), KEYS)
    np.testing.assert_array_equal(rows, np.ones((5, 3)))


def test_a_tensor_is_what_each_row_begins_with(mode):
    for number, value in enumerate([2.5, [1.0, 2.0, 3.0], [[1.0, 2.0, 3.0]] * 4]):
        variable = get_kv_variable(f"kv{number}", 3, initializer=tf.constant(value))
        rows = mode.run(lambda variable=variable: tf.nn.embedding_lookup(variable, [5, 6]))
        wanted = np.reshape(value, [-1, 3])[0] if np.ndim(value) else value
        np.testing.assert_array_equal(rows, np.broadcast_to(wanted, (2, 3)))


def test_a_key_takes_one_row_of_a_tensor(mode, made):
    rows = np.arange(12.0, dtype=np.float32).reshape(4, 3)
    variable = made(initializer=tf.constant(rows))
    keys = np.arange(-50, 50)
    taken = mode.run(lambda: variable.sparse_read(keys))
    assert {tuple(row) for row in taken} == {tuple(row) for row in rows}
    again = mode.run(lambda: tf.nn.embedding_lookup(variable, keys[::-1]))
    np.testing.assert_array_equal(again, taken[::-1])


def test_a_tensor_without_a_known_value_or_shape_is_refused():
    with tf.Graph().as_default():
        computed = tf.constant([1.0, 2.0]) + 1.0  # is evaluated
        variable = get_kv_variable("kv", 2, initializer=computed)
        rows = tf.nn.embedding_lookup(variable, [1])
        with tf1.Session() as session:
            session.run(tf1.global_variables_initializer())
            assert session.run(rows).tolist() == [[2.0, 3.0]]
        with pytest.raises(ValueError, match="static shape"):
            get_kv_variable("a", 2, initializer=tf1.placeholder(tf.float32, [None]))
        with pytest.raises(ValueError, match="known when the variable is made"):
            get_kv_variable("b", 2, initializer=tf1.placeholder(tf.float32, [2]))


def test_new_rows_have_the_mean_and_deviation_that_is_asked_for():
    for name, initializer, mean, deviation in (
        ("default", None, 0.0, np.sqrt(2 / 10016)),  # Glorot's uniform of [10000, 16]
        ("normal", tf1.random_normal_initializer(0.5, 2.0), 0.5, 2.0),
    ):
        variable = get_kv_variable(f"of_{name}", 16, initializer=initializer)
        rows = tf.nn.embedding_lookup(variable, tf.range(20_000, dtype=tf.int64)).numpy()
        tolerance = 5 * deviation / np.sqrt(rows.size)
        assert abs(rows.mean() - mean) < tolerance, name
        assert abs(rows.std() - deviation) < tolerance, name
        assert len(np.unique(rows, axis=0)) == len(rows)


def first_rows(seed, parts, keys, name="seeded"):
    with tf.Graph().as_default():
        tf1.set_random_seed(seed)
        partitioner = None if parts is None else tf1.fixed_size_partitioner(parts)
        variable = get_kv_variable(name, 4, partitioner=partitioner)
        rows = tf.nn.embedding_lookup(variable, keys)
        with tf1.Session() as session:
            session.run(tf1.global_variables_initializer())
            return session.run(rows)


def test_a_row_begins_by_seed_name_and_key_alone():
    rows = first_rows(7, None, KEYS)
    for parts in (1, 2, 5):
        np.testing.assert_array_equal(first_rows(7, parts, KEYS), rows)
    np.testing.assert_array_equal(first_rows(7, 3, KEYS[::-1]), rows[::-1])
    np.testing.assert_array_equal(first_rows(7, None, KEYS[2:3]), rows[2:3])
    assert not np.isin(rows, first_rows(8, None, KEYS)).any()
    assert not np.isin(rows, first_rows(7, None, KEYS, "other")).any()


def test_an_initializers_own_seed_counts():
    def rows(seed):
        initializer = tf1.random_normal_initializer(seed=seed)
        variable = get_kv_variable("own_seed", 4, initializer=initializer)
        return tf.nn.embedding_lookup(variable, KEYS).numpy()

    np.testing.assert_array_equal(rows(3), rows(3))
    assert not np.isin(rows(3), rows(4)).any()


# ---- where a variable may be made ----------------------------------------------------------------


@pytest.mark.parametrize("is_trained", [False, True])
def test_a_graph_that_nobody_has_is_gone_with_its_tables(is_trained, made):
    tf1.reset_default_graph()
    graph = tf1.get_default_graph()
    with graph.as_default():
        variable = made()
        loss = tf.reduce_sum(tf.nn.embedding_lookup(variable, [1, 2]))
        loss += tf.reduce_sum(variable.value())
        if is_trained:
            optimizer = tf1.train.AdamOptimizer(0.1)
            train = optimizer.minimize(loss)
            with tf1.Session() as session:
                session.run(tf1.global_variables_initializer())
                session.run(train)
            del session, optimizer, train
    gone = weakref.ref(variable.table), weakref.ref(graph)
    del variable, loss, graph
    tf1.reset_default_graph()
    gc.collect()
    assert [each() for each in gone] == [None, None]


CALLS = {
    "total_count": lambda v: v.total_count,
    "total_freq": lambda v: v.total_freq,
    "storage_size_count": lambda v: v.storage_size_count,
    "get_counting": lambda v: v.get_counting([1]),
    "get_timestamp": lambda v: v.get_timestamp([1]),
    "value": lambda v: v.value(),
    "variable": lambda v: v,
    "export": lambda v: v.export(),
    "insert": lambda v: kv.insert_kv_embedding(v, [1], [[1.0] * 3]),
    "scatter_add": lambda v: v.scatter_add(tf.IndexedSlices([[1.0] * 3], [1])),
    "increase_counting": lambda v: v.increase_counting([1], [1]),
    "assign": lambda v: v.assign(v),
    "delete": lambda v: v.delete([1]),
    "delete_with_timestamp": lambda v: v.delete_with_timestamp(),
    "lookup": lambda v: tf.nn.embedding_lookup(v, [1]),
}


@pytest.mark.pairs
@pytest.mark.parametrize("call", CALLS)
def test_a_session_that_has_not_initialized_the_variable_cannot_use_it(call, made):
    with tf.Graph().as_default():
        variable = made()
        fetched, count = CALLS[call](variable), variable.total_count
        rows = tf.nn.embedding_lookup(variable, [1, 2])
        with tf1.Session() as first, tf1.Session() as second:
            first.run(tf1.global_variables_initializer())
            first.run(rows)
            with pytest.raises(tf.errors.FailedPreconditionError):
                second.run(fetched)
            assert first.run(count) == 2
            first.run(fetched)
            second.run(variable.initializer)
            second.run(fetched)


def test_a_variable_of_no_global_collection_needs_no_initializer(made):
    with tf.Graph().as_default():
        variable = made(collections=[])
        insert = kv.insert_kv_embedding(variable, [1], [[1.0] * 3])
        with tf1.Session() as session:
            session.run(insert)
            assert session.run(variable.export())[0].tolist() == [1]


def test_a_variable_of_eager_mode_goes_with_the_program(made):
    variable = made()
    reference, table = weakref.ref(variable), weakref.ref(variable.table)
    look_up = tf.function(lambda ids: tf.nn.embedding_lookup(reference(), ids))
    look_up(tf.constant([1]))
    others = tf.function(lambda: (reference().value(), reference().export()))
    others()
    del variable
    assert table() is None  # at once: its name is free


# ---- options -------------------------------------------------------------------------------------


def test_rows_beside_the_first_memory(tmp_path):
    options = kv.KvOptions(
        kv.StorageCombination.MEM_SSD,
        {"max_hbm_for_vectors": 1e-5, "far_path": str(tmp_path / "rows"), "init_capacity": 256},
    )
    variable = get_kv_variable(
        "tiers", 8, initializer=tf1.random_normal_initializer(), kv_options=options
    )
    rows = tf.nn.embedding_lookup(variable, tf.range(3000, dtype=tf.int64)).numpy()
    near, far = variable.storage_size_count.numpy()
    assert near + far == 3000 and far > 2000 and variable.has_storage()
    np.testing.assert_array_equal(
        tf.nn.embedding_lookup(variable, tf.range(3000, dtype=tf.int64)), rows
    )
    whole = get_kv_variable("memory", 8)
    assert not whole.has_storage() and whole.kv_options == kv.KvOptions()


def test_capacities_are_rounded_up(monkeypatch):
    monkeypatch.setattr(hkv_options, "_rounded", set())
    config = kv.KvStorageConfig()
    with pytest.warns(UserWarning, match="max_capacity=1000 is rounded up to 1024") as told:
        options = kv.KvOptions(configs={"max_capacity": 1000, kv.StorageType.MEM_STORAGE: config})
    assert [each.filename for each in told] == [__file__]
    assert options.configs == {"max_capacity": 1024, kv.StorageType.MEM_STORAGE: config}
    variable = get_kv_variable("rounded", 2, kv_options=options)
    tf.nn.embedding_lookup(variable, tf.range(3000, dtype=tf.int64))
    assert 500 < len(variable.export()[0]) <= 1024


def test_a_configuration_of_tfplus_is_taken():
    config = kv.KvStorageConfig(storage_path="x", training_storage_size=5)
    assert (config.storage_path, config.training_storage_size) == ("x", 5)
    assert kv.KvStorageConfig().inference_storage_size == -1
    options = kv.KvOptions(
        kv.StorageCombination.MEM,
        {kv.StorageType.MEM_STORAGE: config, "init_capacity": 64},
    )
    variable = get_kv_variable("configured", 2, kv_options=options)
    tf.nn.embedding_lookup(variable, tf.range(100, dtype=tf.int64))
    assert int(variable.total_count) == 100
    assert variable.has_storage(kv.StorageType.MEM_STORAGE) and not variable.has_storage()


def test_options_that_do_not_fit():
    in_memory = kv.StorageType.MEM_STORAGE
    for arguments, error in (
        ({"combination": "mem"}, TypeError),
        ({"configs": {in_memory: {"storage_path": "x"}}}, TypeError),
        (
            {
                "combination": kv.StorageCombination.MEM_SSD,
                "configs": {in_memory: kv.KvStorageConfig()},
            },
            ValueError,
        ),
        ({"configs": [("init_capacity", 5)]}, TypeError),
        ({"configs": {"enter_threshold": 3}}, ValueError),
        ({"configs": {"far_path": "x"}}, ValueError),
    ):
        with pytest.raises(error, match="Received|Leave it out"):
            kv.KvOptions(**arguments)
