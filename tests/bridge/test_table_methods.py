"""The methods a table has beyond a variable: those of the engine, at once and traced."""

import datetime

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from tests.support.table_state import State

KINDS = {
    "hbm": {},
    "hybrid": {"var_type": "hybrid", "init_capacity": 64, "max_capacity": 4096},
}


@pytest.fixture(params=KINDS)
def options(request):
    return KINDS[request.param]


def row_of(key):
    return [float(key), float(key) / 2]


def filled(options, n=33, dtype=None, **others):
    """A table of the keys 0 to n - 1, each looked up by a lookup of its own."""
    table = sok.DynamicVariable(2, dtype=dtype, **options, **others)
    for key in range(n):
        tf.nn.embedding_lookup(table, [key])
    sok.assign(table, np.arange(n), np.array([row_of(k) for k in range(n)], "f4").reshape(n, 2))
    return table


def content(table):
    keys, rows = sok.export(table)
    return dict(zip(keys.numpy().tolist(), tf.cast(rows, tf.float32).numpy().tolist(), strict=True))


def expected(keys):
    return {key: row_of(key) for key in keys}


def test_len_and_in_are_those_of_the_keys(options):
    table = sok.DynamicVariable(2, key_type=tf.uint64, **options)
    assert len(table) == 0 and 0 not in table
    keys = [0, 7, 2**63, 2**64 - 1]
    tf.nn.embedding_lookup(table, np.array(keys, np.uint64))
    scores = table.scores(np.array(keys, np.uint64)).numpy()
    assert len(table) == 4 and all(key in table for key in keys)
    assert np.int32(7) in table and tf.constant(7) in table and np.uint64(2**63) in table
    assert np.array(7) in table and np.array(8) not in table
    assert not any(key in table for key in (1, -1, 2**64, -(2**63), 2**100))
    np.testing.assert_array_equal(table.scores(np.array(keys, np.uint64)), scores)
    assert len(table) == 4
    table.erase([7])
    assert len(table) == 3 and 7 not in table
    for key in ("7", 7.0, [7], None, tf.constant([7]), True):
        instead = "hash_strings" if isinstance(key, str) else "contains"
        with pytest.raises(TypeError, match=f"one key, an integer. Received: .*{instead}"):
            _ = key in table
    with pytest.raises(NotImplementedError, match="__bool__"):
        bool(table)
    for ask in (lambda: len(table), lambda: 3 in table):
        with pytest.raises(RuntimeError, match="is of the moment: a tf.function would ask once"):
            tf.function(ask)()


KEYS = np.array([[1, 40, 3], [3, 7, -5]])


def is_chosen(keys, values, scores):
    assert type(keys) is type(values) is type(scores) is np.ndarray
    assert (keys.dtype, scores.dtype) == (np.int64, np.uint64) and values.shape == (len(keys), 2)
    return (keys % 2 == 1) | (values[:, 1].astype(np.float32) < 0.25) | (scores > 34)


# Methods that a variable and its table have alike: arguments, and the type of the result.
METHODS = {
    "contains": ([KEYS], tf.bool),
    "scores": ([KEYS], tf.uint64),
    "erase": ([KEYS], tf.int64),
    "num_zero_rows": ([], tf.int64),
    "erase_below": ([2.5], tf.int64),
    "clear": ([], None),
    "reserve": ([2000], None),
    "assign_scores": ([np.array([0, 9, 0, 4]), np.arange(4)], None),
    "expire": ([3], tf.int64),
    "expire in 1000 s": ([1000], tf.int64),
}


@pytest.mark.cases("name")
@pytest.mark.pairs
@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_that_of_the_table(options, mode, name):
    variable, twin = (filled(options, 9, name="same") for _ in range(2))
    for key in range(2, 8):
        for table in (variable, twin):
            tf.nn.embedding_lookup(table, [key])
    given, dtype = METHODS[name]
    method, named = name.split()[0], {}
    of_table = [np.ravel(each) if np.ndim(each) else each for each in given]
    if method == "expire":
        named, given, of_table = {"seconds" if " s" in name else "num_lookups": given[0]}, [], []

    def call():
        result = getattr(variable, method)(*given, **named)
        return result if dtype else None  # an operation cannot leave a tf.function

    result, expected = mode(call)(), getattr(twin.table, method)(*of_table, **named)
    if dtype:
        expected = twin.table.backend.to_host(expected)
        assert result.dtype == dtype and result.shape == (KEYS.shape if np.ndim(expected) else ())
        np.testing.assert_array_equal(np.ravel(result), np.ravel(expected))
    assert State.of(variable.table) == State.of(twin.table)


def test_scores_of_ones_own_and_counts(mode):
    """What the engine makes of them decides what is evicted: tests/engine/test_tables.py."""
    own = {"var_type": "hybrid", "evict_strategy": "kCustomized", "max_capacity": 1024}
    table, (keys, scores) = sok.DynamicVariable(2, **own), ([1, 40, 3], [7, 5, 2])
    mode(lambda: [sok.assign(table, keys, tf.ones([3, 2]), tf.constant(scores)), None][1])()
    assert table.scores(keys).numpy().tolist() == scores
    table.assign([3], [[0.0, 0.0]], [1])
    assert table.scores([1, 3, 9]).numpy().tolist() == [7, 1, 0]
    table = sok.DynamicVariable(2, var_type="hybrid", evict_strategy="kLfu", max_capacity=64)
    for _ in range(3):
        tf.nn.embedding_lookup(table, [7])
    mode(lambda: [table.decay_scores(0.5), None][1])()
    assert table.scores([7, 8]).numpy().tolist() == [1, 0]


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16], ids=lambda d: d.name)
def test_export_if_and_erase_if(options, mode, dtype):
    table = filled(options, dtype=dtype)
    tf.nn.embedding_lookup(table, [30, 31, 32])  # after 34 calls that have seen keys
    chosen = [key for key in range(33) if key % 2 or key >= 30 or key == 0]
    keys, rows = mode(lambda: table.export_if(is_chosen))()
    assert (keys.numpy().tolist(), rows.dtype) == (chosen, dtype)
    np.testing.assert_array_equal(tf.cast(rows, tf.float32), [row_of(key) for key in chosen])
    least = int(table.scores([30])[0])
    keys, rows = mode(lambda: table.export_if(min_score=least))()
    assert keys.numpy().tolist() == [30, 31, 32]
    assert mode(lambda: table.export(cutoff=4.5))()[0].numpy().tolist() == [*range(5, 33)]
    assert int(mode(lambda: table.erase_if(is_chosen))()) == len(chosen)
    assert content(table) == expected(set(range(33)) - set(chosen))


ONE_CHOICE = "Give `predicate` or `min_score`, one of them"
WRONG = [
    (
        lambda t: t.erase_if(lambda keys, *_: keys),
        ValueError,
        "one bool per key, shape .3,",
    ),
    (lambda t: t.export_if(), ValueError, ONE_CHOICE),
    (lambda t: t.export_if(len, min_score=1), ValueError, ONE_CHOICE),
    (lambda t: t.export_if(min_score=-1), ValueError, "`min_score` must be in"),
    (lambda t: t.assign_scores([1], [1.0]), TypeError, "must be integers. Received: dtype float32"),
    (lambda t: t.assign([1], [[1.0, 2.0]], [1, 2]), ValueError, "scores must be integers of shape"),
    (lambda t: t.expire(), ValueError, "Give `num_lookups` or `seconds`"),
    (lambda t: t.expire(days=3), TypeError, r"Received: days=3. Give seconds=3 \* 86_400."),
    (lambda t: t.expire(num_lookups=3, age=5), TypeError, "Received: age=5. Give one of the two."),
    (lambda t: t.expire(seconds=datetime.timedelta(3)), TypeError, "Give its total_seconds"),
    (lambda t: t.erase_below(0.0), ValueError, "`cutoff` must be above 0"),
    (lambda t: next(t.export_chunks(0)), ValueError, "`num_slots` must be at least 1"),
]


def test_what_is_wrong_is_refused_and_changes_nothing():
    table = filled({}, 3)
    before = State.of(table.table)
    for call, error, text in WRONG:
        with pytest.raises(error, match=text):
            call(table)
    assert State.of(table.table) == before


@pytest.mark.cases("num_slots")
@pytest.mark.parametrize(("num_slots", "dtype"), [(7, tf.bfloat16), (1 << 20, tf.float32)])
def test_export_chunks(options, num_slots, dtype):
    table = filled(options, dtype=dtype)
    found, scores = {}, {}
    for keys, rows, of_chunk in table.export_chunks(num_slots):
        assert (keys.dtype, rows.dtype, of_chunk.dtype) == (tf.int64, dtype, tf.uint64)
        assert len(keys) <= num_slots
        rows = tf.cast(rows, tf.float32).numpy().tolist()
        found |= dict(zip(keys.numpy().tolist(), rows, strict=True))
        scores |= dict(zip(keys.numpy().tolist(), of_chunk.numpy().tolist(), strict=True))
    assert found == expected(range(33))
    all_scores = table.scores(np.arange(33)).numpy().tolist()
    assert scores == dict(zip(range(33), all_scores, strict=True))
    chunks = table.export_chunks(7)
    next(chunks)
    table.erase([4])
    with pytest.raises(RuntimeError, match="has changed during export_chunks"):
        list(chunks)


def test_statistics_count_what_was_done(options):
    table = filled(options)
    tf.nn.embedding_lookup(table, [1, 2, 99])
    table.erase([1])
    counts = table.statistics()
    counted = (counts.size, counts.inserted_total, counts.erased_total, counts.evicted_total)
    assert counted == (33, 34, 1, 0)
    assert (counts.found_total, counts.missed_total) == (2, 34)
    with pytest.raises(RuntimeError, match="outside of the tf.function"):
        tf.function(lambda: table.statistics().size)()


def test_an_epoch_is_set_outside_of_functions():
    options = {"init_capacity": 16, "max_capacity": 16, "evict_strategy": "kEpochLfu"}
    table = sok.DynamicVariable(2, var_type="hybrid", **options)
    table.epoch = 1
    assert table.epoch == table.table.epoch == 1
    with pytest.raises(ValueError, match="`epoch` must be in"):
        table.epoch = -1
    with pytest.raises(TypeError, match="`epoch` must be an integer. Received: 2.5"):
        table.epoch = 2.5

    @tf.function
    def next_epoch():
        table.epoch = 2

    with pytest.raises(RuntimeError, match="Set it outside of the function"):
        next_epoch()
    assert table.epoch == 1


def test_hbm_has_no_epoch():
    table = sok.DynamicVariable(2)
    with pytest.raises(NotImplementedError, match="no epoch.*var_type='hybrid'"):
        table.epoch = 1
    with pytest.raises(NotImplementedError, match="no epoch"):
        _ = table.epoch


@pytest.mark.parametrize("kind", ["hbm", "hybrid"])
def test_a_table_that_shrinks_while_it_is_exported_says_so(kind):
    table = sok.DynamicVariable(2, var_type=kind, name="shrinking")
    keys = np.arange(10_000)
    sok.assign(table, keys, np.ones((len(keys), 2), np.float32))
    with pytest.raises(RuntimeError, match="has changed during export_chunks"):
        for number, _ in enumerate(table.export_chunks(num_slots=5_000)):
            if number == 0:
                table.erase(keys[1000:])
