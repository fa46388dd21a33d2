"""`Variable` against a Python dict, and what TFRA's recorded answers do not tell of it."""

import gc
import json
import threading
import weakref

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from sok_lite import dynamic_embedding as de
from sok_lite.bridge import table_ops
from sok_lite.dynamic_embedding.partition import default_partition_fn
from tests.support.dict_variable import check_as_a_dict
from tests.support.helpers import run_threads
from tests.support.modes import Eager, Function

tf1 = tf.compat.v1
KEYS = [tf.int64, tf.int32, tf.string]
VALUES = [tf.float32, tf.float16, tf.bfloat16, tf.float64, tf.int32, tf.int64, tf.int8]
CREATORS = [de.CuckooHashTableCreator, de.HkvHashTableCreator]


def variable_of(key_dtype, value_dtype, make, shards):
    return de.Variable(
        key_dtype,
        value_dtype,
        dim=3,
        devices=["/CPU:0"] * shards,
        initializer=-2,
        name="v",
        kv_creator=make(),
    )


@pytest.mark.parametrize("make", CREATORS)
def test_every_method_in_every_mode(here, tables_on, make):
    for shards, dtypes in enumerate([(tf.string, tf.bfloat16), (tf.int32, tf.int8)], 1):
        check_as_a_dict(here, variable_of(*dtypes, make, shards), -2)


@given(
    st.sampled_from(KEYS),
    st.sampled_from(VALUES),
    st.sampled_from(CREATORS),
    st.integers(1, 3),
    st.integers(0, 2**32),
)
def test_any_calls_for_every_dtype(key_dtype, value_dtype, make, shards, seed):
    variable = variable_of(key_dtype, value_dtype, make, shards)
    check_as_a_dict(Eager(), variable, -2, seed, turns=3)


@pytest.mark.parametrize("make", CREATORS)
def test_rows_are_in_the_memory_of_the_device(tables_on, make):
    variable = de.Variable(dim=8, kv_creator=make())
    assert variable.rows.table.backend.name == ("cpu" if tables_on == "cpu" else "cuda")
    keys = np.zeros(5000, np.int64)  # of many at once the last one is written
    variable.upsert(keys, np.repeat(np.arange(5000, dtype=np.float32)[:, None], 8, 1))
    assert variable.lookup([0]).numpy().tolist() == [[4999.0] * 8]
    variable.upsert(np.arange(5000), np.ones((5000, 8)))
    facts = table_ops.statistics(variable.rows)
    assert facts.near_bytes >= 5000 * 32 and facts.far_bytes == 0


def test_lists_and_arrays_become_keys():
    texts = de.Variable(tf.string, dim=1)
    texts.upsert([b"a\0", b"a", b""], [[1.0], [2.0], [3.0]])  # NumPy would cut zero bytes off
    texts.upsert(tf.constant(b"b\0"), [4.0])
    assert texts.lookup([b"a\0", b"a", b"", b"b\0"])[:, 0].numpy().tolist() == [1, 2, 3, 4]
    variable = de.Variable(dim=1)
    variable.upsert(np.array([2**62 + 1, -3], object), np.array([[1.0], [2.0]]))
    variable.upsert(np.array([3], np.int32), [[3.0]])
    assert variable.lookup([-3, 3, 2**62 + 1])[:, 0].numpy().tolist() == [2, 3, 1]


# ---- devices and partitioners --------------------------------------------------------------------


def by_tens(keys, shard_num):
    return 2 - tf.cast(keys // 10, tf.int32)  # the highest first


def test_shards_are_what_the_partitioner_says(here):
    variable = de.Variable(dim=1, devices=["/CPU:0"] * 3, partitioner=by_tens)
    keys = np.array([25, 1, 12, 2, 29, 3], np.int64)
    here.run(variable.upsert, keys, keys[:, None].astype(np.float32))
    assert [here.run(table.size) for table in variable.tables] == [2, 1, 3]
    exported, values = here.run(variable.export)
    assert [key // 10 for key in exported.tolist()] == [2, 2, 1, 0, 0, 0]
    np.testing.assert_array_equal(values[:, 0], exported)
    shard = variable.tables[0]
    assert sorted(here.run(shard.export)[0].tolist()) == [25, 29]
    here.run(shard.insert, [27], [[7.0]])
    here.run(shard.accum, [27], [[1.0]], [True])
    assert here.run(shard.lookup, [27]).tolist() == [[8.0]]
    here.run(shard.remove, [27])
    here.run(shard.clear)
    assert sorted(here.run(variable.export)[0].tolist()) == [1, 2, 3, 12]
    with pytest.raises(IndexError):
        variable.size(3)


def test_the_default_partitioner_is_the_remainder_also_below_0():
    for dtype in (np.int32, np.int64):
        keys = np.array([-7, -1, 0, 5, 11], dtype)
        np.testing.assert_array_equal(default_partition_fn(tf.constant(keys), 3), keys % 3)


@pytest.mark.parametrize("call", ["upsert", "lookup", "remove"])
def test_what_a_partitioner_may_not_give(call):
    def too_large(keys, shard_num):
        return tf.fill(tf.shape(keys), 2)

    def wrong_dtype(keys, shard_num):
        return keys % shard_num

    values = [[[1.0]]] if call == "upsert" else []
    # It is asked for one shard too.
    for devices, partitioner, text in (
        (2, too_large, r"\[0, 2\).*Received: 2"),
        (2, wrong_dtype, "int64"),
        (1, too_large, r"\[0, 1\).*Received: 2"),
    ):
        variable = de.Variable(dim=1, devices=["/CPU:0"] * devices, partitioner=partitioner)
        with pytest.raises(tf.errors.InvalidArgumentError, match=text):
            getattr(variable, call)(tf.constant([1], tf.int64), *values)
        assert int(variable.rows.size()) == 0
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"\[0, 1\)"):
        Function().run(lambda keys: getattr(variable, call)(keys, *values), [1])


# ---- initial values ------------------------------------------------------------------------------


HALVES = np.array([1.5, -2.0], tf.bfloat16.as_numpy_dtype)


def test_what_a_missing_key_gives():
    float_rows = [
        (np.float32(0.25), [0.25, 0.25]),
        (np.array([7.0]), [7, 7]),
        ([1.5, -2.0], [1.5, -2.0]),
        (np.array([[4.0], [5.0]]), [4, 5]),
        (lambda: 2.0, [2, 2]),
        (lambda shape: np.arange(shape[0]) + 1, [1, 2]),
        (tf.keras.initializers.Constant(6.0), [6, 6]),
        (tf.keras.initializers.Ones, [1, 1]),
        (HALVES, [1.5, -2.0]),
    ]
    cases = [(tf.float32, *each) for each in float_rows]
    cases += [
        (tf.bfloat16, HALVES, [1.5, -2.0]),
        (tf.bfloat16, tf.constant(0.25, tf.bfloat16), [0.25, 0.25]),
        # Integers begin with what is before the point.
        (tf.int32, 2.7, [2, 2]),
        (tf.int32, [1.0, -2.5], [1, -2]),
        (tf.int32, -0.5, [0, 0]),
    ]
    for dtype, initializer, expected in cases:
        variable = de.Variable(value_dtype=dtype, dim=2, initializer=initializer)
        rows = tf.cast(variable.lookup([[3], [4]]), tf.float32)
        np.testing.assert_array_equal(rows, [[expected], [expected]], err_msg=repr(initializer))
    with tf.Graph().as_default():
        de.Variable(dim=2, initializer=tf.constant([1.0, 2.0]))


def random_in_a_graph():
    with tf.Graph().as_default():
        de.Variable(dim=2, initializer=tf.random.uniform([2]))


INT32 = {"value_dtype": tf.int32}
IDENTITY = tf.keras.initializers.Identity()
WRONG_INITIALIZERS = [
    ({"initializer": "normal"}, TypeError, "Received: 'normal'"),
    ({"initializer": [1.0, 2.0, 3.0]}, ValueError, "one number, or 2.*3 numbers"),
    ({"initializer": []}, ValueError, "one number, or 2.*0 numbers"),
    ({"initializer": object()}, TypeError, "must be a number"),
    ({"initializer": IDENTITY}, ValueError, "Received: Identity"),
    ({"initializer": np.nan, **INT32}, ValueError, "int32 begin with numbers.*Received"),
    ({"initializer": [1.0, np.inf], **INT32}, ValueError, "int32 begin with numbers.*Received"),
]


def test_initializers_that_there_are_not():
    for options, error, text in WRONG_INITIALIZERS:
        with pytest.raises(error, match=text):
            de.Variable(dim=2, **options)
    with pytest.raises(ValueError, match="known when the variable is made"):
        random_in_a_graph()


# ---- arguments -----------------------------------------------------------------------------------


WRONG = [
    ({"dim": 0}, ValueError, "dim=0"),
    ({"dim": 1.5}, TypeError, "dim=1.5"),
    ({"init_size": -1}, ValueError, "init_size=-1"),
    ({"devices": []}, ValueError, "devices"),
    ({"devices": 16}, TypeError, "`devices` must be a name.*devices=16"),
    # Of Embedding(rows, dim): TensorFlow has 9 for int64 and 7 for string.
    ({"key_dtype": 1000, "value_dtype": 16}, TypeError, "key_dtype=1000. A table has a dim"),
    ({"key_dtype": 9}, TypeError, "`key_dtype` must be a dtype such as .*key_dtype=9"),
    ({"value_dtype": 1}, TypeError, "`value_dtype` must be a dtype such as .*value_dtype=1"),
    ({"key_dtype": tf.float32}, TypeError, "key_dtype=float32"),
    ({"value_dtype": tf.complex64}, TypeError, "value_dtype=complex64"),
    ({"value_dtype": tf.string}, TypeError, "value_dtype=string"),
    ({"kv_creator": 3}, TypeError, "KVCreator"),
    ({"restrict_policy": int}, TypeError, "restrict_policy must be subclass"),
    ({"restrict_policy": 3}, TypeError, "restrict_policy must be subclass"),
]


def test_arguments_that_do_not_fit():
    for arguments, error, text in WRONG:
        with pytest.raises(error, match=text):
            de.Variable(**arguments)


REFUSED_KEYS = [
    (tf.int64, [2**63 + 7, 5], "must fit int64.*9223372036854775815. Make"),
    (tf.int64, [2**64], "must fit int64.*18446744073709551616. No key has more"),
    (tf.int32, [5, 2**40], "must fit int32.*1099511627776. Make the table"),
    (tf.int64, ["a"], "must be int64. Received: texts. Make .* key_dtype=tf.string"),
    (tf.int32, np.array([b"a"]), "must be int32. Received: texts"),
    (tf.int64, tf.constant(["a"]), "must be int64. Received: string. Make"),
    (tf.int64, tf.constant([1]), "must be int64. Received: int32"),
    (tf.int64, [1.5], "must be int64. Received: float"),
    (tf.string, [1, 2], "must be string. Received: int64. .*as_string"),
    (tf.string, ["a", 2], "must be string. Received"),
    (tf.string, np.array(["a", None], object), "must be string. Received: object"),
]


def test_keys_that_do_not_fit():
    for key_dtype, keys, text in REFUSED_KEYS:
        variable = de.Variable(key_dtype, dim=1)
        rows = np.ones((len(keys), 1), np.float32)
        # TypeError by TFRA's documents, ValueError by what it raises.
        for call, values, error in (
            (variable.lookup, [], TypeError),
            (variable.remove, [], ValueError),
            (variable.upsert, [rows], TypeError),
            (variable.accum, [rows, rows, [True] * len(keys)], ValueError),
        ):
            with pytest.raises(error, match=text):
                call(keys, *values)
        assert int(variable.size()) == 0


def test_values_that_do_not_fit():
    variable, good = de.Variable(dim=2), tf.ones([1, 2])
    for error in (TypeError, ValueError):
        for rows in ([good, tf.cast(good, tf.float64)], [tf.cast(good, tf.float64), good]):
            with pytest.raises(error, match="must be float32. Received: float64"):
                variable.accum([1], *rows, [True])
    for error in (tf.errors.InvalidArgumentError, ValueError):
        for values in (np.ones((1, 3)), np.ones((2, 2)), np.ones(2)):
            with pytest.raises(error, match=r"Expected shape \(1, 2\)"):
                variable.upsert([1], values)
    with pytest.raises(ValueError, match="`exists` must have one bool for each of 1 keys"):
        variable.accum([1], good, good, [True, False])

    @tf.function(input_signature=[tf.TensorSpec(None, t) for t in (tf.int64, *[tf.float32] * 2)])
    def accum(keys, old, new):
        variable.accum(keys, old, new, [False, False])

    with pytest.raises((ValueError, tf.errors.OpError), match="must have one shape"):
        accum([1, 2], [[1.0, 1.0]], [[1.0, 1.0], [2.0, 2.0]])
    assert int(variable.size()) == 0


def test_what_a_variable_says_of_itself():
    variable = de.Variable(dim=5, devices="/CPU:0", name="facts", init_size=100)
    assert variable.devices == ["/CPU:0"] and variable.trainable_store == {}
    assert isinstance(variable.kv_creator, de.CuckooHashTableCreator)
    assert isinstance(variable.tables[0], de.CuckooHashTable)
    assert "facts" in repr(variable) and "dim=5" in repr(variable)
    assert de.Variable(devices=["a", "b"], init_size=101).init_size == 101


def test_the_initial_size(monkeypatch):
    monkeypatch.delenv("TF_HASHTABLE_INIT_SIZE", raising=False)
    usual = de.Variable().rows.table.capacity
    monkeypatch.setenv("TF_HASHTABLE_INIT_SIZE", "200000")
    assert de.Variable().rows.table.capacity >= 200_000 > usual >= 8192
    assert de.Variable(init_size=5000).rows.table.capacity < 200_000


# ---- by name -------------------------------------------------------------------------------------


PS = ["/job:ps/replica:0/task:0/CPU:0", "/job:ps/replica:0/task:1/CPU:0"]


def cluster(**jobs):
    named = {name: [f"machine{i}:1" for i in range(count)] for name, count in jobs.items()}
    return json.dumps({"cluster": named, "task": {"type": "worker", "index": 0}})


def test_workers_share_no_table_on_parameter_servers(monkeypatch):
    """Each would train one of its own, and nobody would be told."""
    for config in ("", "{}", "no JSON", cluster(ps=2, worker=1), '{"cluster": 3}'):
        monkeypatch.setenv("TF_CONFIG", config)
        assert de.Variable(dim=2, name="users", devices=PS).devices == PS
    for jobs in ({"ps": 2, "worker": 2}, {"ps": 1, "chief": 1, "worker": 1}):
        monkeypatch.setenv("TF_CONFIG", cluster(**jobs))
        with pytest.raises(NotImplementedError, match=r"'users'.*/job:ps.*2 workers.*horovodrun"):
            de.Variable(dim=2, name="users", devices=PS)
        local = ["/CPU:0", "/job:localhost/CPU:0"]
        assert de.Variable(dim=2, name="users", devices=local).shard_num == 2


def test_get_variable_gives_the_same_one_again():
    first = de.get_variable("again", dim=3)
    assert de.get_variable("again", dim=3) is first
    for other in (
        {"dim": 4},
        {"key_dtype": tf.int32},
        {"value_dtype": tf.float64},
        {"devices": ["a", "b"]},
    ):
        with pytest.raises(ValueError, match="exists with"):
            de.get_variable("again", **{"dim": 3, **other})
    first.upsert([1], [[1.0, 2.0, 3.0]])
    del first
    gc.collect()
    assert de.get_variable("again", dim=3).lookup([1]).numpy().tolist() == [[1.0, 2.0, 3.0]]


@pytest.mark.parametrize("package", ["keras", "tf_keras", None])
def test_a_new_session_knows_no_names_and_what_is_held_keeps_its_rows(package):
    """As in TFRA, which keeps variables by name with the default graph."""
    keras = package and pytest.importorskip(package)
    clear = keras.backend.clear_session if keras else tf1.reset_default_graph
    first = de.get_variable("of a session", dim=3)
    first.upsert([1], [[1.0, 2.0, 3.0]])
    clear()
    second = de.get_variable("of a session", dim=2)  # nothing compares it with the old one
    assert second is not first and int(second.size()) == 0
    assert first.lookup([1]).numpy().tolist() == [[1.0, 2.0, 3.0]]
    assert de.get_variable("of a session", dim=2) is second
    table = weakref.ref(second.rows.table)
    del second
    clear()
    de.get_variable("another")
    gc.collect()
    assert table() is None


def test_a_graph_that_is_entered_and_a_function_are_of_the_same_session():
    found = [de.get_variable("around", dim=2)]
    with tf.Graph().as_default():
        assert de.get_variable("around", dim=2) is not found[0]  # the graph's own
    tf.function(lambda: found.append(de.get_variable("around", dim=2)))()
    found.append(de.get_variable("around", dim=2))
    assert {id(variable) for variable in found} == {id(found[0])}


def test_a_thread_that_clears_its_session_leaves_the_names_of_others():
    mine, found = de.get_variable("of threads", dim=2), []

    def ask():
        found.append(de.get_variable("of threads", dim=2))
        tf1.reset_default_graph()
        found.append(de.get_variable("of threads", dim=2))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert found[0] is mine and found[1] is not mine
    assert de.get_variable("of threads", dim=2) is mine
    tf1.reset_default_graph()
    assert de.get_variable("of threads", dim=2) not in (mine, found[1])


def test_one_variable_of_a_name_whoever_asks_first():
    start, found = threading.Barrier(4), []

    def ask(number):
        start.wait()
        variable = de.get_variable("asked at once", dim=2)
        found.append((variable, variable.get_trainable_by_name("t")))

    run_threads(ask)
    assert len({id(variable) for variable, _ in found}) == 1
    assert len({id(trainable) for _, trainable in found}) == 1


def test_get_variable_in_a_graph_follows_scopes():
    with tf.Graph().as_default():
        with tf1.variable_scope("outer"):
            first = de.get_variable("a", dim=2)
            short = de.get_variable("b", dim=2, short_file_name=True)
        assert (first.name, short.name) == ("outer/a", "b")
        with (
            tf1.variable_scope("outer"),
            pytest.raises(ValueError, match="already exists, disallowed.*AUTO_REUSE"),
        ):
            de.get_variable("a", dim=2)
        with tf1.variable_scope("outer", reuse=True):  # as in TFRA, a new one too
            new = de.get_variable("c", dim=2)
            assert new.name == "outer/c" and de.get_variable("c", dim=2) is new
        collections = de.GraphKeys
        assert tf1.get_collection(collections.DYNAMIC_EMBEDDING_VARIABLES) == [first, short, new]
    with tf.Graph().as_default():
        assert de.get_variable("a") is not first


def test_a_finalized_graph_of_tf1_tells_the_size():
    with tf.Graph().as_default() as graph, tf1.Session() as session:
        variable = de.get_variable("sized", dim=2)
        upsert = variable.upsert(tf.constant([1, 2, 3], tf.int64), tf.ones([3, 2]))
        with tf.control_dependencies([upsert]):
            after = variable.size()
        assert variable.size() is variable.size() and after is not variable.size()
        graph.finalize()
        assert session.run(variable.size()) == 0
        assert session.run(after) == session.run(variable.size()) == 3


def test_trainables_of_a_graph_have_the_names_of_tfra():
    with tf.Graph().as_default():
        variable = de.get_variable("v", dim=2)
        ids = tf.constant([1], tf.int64)
        matrix = tf.RaggedTensor.from_row_lengths(ids, [1])
        with tf1.variable_scope("test"), tf1.variable_scope("q"):
            _, one = de.embedding_lookup(variable, ids, name="emb", return_trainable=True)
            _, again = de.embedding_lookup(variable, ids, name="emb", return_trainable=True)
        _, pooled = de.embedding_lookup_sparse(
            variable, matrix, None, name="s", return_trainable=True
        )
    assert [each.name for each in (one, again, pooled)] == [
        "test/q/emb/emb:0",
        "test/q/emb/emb_1:0",
        "s/embedding_lookup/s/embedding_lookup:0",
    ]


def test_ragged_and_sparse_keys_are_told_where_to_go():
    variable, ids = de.get_variable("v", dim=2), tf.constant([1, 2], tf.int64)
    ragged = tf.RaggedTensor.from_row_lengths(ids, [2])
    for keys, values in ((ragged, "flat_values"), (ragged.to_sparse(), "values")):
        with pytest.raises(TypeError, match=f"Give its `{values}`, or use de.embedding_lookup_sp"):
            de.embedding_lookup(variable, keys, name="t")


# ---- in place of a dense variable ----------------------------------------------------------------

NOT_A_TENSOR = [
    lambda variable: softmax_loss(variable, tf.ones([2, 3])),
    lambda variable: tf.nn.embedding_lookup(variable, [1]),
    lambda variable: tf.matmul(tf.ones([2, 3]), variable, transpose_b=True),
    tf.convert_to_tensor,
]


def softmax_loss(weights, inputs):
    """The loss of labels 1 and 7 among ten, with 2 and 5 for the others, and dense biases."""
    sampled = (tf.constant([2, 5], tf.int64), tf.fill([2, 1], 0.25), tf.fill([2], 0.5))
    labels = tf.constant([[1], [7]], tf.int64)
    biases = tf.linspace(0.0, 1.0, 10)
    return tf.nn.sampled_softmax_loss(weights, biases, labels, inputs, 2, 10, 1, sampled)


@pytest.mark.parametrize("mode", [lambda call: call, tf.function], ids=["eager", "tf.function"])
def test_a_use_as_a_tensor_says_what_to_call(mode):
    variable, text = de.Variable(dim=3), r"de.Variable.*de.embedding_lookup\(.*get_trainable_by_n"
    for use in NOT_A_TENSOR:
        with pytest.raises(TypeError, match=text):
            mode(lambda use=use: use(variable))()


@pytest.mark.parametrize("is_traced", [False, True])
def test_a_sampled_softmax_reads_a_trainable_as_dense_weights(is_traced):
    rng = np.random.default_rng(0)
    rows, inputs = (tf.constant(rng.normal(size=(n, 3)), tf.float32) for n in (10, 2))
    variable, dense = de.Variable(dim=3, name="softmax"), tf.Variable(rows)
    variable.upsert(np.arange(10), rows)

    def gradient(weights):
        with tf.GradientTape() as tape:
            loss = softmax_loss(weights, inputs)
        return loss, tf.convert_to_tensor(tape.gradient(loss, weights).values)

    def ours():
        return gradient(variable.get_trainable_by_name("softmax"))

    loss, values = tf.function(ours)() if is_traced else ours()
    expected, of_dense = gradient(dense)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    np.testing.assert_allclose(values, of_dense, rtol=1e-6)
