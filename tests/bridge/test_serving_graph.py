"""Parts of TF1 graphs, exported, give in a process without sok_lite what the session gives."""

import re

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite.bridge.serving import files
from sok_lite.bridge.serving.graph import Nodes
from tests.support.fresh_process import FreshProcess

v1 = tf.compat.v1

pytestmark = pytest.mark.usefixtures("initialised")

RNG = np.random.default_rng(0)
LOADERS = ["tf2", "tf1"]
KEYS = np.array([5, 1, -3, np.iinfo(np.int64).max, 0, np.iinfo(np.int64).min])
IDS = np.append(KEYS, [77, 5])


@pytest.fixture(scope="module")
def fresh():
    with FreshProcess() as process:
        yield process


@pytest.fixture
def session():
    with tf.Graph().as_default(), v1.Session() as session:
        yield session


def rows_like(keys, dim):
    return RNG.normal(size=(len(keys), dim)).astype(np.float32)


def filled(session, keys=KEYS, dim=3, **arguments):
    table = sok.DynamicVariable(dim, **({"initializer": "0.5"} | arguments))
    session.run(sok.assign(table, keys, rows_like(keys, dim)))
    return table


def exported(session, path, inputs, outputs, **options):
    sok.export_serving_graph(session, path, inputs, outputs, **options)
    return path


def variables_in(path):
    return tf.train.list_variables(str(path / "variables" / "variables"))


def check(fresh, session, path, feed, outputs):
    """The outputs of both loaders are those of the session; feed: by name (placeholder, array)."""
    with sok.inference_mode():
        expected = session.run(outputs, dict(feed.values()))
    for loader in LOADERS:
        arrays = {name: array for name, (_, array) in feed.items()}
        served = fresh.run(path, arrays, loader)
        assert set(served) == set(expected)
        for name, array in expected.items():
            np.testing.assert_allclose(served[name], array, rtol=1e-6, err_msg=name)


def test_lookups_that_depend_on_each_other_between_dense_layers(fresh, session, tmp_path):
    table = filled(session, name="user")
    item = filled(session, np.arange(40), 2, key_type=tf.int32, name="item")
    ids = v1.placeholder(tf.int64, [None], "ids")
    bag = v1.sparse_placeholder(tf.int32, [None, None], "bag")
    dense = v1.get_variable("dense", [3, 2], use_resource=True)
    old = v1.get_variable("old", [2], use_resource=False)
    first = tf.nn.embedding_lookup(table, ids)
    second = tf.cast(tf.abs(first[:, 0] * 10), tf.int32)
    pooled = sok.lookup_sparse(item, bag, combiners="sum")
    static = sok.Variable(rows_like(range(10), 4), name="static")
    ragged = tf.RaggedTensor.from_tensor(tf.reshape(tf.abs(ids) % 10, [-1, 2]))
    with tf.control_dependencies([first, first.op, first.op.inputs[0]]):
        waiting = tf.reduce_sum(tf.cast(ids, tf.float64))
    two = sok.lookup_sparse([static, item], [ragged, tf.cast(ragged, tf.int32)])
    outputs = {
        "static": two[0],
        "two": two[1],
        "summed": sok.lookup_sparse(static, ragged, combiners="sum"),
        "own": tf.gather(static, tf.abs(ids) % 10),
        "waiting": waiting,
        "hidden": first @ dense + old,
        "second": tf.nn.embedding_lookup(item, second),
        "pooled": pooled * tf.reduce_sum(old),
    }
    # What trains the model is left out.
    descent = sok.OptimizerWrapper(v1.train.GradientDescentOptimizer(0.1))
    descent.minimize(tf.reduce_sum(outputs["hidden"] ** 2), [table, dense])
    session.run(v1.global_variables_initializer())
    path = exported(session, tmp_path / "m", {"ids": ids, "bag": bag}, outputs)
    feed = {
        "ids": (ids, IDS),
        "bag_indices": (bag.indices, np.array([[0, 0], [0, 3], [2, 1]])),
        "bag_values": (bag.values, np.array([1, 39, 77], np.int32)),
        "bag_dense_shape": (bag.dense_shape, np.array([3, 4])),
    }
    check(fresh, session, path, feed, outputs)


def test_an_input_may_be_any_tensor(fresh, session, tmp_path):
    table = filled(session)
    batch = v1.data.make_one_shot_iterator(tf.data.Dataset.from_tensors(IDS)).get_next()
    rows = tf.nn.embedding_lookup(table, batch)
    outputs = {"total": tf.reduce_sum(rows, axis=1)}
    other = tf.nn.embedding_lookup(filled(session, dim=2), batch)
    path = exported(session, tmp_path / "keys", {"ids": batch}, outputs)
    check(fresh, session, path, {"ids": (batch, IDS)}, outputs)
    # Only tables that an output needs are written.
    shapes = [*dict(variables_in(path)).values()]
    assert [len(KEYS) + 2, 3] in shapes and [len(KEYS) + 2, other.shape[1]] not in shapes
    # What a lookup gives as well: the table is not needed then.
    path = exported(session, tmp_path / "rows", {"rows": rows}, outputs)
    check(fresh, session, path, {"rows": (rows, rows_like(IDS, 3))}, outputs)
    assert not any((path / "variables").glob("*"))


def test_branches_and_tables_of_words(fresh, session, tmp_path):
    table = filled(session)
    words = v1.placeholder(tf.string, [None], "words")
    flag = v1.placeholder(tf.bool, [], "flag")
    names = tf.lookup.KeyValueTensorInitializer(["a", "b"], tf.constant([5, 1], tf.int64))
    numbers = tf.lookup.StaticHashTable(names, 0).lookup(words)
    rows = tf.nn.embedding_lookup(table, numbers)
    outputs = {"rows": tf.cond(flag, lambda: rows, lambda: 2 * rows)}
    session.run(v1.tables_initializer())
    path = exported(session, tmp_path / "m", {"words": words, "flag": flag}, outputs)
    for is_set in (True, False):
        feed = {"words": (words, np.array([b"b", b"c"], object)), "flag": (flag, is_set)}
        check(fresh, session, path, feed, outputs)


def test_names_of_the_graph_are_its_own(fresh, session, tmp_path):
    """The export makes zeros, variables and placeholders of its own."""
    table = filled(session)
    keys = v1.placeholder(tf.int64, [None]) * 1
    rows = tf.nn.embedding_lookup(table, keys)
    pad = tf.zeros([1, 3])
    assert pad.op.name == "zeros"
    outputs = {"padded": tf.concat([rows, pad], 0)}
    for scope, name in [
        ("", "zeros_1"),
        ("SOK_serving/", "sok_table_0_keys"),
        ("sok_serving_1/input/", "mul"),
        ("sok_serving_input/", "mul"),
    ]:
        with tf.name_scope(scope):
            outputs[name + scope] = tf.constant([float(len(outputs))], name=name)
    outputs = {re.sub(r"\W", "_", name): value for name, value in outputs.items()}
    first = v1.get_variable("first", [3], initializer=v1.constant_initializer(2.0))
    later = v1.get_variable("zeros_2", [3], initializer=v1.constant_initializer(9.0))
    old = v1.get_variable("zeros_3", [3], use_resource=False)
    outputs["rows"] = rows * first + later + old
    session.run(v1.global_variables_initializer())
    path = exported(session, tmp_path / "m", {"keys": keys}, outputs)
    assert {"first", "zeros_2", "zeros_3"} <= dict(variables_in(path)).keys()
    check(fresh, session, path, {"keys": (keys, IDS)}, outputs)


def test_no_node_takes_the_place_of_another(session):
    tf.constant(1, name="one")
    nodes = Nodes(session.graph.as_graph_def())
    with tf.Graph().as_default() as other:
        tf.constant(1, name="two")
        nodes.add(other.as_graph_def())
        tf.constant(1, name="three")
        nodes.add(other.as_graph_def())
        tf.constant(2, name="one")
        with pytest.raises(ValueError, match=r"Received: \['one'\]"):
            nodes.add(other.as_graph_def())


def test_quantized_and_without_rows_of_zeros(fresh, session, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "PIECE_BYTES", 10)  # a row a piece
    table = filled(session, np.arange(100), initializer="0")
    session.run(sok.assign(table, np.arange(50), np.zeros((50, 3), np.float32)))
    ids = v1.placeholder(tf.int64, [None])
    rows = tf.nn.embedding_lookup(table, ids)
    options = {"quantize": "int8", "cutoff": 1e-20}
    path = exported(session, tmp_path / "m", {"ids": ids}, {"rows": rows}, **options)
    assert [52, 3] in dict(variables_in(path)).values()
    expected = session.run(rows, {ids: np.arange(100)})
    served = fresh.run(path, {"ids": np.arange(100)}, "tf1")["rows"]
    largest = np.abs(expected).max(axis=1, keepdims=True)
    assert (np.abs(served - expected) <= largest * (1 / 254 + 2.0**-23)).all()


def test_the_graph_stays_as_it_is(session, tmp_path):
    table = filled(session)
    ids = v1.placeholder(tf.int64, [None])
    rows = tf.nn.embedding_lookup(table, ids)
    before = session.graph.as_graph_def().SerializeToString(deterministic=True)
    session.graph.finalize()
    exported(session, tmp_path / "m", {"ids": ids}, {"rows": rows})
    assert session.graph.as_graph_def().SerializeToString(deterministic=True) == before
    with pytest.raises(FileExistsError, match="is not empty"):
        exported(session, tmp_path / "m", {"ids": ids}, {"rows": rows})


def in_a_loop(table, ids):
    def body(i, total):
        return i + 1, total + tf.reduce_sum(tf.nn.embedding_lookup(table, ids[i]))

    return tf.while_loop(lambda i, _: i < tf.size(ids), body, [0, 0.0])[1]


def in_a_function(table, ids):
    return tf.function(lambda keys: tf.nn.embedding_lookup(table, keys))(ids)


@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize("build", [in_a_loop, in_a_function])
def test_lookups_elsewhere_than_in_the_graph_are_refused(session, build, version, tmp_path):
    switch = v1.enable_control_flow_v2 if version == "v2" else v1.disable_control_flow_v2
    was = v1.control_flow_v2_enabled()
    switch()
    try:
        table = filled(session, name="table")
        ids = v1.placeholder(tf.int64, [None])
        outputs = {"total": build(table, ids)}
    finally:
        (v1.enable_control_flow_v2 if was else v1.disable_control_flow_v2)()
    with pytest.raises(NotImplementedError, match=r"within a loop|calls a function of Python"):
        exported(session, tmp_path / "m", {"ids": ids}, outputs)
    assert not (tmp_path / "m").exists()


def test_what_cannot_be_exported_is_refused(session, tmp_path):
    table = filled(session, name="table")
    ids = v1.placeholder(tf.int64, [None], "ids")
    rows = tf.nn.embedding_lookup(table, ids)
    path = tmp_path / "m"
    with pytest.raises(ValueError, match=r"needs the placeholders \['ids:0'\]"):
        exported(session, path, {"other": v1.placeholder(tf.int64, [])}, {"rows": rows})
    with pytest.raises(NotImplementedError, match="calls a function of Python"):
        exported(session, path, {"ids": ids}, {"is_held": table.contains(ids)})
    with pytest.raises(TypeError, match="`outputs` must be a dict of tensors"):
        exported(session, path, {"ids": ids}, rows)
    with tf.Graph().as_default(), pytest.raises(TypeError, match="of the session's graph"):
        exported(session, path, {"ids": ids}, {"rows": tf.zeros([])})
    ragged = tf.RaggedTensor.from_tensor(ids[:, None])
    with pytest.raises(ValueError, match="are named 'a_values'"):
        exported(session, path, {"ids": ids}, {"a": ragged, "a_values": rows})
    training = table.sparse_read(ids, training=True)
    with pytest.raises(NotImplementedError, match="training=True"):
        exported(session, path, {"ids": ids}, {"rows": training})
    gradient = tf.IndexedSlices(tf.ones([tf.size(ids), table.dimension]), ids)
    with tf.control_dependencies([sok.SGD(1.0).apply_gradients([(gradient, table)])]):
        trained = tf.identity(ids)
    with pytest.raises(NotImplementedError, match="update.* calls a function of Python"):
        exported(session, path, {"ids": ids}, {"ids": trained})
    assert not path.exists()
