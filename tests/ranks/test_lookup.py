"""Lookups over real ranks: rows and gradients of one big batch, and errors that all ranks know."""

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite.bridge import job, static_lookup
from sok_lite.comm import CommunicatorError
from sok_lite.comm.local import LocalCommunicator, MultiHostCommunicator, connect_local
from sok_lite.engine.exchange import AllToAllPlan
from tests.support.step_oracle import flat, key_gradients, outputs, random_ragged

DIM, NUM_ROWS = 4, 37
ROWS = np.random.default_rng(0).normal(size=(NUM_ROWS, DIM)).astype(np.float32)
COMBINERS = ("sum", "mean", "sqrtn")


@pytest.fixture
def of_several(comm, monkeypatch):
    """A communicator of several ranks: those that have disagreed do not go on with it."""
    if comm.size == 1:
        pytest.skip("one rank agrees with itself")
    if isinstance(comm, (MultiHostCommunicator, LocalCommunicator)):
        comm = connect_local(comm._base)
        monkeypatch.setattr(job, "_communicator", comm)
    return comm


def batch_of(rank, size, step=0):
    """The ragged keys and output gradients of a rank; of several the last has none at times."""
    rng = np.random.default_rng([step, rank])
    batch = 0 if size > 1 and rank == size - 1 and step % 2 else 7 + rank
    return random_ragged(rng, batch, 5, 0, NUM_ROWS), rng.normal(size=(batch, DIM)).astype("f4")


def to_ragged(ragged, dtype=np.int64):
    values, splits = flat(ragged, dtype)
    return tf.RaggedTensor.from_row_splits(tf.constant(values), tf.constant(splits))


def eagerly(function):
    return function


def traced(function):
    return tf.function(function, reduce_retracing=True)


@pytest.mark.parametrize("run", [eagerly, traced], ids=["eager", "tf.function"])
@pytest.mark.parametrize("placed", ["distributed", "localized:0", "localized:last"])
@pytest.mark.parametrize("kind", ["growing", "static"])
def test_outputs_and_gradients_are_those_of_all_ranks_together(comm, kind, placed, run):
    """By `lookup_sparse`, which has the table in three parts, and by a row for each key."""
    owner = {"localized:0": 0, "localized:last": comm.size - 1}.get(placed)
    mode, keys = placed if owner is None else f"localized:{owner}", np.arange(NUM_ROWS)
    mine = keys[(keys % comm.size if owner is None else keys * 0 + owner) == comm.rank]
    if kind == "static":
        table = sok.Variable(ROWS, mode=mode)
    else:
        table = sok.DynamicVariable(DIM, name="table", mode=mode)
        sok.assign(table, mine, ROWS[mine])

    def step(ids, out_grads):
        weights = tf.cast(1 + ids % 3, tf.float32)
        with tf.GradientTape(persistent=True) as tape:
            outs = sok.lookup_sparse(
                [table] * 3, [ids, ids.to_sparse(), ids], [None, None, weights], COMBINERS
            )
            loss = tf.add_n([tf.reduce_sum(out * out_grads) for out in outs])
            rows = sok.all2all_dense_embedding(table, ids.flat_values)
            other = tf.reduce_sum(rows * tf.gather(out_grads, ids.value_rowids()))
        gradients = [tape.gradient(each, table) for each in (loss, other)]
        return outs, rows, [(each.indices, each.values) for each in gradients]

    call = run(step)
    for number in range(3):
        ragged, out_grads = batch_of(comm.rank, comm.size, number)
        outs, rows, gradients = call(to_ragged(ragged), tf.constant(out_grads))
        factors = [[1.0 + key % 3 for key in row] for row in ragged]
        for out, combiner, weights in zip(outs, COMBINERS, [None, None, factors], strict=True):
            expected = outputs(ragged, lambda key: ROWS[key], combiner, DIM, weights)
            np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(rows, ROWS[flat(ragged, np.int64)[0]])
        for which, (indices, values) in zip((COMBINERS, ["sum"]), gradients, strict=True):
            total, found = np.zeros((NUM_ROWS, DIM)), np.zeros((NUM_ROWS, DIM))
            asked = set()
            for rank in range(comm.size):
                ragged, out_grads = batch_of(rank, comm.size, number)
                factors = [[1.0 + key % 3 for key in row] for row in ragged]
                for combiner in which:
                    given = factors if combiner == "sqrtn" else None
                    for key, grad in key_gradients(ragged, out_grads, combiner, given).items():
                        total[key] += grad
                        asked.add(key)
            places = indices.numpy()
            places = mine[places] if kind == "static" else places
            np.add.at(found, places, values)
            assert set(places.tolist()) == asked & set(mine.tolist())
            np.testing.assert_allclose(found[mine], total[mine], rtol=1e-5, atol=1e-5)
    if kind == "growing":
        assert table.table.size == len(mine)


@pytest.mark.parametrize(
    ("key_type", "dtype"), [(tf.int32, tf.float16), (tf.uint64, tf.bfloat16)], ids=lambda d: d.name
)
def test_other_formats_travel(comm, key_type, dtype):
    table = sok.DynamicVariable(DIM, "2", name="formats", key_type=key_type, dtype=dtype)
    static = sok.Variable(ROWS, dtype=dtype)
    top = np.iinfo(key_type.as_numpy_dtype).max
    keys = np.array([top, 0, top - 1, top], key_type.as_numpy_dtype)
    ids = tf.RaggedTensor.from_row_lengths(tf.constant(keys), [3, 1])
    with tf.GradientTape() as tape:
        out = sok.lookup_sparse(table, ids, combiners="sum")
        loss = tf.reduce_sum(out)
    np.testing.assert_array_equal(tf.cast(out, tf.float32), [[6.0] * DIM, [2.0] * DIM])
    gradient = tape.gradient(loss, table)
    assert (out.dtype, gradient.indices.dtype) == (dtype, key_type)
    assert gradient.values.dtype == tf.float32
    expected = {int(top): 2.0, 0: 1.0, int(top) - 1: 1.0}
    mine = {key: comm.size * n for key, n in expected.items() if key % comm.size == comm.rank}
    found = zip(gradient.indices.numpy().tolist(), gradient.values.numpy()[:, 0], strict=True)
    assert dict(found) == mine
    rows = sok.all2all_dense_embedding(static, np.array([7, 0, 7]))
    np.testing.assert_array_equal(rows, tf.cast(ROWS, dtype).numpy()[[7, 0, 7]])


def test_what_is_not_lookup_sparse_stays_on_its_rank(comm):
    table = sok.DynamicVariable(DIM, "2", name="mine", mode="localized:0")
    np.testing.assert_array_equal(tf.nn.embedding_lookup(table, [comm.rank]), [[2.0] * DIM])
    assert sok.export(table)[0].numpy().tolist() == [comm.rank]


def test_only_the_rank_that_has_the_table_counts_for_what_rows_begin_with(comm):
    table = sok.DynamicVariable(
        DIM, str(10 + comm.rank), name="begins", seed=comm.rank, mode=f"localized:{comm.size - 1}"
    )
    out = sok.lookup_sparse(table, to_ragged([[3, comm.rank]]), combiners="mean")
    np.testing.assert_array_equal(out, [[9.0 + comm.size] * DIM])


# ---- errors


SMALL = {"var_type": "hybrid", "max_capacity": 64}
# Of each what the error says, and how a table is made by rank.
DIFFERENT = {
    "dimension of table 1 is 4 on rank 0 and 5 on rank 1": lambda rank: {"dimension": 4 + rank},
    "gradients sent as bfloat16 of table 1 is True": lambda rank: {
        "gradient_dtype": tf.float32 if rank else tf.bfloat16
    },
    "number of rows of table 1 is 10 on rank 0 and 11 on ran": lambda rank: {
        "initial_value": ROWS[: 10 + rank]
    },
    "evict_strategy of table 1 is 'kLru' on rank 0": lambda rank: (
        SMALL | {"evict_strategy": "kLfu" if rank else "kLru"}
    ),
    "var_type of table 1 is 'hbm' on rank 0": lambda rank: SMALL if rank else {},
}


def test_tables_that_differ_between_ranks_raise_on_all(of_several):
    for number, (text, options_of) in enumerate(DIFFERENT.items()):
        options = options_of(of_several.rank)
        make = sok.Variable if "initial_value" in options else sok.DynamicVariable
        options = options if "initial_value" in options else {"dimension": DIM} | options
        good = sok.DynamicVariable(DIM, name=f"good {number}")
        table = make(name=f"differs {number}", **options)
        with pytest.raises(ValueError, match=text):
            sok.lookup_sparse([good, table], [to_ragged([[1]])] * 2, combiners="sum")
        assert good.table.size == 0


def test_a_table_that_one_rank_makes_again_in_another_mode_raises_on_all(of_several):
    """The ranks have agreed on one of that name before."""
    ids = to_ragged([[1]])
    sok.lookup_sparse(sok.DynamicVariable(DIM, name="again"), ids)
    mode = "localized:0" if of_several.rank else None
    table = sok.DynamicVariable(DIM, name="again", mode=mode)
    with pytest.raises(CommunicatorError, match="different calls"):
        sok.lookup_sparse(table, ids)
    assert table.table.size == 0


@pytest.mark.parametrize("run", [eagerly, traced], ids=["eager", "tf.function"])
@pytest.mark.parametrize("kind", ["narrow", "few"])
def test_a_key_that_fits_on_no_rank_fails_on_all_of_them(comm, run, kind):
    other = sok.DynamicVariable(2, name="other")
    if kind == "few":
        table, text = sok.Variable(ROWS, name="few"), "from 0 to 36: it has 37 rows. Received: 40"
    else:
        table, text = sok.DynamicVariable(DIM, key_type=tf.int32, name="narrow"), "must fit int32"
    call = run(lambda ids: sok.lookup_sparse([other, table], [ids, ids], combiners="sum"))
    bad = 40 if kind == "few" else 2**40
    with pytest.raises((ValueError, RuntimeError, tf.errors.OpError), match=text):
        call(to_ragged([[bad if comm.rank == comm.size - 1 else 5]]))
    assert other.table.size == 0
    assert call(to_ragged([[5]]))[1].shape == (1, DIM)


@pytest.mark.parametrize("run", [eagerly, traced], ids=["eager", "tf.function"])
def test_a_number_of_weights_that_fits_on_no_rank_fails_on_all_of_them(comm, run):
    table = sok.DynamicVariable(2, name="weighted", initializer="ones")
    call = run(lambda ids, weights: sok.lookup_sparse(table, ids, weights, combiners="sum"))
    ids = to_ragged([[5, 6], [7]])
    weights = to_ragged([[1, 2], [3]]).with_flat_values(tf.constant([1.0, 2, 3]))
    few = tf.RaggedTensor.from_row_lengths([1.0, 2], [1, 1])
    with pytest.raises((ValueError, RuntimeError, tf.errors.OpError), match="one weight for each"):
        call(ids, few if comm.rank == comm.size - 1 else weights)
    assert table.table.size == 0
    np.testing.assert_array_equal(call(ids, weights), [[3, 3], [3, 3]])


def test_a_row_that_there_is_not_is_told_to_all_ranks_of_a_session(comm):
    """It runs what it has to in any order."""
    with tf.Graph().as_default():
        tables = [sok.DynamicVariable(2, name="other"), sok.Variable(ROWS, name="few")]
        row = NUM_ROWS if comm.rank == comm.size - 1 else 0
        outs = sok.lookup_sparse(tables, [to_ragged([[row]])] * 2)
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            with pytest.raises(Exception, match="'few' must be from 0 to 36"):
                session.run(outs[0])
        assert tables[0].table.size == 0


@pytest.mark.parametrize(
    ("module", "name", "run"),
    [
        (static_lookup, "_read", eagerly),  # in a graph that is TensorFlow's
        (AllToAllPlan, "restore", eagerly),
        (AllToAllPlan, "restore", traced),
    ],
    ids=["read", "taken, eager", "taken, tf.function"],
)
def test_a_rank_that_fails_once_its_keys_are_sent_tells_those_that_wait(
    of_several, monkeypatch, module, name, run
):
    """They wait for rows, so the reason cannot come in place of keys."""
    comm = of_several
    tables = [sok.Variable(ROWS, name="s"), sok.DynamicVariable(2, "ones", name="g")]
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
    np.testing.assert_array_equal(call()[0], ROWS[[7, 8]])


def test_a_rank_that_there_is_not_and_wrong_arguments_are_refused_before_any_rank_waits(comm):
    good = sok.DynamicVariable(DIM, name="good")
    table = sok.DynamicVariable(DIM, name="nowhere", mode=f"localized:{comm.size}")
    ids, before = to_ragged([[1]]), comm.turn
    text = rf"There are only {comm.size} GPU\(s\), cannot put .* on {comm.size}th\(zero-indexed\)"
    for call in (sok.lookup_sparse, tf.function(sok.lookup_sparse)):
        with pytest.raises(RuntimeError, match=text):
            call([good, table], [ids, ids])
    with pytest.raises(RuntimeError, match=f"only {comm.size} GPU"):
        sok.Variable(ROWS, mode=f"localized:{comm.size}")
    for keys, error in (([[1]], ValueError), ([0.5], TypeError)):
        with pytest.raises(error, match="shape|integers"):
            sok.all2all_dense_embedding(good, keys)
    assert comm.turn == before, "a rank has begun a collective"
    assert good.table.size == 0


def test_collectives_of_tensors(comm):
    x = tf.constant([[1.0, 2.0]]) * (comm.rank + 1)
    total = sum(range(1, comm.size + 1))
    np.testing.assert_array_equal(sok.communication.allreduce(x, "sum"), [[total, 2 * total]])
    np.testing.assert_array_equal(
        sok.communication.allreduce(x, "average"), [[total / comm.size, 2 * total / comm.size]]
    )
    np.testing.assert_array_equal(sok.communication.allgather(x)[:, 0], np.arange(1, comm.size + 1))
    rows = tf.fill([comm.size, 1], float(comm.rank))
    received, splits = sok.communication.alltoall(rows, tf.ones([comm.size], tf.int32))
    np.testing.assert_array_equal(received[:, 0], np.arange(comm.size))
    np.testing.assert_array_equal(splits, np.ones(comm.size))
    np.testing.assert_array_equal(sok.communication.broadcast(x, 0), [[1.0, 2.0]])
