"""Tables of every kind train over real ranks as on one, and lie with their owners."""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite.bridge import job
from sok_lite.comm import SingleCommunicator
from sok_lite.engine.owner import HASH
from tests.support.step_oracle import flat, random_ragged

IN_TURN = "comm"
NUM_ROWS = 37


def to_ragged(ragged, dtype=np.int64):
    values, splits = flat(ragged, dtype)
    return tf.RaggedTensor.from_row_splits(tf.constant(values), tf.constant(splits))


def spread(keys, size):
    return keys % size


def on_the_first(keys, size):
    return keys * 0


def on_the_last(keys, size):
    return keys * 0 + size - 1


def by_tens(keys, ranks):
    return (keys // 10) % ranks


class Kind(NamedTuple):
    """A table: its rows are given where it is static. `owners` is by (keys, ranks)."""

    owners: Callable[..., Any]
    dim: int
    options: dict[str, Any]
    num_rows: int = 0


SMALL = {"var_type": "hybrid", "init_capacity": 1024, "max_capacity": 1024}
KINDS = {
    "spread": Kind(spread, 4, {}),
    "narrow": Kind(on_the_first, 3, {"key_type": tf.int32}),
    "hybrid": Kind(on_the_last, 4, SMALL),
    "unsigned": Kind(spread, 2, {"key_type": tf.uint64, "mode": "distributed"}),
    "hash": Kind(HASH.owners, 3, {"partitioner": "hash"}),
    "tens": Kind(by_tens, 3, {"partitioner": by_tens, "var_type": "hybrid"}),
    "tens_of_int32": Kind(by_tens, 3, {"partitioner": by_tens, "key_type": tf.int32}),
    "static": Kind(spread, 4, {}, NUM_ROWS),
    "static_first": Kind(on_the_first, 5, {}, NUM_ROWS),
    "static_last": Kind(on_the_last, 2, {}, NUM_ROWS),
    "fewer_rows_than_ranks": Kind(spread, 3, {}, 1),
}
PARTS = [*KINDS, "hybrid", "static"]  # of a call: two come twice


def new_table(name, size):
    kind = KINDS[name]
    target = {on_the_first: 0, on_the_last: size - 1}.get(kind.owners)
    options = kind.options if target is None else kind.options | {"mode": f"localized:{target}"}
    if not kind.num_rows:
        return sok.DynamicVariable(kind.dim, "uniform", name=name, seed=3, **options)
    rows = np.random.default_rng(kind.dim).normal(size=(kind.num_rows, kind.dim))
    return sok.Variable(rows.astype(np.float32), name=name, **options)


def whole(comm, name, table):
    """Returns what all ranks have of a table, (keys, rows), and checks whose is what."""
    kind = KINDS[name]
    if kind.num_rows:
        keys = np.arange(kind.num_rows)
        keys = keys[kind.owners(keys, comm.size) == comm.rank]
        assert np.array_equal(table.key_map(keys), np.arange(len(keys)))
        rows = table.numpy()
        assert rows.shape == (len(keys), kind.dim)
    else:
        keys, rows = (each.numpy() for each in sok.export(table))
        assert (kind.owners(keys.astype(np.int64), comm.size) == comm.rank).all()
    keys, rows = (comm.allgatherv(np.ascontiguousarray(each)).rows for each in (keys, rows))
    order = np.argsort(keys)
    return keys[order], rows[order]


def share(size, rank, step, batch=24):
    """What a rank has of a batch; of several ranks the last has none in every third step."""
    if size > 1 and step % 3 == 2:
        return slice(batch, batch) if rank == size - 1 else share(size - 1, rank, 0)
    return slice(batch * rank // size, batch * (rank + 1) // size)


def train(comm, size, make, wrapped, is_traced, steps=6):
    """Trains on the rank's part of equal global batches."""
    tables = {name: new_table(name, size) for name in KINDS}
    static = [each for name, each in tables.items() if KINDS[name].num_rows]
    growing = [each for name, each in tables.items() if not KINDS[name].num_rows]
    ours, theirs = sok.OptimizerWrapper(make()), make()
    params = [tables[name] for name in PARTS]
    combiners = [("sum", "mean", "sqrtn")[i % 3] for i in range(len(PARTS))]

    def batch(step):
        rng, ids, weights = np.random.default_rng([7, step]), [], []
        mine = share(size, comm.rank if size > 1 else 0, step)
        for i, name in enumerate(PARTS):
            kind, key_type = KINDS[name], KINDS[name].options.get("key_type", tf.int64)
            low = -20 if key_type == tf.int64 and not kind.num_rows else 0
            ragged = random_ragged(rng, 24, 4, low, kind.num_rows or 40)[mine]
            factors = [[1.0 + key % 3 for key in row] for row in ragged]
            ids.append(to_ragged(ragged, key_type.as_numpy_dtype))
            weights.append(to_ragged(factors, np.float32) if i % 2 else None)
        return ids, weights

    def step(ids, weights):
        with tf.GradientTape() as tape:
            outs = sok.lookup_sparse(params, ids, weights, combiners)
            loss = tf.add_n([tf.reduce_sum(tf.sin(out)) for out in outs])
        grads = tape.gradient(loss, [static, growing])
        if not wrapped:
            theirs.apply_gradients(list(zip(grads[0], static, strict=True)))
        pairs = zip(grads[1] + grads[0] * wrapped, growing + static * wrapped, strict=True)
        ours.apply_gradients(list(pairs))

    if is_traced:
        step = tf.function(step, reduce_retracing=True)
    for number in range(steps):
        step(*batch(number))
    return tables


@pytest.mark.parametrize(
    ("make", "wrapped"),
    [
        (lambda: keras.optimizers.SGD(0.05), True),
        (lambda: keras.optimizers.Adam(0.01), True),
        (lambda: keras.optimizers.Adagrad(0.1), False),
    ],
    ids=["SGD", "Adam", "Adagrad, by itself for static tables"],
)
def test_tables_of_every_kind_train_as_on_one_rank(comm, make, wrapped, monkeypatch):
    tables = train(comm, comm.size, make, wrapped, True)
    entries = [whole(comm, *each) for each in tables.items()]
    alone = SingleCommunicator()
    monkeypatch.setattr(job, "_communicator", alone)
    # A trace takes longer than these steps.
    expected = [whole(alone, *each) for each in train(comm, 1, make, wrapped, False).items()]
    for name, mine, other in zip(KINDS, entries, expected, strict=True):
        np.testing.assert_array_equal(mine[0], other[0])
        np.testing.assert_allclose(mine[1], other[1], rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("partitioner", "key_type"), [("mod", tf.int64), ("hash", tf.uint64), (by_tens, tf.int32)]
)
def test_keys_are_asked_for_at_their_owners(comm, partitioner, key_type):
    """Each rank asks about others, some with a row on no rank, and some by nobody."""
    keys, dtype = np.arange(0, 90, 2), key_type.as_numpy_dtype
    table = sok.DynamicVariable(3, name="asked", partitioner=partitioner, key_type=key_type)
    own = keys[table.table.owner.owners(keys, comm.size) == comm.rank]
    sok.assign(table, own.astype(dtype), np.ones((own.size, 3), np.float32))
    asked = np.random.default_rng(comm.rank).integers(0, 120, (comm.rank * 5, 3))
    traced = tf.function(lambda ids: table.contains(ids, all_ranks=True))
    for find in (traced, lambda ids: table.contains(ids, all_ranks=True)):
        found = find(tf.constant(asked.astype(dtype)))
        np.testing.assert_array_equal(found, np.isin(asked, keys))
    assert table.table.size == own.size
