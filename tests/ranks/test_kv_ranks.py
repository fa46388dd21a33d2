"""KvVariables over real ranks, against one rank that has the batches of all."""

import numpy as np
import pytest
import tensorflow as tf

from sok_lite import kv_variable as kv
from sok_lite.kv_variable import get_kv_variable, variable_scope
from tests.support.lone_rank import lone_rank

tf1 = tf.compat.v1
DIM, NUM_KEYS, STEPS, SMALLEST = 3, 20, 5, -(2**63)


@pytest.fixture(autouse=True)
def no_names(monkeypatch):
    monkeypatch.setattr(variable_scope, "_by_name", type(variable_scope._by_name)())


def batch_of(rank, step):
    """Keys and output gradients of a rank; in every third step the first rank has none."""
    rng = np.random.default_rng([rank, step])
    shape = (0 if rank == 0 and step % 3 == 2 else 5 + 3 * rank, 2)
    keys = rng.integers(-NUM_KEYS, NUM_KEYS, shape)
    if keys.size:
        keys[0, 0] = SMALLEST + rank
    return keys, rng.normal(size=(*shape, DIM)).astype(np.float32)


def together(comm, step):
    """The batches of all ranks, one after the other."""
    keys, grads = zip(*(batch_of(rank, step) for rank in range(comm.size)), strict=True)
    return np.concatenate(keys), np.concatenate(grads)


def looked_up(variable, keys, kind, **arguments):
    """Returns (n, 2, DIM) of a plain lookup, (n, 1, DIM) of a sparse one."""
    if kind == "plain":
        return kv.embedding_lookup(variable, keys, **arguments)
    ids = tf.RaggedTensor.from_tensor(keys)
    rows = kv.embedding_lookup_sparse(variable, ids, None, combiner="sum", **arguments)
    return rows[:, None, :]


def made(parts, initializer=None):
    partitioner = None if parts is None else tf1.fixed_size_partitioner(parts)
    return get_kv_variable("kv", DIM, initializer=initializer, partitioner=partitioner)


def trained(batches, parts, kind):
    """Returns what each step's lookup gave, and keys and rows of each partition in the end."""
    with tf.Graph().as_default():
        variable = made(parts)
        keys = tf1.placeholder(tf.int64, [None, 2])
        grads = tf1.placeholder(tf.float32, [None, 2, DIM])
        rows = looked_up(variable, keys, kind)
        loss = tf.reduce_sum(rows * grads)
        optimizer = tf1.train.AdagradOptimizer(0.1)
        step = optimizer.minimize(loss)
        each = [variable] if parts is None else list(variable)
        exported = [part.export(cutoff=None) for part in each]
        found = []
        with tf1.Session() as session:
            session.run(tf1.global_variables_initializer())
            for its_keys, its_grads in batches:
                feeds = {keys: its_keys, grads: its_grads}
                found.append(session.run([rows, step], feeds)[0])
            return found, session.run(exported)


@pytest.mark.parametrize("kind", ["plain", "sparse"])
@pytest.mark.parametrize("parts", [None, 3])
def test_ranks_and_partitions_train_as_one_rank_with_all_batches(comm, parts, kind):
    mine = [batch_of(comm.rank, step) for step in range(STEPS)]
    rows, exported = trained(mine, parts, kind)
    with lone_rank():
        everything = [together(comm, step) for step in range(STEPS)]
        all_rows, ((all_keys, oracle),) = trained(everything, None, kind)
    for step, (found, wanted) in enumerate(zip(rows, all_rows, strict=True)):
        start = sum(len(batch_of(rank, step)[0]) for rank in range(comm.rank))
        np.testing.assert_allclose(found, wanted[start : start + len(found)], atol=1e-5)
    owned = all_keys % comm.size == comm.rank
    for number, (keys, values) in enumerate(exported):
        own = owned & (all_keys % len(exported) == number)
        np.testing.assert_array_equal(keys, all_keys[own])
        np.testing.assert_allclose(values, oracle[own], atol=1e-5)


@pytest.mark.parametrize("kind", ["plain", "sparse"])
@pytest.mark.parametrize("parts", [None, 2])
def test_every_rank_predicts_from_the_rows_of_all(comm, kind, parts):
    variable = made(parts, tf1.ones_initializer())
    tf.nn.embedding_lookup(variable, tf.constant([comm.rank, comm.rank + 100]))
    before = variable.export()[0].numpy()
    assert (before % comm.size == comm.rank).all()
    ranks = np.arange(comm.size + 1)  # the last has not been seen
    keys = np.stack([ranks, ranks + 100], axis=1)
    rows = looked_up(variable, tf.constant(keys), kind, training=False).numpy()
    wanted = np.ones(rows.shape) * (2 if kind == "sparse" else 1)
    wanted[-1] = 0
    np.testing.assert_array_equal(rows, wanted)
    np.testing.assert_array_equal(variable.export()[0], before)


@pytest.mark.parametrize("lookup", [tf.nn.embedding_lookup, kv.embedding_lookup_unique])
def test_a_key_counts_once_for_each_rank_and_lookup(comm, lookup):
    variable = get_kv_variable("kv", DIM, enter_threshold=comm.size)
    lookup(variable, tf.constant([7, -8]))
    mine = [key for key in (-8, 7) if key % comm.size == comm.rank]
    assert variable.export(cutoff=None)[0].numpy().tolist() == mine
    assert variable.get_counting(mine).numpy().tolist() == [comm.size] * len(mine)


def test_errors_come_before_any_rank_waits(comm):
    variable = get_kv_variable("kv", DIM)
    ids = tf.RaggedTensor.from_row_splits(tf.constant([1]), [0, 1])
    before = comm.turn
    with pytest.raises(TypeError, match="integers"):
        tf.nn.embedding_lookup(variable, tf.constant([1.0]))
    with pytest.raises(ValueError, match="combiner"):
        tf.nn.embedding_lookup_sparse(variable, ids, None, combiner="max")
    with pytest.raises(ValueError, match="all partitions of one"):
        tf.nn.embedding_lookup([variable, variable], tf.constant([1]))
    with pytest.raises(TypeError, match="`training`"):
        kv.embedding_lookup(variable, tf.constant([1]), training="yes")
    with pytest.raises(ValueError, match="`missing`"):
        variable.sparse_read(tf.constant([1]), missing="ones")
    if comm.size > 1:
        with pytest.raises(NotImplementedError, match="works on one rank"):
            variable.sparse_read_with_counts(tf.constant([1]), tf.constant([2]))
    assert comm.turn == before
    assert variable.export()[0].shape == (0,)
