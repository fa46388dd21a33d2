"""Native lookups beside other threads, finalizers and interrupts, and without their tables."""

import ctypes
import gc
import itertools
import threading

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite.engine.work_counters import LOOKUPS, UPDATES
from sok_lite.native.plans import num_entries
from tests.conftest import QUICK
from tests.support.helpers import give_room, run_threads
from tests.support.routes import counts_of, new_variable
from tests.support.table_audit import audit
from tests.support.table_state import State
from tests.support.tripwire import AtEveryLine

pytestmark = pytest.mark.usefixtures("initialised")

NUM_KEYS = 400  # that threads look up; others are inserted and erased beside


def in_threads(*works):
    """Does things at once; raises what one of them raises."""
    run_threads(lambda number: works[number](), len(works))


@pytest.mark.parametrize("is_eager", [False, True])
@pytest.mark.parametrize("kind", ["hbm", "kLfu of all"])
def test_steps_of_several_threads_add_up(kind, is_eager):
    """Each takes 1 off a row for each time that its key comes, whoever takes the step."""
    variables = [new_variable(kind, f"t{i}") for i in range(2)]
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(1.0))
    keys = tf.range(20, dtype=tf.int64)
    first = [tf.nn.embedding_lookup(each, keys).numpy() for each in variables]

    def step(ids):
        with tf.GradientTape() as tape:
            rows = sok.lookup_sparse(variables, [ids, ids], combiners=["sum", "sum"])
            loss = tf.add_n([tf.reduce_sum(each) for each in rows])
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    if not is_eager:
        spec = [tf.TensorSpec([None, 1], tf.int64)]
        step = tf.function(step, input_signature=spec, autograph=False)
    rounds = 30 if QUICK else 300
    counts, before = np.zeros((3, 20), np.int64), UPDATES.native[0]

    def train(number):
        rng = np.random.default_rng(number)
        for _ in range(rounds):
            ids = rng.integers(0, 20, rng.integers(1, 9))
            step(tf.constant(ids[:, None]))
            np.add.at(counts[number], ids, 1)

    in_threads(*(lambda number=number: train(number) for number in range(3)))
    train(0)  # alone: every step but the first few is native code's
    assert UPDATES.native[0] - before > rounds // 2
    assert int(optimizer.iterations) == 4 * rounds
    for each, rows in zip(variables, first, strict=True):
        expected = rows - counts.sum(axis=0)[:, None]
        np.testing.assert_allclose(tf.nn.embedding_lookup(each, keys), expected, atol=1e-3)
        audit(each.table)


@pytest.mark.parametrize("kind", ["hbm", "kLfu of all", "kEpochLfu"])
def test_what_threads_do_adds_up(kind):
    variables = [new_variable(kind, f"t{i}") for i in range(3)]
    tables = [each.table for each in variables]
    combiners = ["sum"] * 3

    def in_all(keys):
        return sok.lookup_sparse(variables, [keys, keys, keys], combiners=combiners)

    def in_one(keys):
        return tf.nn.embedding_lookup(variables[0], keys)

    def backwards(keys):
        # The last table twice: a key counts once.
        return sok.lookup_sparse([*variables[::-1], variables[2]], [keys] * 4, combiners="sum")

    def reading(keys):
        return sok.lookup_sparse(
            variables, [keys, keys, keys], training=False, missing="zeros", combiners=combiners
        )

    spec = [tf.TensorSpec([None], tf.int64)]
    eager = [in_all, in_one, backwards, reading]
    calls = [*eager, *(tf.function(each, input_signature=spec) for each in eager)]
    # Of each call how many keys it asks each table for, by keys, and whether they count as seen.
    asks = [((1, 1, 1), True), ((1, 0, 0), True), ((1, 1, 2), True), ((1, 1, 1), False)] * 2
    for call in calls:
        call(tf.constant([], tf.int64))  # traced
    num_calls = [0, 0, 0]
    for times, is_seen in asks:
        num_calls = [n + bool(is_seen and t) for n, t in zip(num_calls, times, strict=True)]
    rounds = 40 if QUICK else 500
    seen = np.zeros((8, 3, NUM_KEYS), np.int64)
    asked = np.zeros((8, 3), np.int64)
    begun = np.zeros((8, 3), np.int64)
    before = LOOKUPS.native[0]

    def look_up(number):
        rng = np.random.default_rng(number)
        for round in range(rounds):
            most = NUM_KEYS * (round + 10) // (rounds + 10)
            keys = rng.integers(0, most, rng.integers(1, 20))
            which = rng.integers(len(calls))
            calls[which](tf.constant(keys))
            times, is_seen = asks[which]
            for table in range(3):
                asked[number, table] += times[table] * keys.size
                if is_seen and times[table]:
                    begun[number, table] += 1
                    seen[number, table, np.unique(keys)] += 1

    num_beside = [0, 0, 0]

    def beside():
        rng = np.random.default_rng(99)
        for _ in range(rounds // 4):
            at = int(rng.integers(3))
            keys = NUM_KEYS + rng.integers(0, 50, 10)
            tables[at].lookup(keys)
            num_beside[at] += 1
            tables[at].erase(keys)
            assert not tables[at].contains(keys).any()
            tables[at].export()
            assert 0 <= tables[at].size <= NUM_KEYS
            # Beside others it removes nothing: all was seen within the last hour.
            tables[at].expire(seconds=3600)

    in_threads(*(lambda number=number: look_up(number) for number in range(8)), beside)
    assert LOOKUPS.native[0] > before
    for at, table in enumerate(tables):
        expected = seen.sum(0)[at]
        counters = table.record.counters
        assert counters.found + counters.missed == asked.sum(0)[at] + 10 * num_beside[at]
        assert table.clock.now == num_calls[at] + begun.sum(0)[at] + num_beside[at]
        keys = np.flatnonzero(expected)
        assert table.size == keys.size
        if kind != "hbm":
            np.testing.assert_array_equal(table.scores(keys), expected[keys])
        audit(table)


# ---------------------------------------------------------------- within a handed-over lookup
# Of a table with room that admits every key Python does nothing.


def lookups(variable):
    return {
        "pooled": lambda keys: sok.lookup_sparse([variable], [keys], combiners=["sum"]),
        "rows": lambda keys: tf.nn.embedding_lookup(variable, keys),
    }


def pair(kind, dim=4):
    """Two equal tables with a few keys."""
    made = [new_variable(kind, dim=dim) for _ in range(2)]
    for each in made:
        each.table.lookup(np.arange(10))
        give_room(each.table)
    return made


@pytest.mark.parametrize("name", ["pooled", "rows"])
@pytest.mark.parametrize("kind", ["kEpochLru", "kLru in tiers", "full kEpochLfu"])
def test_a_change_within_a_lookup_that_python_goes_on_with_is_refused(kind, name):
    variable, other = pair(kind)
    table, refused = variable.table, []
    within, keys = lookups(variable), tf.constant([1, 2])
    changes = [
        lambda: within["pooled"](keys),
        lambda: within["rows"](keys),
        lambda: table.erase([1]),
        lambda: table.insert_or_assign([1], np.zeros((1, 4), np.float32)),
    ]
    assert within["rows"](keys) is not None and lookups(other)["rows"](keys) is not None

    places = itertools.count()

    def as_a_finalizer_does():
        has_begun = table.is_changing or table.record.is_settled == 2  # handed over
        if not table.lock._is_owned() or not has_begun:
            return
        if next(places) % (11 if QUICK else 3):
            return
        assert table.size >= 10 or kind != "kEpochLru"
        table.contains([1])
        with pytest.raises(RuntimeError, match="while this thread was"):
            changes[len(refused) % len(changes)]()
        refused.append(table.record.is_settled)

    tracer = AtEveryLine(as_a_finalizer_does)
    for new in ([3, 50, 4], [51, 51], [52, 1]):
        new = tf.constant(new)
        before = num_entries()
        result = tracer.run(lambda new=new: lookups(variable)[name](new))
        assert num_entries() > before
        expected = lookups(other)[name](new)
        for one, two in zip(tf.nest.flatten(result), tf.nest.flatten(expected), strict=True):
            np.testing.assert_array_equal(one, two)
        audit(table)
    assert 2 in refused and 0 in refused, "before Python has begun, and then"
    assert State.of(table) == State.of(other.table)
    before = num_entries()
    within[name](keys)
    assert num_entries() == before, "it is not settled"


# ---------------------------------------------------------------- without its table


@pytest.mark.parametrize("name", ["pooled", "rows"])
def test_a_function_whose_table_is_gone_leaves_the_next_one_alone(name):
    variables = [new_variable()]
    function = tf.function(lambda keys: lookups(variables[0])[name](keys))
    keys = tf.constant([1, 2, 3])
    function(keys)
    before = num_entries()
    function(keys)
    assert num_entries() == before
    record = ctypes.addressof(variables[0].table.record)
    variables.clear()
    gc.collect()
    with pytest.raises(tf.errors.InvalidArgumentError, match="whose variable was deleted"):
        function(keys)
    others = []  # which have the records of tables that are gone
    while not others or ctypes.addressof(others[-1].table.record) != record:
        others.append(new_variable())
        assert len(others) < 1000
    new = others[-1]
    new.table.lookup([1, 2, 3])
    rows = new.table.lookup([1, 2, 3], insert=False).values.copy()
    counts = counts_of(new.table)
    with pytest.raises(tf.errors.InvalidArgumentError, match="whose variable was deleted"):
        function(keys)
    assert counts_of(new.table) == counts
    np.testing.assert_array_equal(new.table.lookup([1, 2, 3], insert=False).values, rows)
    audit(new.table)


def test_a_table_may_go_in_a_thread_that_has_another_of_the_same_lookup():
    """Freeing it waits for native calls: none may have it while it waits for that other."""
    variables = sorted(
        [new_variable(), new_variable()], key=lambda each: ctypes.addressof(each.table.record)
    )
    rows = tf.function(lambda keys: sok.lookup_sparse(variables, [keys] * 2, combiners="sum"))
    keys = tf.constant([1, 2, 3])
    rows(keys)
    function = rows.get_concrete_function(keys)
    lock = variables[1].table.lock
    cycle = [variables[0]]
    cycle.append(cycle)
    del variables[0], cycle  # only the garbage collector frees it
    is_held = threading.Event()

    def free():
        with lock:
            is_held.set()
            while not lock.waiting:
                pass
            gc.collect()

    def look_up():
        is_held.wait()
        with pytest.raises(tf.errors.InvalidArgumentError, match="whose variable was deleted"):
            function(keys)

    gc.disable()
    try:
        in_threads(free, look_up)
    finally:
        gc.enable()
