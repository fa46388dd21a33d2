"""Static tables over real ranks, beside growing ones: spread, on one rank, mixed in one lookup."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite.bridge import job, static_lookup
from sok_lite.comm import CommunicatorError, SingleCommunicator
from sok_lite.comm.local import LocalCommunicator, MultiHostCommunicator, connect_local
from sok_lite.engine.exchange import AllToAllPlan
from tests.ranks.test_localized import share, to_ragged
from tests.support.step_oracle import random_ragged

NUM_ROWS, DIM = 37, 4


IN_TURN = "comm"


@pytest.fixture(autouse=True)
def over(comm, monkeypatch):
    """Every test runs over each transport, as if `sok.init` had chosen it."""
    monkeypatch.setattr(job, "_communicator", comm)


def rows_of(seed, dim=DIM, num_rows=NUM_ROWS):
    return np.random.default_rng(seed).normal(size=(num_rows, dim)).astype(np.float32)


def new_params(size):
    """Static and growing variables of all modes, that hold the same rows in any job."""
    last = f"localized:{size - 1}"
    params = [
        sok.Variable(rows_of(0), name="spread"),
        sok.DynamicVariable(3, "uniform", name="growing"),
        sok.Variable(rows_of(1, 5), mode="localized:0", name="on_the_first"),
        sok.Variable(rows_of(2, 2), mode=last, name="on_the_last"),
        sok.DynamicVariable(2, "uniform", name="growing_on_the_last", mode=last),
        sok.Variable(rows_of(3, 3, 1), name="fewer_rows_than_ranks"),
    ]
    return [*params, params[0]]


def whole(comm, variable):
    """What all ranks have of a variable: (keys, rows)."""
    if isinstance(variable, sok.DynamicVariable):
        keys, rows = (each.numpy() for each in sok.export(variable))
    else:
        keys = np.arange(variable.global_shape[0])
        if variable.target_gpu < 0:
            keys = keys[comm.rank :: comm.size]
        elif variable.target_gpu != comm.rank:
            keys = keys[:0]
        assert np.array_equal(variable.key_map(keys), np.arange(len(keys)))
        rows = variable.numpy()
        assert rows.shape == (len(keys), variable.global_shape[1])
    keys, rows = (comm.allgatherv(np.ascontiguousarray(each)).rows for each in (keys, rows))
    order = np.argsort(keys)
    return keys[order], rows[order]


def train(comm, size, make, wrapped, steps=6):
    """Trains on the rank's part of equal global batches."""
    params = new_params(size)
    tables = params[:-1]
    static = [each for each in tables if not isinstance(each, sok.DynamicVariable)]
    growing = [each for each in tables if isinstance(each, sok.DynamicVariable)]
    ours, theirs = sok.OptimizerWrapper(make()), make()
    combiners = ["sum", "mean", "sqrtn", "sum", "mean", "sum", "mean"]
    limits = [NUM_ROWS, 50, NUM_ROWS, NUM_ROWS, 50, 1, NUM_ROWS]

    def batch(step):
        rng = np.random.default_rng([7, step])
        mine = share(size, comm.rank if size > 1 else 0, step)
        ragged = [random_ragged(rng, 24, 4, 0, limit)[mine] for limit in limits]
        factors = [
            to_ragged([[1.0 + key % 3 for key in row] for row in each], np.float32)
            for each in ragged[:3]
        ]
        return [to_ragged(each) for each in ragged], [*factors, *[None] * 4]

    @tf.function(reduce_retracing=True)
    def step(ids, weights):
        with tf.GradientTape() as tape:
            outs = sok.lookup_sparse(params, ids, weights, combiners)
            loss = tf.add_n([tf.reduce_sum(tf.sin(out)) for out in outs])
        grads = tape.gradient(loss, [static, growing])
        if wrapped:
            pairs = zip([*grads[0], *grads[1]], [*static, *growing], strict=True)
            ours.apply_gradients(list(pairs))
        else:
            theirs.apply_gradients(list(zip(grads[0], static, strict=True)))
            ours.apply_gradients(list(zip(grads[1], growing, strict=True)))

    for number in range(steps):
        step(*batch(number))
    return tables


@pytest.mark.parametrize(
    ("make", "wrapped"),
    [(lambda: keras.optimizers.SGD(0.05), True), (lambda: keras.optimizers.Adagrad(0.1), False)],
    ids=["wrapped SGD", "Adagrad"],
)
def test_static_tables_train_as_on_one_rank(comm, make, wrapped, monkeypatch):
    tables = train(comm, comm.size, make, wrapped)
    entries = [whole(comm, table) for table in tables]
    alone = SingleCommunicator()
    monkeypatch.setattr(job, "_communicator", alone)
    expected = [whole(alone, table) for table in train(comm, 1, make, wrapped)]
    for (keys, rows), (expected_keys, expected_rows), table in zip(
        entries, expected, tables, strict=True
    ):
        np.testing.assert_array_equal(keys, expected_keys)
        np.testing.assert_allclose(rows, expected_rows, rtol=1e-5, atol=1e-6, err_msg=table.name)


@pytest.mark.parametrize(
    ("mode", "dtype"), [(None, "float32"), ("localized:0", "bfloat16"), ("last", "float16")]
)
def test_a_row_for_each_key(comm, mode, dtype):
    mode = f"localized:{comm.size - 1}" if mode == "last" else mode
    table = sok.Variable(rows_of(0), mode=mode, dtype=dtype)
    # The last of several ranks asks for nothing.
    keys = np.array([7, 0, 7, NUM_ROWS - 1])
    keys = keys[:0] if 0 < comm.rank == comm.size - 1 else keys
    with tf.GradientTape() as tape:
        rows = sok.all2all_dense_embedding(table, keys)
        loss = tf.reduce_sum(rows)
    np.testing.assert_array_equal(rows, tf.cast(rows_of(0), dtype).numpy()[keys])
    grads = tape.gradient(loss, table)
    places, values = (
        comm.allgatherv(np.ascontiguousarray(each)).rows
        for each in (
            grads.indices.numpy() if mode else grads.indices.numpy() * comm.size + comm.rank,
            tf.cast(grads.values, tf.float32).numpy(),
        )
    )
    expected = np.zeros((NUM_ROWS, DIM))
    np.add.at(expected, comm.allgatherv(keys).rows, 1.0)
    total = np.zeros((NUM_ROWS, DIM))
    np.add.at(total, places, values)
    np.testing.assert_array_equal(total, expected)


@pytest.mark.full_only("runs a session for 7 s")
def test_a_session_looks_both_kinds_up_in_one_order_on_all_ranks(comm):
    """Rows, gradients and a step of both; then what is of one kind alone."""
    with tf.Graph().as_default():
        static = sok.Variable(rows_of(0), name="static")
        growing = sok.DynamicVariable(DIM, "ones", name="growing")
        ids = to_ragged([[1, 2 + comm.rank], [NUM_ROWS - 1]])
        outs = sok.lookup_sparse([growing, static], [ids, ids], combiners="sum")
        loss = tf.add_n([tf.reduce_sum(out) for out in outs])
        grads = tf.gradients(loss, [growing, static])
        step = sok.SGD(0.0).apply_gradients([(grads[0], growing)])
        keys = [1, 2 + comm.rank, NUM_ROWS - 1]
        expected = np.stack([rows_of(0)[keys[:2]].sum(0), rows_of(0)[NUM_ROWS - 1]])
        counts = np.bincount([1, NUM_ROWS - 1] * comm.size + [2 + i for i in range(comm.size)])
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            for _ in range(20):
                ones, rows, by_key, by_row, _ = session.run([*outs, *grads, step])
                np.testing.assert_array_equal(ones, [[2] * DIM, [1] * DIM])
                np.testing.assert_allclose(rows, expected, rtol=1e-6)
                of_keys = counts[by_key.indices]
                np.testing.assert_array_equal(by_key.values, np.repeat(of_keys[:, None], DIM, 1))
                of_rows = counts[by_row.indices * comm.size + comm.rank]
                np.testing.assert_array_equal(by_row.values, np.repeat(of_rows[:, None], DIM, 1))
            for out, alone in zip(outs, (ones, rows), strict=True):
                np.testing.assert_array_equal(session.run(out), alone)
            for grad, alone in zip(grads, (by_key, by_row), strict=True):
                np.testing.assert_array_equal(session.run(grad.values), alone.values)


def test_a_row_that_there_is_not_is_told_to_all_ranks(comm):
    static, growing = sok.Variable(rows_of(0), name="few"), sok.DynamicVariable(2, name="other")
    row = NUM_ROWS if comm.rank == comm.size - 1 else 0
    ids = tf.ragged.constant([[row]], dtype=tf.int64)
    with pytest.raises(Exception, match="'few' must be from 0 to 36: it has 37 rows. Received: 37"):
        sok.lookup_sparse([growing, static], [ids, ids])
    assert growing.table.size == 0
    with tf.Graph().as_default():  # of a session, which runs what it has to in any order
        tables = [sok.DynamicVariable(2, name="other"), sok.Variable(rows_of(0), name="few")]
        outs = sok.lookup_sparse(tables, [to_ragged([[row]])] * 2)
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            with pytest.raises(Exception, match="'few' must be from 0 to 36"):
                session.run(outs[0])
        assert tables[0].table.size == 0
    # The next call goes on.
    ids = tf.ragged.constant([[NUM_ROWS - 1]], dtype=tf.int64)
    np.testing.assert_array_equal(sok.lookup_sparse(static, ids), rows_of(0)[-1:])


@pytest.mark.parametrize(
    ("module", "name", "run"),
    [
        (static_lookup, "_read", lambda call: call),  # in a graph that is TensorFlow's
        (AllToAllPlan, "restore", lambda call: call),
        (AllToAllPlan, "restore", tf.function),
    ],
    ids=["read", "taken, eager", "taken, tf.function"],
)
def test_a_rank_that_fails_once_its_keys_are_sent_tells_those_that_wait(
    comm, monkeypatch, module, name, run
):
    """They wait for rows, so the reason cannot come in place of keys."""
    if comm.size == 1:
        pytest.skip("one rank waits for nobody")
    if isinstance(comm, (MultiHostCommunicator, LocalCommunicator)):
        comm = connect_local(comm._base)  # ranks that have disagreed do not go on with it
        monkeypatch.setattr(job, "_communicator", comm)
    tables = [sok.Variable(rows_of(0), name="s"), sok.DynamicVariable(2, "ones", name="g")]
    ids, is_culprit = tf.ragged.constant([[7], [8]], dtype=tf.int64), comm.rank == comm.size - 1
    call = run(lambda: sok.lookup_sparse(tables, [ids, ids]))
    call()  # traced, and the ranks have agreed on the tables

    def fails(*_):
        raise ValueError("these rows cannot be read")

    kind = (CommunicatorError, tf.errors.UnknownError)
    if is_culprit:
        kind = (ValueError, tf.errors.InvalidArgumentError)
    with monkeypatch.context() as patch:
        if is_culprit:
            patch.setattr(module, name, fails)
        with pytest.raises(kind, match="these rows cannot be read"):
            call()
    # The ranks are still in step: all refuse to go on, or all go on.
    if isinstance(comm, (MultiHostCommunicator, LocalCommunicator)):
        with pytest.raises(CommunicatorError, match="these rows cannot be read"):
            sok.lookup_sparse(tables, [ids, ids])
        return
    np.testing.assert_array_equal(call()[0], rows_of(0)[[7, 8]])


def test_other_rows_on_another_rank_are_refused(comm):
    if comm.size == 1:
        pytest.skip("there is no other rank")
    static = sok.Variable(rows_of(0, 4, 10 + comm.rank), name="grows_with_the_rank")
    with pytest.raises(ValueError, match="number of rows of table 0 is 10 on rank 0 and 11 on ran"):
        sok.lookup_sparse(static, tf.ragged.constant([[0]]))


def test_there_is_no_such_rank(comm):
    with pytest.raises(RuntimeError, match=f"only {comm.size} GPU"):
        sok.Variable(rows_of(0), mode=f"localized:{comm.size}")
