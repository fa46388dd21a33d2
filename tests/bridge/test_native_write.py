"""Writes of rows in functions, and TFRA's reads, by native code and by Python: the same bits."""

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
import sok_lite.dynamic_embedding as de
from sok_lite.native.plans import num_entries
from tests.support.routes import (
    FLOATS,
    INTEGERS,
    KINDS,
    WRITES,
    assert_equal,
    audit_both,
    both,
    new_variable,
    said_in,
    writing,
)

pytestmark = pytest.mark.usefixtures("initialised")


def has_all(variable, keys):
    return bool(variable.table.contains(keys).all())


def write_both(routes, functions, *given):
    """Writes by both routes; returns how often the first has entered Python."""
    entries = []
    for route, function in zip(routes, functions, strict=True):
        before = num_entries()
        with route.route():
            function(*given)
        entries.append(num_entries() - before)
    assert entries[1] > 0
    return entries[0]


_KINDS = [name for name in KINDS if name not in ("full kEpochLfu", "full kCustomized")]
_TABLES = [
    *[("hbm", dtype, "int64") for dtype in (*FLOATS, *INTEGERS)],
    *[("hbm", "float32", key_type) for key_type in ("int32", "uint64")],
    *[(kind, "float32", "int64") for kind in _KINDS if kind != "hbm"],
]


@pytest.mark.filterwarnings("ignore:Table 'table' had no room")
@pytest.mark.parametrize("kind, dtype, key_type", _TABLES)
def test_drawn_writes(kind, dtype, key_type):
    rng = np.random.default_rng(0)
    routes = both(lambda: [new_variable(kind, dim=4, dtype=dtype, key_type=key_type)])
    functions = {name: [writing(route.variables[0], name) for route in routes] for name in WRITES}
    num_native = 0
    for number in range(32):
        name = "assign" if number < 2 else list(WRITES)[rng.integers(4)]
        count = 2000 if number == 30 else max(number < 2, rng.integers(100))  # long sums, and none
        keys = tf.constant(rng.integers(0, 3 + number // 6, count), key_type)
        rows = tf.cast(rng.integers(-9, 9, (len(keys), 4)), dtype)
        is_known = has_all(routes[0].variables[0], keys.numpy())
        adds_natively = dtype in ("float32", "float16", "bfloat16")
        is_native = is_known and (name in ("assign", "scatter_update") or adds_natively)
        assert write_both(routes, functions[name], keys, rows) == (not is_native)
        num_native += is_native
        assert_equal(*routes)
    assert num_native > 3
    audit_both(*routes)


def test_a_write_that_does_not_fit_changes_nothing_and_says_why():
    routes = both(lambda: [new_variable()])
    functions = [writing(route.variables[0], "assign") for route in routes]
    write_both(routes, functions, tf.constant([1, 2], tf.int64), tf.ones([2, 3]))
    said = []
    for rows in (tf.ones([3, 3]), tf.ones([2, 4]), tf.ones([0, 3])):
        for route, function in zip(routes, functions, strict=True):
            with route.route(), pytest.raises(tf.errors.InvalidArgumentError) as got:
                function(tf.constant([1, 2], tf.int64), rows)
            said.append(said_in(got.value))
        assert said[-1] == said[-2]
        assert_equal(*routes)


# ---- TFRA's


def new_table(kind, dtype):
    """Returns a maker of one of TFRA's tables, whose name does not change its rows."""
    arguments = (tf.int64, dtype, np.zeros(5))
    if kind == "cuckoo":
        return lambda: [de.CuckooHashTable(*arguments, name="t")]
    options = {"evict_strategy": de.HkvEvictStrategy[kind], "init_capacity": 64}
    if "EPOCH" in kind:
        options["step_per_epoch"] = 2
    return lambda: [de.HkvHashTable(*arguments, name="t", max_capacity=1024, **options)]


@pytest.mark.parametrize("dtype", [tf.float32, tf.float16, tf.bfloat16, tf.float64, tf.int32])
@pytest.mark.parametrize("kind", ["cuckoo", "LRU", "LFU", "EPOCHLFU"])
def test_accum(kind, dtype):
    rng = np.random.default_rng(3)
    routes = both(new_table(kind, dtype))

    def functions_of(table):
        @tf.function(autograph=False, reduce_retracing=True)
        def accum(keys, rows, flags):
            table.accum(keys, rows, flags)

        @tf.function(autograph=False, reduce_retracing=True)
        def difference(keys, rows, flags):
            table.accum_difference(keys, rows, rows * rows, flags)

        return {"accum": accum, "difference": difference}

    functions = [functions_of(route.variables[0]) for route in routes]
    for number in range(32):
        name = ("accum", "difference")[number % 2]
        keys = rng.integers(0, 2 + number // 4, 1 + rng.integers(80))
        is_there = routes[0].variables[0].table.contains(keys)
        flags = is_there if number % 4 < 3 else rng.random(keys.size) < 0.9
        rows = tf.cast(rng.normal(scale=9, size=(keys.size, 5)), dtype)
        given = (tf.constant(keys), rows, tf.constant(flags))
        is_native = bool(is_there.all() and flags.all()) and dtype not in (tf.float64, tf.int32)
        entered = write_both(routes, [each[name] for each in functions], *given)
        assert entered == (not is_native) + ("EPOCH" in kind)  # which counts a step of its epoch
        assert_equal(*routes)
    audit_both(*routes)


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16, tf.float64, tf.int8])
@pytest.mark.parametrize("kind", ["cuckoo", "LFU"])
@pytest.mark.parametrize("return_exists", [False, True])
def test_reads(kind, dtype, return_exists):
    routes = both(new_table(kind, dtype))
    for route in routes:
        route.variables[0].insert(np.arange(6), tf.cast(tf.reshape(tf.range(30), [6, 5]), dtype))

    def function_of(table):
        specs = [tf.TensorSpec([None, None], tf.int64)]

        @tf.function(autograph=False, input_signature=specs)
        def run(keys):
            return table.lookup(keys, return_exists=return_exists)

        return run

    functions = [function_of(route.variables[0]) for route in routes]
    entries = []
    for keys in ([[0, 5], [3, 3]], [[0, 9], [-1, 3]], [[], []], [[1]]):
        before, keys = num_entries(), tf.constant(keys, tf.int64)
        with sok.inference_mode(missing="zeros"):
            results = [
                route.run(function, keys) for route, function in zip(routes, functions, strict=True)
            ]
        entries.append(num_entries() - before - 1)
        assert results[0] == results[1]
        assert_equal(*routes)
    assert entries == [0, 0, 0, 0]
    audit_both(*routes)


def test_reads_have_their_place_among_writes_of_their_table():
    """A read waits for no other table, so nothing but the handle has it in order."""
    (one,), (other,) = (new_table("cuckoo", tf.float32)() for _ in range(2))
    keys = tf.range(2000, dtype=tf.int64)
    for table in (one, other):
        table.insert(keys, tf.zeros([2000, 5]))

    @tf.function(autograph=False)
    def run(first):
        found = []
        for step in range(4):
            for table in (one, other):
                table.insert(keys, tf.fill([2000, 5], first + step))
                found.append(table.lookup(keys))
        return found

    for first in range(20):
        for place, rows in enumerate(run(tf.constant(100.0 * first))):
            np.testing.assert_array_equal(rows, 100.0 * first + place // 2)
