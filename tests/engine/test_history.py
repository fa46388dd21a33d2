"""What a table knows of the past of its keys, against dicts."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from sok_lite.comm import run_ranks
from sok_lite.engine.gathered_update import GatheredStep, Stepped
from sok_lite.engine.rows.store import NO_ROW
from sok_lite.engine.table import clock
from sok_lite.engine.table.content import take
from sok_lite.engine.table.restore import restore
from sok_lite.engine.update import StepOptions
from tests.support.helpers import new_table, sized, update_of
from tests.support.parts import Part, forward_parts
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


@pytest.mark.pairs
@pytest.mark.parametrize("repeats", [True, False])
@pytest.mark.parametrize("threshold", [0, 1, 2, 5, 1000])
@pytest.mark.parametrize("n", [0, 1, 31, 33, 1000])
def test_every_occurrence_counts(backend, threshold, n, repeats):
    """As often as a key comes, or as the caller says; without `count_repeats` once a lookup. Keys
    without a row are those seen less."""
    table, seen = counting(backend, threshold, count_repeats=repeats), Counter()
    rng, host = np.random.default_rng(n), backend.to_host
    for turn in range(7):
        # Few keys come most often.
        keys = np.minimum(rng.geometric(0.1, n), n) - n // 3
        keys = np.array([*keys.tolist(), *RESERVED[: n % 3], *RESERVED[: n % 2]], np.int64)
        keys = np.unique(keys) if turn % 4 == 3 else rng.permutation(keys)
        counts, options = np.ones(keys.size, np.int64), {"unique_keys": turn % 4 == 3}
        if not repeats:  # the first of each
            first_at = np.unique(keys, return_index=True)[1]
            counts = np.isin(np.arange(keys.size), first_at).astype(np.int64)
        elif turn % 2:
            counts = rng.choice([1, 2, 77, 2**32 - 1], keys.size, p=[0.5, 0.3, 0.19, 0.01])
            options["counts"] = counts
        values, rows, num_without_row = table.lookup(keys, **options)
        for key, count in zip(keys.tolist(), counts.tolist(), strict=True):
            seen[key] += count
        enters = np.array([seen[key] >= threshold for key in keys.tolist()], bool)
        np.testing.assert_array_equal(host(rows) != NO_ROW, enters)
        assert num_without_row == (~enters).sum()
        first = np.array([[key % 1000] * 2 for key in keys.tolist()]).reshape(-1, 2)
        np.testing.assert_array_equal(host(values), first)
        # What reads, writes a row or is filtered does not count.
        table.find(keys)
        table.lookup(keys, insert=False, counts=counts if repeats else None)
        table.lookup([10**9] * 3, filter_ratio=0.0)
        table.assign(keys, first.astype(np.float32))
        table.accumulate(keys, np.zeros((keys.size, 2), np.float32))
        if repeats:
            assert_counts(table, seen)
        held = {key for key, count in seen.items() if count >= threshold}
        # Scores are the counts, those before a key had a row among them.
        scores = host(table.scores(np.array(sorted(held), np.int64))).tolist()
        assert scores == [seen[key] for key in sorted(held)]
        assert set(host(table.export()[0]).tolist()) == held
        audit(table)
        pending = table.pending_keys()
        assert pending.dtype == np.int64
        assert host(pending).tolist() == sorted(set(seen) - held)
        erased = list(seen)[::5]
        table.erase(np.array(erased, np.int64))
        for key in erased:
            del seen[key]
    table.clear()
    assert table.pending_keys().size == 0


def test_a_table_that_admits_all_has_sighted_none(backend):
    table = new_table(backend, 2, "hbm", key_type="int32")
    table.lookup(np.array([5, -6], np.int32))
    keys = table.pending_keys()
    assert keys.shape == (0,) and keys.dtype == np.int32


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


def test_a_write_counts_its_keys_once_and_no_count_falls_when_a_key_gets_its_row(backend):
    table = counting(backend, 10)
    table.lookup([1, 1, 1, 2, 2, 3])
    table.insert_or_assign([1, 1], np.ones((2, 2), np.float32))
    assert_counts(table, {1: 4, 2: 2, 3: 1})
    table.accum_or_assign([2], np.ones((1, 2), np.float32), np.array([False]))
    assert_counts(table, {1: 4, 2: 3, 3: 1})
    table.find_or_insert([3], scores=np.array([2**64 - 1], np.uint64))
    table.insert_or_assign([5], np.ones((1, 2), np.float32), np.array([3], np.uint64))
    assert_counts(table, {1: 4, 2: 3, 3: 2**63 - 1, 5: 3})


def test_a_key_counts_once_for_each_rank_that_asks(backend):
    def work(comm):
        table = counting(backend, name="t")
        keys = backend.from_host(np.array([4, 4, 4, 2 + comm.rank]))
        part = Part(table, keys, backend.from_host(np.array([0, 4])), None, "sum")
        forward_parts(backend, comm, [part])
        return backend.to_host(table.counts([4, 2, 3])).tolist()

    assert run_ranks(2, work) == [[2, 1, 0], [0, 0, 1]]


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

KINDS = {"hbm": {}, "kLfu": {"var_type": "hybrid", "evict_strategy": "kLfu"}}
DIM = 2


def test_an_update_of_a_function_changes_rows_too(backend):
    table = new_table(backend, DIM)
    for keys in ([1, 2, 3], [4]):
        table.lookup(keys)
    update = update_of(table, None, [2, 3], np.ones((2, DIM)))

    def step(gathered):
        return [Stepped(each.rows - each.grads, each.states) for each in gathered], None

    update_step = GatheredStep([update], lambda table: {}, step, StepOptions(0.0, 1))
    update_step.prepare()
    assert backend.to_host(table.changed_since(2)).tolist() == [4]
    update_step.commit()
    assert backend.to_host(table.changed_since(2)).tolist() == [2, 3, 4]


def test_a_number_of_before_they_were_halved_is_refused(backend):
    table = new_table(backend, DIM)
    table.clock.now = 2**32 - 1
    noted = table.num_lookups
    table.find_or_insert([4])
    with pytest.raises(ValueError, match="from 0 to 2,147,483,648.*numbers were halved"):
        table.changed_since(noted)
    assert backend.to_host(table.changed_since(noted >> 1)).tolist() == [4]


@pytest.mark.parametrize("kind", KINDS)
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


def test_numbers_of_no_lookup_are_refused(backend):
    table = new_table(backend, DIM)
    table.find_or_insert([1])
    table.log_removals()
    for number in (-1, 2, 2**40):
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
    table = new_table(backend, DIM)
    for ask in (lambda: table.removed_since(0), lambda: table.forget_removals(before=0)):
        with pytest.raises(ValueError, match=r"'table' does not note.*log_removals\(\)"):
            ask()


@pytest.mark.cases("text")
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
    table = new_table(backend, var_type="hybrid", evict_strategy="kLfu")
    for ask in (lambda: table.counts([1]), lambda: table.lookup([1], counts=[1])):
        with pytest.raises(ValueError, match="'table' does not.*count_repeats=True"):
            ask()


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
