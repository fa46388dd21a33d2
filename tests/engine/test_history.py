"""What a table knows of the past of its keys, against dicts."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from scripts.bench.common.row_steps import ensure_state
from sok_lite.comm import SingleCommunicator, run_ranks
from sok_lite.engine import lookup
from sok_lite.engine.gathered_update import GatheredStep, Stepped
from sok_lite.engine.optimizers import SGD, Adagrad
from sok_lite.engine.rows.store import NO_ROW
from sok_lite.engine.table import clock
from sok_lite.engine.table.content import take
from sok_lite.engine.table.restore import restore
from sok_lite.engine.update import StepOptions
from sok_lite.engine.update_rows import Update
from tests.support.helpers import new_table, sized, update_of
from tests.support.parts import Part, by_part, forward_parts
from tests.support.steps import apply_updates
from tests.support.table_audit import audit

I64 = np.iinfo(np.int64)
RESERVED = [I64.max, I64.min, I64.max - 1]


def counting(backend, threshold=0, **options):
    """A table that counts how often keys come."""
    options = {"evict_strategy": "kLfu", "count_repeats": True} | options
    return new_table(backend, 2, "hybrid", enter_threshold=threshold, **options)


def assert_counts(table, expected):
    """All keys that were ever seen, and one that was not, are counted as in a dict."""
    keys = np.array([*expected, 10**12], np.int64)
    got = table.counts(keys)
    assert got.dtype == np.int64
    assert table.backend.to_host(got).tolist() == [*expected.values(), 0]


# -------------------------------------------------------------------- how often


@pytest.mark.parametrize("threshold", [0, 1, 2, 5])
@pytest.mark.parametrize("n", [0, 1, 31, 33, 1000])
def test_every_occurrence_counts(backend, threshold, n):
    table, seen = counting(backend, threshold), Counter()
    rng = np.random.default_rng(n)
    for _ in range(6):
        # Few keys come most often.
        keys = np.minimum(rng.geometric(0.1, n), n) - n // 3
        keys = np.array([*keys.tolist(), *RESERVED[: n % 3], *RESERVED[: n % 2]], np.int64)
        keys = rng.permutation(keys)
        values, rows, num_without_row = table.lookup(keys)
        seen.update(keys.tolist())
        enters = np.array([seen[key] >= threshold for key in keys.tolist()], bool)
        np.testing.assert_array_equal(backend.to_host(rows) != NO_ROW, enters)
        assert num_without_row == (~enters).sum()
        first = np.array([[key % 1000] * 2 for key in keys.tolist()]).reshape(-1, 2)
        np.testing.assert_array_equal(backend.to_host(values), first)
        assert_counts(table, seen)
    held = {key for key, count in seen.items() if count >= threshold}
    assert set(backend.to_host(table.export()[0]).tolist()) == held
    if threshold > 1:
        assert table.pending.size == len(seen) - len(held)


@pytest.mark.parametrize("threshold", [0, 1, 2, 4])
def test_keys_that_were_seen_and_have_no_row(backend, threshold):
    table, seen = counting(backend, threshold), Counter()

    def assert_sighted():
        keys = table.pending_keys()
        assert keys.dtype == np.int64
        held = backend.to_host(table.export()[0]).tolist()
        assert backend.to_host(keys).tolist() == sorted(set(seen) - set(held))

    assert_sighted()
    for batch in ([5, -6, 5], [7], [*RESERVED, -6, 8, 8, 8, 8], range(-40, 40), [5, 7]):
        table.lookup(np.array(batch, np.int64))
        seen.update(batch)
        assert_sighted()
        assert set(backend.to_host(table.pending_keys()).tolist()) == {
            key for key, count in seen.items() if count < threshold
        }
    table.erase(np.array([-7, 9], np.int64))
    del seen[-7], seen[9]
    assert_sighted()
    table.clear()
    assert table.pending_keys().size == 0


def test_a_table_that_admits_all_has_sighted_none(backend):
    table = new_table(backend, 2, "hbm", key_type="int32")
    table.lookup(np.array([5, -6], np.int32))
    keys = table.pending_keys()
    assert keys.shape == (0,) and keys.dtype == np.int32


@pytest.mark.parametrize("unique_keys", [False, True])
@pytest.mark.parametrize("threshold", [0, 1000])
@pytest.mark.parametrize("n", [0, 1, 31, 33, 1000])
def test_given_counts_add_up(backend, threshold, n, unique_keys):
    table, seen = counting(backend, threshold), Counter()
    rng = np.random.default_rng(n)
    for _ in range(4):
        keys = rng.permutation(3 * n)[:n] if unique_keys else rng.integers(0, n // 2 + 1, n)
        counts = rng.choice([1, 2, 77, 2**32 - 1], n, p=[0.5, 0.3, 0.19, 0.01])
        table.lookup(keys, counts=counts, unique_keys=unique_keys)
        for key, count in zip(keys.tolist(), counts.tolist(), strict=True):
            seen[key] += count
        assert_counts(table, seen)
        held = {key for key, count in seen.items() if count >= threshold}
        assert set(backend.to_host(table.export()[0]).tolist()) == held


def test_counts_are_as_large_as_64_bits(backend):
    table = counting(backend)
    table.lookup([1], counts=[2**32 - 1])
    table.find_or_insert([1, 1])
    table.assign_scores([2], [3])
    table.lookup([2])
    table.assign_scores([2], np.array([2**64 - 2], np.uint64))
    assert backend.to_host(table.counts([1, 2])).tolist() == [2**32 + 1, 2**63 - 1]
    table.lookup(np.full(5, 2))
    assert backend.to_host(table.scores([2])).tolist() == [2**64 - 1]


def test_reading_counts_nothing_and_a_write_counts_its_keys_once(backend):
    table, seen = counting(backend, 2), Counter()
    table.find_or_insert([1, 1, 2])
    seen.update([1, 1, 2])
    for _ in range(3):
        table.find([1, 2])
        table.lookup([1, 1, 2, 2], insert=False)
        table.lookup([1, 2, 3], insert=False, counts=[5, 5, 5])
        table.assign([1, 1, 2], np.zeros((3, 2), np.float32))
        table.accumulate([1, 1, 2], np.zeros((3, 2), np.float32))
    assert_counts(table, seen)
    table.insert_or_assign([1, 1, 4], np.ones((3, 2), np.float32))
    seen.update([1, 4])
    assert_counts(table, seen)


def test_no_count_falls_when_a_key_gets_its_row_by_a_write(backend):
    table = counting(backend, 10)
    table.lookup([1, 1, 1, 2, 2, 3])
    table.insert_or_assign([1], np.ones((1, 2), np.float32))
    assert_counts(table, {1: 4, 2: 2, 3: 1})
    table.accum_or_assign([2], np.ones((1, 2), np.float32), np.array([False]))
    assert_counts(table, {1: 4, 2: 3, 3: 1})
    table.find_or_insert([3], scores=np.array([2**64 - 1], np.uint64))
    table.insert_or_assign([5], np.ones((1, 2), np.float32), np.array([3], np.uint64))
    assert_counts(table, {1: 4, 2: 3, 3: 2**63 - 1, 5: 3})


def test_a_filtered_key_is_not_counted(backend):
    table = counting(backend, 3)
    table.lookup([1, 1, 1, 1], filter_ratio=0.0)
    assert_counts(table, {1: 0})
    table.lookup([1, 1])
    assert_counts(table, {1: 2})


def test_counts_come_back_with_a_table(backend):
    table, other = counting(backend, 4), counting(backend, 4)
    table.lookup([1] * 7 + [2] * 3)
    restore(other, take(table))
    assert_counts(other, {1: 7, 2: 3})
    other.lookup([2])
    assert_counts(other, {1: 7, 2: 4})
    assert other.size == 2


def test_an_evicting_table_keeps_what_came_most_often(backend):
    options = {"init_capacity": 16, "max_capacity": 16, "on_refused": "ignore"}
    table = counting(backend, **options)
    table.lookup(np.repeat(np.arange(16), 3))
    table.lookup(np.arange(100, 116))
    table.lookup(np.repeat(np.arange(200, 203), 2))
    held = backend.to_host(table.export()[0])
    assert_counts(table, {200: 2, 201: 2, 202: 2})
    # Each took the place of one of those that came once.
    assert len(held) == 16 and (held >= 200).sum() == 3


def test_tables_of_one_call_count_their_own_keys(backend):
    first, second = counting(backend, 2), counting(backend)
    plain = new_table(backend, 2, "hybrid", evict_strategy="kLfu")
    hbm = new_table(backend, 2)
    batches = [[5, 5, 6], [5, 7, 7, 7], [5, 5], [5, 5], [6, 5]]
    parts = []
    for table, keys in zip((first, second, plain, hbm, first), batches, strict=True):
        keys = backend.from_host(np.array(keys))
        splits = backend.from_host(np.array([0, 1, keys.size]))
        parts.append(Part(table, keys, splits, None, "sum"))
    for times in (1, 2):  # the keys are new, and then known
        outs, _ = forward_parts(backend, SingleCommunicator(), parts)
        for keys, out in zip(batches, outs[:], strict=True):
            np.testing.assert_array_equal(backend.to_host(out)[:, 0], [keys[0], sum(keys[1:])])
        assert_counts(first, {5: 3 * times, 6: 2 * times})
        assert_counts(second, {5: times, 7: 3 * times})
        assert backend.to_host(plain.scores([5])).tolist() == [times]
    assert first.size == 2 and hbm.size == 1


def test_a_key_counts_once_for_each_rank_that_asks(backend):
    def work(comm):
        table = counting(backend, name="t")
        keys = backend.from_host(np.array([4, 4, 4, 2 + comm.rank]))
        part = Part(table, keys, backend.from_host(np.array([0, 4])), None, "sum")
        forward_parts(backend, comm, [part])
        return backend.to_host(table.counts([4, 2, 3])).tolist()

    assert run_ranks(2, work) == [[2, 1, 0], [0, 0, 1]]


def test_a_batch_of_millions_is_counted(backend):
    n = sized(backend, 3_000_000, 3_000)
    table = counting(backend)
    table.lookup(np.zeros(n, np.int64), out=None)
    table.lookup(np.repeat(np.arange(3), [n // 2, 1, n // 2]))
    assert_counts(table, {0: n + n // 2, 1: 1, 2: n // 2})


# -------------------------------------------------------------------- when


@pytest.mark.parametrize("n", [0, 1, 31, 33, 1000])
@pytest.mark.parametrize(
    "options",
    [{}, {"var_type": "hybrid"}, {"var_type": "hybrid", "evict_strategy": "kLfu"}]
    + [{"var_type": "hybrid", "enter_threshold": 3}],
    ids=["hbm", "kLru", "kLfu", "sighting"],
)
def test_a_table_tells_when_keys_were_seen(backend, monkeypatch, options, n):
    now = [7e8]
    monkeypatch.setattr(clock, "time", SimpleNamespace(time=lambda: now[0]))
    table, seen = new_table(backend, 2, **options), {}
    rng = np.random.default_rng(n)
    for _ in range(8):
        now[0] += float(rng.integers(2, 1000))
        keys = np.array([*rng.integers(0, n + 1, n // 3 + 1).tolist(), *RESERVED[: n % 3]])
        table.lookup(keys)
        seen |= dict.fromkeys(keys.tolist(), now[0])
        now[0] += 100
        table.lookup(np.arange(n + 1), insert=False)
        table.find(np.arange(n + 1))
    some = list(seen)[::3]
    table.erase(some)
    seen |= dict.fromkeys([*some, 10**9], 0.0)
    got = table.times(np.array(list(seen)))
    assert got.dtype == np.float64
    assert backend.to_host(got).tolist() == list(seen.values())


# -------------------------------------------------------------------- what has changed

KINDS = {
    "hbm": {},
    "kLru": {"var_type": "hybrid"},
    "kLfu": {"var_type": "hybrid", "evict_strategy": "kLfu"},
    "kCustomized": {"var_type": "hybrid", "evict_strategy": "kCustomized"},
    "tiers": {"var_type": "hybrid", "max_hbm_for_vectors": 64 * 8 / 2**30, "max_capacity": 4096},
}
DIM = 2


class Changes:
    """The oracle: a number for each key that changed, and for each that is gone."""

    def __init__(self):
        self.now, self.changed, self.gone = 0, {}, {}

    def look_up(self, keys):
        self.now += 1
        self.write(keys, insert=True)

    def write(self, keys, insert=False):
        for key in map(int, keys):
            if insert or key in self.changed:
                self.changed[key] = self.now
                self.gone.pop(key, None)

    def remove(self, keys):
        for key in map(int, keys):
            if self.changed.pop(key, None) is not None:
                self.gone[key] = self.now


def assert_changes(table, oracle):
    host = table.backend.to_host
    assert table.num_lookups == oracle.now
    for number in range(oracle.now + 1):
        changed = sorted(key for key, at in oracle.changed.items() if at >= number)
        assert host(table.changed_since(number)).tolist() == changed, number
        gone = sorted(key for key, at in oracle.gone.items() if at >= number)
        assert host(table.removed_since(number)).tolist() == gone, number


def train(table, keys, learning_rate=0.5):
    update = update_of(table, Adagrad(), keys, np.ones((len(keys), DIM)))
    apply_updates([update], learning_rate, 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [0, 1, 31, 33, 1000])
def test_a_table_tells_what_has_changed_and_gone(backend, kind, n):
    table, oracle = new_table(backend, DIM, **KINDS[kind]), Changes()
    table.log_removals()
    rng = np.random.default_rng(n)
    n = sized(backend, n, min(n, 100))

    def some(most):
        keys = rng.integers(0, most + 1, n // 3 + 1) - most // 2
        return np.array([*keys.tolist(), *RESERVED[: n % 3]], np.int64)

    def rows(keys):
        return backend.from_host(np.ones((len(keys), DIM), np.float32))

    for turn in range(6):
        keys = some(2 * n)
        table.lookup(keys)
        oracle.look_up(keys)
        table.lookup(some(2 * n), insert=False)
        table.find(some(2 * n))
        keys = some(n)
        (table.assign if turn % 2 else table.accumulate)(keys, rows(keys))
        oracle.write(keys)
        keys = some(n)
        table.insert_or_assign(keys, rows(keys))
        oracle.look_up(keys)
        held = list(oracle.changed)[::5]
        ensure_state(table.store, "m", 0.0)
        table.assign_state("m", held, np.ones((len(held), DIM), np.float32))
        oracle.write(held)
        held = list(oracle.changed)[::4]  # none without a row, which an update would insert
        train(table, held * 2)
        oracle.write(held)
        keys = some(n)
        table.erase(keys)
        oracle.remove(keys)
        assert_changes(table, oracle)
    limit = oracle.now - 3
    table.expire(num_lookups=4)
    oracle.remove([key for key, at in oracle.changed.items() if at < limit])
    assert_changes(table, oracle)
    table.erase_if(lambda entries: entries.keys % 2 == 0)
    oracle.remove([key for key in oracle.changed if key % 2 == 0])
    assert_changes(table, oracle)
    table.forget_removals(before=3)
    with pytest.raises(ValueError, match="removals since lookup 3. Received: number=2"):
        table.removed_since(2)
    gone = sorted(key for key, at in oracle.gone.items() if at >= 3)
    assert backend.to_host(table.removed_since(3)).tolist() == gone
    table.clear()
    oracle.remove(list(oracle.changed))
    gone = sorted(key for key, at in oracle.gone.items() if at >= oracle.now)
    assert backend.to_host(table.removed_since(oracle.now)).tolist() == gone
    assert table.changed_since(0).size == 0
    table.lookup(some(n))


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_of_keys_that_are_new_inserts_them(backend, kind):
    table, oracle = new_table(backend, DIM, **KINDS[kind]), Changes()
    table.log_removals()
    for keys in ([1, 2], [3]):
        table.lookup(keys)
        oracle.look_up(keys)
    train(table, [1, 4])
    oracle.look_up([1, 4])
    assert_changes(table, oracle)


def gradient(backend, tables, keys, **options):
    """Looks keys up in some tables, and returns the gradient of each."""
    keys = backend.from_host(np.array(keys))
    splits, comm = backend.from_host(np.arange(keys.size + 1)), SingleCommunicator()
    parts = [Part(table, keys, splits, None, "sum", **options) for table in tables]
    _, context = forward_parts(backend, comm, parts)
    grads = [backend.xp.ones((keys.size, DIM), np.float32) for _ in tables]
    return by_part(lookup.backward(backend, grads, context))


@pytest.mark.parametrize("of_gradient", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_what_an_update_changes_has_changed_whichever_lookup_came_last(backend, kind, of_gradient):
    tables = [new_table(backend, DIM, name=name, **KINDS[kind]) for name in "ab"]
    oracle = Changes()
    for table in tables:
        table.log_removals()
        table.find_or_insert(np.arange(10))
    oracle.look_up(range(10))

    def apply(grads):
        apply_updates(
            [
                Update(table, SGD(), grad.keys, grad.row_grads, of_gradient=of_gradient)
                for table, grad in zip(tables, grads, strict=True)
            ],
            *(0.5, 1),
        )

    first = gradient(backend, tables, [1, 2, 3])
    oracle.look_up([1, 2, 3])
    apply(first)
    second = gradient(backend, tables, [4, 5, 6])
    oracle.look_up([4, 5, 6])
    apply(second)
    for table in tables:
        assert_changes(table, oracle)
    apply(first)  # a step of an earlier gradient, of as many keys as the last one
    oracle.write([1, 2, 3])
    for table in tables:
        assert_changes(table, oracle)
    third = gradient(backend, tables, [7, 7, 8])
    oracle.look_up([7, 8])
    for table in tables:
        table.lookup([9])
    oracle.look_up([9])
    apply(third)
    oracle.write([7, 8])
    unseen = gradient(backend, tables, [0, 1], insert=False)
    for table in tables:
        assert_changes(table, oracle)
    apply(unseen)
    oracle.write([0, 1])
    for table in tables:
        assert_changes(table, oracle)


def test_an_update_of_a_function_changes_rows_too(backend):
    table, oracle = new_table(backend, DIM), Changes()
    table.log_removals()
    for keys in ([1, 2, 3], [4]):
        table.lookup(keys)
        oracle.look_up(keys)
    update = update_of(table, None, [2, 3], np.ones((2, DIM)))

    def step(gathered):
        return [Stepped(each.rows - each.grads, each.states) for each in gathered], None

    update_step = GatheredStep([update], lambda table: {}, step, StepOptions(0.0, 1))
    update_step.prepare()
    assert_changes(table, oracle)
    update_step.commit()
    oracle.write([2, 3])
    assert_changes(table, oracle)


@pytest.mark.parametrize("kind", ["kLfu", "kEpochLfu", "kCustomized", "kEpochLru"])
def test_a_write_leaves_scores_alone(backend, kind):
    table = new_table(backend, DIM, "hybrid", evict_strategy=kind)
    table.lookup([1, 1, 2])
    table.lookup([1])
    table.lookup([3])
    before = backend.to_host(table.scores([1, 2, 3])).tolist()
    table.assign([1, 2], np.zeros((2, DIM), np.float32))
    table.accumulate([2, 3], np.zeros((2, DIM), np.float32))
    train(table, [1, 2])
    assert backend.to_host(table.scores([1, 2, 3])).tolist() == before
    assert backend.to_host(table.changed_since(3)).tolist() == [1, 2, 3]


@pytest.mark.parametrize("kind", ["kLru", "kLfu", "kCustomized"])
def test_evicted_keys_are_gone(backend, kind):
    table = new_table(
        *(backend, DIM, "hybrid"),
        evict_strategy=kind,
        init_capacity=16,
        max_capacity=16,
        on_refused="ignore",
    )
    table.log_removals()
    oracle, rng = Changes(), np.random.default_rng(0)
    for turn in range(12):
        keys = rng.integers(-20, 20, (1, 5, 40)[turn % 3])
        before = set(oracle.changed)
        _, evicted = table.lookup_and_evict(keys)
        evicted = backend.to_host(evicted.keys).tolist()
        held = set(backend.to_host(table.export()[0]).tolist())
        oracle.look_up(sorted(set(keys.tolist()) & held))
        oracle.remove(evicted)
        assert set(oracle.changed) == held == (before | set(keys.tolist())) & held
        assert_changes(table, oracle)
        if turn % 4 == 3:
            table.erase(keys[:2])
            oracle.remove(keys[:2])
    assert len(oracle.gone) > 10
    audit(table)


def test_numbers_are_halved_with_those_of_the_table(backend):
    for options in ({}, {"var_type": "hybrid"}):
        table = new_table(backend, DIM, **options)
        table.log_removals()
        table.find_or_insert([1, 2, 3, 4])
        table.clock.prepare_restart(2**32 - 2)()
        table.find_or_insert([1, 2])
        table.erase([2, 3])
        noted = table.num_lookups
        table.find_or_insert([4])
        assert table.num_lookups == 2**31
        with pytest.raises(ValueError, match="from 0 to 2,147,483,648.*numbers were halved"):
            table.changed_since(noted)
        assert backend.to_host(table.changed_since(noted >> 1)).tolist() == [1, 4]
        assert backend.to_host(table.removed_since(noted >> 1)).tolist() == [2, 3]
        assert backend.to_host(table.changed_since(2**31)).tolist() == [4]
        assert table.removed_since(2**31).size == 0


@pytest.mark.parametrize("kind", ["hbm", "kLfu"])
def test_a_restored_table_begins_a_new_log(backend, kind):
    table, other = (new_table(backend, DIM, **KINDS[kind]) for _ in range(2))
    for keys in ([1, 2], [2, 3], [4]):
        table.find_or_insert(keys)
    other.log_removals()
    other.find_or_insert([7])
    other.erase([7])
    restore(other, take(table))
    assert backend.to_host(other.changed_since(2)).tolist() == [2, 3, 4]
    assert other.removed_since(3).size == 0
    with pytest.raises(ValueError, match="since lookup 3"):
        other.removed_since(2)
    other.erase([1, 7])
    assert backend.to_host(other.removed_since(3)).tolist() == [1]
    restore(table, take(other))
    assert table.removals is None


@pytest.mark.parametrize("key_type", ["int32", "uint64"])
def test_keys_come_in_the_tables_type_and_order(backend, key_type):
    table = new_table(backend, DIM, key_type=key_type)
    table.log_removals()
    keys = np.array([5, 1, np.iinfo(key_type).max, 3, np.iinfo(key_type).min], key_type)
    table.find_or_insert(keys)
    changed = table.changed_since(0)
    assert changed.dtype == key_type
    assert backend.to_host(changed).tolist() == sorted(keys.tolist())
    table.erase(keys)
    removed = table.removed_since(0)
    assert removed.dtype == key_type
    assert backend.to_host(removed).tolist() == sorted(keys.tolist())


def test_the_log_counts_as_memory_and_gives_it_back(backend):
    table = new_table(backend, DIM)
    table.log_removals()
    before, n = table.statistics().index_bytes, sized(backend, 100_000, 5_000)
    table.find_or_insert(np.arange(n))
    table.clear()
    assert 16 * n < table.statistics().index_bytes - before < 60 * n
    table.log_removals()  # there is one
    assert table.removed_since(0).size == n
    table.find_or_insert([1])
    table.forget_removals(before=2)
    assert table.removals.size == 0 and table.statistics().index_bytes == before


def test_without_memory_for_the_log_nothing_is_removed(backend, monkeypatch):
    table = new_table(backend, DIM)
    table.log_removals()
    table.find_or_insert(np.arange(2000))

    def none_left(num_bytes):
        raise MemoryError("none left")

    with monkeypatch.context() as patch:
        patch.setattr(backend, "zeros_chunk", none_left)
        with pytest.raises(MemoryError):
            table.erase(np.arange(1000))
        with pytest.raises(MemoryError):
            table.clear()
    assert table.size == 2000 and table.removed_since(0).size == 0


@pytest.mark.parametrize("number", [-1, 2, 2**40], ids=str)
def test_numbers_of_no_lookup_are_refused(backend, number):
    table = new_table(backend, DIM)
    table.find_or_insert([1])
    table.log_removals()
    for ask in (table.changed_since, table.removed_since):
        with pytest.raises(ValueError, match=f"from 0 to 1. Received: number={number:,}"):
            ask(number)
        with pytest.raises(TypeError, match="must be an integer. Received: number=0.5"):
            ask(0.5)
    with pytest.raises(ValueError, match=f"Received: before={number:,}"):
        table.forget_removals(before=number)
    assert backend.to_host(table.removed_since(1)).tolist() == []
    with pytest.raises(ValueError, match="the removals since lookup 1. Received: number=0"):
        table.removed_since(0)


def test_without_a_log_nobody_knows_what_is_gone(backend):
    table = new_table(backend, DIM)
    with pytest.raises(ValueError, match=r"'table' does not note.*log_removals\(\)"):
        table.removed_since(0)
    with pytest.raises(ValueError, match=r"log_removals\(\)"):
        table.forget_removals(before=0)


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ([1], r"integers of shape \(2,\).*int64 of shape \(1,\)"),
        ([1.0, 2.0], "integers of shape.*float64"),
        ([1, 0], "from 1 to 4294967295. Received: from 0 to 1"),
        ([1, 2**32], "Received: from 1 to 4294967296"),
    ],
    ids=str,
)
def test_wrong_counts_are_refused(backend, counts, text):
    table = counting(backend)
    with pytest.raises(ValueError, match=text):
        table.lookup([1, 2], counts=np.array(counts))
    assert table.size == 0 == table.num_lookups


@pytest.mark.parametrize("options", [{}, {"var_type": "hybrid", "evict_strategy": "kLfu"}], ids=str)
def test_a_table_that_does_not_count_says_so(backend, options):
    table = new_table(backend, **options)
    with pytest.raises(ValueError, match="'table' does not.*count_repeats=True"):
        table.counts([1])
    with pytest.raises(ValueError, match="does not.*count_repeats=True"):
        table.lookup([1], counts=[1])


@pytest.mark.parametrize("kind", ["hbm", "hybrid"])
def test_rows_that_have_changed_since_a_time(backend, monkeypatch, kind):
    table = new_table(backend, 2, kind, key_type="int32")
    for time, keys in ((100.0, [3, 1, 2]), (200.0, [5, 1]), (300.0, [-4])):
        monkeypatch.setattr(clock.time, "time", lambda: time)  # noqa: B023
        table.lookup(np.array(keys, np.int32))
    table.assign(np.array([2], np.int32), np.full((1, 2), 7, np.float32))
    table.erase(np.array([5], np.int32))
    for since, expected in ((0, [-4, 1, 2, 3]), (150, [-4, 1, 2]), (250, [-4, 2]), (400, [])):
        keys, rows = map(backend.to_host, table.export_since(since))
        assert keys.dtype == np.int32 and keys.tolist() == expected
        first = [7 if key == 2 else key % 1000 for key in expected]
        np.testing.assert_array_equal(rows, np.array([first, first]).T.reshape(-1, 2))
