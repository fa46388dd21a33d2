"""`sok.prefetch` over real ranks: a lookup of what it gives is the lookup of the ids."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite.bridge import job
from sok_lite.comm import CommunicatorError, SingleCommunicator
from sok_lite.comm.hosts import HostsCommunicator
from sok_lite.comm.local import LocalCommunicator, connect_local

DIM = 4
NAMES = ("one", "two", "three")


@pytest.fixture(autouse=True)
def over(comm, monkeypatch):
    """Every test runs over each transport, as if `sok.init` had chosen it."""
    monkeypatch.setattr(job, "_communicator", comm)


def new_tables(**options):
    return [
        sok.DynamicVariable(DIM, "uniform", name=NAMES[0], seed=1),
        sok.DynamicVariable(
            3, "uniform", "hybrid", name=NAMES[1], seed=2, key_type=tf.int32, **options
        ),
        sok.DynamicVariable(DIM, "uniform", name=NAMES[2], seed=3, dtype=tf.bfloat16),
    ]


def ids_of(rank, step, batch=6):
    """Ragged, sparse and ragged ids; the last rank has none in every third step."""
    rng = np.random.default_rng([rank, step])
    batch = 0 if rank and step % 3 == 2 else batch + rank

    def ragged():
        lengths = rng.integers(0, 4, batch)
        keys = rng.integers(0, 30, lengths.sum())
        return tf.RaggedTensor.from_row_lengths(tf.constant(keys, tf.int64), lengths)

    return [ragged(), ragged().to_sparse(), ragged()]


def weights_of(ids):
    return [None, None, ids.with_flat_values(tf.cast(ids.flat_values % 3 + 1, tf.float32))]


def entries(tables):
    """Every key's row on this rank."""
    return [
        {
            int(k): row
            for k, row in zip(keys.numpy(), tf.cast(rows, tf.float32).numpy(), strict=True)
        }
        for keys, rows in map(sok.export, tables)
    ]


def same(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert a.keys() == b.keys()
        for key in a:
            np.testing.assert_array_equal(a[key], b[key])


def trained(comm, ahead, steps=5):
    """Trains with prefetched keys or without; returns losses and what the tables hold."""
    tables = new_tables()
    optimizer = sok.OptimizerWrapper(keras.optimizers.Adam(0.1))

    @tf.function(reduce_retracing=True)
    def step(ids, weight, following):
        with tf.GradientTape() as tape:
            outs = sok.lookup_sparse(tables, ids, [None, None, weight], "sum")
            if ahead:
                following = sok.prefetch(tables, following)
            loss = tf.add_n([tf.reduce_sum(tf.cast(out, tf.float32) ** 2) for out in outs])
        gradients = tape.gradient(loss, tables)
        optimizer.apply_gradients(zip(gradients, tables, strict=True))
        return loss, following

    ids, losses = ids_of(comm.rank, 0), []
    following = sok.prefetch(tables, ids) if ahead else ids
    for number in range(steps):
        weight = weights_of(ids_of(comm.rank, number)[2])[2]
        ids = ids_of(comm.rank, number + 1)
        loss, following = step(following, weight, ids)
        losses.append(float(loss))
    return losses, entries(tables)


def test_training_with_prefetched_keys_is_training_to_the_bit(comm):
    losses, held = trained(comm, ahead=True)
    expected_losses, expected = trained(comm, ahead=False)
    assert losses == expected_losses
    same(held, expected)


@pytest.mark.parametrize("change", ["insert", "erase", "assign", "evict", "nothing"])
def test_what_happens_in_between_counts(comm, change):
    def run(ahead):
        options = {"init_capacity": 128, "max_capacity": 128} if change == "evict" else {}
        tables = new_tables(**options)
        ids = ids_of(comm.rank, 1)
        sok.lookup_sparse(tables, ids_of(comm.rank, 0), combiners="sum")
        asked = sok.prefetch(tables, ids, combiners="mean") if ahead else ids
        if change == "insert":
            sok.lookup_sparse(tables, ids_of(comm.rank, 5), combiners="sum")
        if change == "erase":
            for table in tables:
                keys, _ = sok.export(table)
                table.table.erase(keys.numpy()[::2])
        if change == "assign":
            for table in tables:
                keys, rows = sok.export(table)
                sok.assign(table, keys, rows * 0 + 7)
        if change == "evict":
            many = comm.rank + comm.size * np.arange(1000, 3000)
            tables[1].table.lookup(many.astype(np.int32))
        outs = sok.lookup_sparse(tables, asked, weights_of(ids[2]), "mean")
        return [out.numpy() for out in outs], entries(tables)

    found, expected = run(True), run(False)
    for a, b in zip(found[0], expected[0], strict=True):
        np.testing.assert_array_equal(a, b)
    same(found[1], expected[1])


def test_it_may_be_looked_up_twice_or_never(comm):
    tables = new_tables()
    ids = ids_of(comm.rank, 1)
    sok.prefetch(tables, ids_of(comm.rank, 3))
    assert [table.table.size for table in tables] == [0, 0, 0]
    asked = sok.prefetch(tables, ids)
    results = []
    with tf.GradientTape() as tape:
        for _ in range(2):
            results.append(sok.lookup_sparse(tables, asked, combiners="sum"))
        results.append(sok.lookup_sparse(tables, ids, combiners="sum"))
        loss = tf.add_n([tf.reduce_sum(tf.cast(x, tf.float32)) for out in results for x in out])
    for first, second, plain in zip(*results, strict=True):
        np.testing.assert_array_equal(first, plain)
        np.testing.assert_array_equal(second, plain)
    for gradient in tape.gradient(loss, tables):
        sums = {}
        for key, row in zip(gradient.indices.numpy(), gradient.values.numpy(), strict=True):
            sums[key] = sums.get(key, 0) + row[0]
        # Three lookups alike: a key's gradient is three times what one of them gives.
        assert all(each > 0 and each % 3 == 0 for each in sums.values())


def test_a_rank_that_looks_up_while_others_prefetch_raises_on_all(comm):
    if comm.size == 1:
        pytest.skip("one rank waits for nobody")
    tables, ids = new_tables(), ids_of(comm.rank, 1)
    with pytest.raises(CommunicatorError):
        if comm.rank == 0:
            # By the combiner of a prefetched call: else the ranks disagree on that first.
            sok.lookup_sparse(tables, ids, combiners="sum")
        else:
            sok.prefetch(tables, ids)
    assert [table.table.size for table in tables] == [0, 0, 0]


def test_a_key_that_does_not_fit_is_refused_on_all_ranks_when_it_is_prefetched(comm):
    table = sok.DynamicVariable(DIM, name="narrow", key_type=tf.int32)
    key = 2**31 if comm.rank == comm.size - 1 else 1
    ids = tf.RaggedTensor.from_row_lengths(tf.constant([key], tf.int64), [1])
    if comm.size == 1:
        asked = sok.prefetch(table, ids)  # nothing is sent, so nobody looks at it yet
        with pytest.raises(ValueError, match="must fit int32"):
            sok.lookup_sparse(table, asked)
        return
    kind = ValueError if comm.rank == comm.size - 1 else CommunicatorError
    with pytest.raises(kind, match="must fit int32"):
        sok.prefetch(table, ids)


@pytest.mark.parametrize("run", [lambda call: call, tf.function], ids=["eager", "tf.function"])
@pytest.mark.parametrize("wrong", ["weights", "handle"])
def test_a_rank_that_fails_once_its_keys_are_sent_tells_those_that_wait(
    comm, monkeypatch, wrong, run
):
    """They wait for rows, so the reason cannot come in place of keys."""
    if comm.size == 1:
        pytest.skip("one rank waits for nobody")
    if isinstance(comm, (HostsCommunicator, LocalCommunicator)):
        comm = connect_local(comm._base)  # ranks that have disagreed do not go on with it
        monkeypatch.setattr(job, "_communicator", comm)
    table, is_culprit = new_tables()[0], comm.rank == comm.size - 1
    ids = tf.RaggedTensor.from_row_lengths(tf.constant([comm.rank, 7, 8], tf.int64), [1, 2])
    weights = ids.with_flat_values(tf.constant([1.0, 2.0, 3.0]))
    asked = sok.prefetch(table, ids)
    used, used_weights, text = asked, weights, ""
    if wrong == "weights":
        text = "ValueError: The rows of sp_weights"
        if is_culprit:
            used_weights = tf.RaggedTensor.from_row_lengths(weights.flat_values, [2, 1])
    else:
        text = "ValueError: Arrays packed by version"
        if is_culprit:
            with monkeypatch.context() as patch:  # as if it came from before `sok.init`
                patch.setattr(job, "_communicator", SingleCommunicator())
                used = sok.prefetch(table, ids)

    def look_up(asked, weights):
        return sok.lookup_sparse(table, asked, weights, "sum")

    call = run(look_up)
    error = (ValueError, tf.errors.InvalidArgumentError)
    if not is_culprit:
        error = (CommunicatorError, tf.errors.UnknownError)
        text = f"rank {comm.size - 1} in no call, after {text}"
    with pytest.raises(error, match=text.removeprefix("ValueError: ")):
        call(used, used_weights)
    assert not (is_culprit and table.table.size)
    # The ranks are still in step: all refuse to go on, or all look up what was sent.
    if isinstance(comm, (HostsCommunicator, LocalCommunicator)):
        with pytest.raises(CommunicatorError, match="no call, after ValueError"):
            look_up(ids, weights)
        return
    np.testing.assert_array_equal(call(asked, weights), look_up(ids, weights))


def test_it_belongs_to_its_tables(comm):
    tables, ids = new_tables(), ids_of(comm.rank, 1)
    asked = sok.prefetch(tables[:2], ids[:2])
    with pytest.raises(ValueError, match="tables that it was made for"):
        sok.lookup_sparse([tables[1], tables[0]], asked)
    with pytest.raises(ValueError, match="equally long"):
        sok.lookup_sparse(tables, asked)


def test_a_function_is_traced_once_for_batches_of_all_sizes(comm):
    (table, *_), traces = new_tables(), []

    @tf.function
    def step(asked, ids):
        traces.append(1)
        return sok.lookup_sparse(table, asked, combiners="sum"), sok.prefetch(table, ids)

    def batch(step):
        rng = np.random.default_rng([comm.rank, step])
        lengths = rng.integers(0, 5, 6)
        return tf.RaggedTensor.from_row_lengths(rng.integers(0, 99, lengths.sum()), lengths)

    asked = sok.prefetch(table, batch(0))
    for number in range(6):
        out, asked = step(asked, batch(number + 1))
        np.testing.assert_array_equal(out, sok.lookup_sparse(table, batch(number), combiners="sum"))
    assert len(traces) == 1
