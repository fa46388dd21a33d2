"""The methods a table has beyond a variable, against a dict: at once, traced, in TF1."""

import datetime
import time

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok

KINDS = {
    "hbm": {},
    "hybrid": {"var_type": "hybrid", "init_capacity": 1024, "max_capacity": 4096},
}


@pytest.fixture(params=KINDS)
def options(request):
    return KINDS[request.param]


def row_of(key):
    return [float(key), float(key) / 2]


def filled(options, n=33, dtype=None):
    """A table of the keys 0 to n - 1, each looked up by a lookup of its own."""
    table = sok.DynamicVariable(2, dtype=dtype, **options)
    for key in range(n):
        tf.nn.embedding_lookup(table, [key])
    sok.assign(table, np.arange(n), np.array([row_of(k) for k in range(n)], "f4").reshape(n, 2))
    return table


def content(table):
    keys, rows = sok.export(table)
    return dict(zip(keys.numpy().tolist(), tf.cast(rows, tf.float32).numpy().tolist(), strict=True))


def expected(keys):
    return {key: row_of(key) for key in keys}


def doing(function):
    """The same without its result: an operation cannot leave a tf.function."""

    def run(*arguments):
        function(*arguments)

    return run


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


@pytest.mark.parametrize("n", [0, 1, 1000])
def test_erase_removes_the_keys_that_are_there_and_counts_them(options, mode, n):
    """`contains` finds them, and changes no score."""
    table = filled(options)
    keys = np.random.default_rng(n).integers(-40, 80, n)
    before = table.scores(np.arange(33)).numpy()
    found = mode(table.contains)(tf.constant(keys.reshape(1, n)))
    assert found.dtype == tf.bool
    np.testing.assert_array_equal(found, ((keys >= 0) & (keys < 33)).reshape(1, n))
    np.testing.assert_array_equal(table.scores(np.arange(33)), before)
    count = mode(table.erase)(tf.constant(keys))
    left = set(range(33)) - set(keys.tolist())
    assert (count.dtype, int(count)) == (tf.int64, 33 - len(left))
    assert content(table) == expected(left)


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16], ids=lambda d: d.name)
def test_erase_if_and_export_if(options, mode, dtype):
    table = filled(options, dtype=dtype)
    seen = []

    def odd_or_large(keys, values, scores):
        assert type(keys) is type(values) is type(scores) is np.ndarray
        assert (keys.dtype, scores.dtype) == (np.int64, np.uint64)
        assert (values.dtype, values.shape) == (dtype.as_numpy_dtype, (len(keys), 2))
        seen.extend(scores.tolist())
        return (keys % 2 == 1) | (values[:, 1].astype(np.float32) >= 15)

    chosen = [key for key in range(33) if key % 2 or key >= 30]
    keys, rows = mode(lambda: table.export_if(odd_or_large))()
    assert (keys.numpy().tolist(), rows.dtype) == (chosen, dtype)
    np.testing.assert_array_equal(tf.cast(rows, tf.float32), [row_of(key) for key in chosen])
    assert sorted(seen) == sorted(table.scores(np.arange(33)).numpy().tolist())
    with pytest.raises(ValueError, match="one bool per key, shape \\(33,\\). Received: int64"):
        table.erase_if(lambda keys, values, scores: keys)
    assert int(mode(lambda: table.erase_if(odd_or_large))()) == len(chosen)
    assert content(table) == expected(set(range(33)) - set(chosen))


def test_scores_and_export_by_score(options, mode):
    table = filled(options, 5)
    tf.nn.embedding_lookup(table, [1, 3])
    scores = mode(table.scores)(tf.constant([[0, 1], [3, 9]])).numpy()
    assert scores.dtype == np.uint64
    assert scores[0, 1] == scores[1, 0] > scores[0, 0] > scores[1, 1] == 0
    keys, rows = mode(lambda: table.export_if(min_score=int(scores[0, 1])))()
    assert keys.numpy().tolist() == [1, 3]
    np.testing.assert_array_equal(rows, [row_of(1), row_of(3)])
    mode(doing(table.assign_scores))(tf.constant([0, 9, 0]), tf.constant([1, 2, 0]))
    np.testing.assert_array_equal(table.scores([0, 9]), [0, 0])
    for arguments in ({}, {"predicate": len, "min_score": 1}):
        with pytest.raises(ValueError, match="Give `predicate` or `min_score`, one of them"):
            table.export_if(**arguments)
    with pytest.raises(ValueError, match="`min_score` must be in"):
        table.export_if(min_score=-1)
    with pytest.raises(TypeError, match="must be integers. Received: dtype float32"):
        table.assign_scores([1], [1.0])
    table = sok.DynamicVariable(2, var_type="hybrid", evict_strategy="kLfu", max_capacity=64)
    for _ in range(3):
        tf.nn.embedding_lookup(table, [7])
    mode(doing(lambda: table.decay_scores(0.5)))()
    assert table.scores([7, 8]).numpy().tolist() == [1, 0]


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
    with pytest.raises(ValueError, match="`num_slots` must be at least 1"):
        next(table.export_chunks(0))


def test_expire_removes_what_was_not_seen_for_so_long(options, mode):
    table = filled(options, 10)  # assigned by an eleventh lookup
    tf.nn.embedding_lookup(table, [2, 5])
    assert int(mode(lambda: table.expire(num_lookups=2))()) == 0
    assert int(mode(lambda: table.expire(num_lookups=1))()) == 8
    assert set(content(table)) == {2, 5}
    assert int(mode(lambda: table.expire(seconds=1000))()) == 0
    time.sleep(0.02)
    assert int(mode(lambda: table.expire(seconds=0.01))()) == 2
    with pytest.raises((ValueError, tf.errors.OpError), match="Give `num_lookups` or `seconds`"):
        mode(lambda: table.expire())()
    for given, text in (
        ({"days": 3}, r"Received: days=3. Give seconds=3 \* 86_400."),
        ({"num_lookups": 3, "age": 5}, "Received: age=5. Give one of the two."),
        ({"seconds": datetime.timedelta(3)}, r"timedelta\(days=3\). Give its total_seconds\(\)."),
    ):
        with pytest.raises(TypeError, match=text):
            mode(lambda given=given: table.expire(**given))()


def test_erase_below_clear_and_reserve(options, mode):
    table = filled(options)
    assert int(mode(lambda: table.erase_below(4.5))()) == 5
    assert content(table) == expected(range(5, 33))
    with pytest.raises((ValueError, tf.errors.OpError), match="`cutoff` must be above 0"):
        mode(lambda: table.erase_below(0.0))()
    mode(doing(table.clear))()
    assert content(table) == {}
    mode(doing(lambda: table.reserve(2000)))()
    capacity = table.table.capacity
    assert capacity >= 2048
    tf.nn.embedding_lookup(table, np.arange(2000))
    assert table.table.capacity == capacity


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


def test_assign_with_scores_decides_what_is_evicted(mode):
    options = {"init_capacity": 16, "max_capacity": 16, "evict_strategy": "kCustomized"}
    table = sok.DynamicVariable(2, var_type="hybrid", on_refused="ignore", **options)

    @doing
    def assign(keys, scores):
        sok.assign(table, keys, tf.ones([len(keys), 2]), scores)

    mode(assign)(tf.range(16), tf.range(100, 116))
    mode(assign)(tf.constant([16, 17]), tf.constant([5, 105]))
    # 16 is below all; 17 takes the place of the lowest.
    assert set(content(table)) == (set(range(1, 16)) | {17})
    assert int(table.scores([17])[0]) == 105
    # Without a score a new key has 0, in a lookup as in an assignment.
    assert tf.nn.embedding_lookup(table, tf.range(300, 308)).shape == (8, 2)
    sok.assign(table, [200], [[1.0, 1.0]])
    assert set(content(table)) == (set(range(1, 16)) | {17})
    table.assign([3], [[0.0, 0.0]], [1])
    sok.assign(table, [18], [[1.0, 1.0]], [2])
    assert 3 not in content(table) and 18 in content(table)
    with pytest.raises((ValueError, tf.errors.OpError), match="scores must be integers of shape"):
        mode(assign)(tf.constant([1, 2]), tf.constant([1]))


def test_a_new_epoch_outweighs_the_old_one():
    options = {"init_capacity": 16, "max_capacity": 16, "evict_strategy": "kEpochLfu"}
    table = sok.DynamicVariable(2, var_type="hybrid", **options)
    for _ in range(5):
        tf.nn.embedding_lookup(table, np.arange(16))
    table.epoch = 1
    assert table.epoch == 1
    tf.nn.embedding_lookup(table, np.arange(8))
    for key in range(100, 108):
        tf.nn.embedding_lookup(table, [key])
    assert set(content(table)) == set(range(8)) | set(range(100, 108))
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
