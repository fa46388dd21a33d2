"""Counts and times of keys, admission by counts, removal by time: against dicts."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from sok_lite import kv_variable as kv
from sok_lite.kv_variable import get_kv_variable
from tests.kv_variable.test_scatter import FUNCTIONS

tf1 = tf.compat.v1
DIM = 3
KEYS = np.array([0, 5, -6, 7, 13, -(2**63), 2**63 - 1])
ASKED = np.append(KEYS, 77).reshape(2, 4)


@pytest.fixture
def now(monkeypatch):
    """The time of the clock of tables; `now.time += seconds` lets it pass."""

    class Now:
        time = 1_000_000_000.0

    monkeypatch.setattr("time.time", lambda: Now.time)
    return Now


class Known:
    """The oracle: rows, counts and times by key. A row begins with ones."""

    def __init__(self, threshold, now):
        self.threshold, self.now = threshold, now
        self.rows, self.counts, self.times = {}, {}, {}

    def row(self, key, missing=1.0):
        return self.rows.get(key, np.full(DIM, missing, np.float32))

    def see(self, keys, counts=None):
        found = [self.row(key) for key in keys]
        for key, count in zip(keys, [1] * len(keys) if counts is None else counts, strict=True):
            self.counts[key] = self.counts.get(key, 0) + count
            self.times[key] = int(self.now.time)
        for key in keys:
            if self.counts[key] >= self.threshold:
                self.rows.setdefault(key, self.row(key))
        return found

    def write(self, keys, values, function):
        for key, value in zip(keys, values, strict=True):
            self.rows[key] = np.float32(function(self.row(key), value))
        self.see(set(keys))

    def train(self, keys):
        """A step by -0.25 for each occurrence of a key with a row."""
        self.see(keys)
        for key in keys:
            if key in self.rows:
                self.rows[key] = self.rows[key] - np.float32(0.25)

    def remove(self, keys):
        for each in (self.rows, self.counts, self.times):
            for key in keys:
                each.pop(key, None)

    def old(self, seconds):
        return [key for key, time in self.times.items() if time <= self.now.time - seconds]


class Calls:
    """Drawn calls of a variable, each made of the oracle too."""

    def __init__(self, here, variable, known, rng, knows_times):
        self.here, self.variable, self.known, self.rng = here, variable, known, rng
        self.parts, self.knows_times = variable.parts, knows_times
        self.optimizer = tf1.train.GradientDescentOptimizer(0.25)
        self.operations = itertools.cycle(FUNCTIONS)
        self.facts = here.step(self.say, ASKED)

    def take(self, name):
        keys = self.rng.choice(KEYS, self.rng.integers(0, 6))
        getattr(self, name)(keys, keys.tolist())

    def look_up(self, keys, listed):
        rows = self.here.run(lambda k: tf.nn.embedding_lookup(self.variable, k), keys)
        np.testing.assert_array_equal(rows, np.reshape(self.known.see(listed), (-1, DIM)))

    def pool(self, keys, listed):
        lengths = [len(keys) // 2, 0, len(keys) - len(keys) // 2]

        def run(keys):
            ids = tf.RaggedTensor.from_row_lengths(keys, lengths)
            return tf.nn.embedding_lookup_sparse(self.variable, ids, None, combiner="mean")

        self.here.run(run, keys)
        self.known.see(listed)

    def predict(self, keys, listed):
        look_up = kv.embedding_lookup
        rows = self.here.run(lambda k: look_up(self.variable, k, training=False), keys)
        expected = [self.known.row(key, 0.0) for key in listed]
        np.testing.assert_array_equal(rows, np.reshape(expected, (-1, DIM)))

    def count(self, keys, listed):
        """A count may be larger than 16 bits."""
        counts = self.rng.choice([1, 2, 70_000], keys.shape)
        if self.rng.integers(2):
            self.here.run(self.variable.increase_counting, keys, counts)
        else:
            read = self.variable.sparse_read_with_counts
            self.here.run(read, keys.reshape(1, -1), counts.reshape(1, -1))
        self.known.see(listed, counts.tolist())

    def train(self, keys, listed):
        def step(keys):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.nn.embedding_lookup(self.variable, keys))
            if self.here.is_graph:
                pairs = self.optimizer.compute_gradients(loss, self.parts)
            else:
                pairs = list(zip(tape.gradient(loss, self.parts), self.parts, strict=True))
            done = self.optimizer.apply_gradients(pairs)
            return done if self.here.is_graph else loss

        self.here.run(step, keys)
        self.known.train(listed)

    def insert(self, keys, listed):
        rows = self.rng.choice([0.0, 1e-30, -1.0, 3.0], (len(keys), DIM)).astype(np.float32)
        self.here.run(lambda k, r: kv.insert_kv_embedding(self.variable, k, r), keys, rows)
        self.known.write(listed, rows, FUNCTIONS["update"])

    def scatter(self, keys, listed):
        """By any part: it reaches keys of the others."""
        for operation in itertools.islice(self.operations, 3):
            variable = [self.variable, *self.parts][self.rng.integers(len(self.parts) + 1)]
            rows = self.rng.choice([-2.0, -0.5, 0.25, 4.0], (len(keys), DIM)).astype(np.float32)
            write = getattr(variable, f"scatter_{operation}")
            self.here.run(lambda k, r, write=write: write(tf.IndexedSlices(r, k)), keys, rows)
            self.known.write(listed, rows, FUNCTIONS[operation])

    def delete(self, keys, listed):
        self.here.run(self.variable.delete, keys)
        self.known.remove(listed)

    def expire(self, keys, listed):
        """Keys with a row and without, of the whole or of a part."""
        ages = [int(self.known.now.time) - time for time in self.known.times.values()]
        seconds, part = int(self.rng.choice(ages or [86400])), len(self.parts)
        given = {"seconds": seconds} if self.rng.integers(2) else {"threshold": seconds / 86400}
        variable = self.variable
        if self.rng.integers(2):
            part = int(self.rng.integers(len(self.parts)))
            variable = self.parts[part]
        gone = self.here.run(lambda: variable.delete_with_timestamp(**given)).tolist()
        old = [k for k in self.known.old(seconds) if part in (len(self.parts), self.part_of(k))]
        assert sorted(gone) == sorted(old)
        self.known.remove(old)

    def part_of(self, key):
        return key % len(self.parts)

    def say(self, asked):
        variable, of_parts = self.variable, [part.export(cutoff=None) for part in self.parts]
        exported = [variable.export(cutoff=None), variable.export(), variable.export(cutoff=2)]
        counted = variable.get_counting(asked), variable.get_timestamp(asked)
        total = [part.total_count for part in self.parts] + [variable.total_freq]
        return exported, variable.value(), of_parts, counted, total

    def check(self):
        known = self.known
        exported, value, of_parts, counted, total = self.facts()
        rows = dict(sorted(known.rows.items()))
        for (keys, found), least in zip(exported, (0.0, 1e-20, 2.0), strict=True):
            expected = {key: row for key, row in rows.items() if np.abs(row).max() >= least}
            assert keys.tolist() == list(expected)
            np.testing.assert_array_equal(found, np.reshape([*expected.values()], (-1, DIM)))
        np.testing.assert_array_equal(value, exported[0][1])
        for number, (keys, found) in enumerate(of_parts):
            assert keys.tolist() == [key for key in rows if self.part_of(key) == number]
            np.testing.assert_array_equal(found, np.reshape([rows[k] for k in keys], (-1, DIM)))
        for found, expected in zip(counted, (known.counts, known.times), strict=True):
            assert found.dtype == np.int64
            if expected is known.counts or self.knows_times:
                expected = [expected.get(key, 0) for key in ASKED.ravel().tolist()]
                assert found.ravel().tolist() == expected
        numbers = [len(keys) for keys, _ in of_parts]
        assert list(total) == [*numbers, sum(known.counts[key] for key in rows)]


@pytest.mark.pairs
@pytest.mark.parametrize("thresholds", [(0, 3), (1, 2)])
def test_any_calls_do_to_keys_what_they_do_to_dicts(here, made, now, thresholds):
    names = ["look_up", "pool", "predict", "count", "train", "insert", "scatter", "delete"]
    for knows_times, threshold in enumerate(thresholds):
        options = {"initializer": tf1.ones_initializer(), "enter_threshold": threshold}
        variable = made(f"of_{threshold}", **options)
        assert variable.enter_threshold == threshold
        if knows_times:
            variable.table.record.allows = 0  # native code has the machine's clock
        rng = np.random.default_rng(threshold)
        calls = Calls(here, variable, Known(threshold, now), rng, knows_times)
        calls.check()
        for name in rng.permutation([*names * 2, *["expire"] * (5 * knows_times)]):
            now.time += 0.5 * 86400
            calls.take(name)
            calls.check()


def test_no_row_before_admission():
    variable = get_kv_variable("kv", 64, enter_threshold=2)
    tf.nn.embedding_lookup(variable, tf.range(5000, dtype=tf.int64))
    assert variable.table.store.num_rows == 0
    assert variable.storage_size_count.numpy().tolist() == [0, 0]
    tf.nn.embedding_lookup(variable, tf.range(10, dtype=tf.int64))
    assert variable.storage_size_count.numpy().tolist() == [10, 0]


def test_what_a_partition_removes_are_its_keys_without_a_row_as_well():
    with tf.Graph().as_default():
        two = tf1.fixed_size_partitioner(2)
        variable = get_kv_variable("kv", 2, enter_threshold=3, partitioner=two)
        other = get_kv_variable("other", 2, partitioner=two)
        odd = list(variable)[1]
        train = tf.nn.embedding_lookup(variable, [1, -1, -2, 4])
        assign, counting = odd.assign(list(other)[1]), variable.get_counting([1, -1, -2, 4])
        with tf1.Session() as session:
            session.run(tf1.global_variables_initializer())
            for remove in (odd.initializer, assign):
                session.run([train])
                assert session.run(counting)[:2].tolist() == [1, 1]
                session.run(remove)
                assert session.run(counting)[:2].tolist() == [0, 0]
            assert session.run(counting)[2:].tolist() == [2, 2]
            session.run(variable.initializer)
            assert session.run(counting).tolist() == [0, 0, 0, 0]


def test_the_default_is_seven_days(now):
    variable = get_kv_variable("kv", 2)
    kv.insert_kv_embedding(variable, [2, 3], [[1.0, 1.0]] * 2)
    now.time += 6.9 * 86400
    assert variable.delete_with_timestamp().shape == (0,)
    now.time += 0.2 * 86400
    assert variable.delete_with_timestamp().numpy().tolist() == [2, 3]
    for wrong in ({"threshold": -1}, {"seconds": float("nan")}):
        with pytest.raises(ValueError, match="0 or more"):
            variable.delete_with_timestamp(**wrong)


def test_delete_frees_optimizer_states():
    with tf.Graph().as_default():
        variable = get_kv_variable("kv", 2)
        optimizer = tf1.train.AdagradOptimizer(0.1, initial_accumulator_value=0.5)
        rows = tf.nn.embedding_lookup(variable, [1, 2])
        step = optimizer.minimize(tf.reduce_sum(rows))
        delete = variable.delete([1])
        with tf1.Session() as session:
            session.run(tf1.global_variables_initializer())
            session.run(step)
            first = session.run(rows)
            session.run(delete)
            session.run(rows)  # begins anew
            session.run(step)
            again = dict(zip(*map(np.ndarray.tolist, session.run(variable.export())), strict=True))
    assert again[1] == first[0].tolist()  # one step of a new accumulator
    assert again[2] != first[1].tolist()
