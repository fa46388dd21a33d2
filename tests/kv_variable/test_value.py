"""What a variable is to TensorFlow: its value, its initializer, assignments, facts."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.ops.variables import PartitionedVariable

from sok_lite import kv_variable as kv
from sok_lite.kv_variable import get_kv_variable

tf1 = tf.compat.v1
KEYS = np.array([5, -7, 0, 12])
ROWS = np.arange(12, dtype=np.float32).reshape(4, 3) + 1


@pytest.fixture
def filled(here, made):
    def make(name="kv", **arguments):
        variable = made(name, **arguments)
        here.run(lambda keys, rows: kv.insert_kv_embedding(variable, keys, rows), KEYS, ROWS)
        return variable

    return make


def test_the_value_is_all_rows_in_the_order_of_their_keys(here, filled):
    """An export too: test_admission.py has both of any keys."""
    variable = filled()
    wanted = ROWS[np.argsort(KEYS)]
    for read in (variable.value, variable.read_value, lambda: tf.convert_to_tensor(variable)):
        np.testing.assert_array_equal(here.run(read), wanted)
    np.testing.assert_array_equal(here.run(lambda: variable + 1.0), wanted + 1)
    if isinstance(variable, kv.PartitionedKvVariable):
        np.testing.assert_array_equal(here.run(variable.as_tensor), wanted)
        by_key = sorted(zip(KEYS.tolist(), ROWS.tolist(), strict=True))
        for number, part in enumerate(variable):
            own = [row for key, row in by_key if key % len(variable) == number]
            assert here.run(part.value).tolist() == own


def test_numpy_has_the_value_of_eager_mode(made):
    variable = made()
    kv.insert_kv_embedding(variable, KEYS, ROWS)
    assert variable.is_initialized() and tf1.is_variable_initialized(variable)
    assert variable.initializer is None
    for rows in (variable.numpy(), np.asarray(variable)):
        np.testing.assert_array_equal(rows, ROWS[np.argsort(KEYS)])


def test_a_session_runs_a_variable(made):
    with tf.Graph().as_default(), tf1.Session() as session:
        variable = made()
        session.run(tf1.global_variables_initializer())
        session.run(kv.insert_kv_embedding(variable, KEYS, ROWS))
        np.testing.assert_array_equal(session.run(variable), ROWS[np.argsort(KEYS)])
        np.testing.assert_array_equal(variable.eval(session), ROWS[np.argsort(KEYS)])
        with pytest.raises(NotImplementedError, match="needs eager mode"):
            variable.numpy()
        fetched = session.run({"a": variable, "b": [variable]})
        assert fetched["a"].shape == fetched["b"][0].shape == (4, 3)


# ---- gradient ------------------------------------------------------------------------------------


def test_a_regularizer_has_a_gradient(made):
    with tf.Graph().as_default(), tf1.Session() as session:
        variable = made(regularizer=lambda v: 0.5 * tf.reduce_sum(v * v))
        (loss,) = tf1.losses.get_regularization_losses()
        train = tf1.train.GradientDescentOptimizer(0.1).minimize(loss)
        session.run(tf1.global_variables_initializer())
        session.run(kv.insert_kv_embedding(variable, KEYS, ROWS))
        assert session.run(loss) == np.float32(0.5 * (ROWS**2).sum())
        for _ in range(2):
            session.run(train)
        _, rows = session.run(variable.export())
    np.testing.assert_allclose(rows, ROWS[np.argsort(KEYS)] * 0.81, rtol=1e-6)


def test_a_value_and_a_lookup_in_one_loss(here, filled):
    variable = filled()
    sources = list(variable) if isinstance(variable, kv.PartitionedKvVariable) else [variable]

    def run(keys):
        def loss():
            return 2.0 * tf.reduce_sum(variable.value()) + tf.reduce_sum(
                tf.nn.embedding_lookup(variable, keys)
            )

        if here.is_graph:
            gradients = tf.gradients(loss(), sources)
        else:
            with tf.GradientTape() as tape:
                total = loss()
            gradients = tape.gradient(total, sources)
        return [(each.indices, each.values) for each in gradients]

    sums = {}
    for keys, values in here.run(run, [5, 12]):
        for key, value in zip(keys.tolist(), values, strict=True):
            sums[key] = sums.get(key, 0) + value[0]
    assert sums == {-7: 2.0, 0: 2.0, 5: 3.0, 12: 3.0}


# ---- assignment ----------------------------------------------------------------------------------


def test_a_variable_takes_what_another_one_holds(here, filled, made):
    variable, other = filled(), made("other", key_dtype=tf.int32)
    zeros = np.zeros((2, 3), np.float32)
    here.run(lambda k, r: kv.insert_kv_embedding(other, k, r), [5, 99], zeros)
    here.run(lambda: other.assign(variable))
    keys, rows = here.run(other.export)
    assert keys.tolist() == sorted(KEYS) and keys.dtype == np.int32
    np.testing.assert_array_equal(rows, ROWS[np.argsort(KEYS)])
    here.run(lambda: variable.assign(variable))
    assert here.run(variable.export)[0].tolist() == sorted(KEYS)


def test_a_partition_takes_its_own_keys_alone():
    split = get_kv_variable("split", 1, initializer=0.0, partitioner=tf1.fixed_size_partitioner(2))
    other = get_kv_variable("other", 1)
    kv.insert_kv_embedding(split, [2, 4, 5], [[1.0]] * 3)
    kv.insert_kv_embedding(other, [4, 5, 6], [[2.0]] * 3)
    next(iter(split)).assign(other)
    keys, rows = split.export()
    assert keys.numpy().tolist() == [4, 5, 6]
    assert rows.numpy().ravel().tolist() == [2.0, 1.0, 2.0]


def test_what_cannot_be_assigned():
    variable, other = get_kv_variable("kv", 2), get_kv_variable("other", 3)
    kv.insert_kv_embedding(variable, [1], [[1.0, 1.0]])
    with pytest.raises(TypeError, match="takes another KvVariable"):
        variable.assign(tf.ones([1, 2]))
    with pytest.raises(ValueError, match="rows of 2.*rows of 3"):
        variable.assign(other)
    assert variable.export()[0].numpy().tolist() == [1]


def test_horovod_cannot_broadcast_one_and_nothing_is_loaded(made):
    hvd = pytest.importorskip("horovod.tensorflow")
    hvd.init()
    alone, no_load = "hvd.broadcast.* leave it out: each", r"load\(\) is not .* insert_kv_embedding"
    with tf.Graph().as_default(), tf1.Session() as session:
        variable = made()
        session.run(tf1.global_variables_initializer())
        with pytest.raises(TypeError, match=alone):
            hvd.broadcast_global_variables(0)
        with pytest.raises(NotImplementedError, match=no_load):
            variable.load(ROWS, session)
    with pytest.raises(TypeError, match=alone):
        hvd.broadcast_variables([made()], 0)
    with pytest.raises(NotImplementedError, match=no_load):
        made().load(ROWS)


# ---- initialization ------------------------------------------------------------------------------


def test_an_initializer_empties(made, parts):
    with tf.Graph().as_default(), tf1.Session() as session:
        variable, other = made(), made("other")
        exported = variable.export(), other.export()
        session.run(tf1.global_variables_initializer())
        for each in (variable, other):
            session.run(kv.insert_kv_embedding(each, KEYS, ROWS))
        session.run(variable.initializer)
        (keys, _), (others, _) = session.run(exported)
        assert (len(keys), len(others)) == (0, 4)
        if parts == 3:
            session.run(list(other)[2].initializer)
            assert session.run(exported)[1][0].tolist() == [0, 12]
        session.run(tf1.variables_initializer(tf1.global_variables()))
        assert len(session.run(exported)[1][0]) == 0


def test_a_session_must_initialize(made, parts):
    with tf.Graph().as_default():
        variable = made()
        names = [b"kv"] if parts is None else [b"kv/part_%d" % n for n in range(parts)]
        missing = tf1.report_uninitialized_variables()
        asked = [variable.is_initialized(), tf1.is_variable_initialized(variable)]
        rows = tf.nn.embedding_lookup(variable, [1])
        for _ in range(2):  # what one session has done is not known to the next
            with tf1.Session() as session:
                assert session.run(missing).tolist() == names
                assert session.run(asked) == [False, False]
                with pytest.raises(tf.errors.FailedPreconditionError):
                    session.run(rows)
                session.run(tf1.global_variables_initializer())
                assert session.run(missing).size == 0 and session.run(asked) == [True, True]
                assert session.run(rows).shape == (1, 3)
        if parts == 3:
            with tf1.Session() as session:
                session.run(next(iter(variable)).initializer)
                assert session.run(asked) == [False, False]
                assert session.run(missing).tolist() == names[1:]


# ---- facts ---------------------------------------------------------------------------------------


def test_what_a_variable_says_of_itself(made, parts):
    variable = made("facts", 4, key_dtype=tf.int32, value_dtype=tf.float16, enter_threshold=2)
    assert variable.shape.as_list() == variable.get_shape().as_list() == [None, 4]
    assert (variable.embedding_dim, variable.key_dtype, variable.dtype) == (4, tf.int32, tf.float16)
    assert (variable.enter_threshold, variable.trainable) == (2, True)
    assert variable.has_storage() is False and variable.kv_options == kv.KvOptions()
    assert "facts" in repr(variable) and "KvVariable" in repr(variable)
    if parts is None:
        assert isinstance(variable, kv.KvVariable) and variable.whole is variable
        assert not isinstance(variable, kv.PartitionedKvVariable)
        return
    assert isinstance(variable, kv.PartitionedKvVariable) and len(variable) == parts
    assert isinstance(variable, PartitionedVariable)
    assert [part.whole for part in variable] == [variable] * parts
    assert all(isinstance(part, kv.KvVariable) for part in variable)
