"""Tables on one rank of several, among tables that are spread over all: real ranks."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite.bridge import job
from sok_lite.comm import CommunicatorError, SingleCommunicator
from sok_lite.comm.local import LocalCommunicator, MultiHostCommunicator, connect_local
from tests.support.step_oracle import flat, outputs, random_ragged

DIM = 4
SMALL = {"init_capacity": 1024, "max_capacity": 1024}


@pytest.fixture(autouse=True)
def over(comm, monkeypatch):
    """Every test runs over each transport, as if `sok.init` had chosen it."""
    monkeypatch.setattr(job, "_communicator", comm)


def to_ragged(ragged, dtype=np.int64):
    values, splits = flat(ragged, dtype)
    return tf.RaggedTensor.from_row_splits(tf.constant(values), tf.constant(splits))


def modes(size):
    """Of each table: spread, on the first rank, on the last one, spread again."""
    return [None, "localized:0", f"localized:{size - 1}", "distributed"]


def new_tables(size):
    first, second, third, fourth = modes(size)
    return [
        sok.DynamicVariable(DIM, "uniform", name="one", mode=first),
        sok.DynamicVariable(3, "uniform", name="two", mode=second, key_type=tf.int32),
        sok.DynamicVariable(DIM, "normal", "hybrid", name="three", mode=third, **SMALL),
        sok.DynamicVariable(2, "uniform", name="four", mode=fourth, key_type=tf.uint64),
    ]


def owner_of(key, mode, size):
    if mode is None or mode == "distributed":
        return key % size
    return int(mode.split(":")[1])


def check_owners(comm, tables):
    """Every key lies where its table wants it: nothing of a localized table is elsewhere."""
    for table, mode in zip(tables, modes(comm.size), strict=True):
        keys, _ = sok.export(table)
        assert all(owner_of(key, mode, comm.size) == comm.rank for key in keys.numpy().tolist())
        if mode is not None and mode != "distributed":
            assert table.target_gpu == int(mode.split(":")[1])
            assert (table.table.size > 0) == (comm.rank == table.target_gpu)


def whole(comm, table):
    """The keys of all ranks, ascending, and their rows."""
    keys, rows = (comm.allgatherv(each.numpy()).rows for each in sok.export(table))
    order = np.argsort(keys)
    return keys[order], rows[order]


def share(size, rank, step, batch=24):
    """What a rank has of a batch; of several ranks the last has none in every third step."""
    if size > 1 and step % 3 == 2:
        return slice(batch, batch) if rank == size - 1 else share(size - 1, rank, 0)
    return slice(batch * rank // size, batch * (rank + 1) // size)


def train(comm, size, make, steps=8):
    """Trains on the rank's part of equal global batches; the third table comes twice."""
    tables = new_tables(size)
    params = [*tables, tables[2]]
    optimizer = sok.OptimizerWrapper(make())
    combiners = ["sum", "mean", "sqrtn", "sum", "mean"]

    def batch(step):
        rng = np.random.default_rng([7, step])
        mine = share(size, comm.rank if size > 1 else 0, step)
        types = [np.int64, np.int32, np.int64, np.uint64, np.int64]
        ragged = [random_ragged(rng, 24, 4, 0, 40)[mine] for _ in params]
        ids = [to_ragged(each, dtype) for each, dtype in zip(ragged, types, strict=True)]
        factors = [
            to_ragged([[1.0 + key % 3 for key in row] for row in each], np.float32)
            for each in ragged[1:3]
        ]
        return ids, [None, *factors, None, None]

    @tf.function(reduce_retracing=True)
    def step(ids, weights):
        with tf.GradientTape() as tape:
            outs = sok.lookup_sparse(params, ids, weights, combiners)
            loss = tf.add_n([tf.reduce_sum(tf.sin(out)) for out in outs])
        gradients = tape.gradient(loss, tables)
        optimizer.apply_gradients(zip(gradients, tables, strict=True))

    for number in range(steps):
        step(*batch(number))
    return tables


@pytest.mark.parametrize(
    "make",
    [lambda: keras.optimizers.SGD(0.05), lambda: keras.optimizers.Adam(0.01)],
    ids=["SGD", "Adam"],
)
def test_tables_of_all_modes_train_as_on_one_rank(comm, make, monkeypatch):
    tables = train(comm, comm.size, make)
    check_owners(comm, tables)
    found = [whole(comm, table) for table in tables]
    # Every rank trains the whole batch by itself, too.
    monkeypatch.setattr(job, "_communicator", SingleCommunicator())
    alone = train(SingleCommunicator(), 1, make)
    for (keys, rows), table in zip(found, alone, strict=True):
        one_keys, one_rows = sok.export(table)
        np.testing.assert_array_equal(keys, one_keys)
        np.testing.assert_allclose(rows, one_rows, rtol=0, atol=1e-5)


def test_gradients_are_those_of_the_rank_that_has_the_table(comm):
    owner = comm.size - 1
    table = sok.DynamicVariable(DIM, "1", name="here", mode=f"localized:{owner}")
    ids = to_ragged([[5, comm.rank], [5]])
    weights = ids.with_flat_values(tf.constant([2.0, 1.0, 3.0]))
    with tf.GradientTape() as tape:
        tape.watch(weights.flat_values)
        out = sok.lookup_sparse(table, ids, weights, "sum")
        loss = tf.reduce_sum(out)
    gradient, by_weights = tape.gradient(loss, [table, weights.flat_values])
    np.testing.assert_array_equal(out, [[3.0] * DIM, [3.0] * DIM])
    np.testing.assert_array_equal(by_weights, [DIM] * 3)
    expected = {}
    for rank in range(comm.size):
        expected[5] = expected.get(5, 0.0) + 5.0
        expected[rank] = expected.get(rank, 0.0) + 1.0
    found = zip(gradient.indices.numpy().tolist(), gradient.values.numpy()[:, 0], strict=True)
    assert dict(found) == (expected if comm.rank == owner else {})
    np.testing.assert_array_equal(gradient.dense_shape, [-1, DIM])


def test_what_is_not_lookup_sparse_stays_on_its_rank(comm):
    table = sok.DynamicVariable(DIM, "2", name="mine", mode="localized:0")
    np.testing.assert_array_equal(tf.nn.embedding_lookup(table, [comm.rank]), [[2.0] * DIM])
    assert sok.export(table)[0].numpy().tolist() == [comm.rank]


def test_rows_that_the_owner_was_given_are_those_of_all_ranks(comm):
    def row_of(key):
        return (key % 50) + np.arange(DIM) / 8

    table = sok.DynamicVariable(DIM, name="given", mode="localized:0")
    if comm.rank == 0:
        keys = np.arange(-15, 15)
        sok.assign(table, keys, np.array([row_of(key) for key in keys]).astype("f4"))
    ragged = random_ragged(np.random.default_rng(comm.rank), 6, 5, -15, 15)
    if comm.rank == comm.size - 1 > 0:
        ragged = []
    for combiner in ("sum", "mean", "sqrtn"):
        out = sok.lookup_sparse(table, to_ragged(ragged), combiners=combiner)
        expected = outputs(ragged, row_of, combiner, DIM)
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    assert table.table.size == (30 if comm.rank == 0 else 0)


def test_only_the_rank_that_has_the_table_counts_for_what_rows_begin_with(comm):
    table = sok.DynamicVariable(
        DIM, str(10 + comm.rank), name="begins", seed=comm.rank, mode=f"localized:{comm.size - 1}"
    )
    out = sok.lookup_sparse(table, to_ragged([[3, comm.rank]]), combiners="mean")
    np.testing.assert_array_equal(out, [[9.0 + comm.size] * DIM])


def test_a_mode_that_differs_raises_on_all_ranks(comm):
    if comm.size == 1:
        pytest.skip("one rank agrees with itself")
    tables = [
        sok.DynamicVariable(DIM, name="equal", mode="localized:0"),
        sok.DynamicVariable(DIM, name="differs", mode="localized:0" if comm.rank else None),
    ]
    ids = to_ragged([[1]])
    text = "owner of keys of table 1 is 'key mod ranks' on rank 0 and 'rank 0' on rank 1"
    with pytest.raises(ValueError, match=text):
        sok.lookup_sparse(tables, [ids, ids])
    assert [table.table.size for table in tables] == [0, 0]


def test_a_table_that_one_rank_makes_again_in_another_mode_raises_on_all(comm, monkeypatch):
    """The ranks have agreed on one of that name before."""
    if comm.size == 1:
        pytest.skip("one rank agrees with itself")
    if isinstance(comm, (MultiHostCommunicator, LocalCommunicator)):
        comm = connect_local(comm._base)  # ranks that have disagreed do not go on with it
        monkeypatch.setattr(job, "_communicator", comm)
    ids = to_ragged([[1]])
    sok.lookup_sparse(sok.DynamicVariable(DIM, name="again"), ids)
    mode = "localized:0" if comm.rank else None
    table = sok.DynamicVariable(DIM, name="again", mode=mode)
    with pytest.raises(CommunicatorError, match="different calls"):
        sok.lookup_sparse(table, ids)
    assert table.table.size == 0


def test_a_rank_that_there_is_not_is_refused_everywhere(comm):
    good = sok.DynamicVariable(DIM, name="good")
    table = sok.DynamicVariable(DIM, name="nowhere", mode=f"localized:{comm.size}")
    ids, before = to_ragged([[1]]), comm.turn
    text = rf"There are only {comm.size} GPU\(s\), cannot put .* on {comm.size}th\(zero-indexed\)"
    for call in (sok.lookup_sparse, tf.function(sok.lookup_sparse)):
        with pytest.raises(RuntimeError, match=text):
            call([good, table], [ids, ids])
    assert comm.turn == before, "a rank has begun a collective"
    assert good.table.size == 0
