"""Hot keys: a program over several ranks does the same with them as without, bit for bit."""

import threading
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sok_lite.backend import get_backend
from sok_lite.comm import CommunicatorError, run_ranks
from sok_lite.engine import lookup, trips
from sok_lite.engine.agreement import agree
from sok_lite.engine.batch import Part, batch_of
from sok_lite.engine.optimizers import Adam
from sok_lite.engine.sent_keys import send
from sok_lite.engine.table import hot_keys
from sok_lite.engine.update import Update, apply_updates
from tests.engine.helpers import new_table, on, sized
from tests.exchange_facts import OWNERS, rule_of

EVICTING = {"init_capacity": 32, "max_capacity": 32, "max_bucket_size": 32}
POOL = {
    "int64": [-(2**63), 2**63 - 1, -1, *range(57)],
    "uint64": [2**64 - 1, 2**63, *range(58)],
    "int32": [-(2**31), 2**31 - 1, *range(58)],
}


class Case(NamedTuple):
    """Tables and how they are looked up."""

    size: int
    seed: int
    kind: str = "hbm"
    dtype: str = "float32"
    key_type: str = "int64"
    owner: str = "mod"
    options: tuple = ()
    limit: int = 6
    dim: int = 3


STEPS = (
    *("train", "train", "train", "train", "read", "read", "zeros", "twice", "ahead", "sum"),
    *("assign", "erase", "clear", "expire", "spread", "scores", "wrong"),
)


@pytest.fixture(autouse=True)
def small_window(monkeypatch):
    monkeypatch.setattr(hot_keys, "WINDOW", 3)
    monkeypatch.setattr(hot_keys, "COUNTED", 1)


def program(backend, comm, case, steps, limit):
    """Does the steps; returns all that can be seen of them, as a list of arrays."""
    rule = rule_of(case.owner, comm.size)
    options = dict(case.options, dtype=case.dtype, key_type=case.key_type, owner=rule)
    tables = [
        new_table(backend, case.dim, case.kind, name="a", hot_keys=limit, **options),
        new_table(backend, case.dim + 2, name="b", owner=rule),
    ]
    seen, rng = [], np.random.default_rng([case.seed, comm.rank])
    number = 0
    for step in steps:
        number += 1
        if step in ("train", "sum", "read", "zeros", "twice", "ahead", "spread", "wrong"):
            seen += looked_up(backend, comm, case, tables, step, rng, number)
        else:
            seen += changed(backend, comm, case, tables[0], step, rng)
    for table in tables:
        keys, rows = table.export()
        # A table looks at the keys of all ranks in the order in which they are hot or not.
        seen += [keys, rows, table.scores(keys)]
        seen += [table.read_state(name, keys) for name in table.store.state_names]
        counted = table.statistics()
        seen.append(np.array([counted.found, counted.missed, counted.inserted, counted.size]))
    return [backend.to_host(each) for each in seen], tables[0].statistics()


def drawn(case, rng, count):
    """Keys, of which few are most."""
    pool = np.array(POOL[case.key_type], case.key_type)
    return pool[np.minimum(rng.zipf(1.3, count) - 1, len(pool) - 1)]


def part_of(backend, case, table, rng, step):
    lengths = rng.integers(0, 5, rng.integers(0, 9))
    keys, splits = drawn(case, rng, lengths.sum()), np.append(0, np.cumsum(lengths))
    weights = rng.normal(size=len(keys)).astype(np.float32) if step != "sum" else None
    if table.name == "b":
        keys = keys.astype(np.int64)
    how = {"read": (False, "initial"), "zeros": (False, "zeros")}.get(step, (True, "initial"))
    combiner = "sum" if step == "sum" else "mean"
    return Part(table, *on(backend, keys, splits, weights), combiner, *how)


def looked_up(backend, comm, case, tables, step, rng, number):
    order = [tables[0], tables[1], tables[0]] if step == "twice" else tables
    batch = batch_of(backend, [part_of(backend, case, table, rng, step) for table in order])
    grads = [backend.from_host(rng.normal(size=s).astype(np.float32)) for s in batch.shapes]
    if step == "wrong":
        fails(backend, comm, batch)
    sent = None
    if step == "ahead":
        sent = send(backend, comm, batch, 3)
        changed(backend, comm, case, tables[0], "assign", rng)
    outputs, trail = lookup.forward_batch(backend, comm, batch, sent=sent)
    seen = list(outputs)
    ways = list(zip(batch.tables, batch.weights, batch.combiners, strict=True))
    gradients = lookup.backward(backend, ways, grads, trail)
    for part in gradients:
        order = backend.xp.argsort(part.keys)
        seen += [part.keys[order], part.row_grads[order]]
        seen += [] if part.weight_grads is None else [part.weight_grads]
    if step == "spread":
        rows = [part.row_grads for part in gradients]
        items = trips.items(backend, trail)
        spread = trips.spread(backend, trail, rows)
        seen += [each[numbers] for each, (numbers, _) in zip(spread, items, strict=True)]
        collected = trips.collect(backend, trail, spread)
        for part, each in zip(gradients, collected, strict=True):
            seen.append(each[backend.xp.argsort(part.keys)])
    if step not in ("read", "zeros"):
        updates = [
            Update(table, Adam(), table.key_dtype.from_int64(backend.xp, part.keys), part.row_grads)
            for table, part in zip(batch.tables, gradients, strict=True)
        ]
        apply_updates(updates, 0.1, number)
    return seen


def fails(backend, comm, batch):
    """A lookup that one rank cannot make."""
    splits = batch.row_splits.copy()
    if comm.rank == 1:
        splits[0] += 1
    with pytest.raises((ValueError, CommunicatorError)):
        lookup.forward_batch(backend, comm, batch._replace(row_splits=splits))


def changed(backend, comm, case, table, step, rng):
    """Changes a table by itself, keys of this rank and others."""
    keys = np.unique(drawn(case, rng, 6))
    if step == "assign":
        rows = rng.integers(-9, 9, (len(keys), case.dim))
        mine = table.owner.owners(keys.astype(np.int64), comm.size, case.key_type) == comm.rank
        table.insert_or_assign(*on(backend, keys[mine], rows[mine].astype(np.float32)))
    elif step == "erase":
        table.erase(backend.from_host(keys))
    elif step == "clear":
        table.clear()
    elif step == "expire":
        table.expire(num_lookups=2)
    else:
        return [table.scores(backend.from_host(keys))]
    return []


def compared(backend, case, steps):
    """Runs a program with and without hot keys, and returns the statistics with them."""
    runs = [
        run_ranks(case.size, lambda comm, n=n: program(backend, comm, case, steps, n))
        for n in (0, case.limit)
    ]
    for (expected, _), (found, _) in zip(*runs, strict=True):
        for want, got in zip(expected, found, strict=True):
            assert (want.dtype, want.shape) == (got.dtype, got.shape)
            np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))
    return [statistics for _, statistics in runs[1]]


@st.composite
def cases(draw):
    return Case(
        draw(st.integers(2, 4)),
        draw(st.integers(0, 2**32 - 1)),
        dtype=draw(st.sampled_from(["float32", "float16", "bfloat16"])),
        key_type=draw(st.sampled_from(list(POOL))),
        owner=draw(st.sampled_from(OWNERS)),
        limit=draw(st.sampled_from([1, 6, 1000])),
    )


@settings(deadline=None, max_examples=60)
@given(steps=st.lists(st.sampled_from(STEPS), max_size=16), case=cases())
def test_a_program_does_the_same_with_hot_keys(steps, case):
    compared(get_backend("cpu"), case, steps)
