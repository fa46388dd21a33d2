"""What must be true of a table after every call, whatever its threads did meanwhile.

`Watched` drives a table beside an oracle. Which of several fair victims a key of a "hybrid" table
evicts depends on timing, so the oracle is told what went, and this module says whether it was
allowed to go. The state machines of test_tables.py and the sanitizers' job use it.
"""

from typing import NamedTuple

import numpy as np

from sok_lite.engine.rows.store import NO_ROW
from sok_lite.engine.table.record import LAST_LOOKUP_NUMBER
from tests.support.reference import ScoredTable


class Place(NamedTuple):
    """Where a key is and its score."""

    slot: int
    row: int
    score: int


class Watched:
    """A table and its oracle; every method calls both, compares, and checks what was evicted.

    Keys are Python ints that may repeat; values (n, dim) float32.
    """

    def __init__(self, table, first_row):
        self.table = table
        self.backend = table.backend
        self.is_hybrid = table.var_type == "hybrid"
        strategy = table.evict_strategy or "kLru"
        self.oracle = ScoredTable(table.dim, first_row, strategy, table.row_dtype.storage)
        self.inserted = self.evicted = self.refused = self.erased = 0
        # The number of the lookup that last saw a key, and of that after which it went.
        self.seen, self.gone = {}, {}

    # ---------------------------------------------------------------- calls

    def lookup(self, keys, *, report=True, unique_keys=False):
        expected = np.array([self.row_of(key) for key in keys]).reshape(len(keys), self.table.dim)
        before = self.begin()
        if report:
            values, evicted = self.table.lookup_and_evict(array(keys), unique_keys=unique_keys)
        else:
            values, evicted = self.table.lookup(array(keys), unique_keys=unique_keys).values, None
        np.testing.assert_array_equal(self.backend.to_host(values), expected)
        self.settle(keys, before, evicted, new_row=self.oracle.first_row)

    def find_or_insert(self, keys, given=None):
        """`given`: a score or an increment for every key."""
        before = self.begin()
        scores = None if given is None else np.array(given, np.uint64)
        rows = self.backend.to_host(self.table.find_or_insert(array(keys), scores=scores))
        by_key = None if given is None else dict(zip(keys, given, strict=True))
        after = self.settle(keys, before, None, new_row=self.oracle.first_row, given=by_key)
        assert rows.tolist() == [after[key].row if key in after else NO_ROW for key in keys]

    def insert(self, keys, values, scores=None, *, report=True):
        before = self.begin()
        given = None if scores is None else np.array(scores, np.uint64)
        if report:
            evicted = self.table.insert_and_evict(array(keys), values, given)
        else:
            evicted = None
            self.table.insert_or_assign(array(keys), values, given)
        by_key = None if scores is None else dict(zip(keys, scores, strict=True))
        last = dict(zip(keys, values, strict=True))
        self.settle(keys, before, evicted, last.__getitem__, given=by_key, given_is_score=True)
        held = [key for key in last if key in self.oracle.rows]
        self.oracle.assign(held, [last[key] for key in held])

    def accum_or_assign(self, keys, values, flags):
        before = self.begin()
        self.table.accum_or_assign(array(keys), values, np.array(flags, bool))
        add = [i for i, key in enumerate(keys) if flags[i] and key in self.oracle.rows]
        put = {}
        for i, key in enumerate(keys):
            if not flags[i] and key not in self.oracle.rows:
                put.setdefault(key, values[i])
        seen = [key for key in keys if key in self.oracle.rows or key in put]
        self.oracle.accumulate([keys[i] for i in add], values[add])
        self.settle(seen, before, None, put.__getitem__)

    def write(self, name, keys, *values):
        """`assign` or `accumulate`."""
        getattr(self.table, name)(array(keys), *values)
        getattr(self.oracle, name)(keys, *values)
        self.wrote(keys)

    def wrote(self, keys):
        """What is written counts as seen by the last lookup."""
        held = {key: self.oracle.now for key in keys if key in self.oracle.rows}
        self.seen.update(held)
        if self.oracle.strategy == "kLru":
            self.oracle.scores.update(held)

    def erase(self, keys):
        self.note_erased(self.table.erase(array(keys)), keys)

    def expire(self, num_lookups):
        limit, seen = self.oracle.now - num_lookups, self.last_seen()
        doomed = [key for key, number in seen.items() if number <= limit]
        self.note_erased(self.table.expire(num_lookups=num_lookups), doomed)

    def last_seen(self):
        """{key: number of the lookup that last saw it}; for kLru they are the scores."""
        if self.oracle.strategy == "kLru":
            return self.oracle.scores
        return {key: self.seen[key] for key in self.oracle.rows}

    def assign_scores(self, keys, scores):
        self.table.assign_scores(array(keys), np.array(scores, np.uint64))
        for key, score in zip(keys, scores, strict=True):
            if key in self.oracle.rows:
                self.oracle.scores[key] = score

    def set_epoch(self, epoch):
        self.table.epoch = self.oracle.epoch = epoch

    def age(self):
        """A lookup of nothing, before which the numbers of all lookups are halved."""
        self.table.clock.now = LAST_LOOKUP_NUMBER
        self.table.find_or_insert(array([]))
        self.oracle.age(LAST_LOOKUP_NUMBER)
        for numbers in (self.seen, self.gone):
            numbers.update({key: number >> 1 for key, number in numbers.items()})

    def clear(self):
        self.table.clear()
        self._drop(list(self.oracle.rows))
        self.inserted = self.evicted = self.refused = self.erased = 0

    def note_erased(self, count, keys):
        held = set(keys) & self.oracle.rows.keys()
        assert count == len(held)
        self._drop(held)
        self.erased += count

    def _drop(self, keys):
        self.oracle.drop(keys)
        self.gone.update(dict.fromkeys(keys, self.oracle.now))

    # ---------------------------------------------------------------- checks

    def row_of(self, key):
        """What a lookup of a key must give."""
        row = self.oracle.rows.get(key)
        return self.oracle.first_row(key) if row is None else row

    def snapshot(self):
        """{key: Place} of the whole table."""
        held = self.table.index.entries()
        parts = (held.keys, held.slots, held.rows, held.scores)
        lists = (self.backend.to_host(part).tolist() for part in parts)
        places = {key: Place(*place) for key, *place in zip(*lists, strict=True)}
        assert len(places) == held.keys.size, "a key is in two slots"
        return places

    def begin(self):
        """A lookup begins: what is there before it."""
        self.oracle.now += 1
        return self.snapshot(), self.table.num_slots

    def settle(self, keys, before, evicted, new_row, given=None, given_is_score=False):
        """Checks what a lookup of `keys` has done, and tells it to the oracle.

        Args:
          before: what `begin` gave.
          evicted: what the table says it evicted; None: it was not asked.
          new_row: of a key, the row it starts with.
          given: {key: score or increment}; None: none.
          given_is_score: whether `given` are the scores to have, whatever the strategy.
        """
        before, num_slots = before
        after = self.snapshot()
        batch = set(keys)
        gone = before.keys() - after.keys()
        came = after.keys() - before.keys()
        refused = batch - after.keys()
        assert not gone & batch, "a key was evicted by the batch that used it"
        assert came <= batch, "a key came from nowhere"
        if evicted is not None:
            self._check_report(evicted, gone, before)
        strategy = self.oracle.strategy
        may_refuse = strategy == "kCustomized" or (given is not None and given_is_score)

        def new_score(key):
            if given is not None and given_is_score:
                return given[key]
            return self.oracle.score_after(key, None if given is None else given[key])

        self._check_victims(
            batch, before, after, came, refused, new_score if may_refuse else None, num_slots
        )
        scores = {key: new_score(key) for key in batch & after.keys()}
        self._drop(gone)
        for key in came:
            self.oracle.rows[key] = np.array(new_row(key), self.oracle.dtype)
            self.gone.pop(key, None)
        self.oracle.scores.update(scores)
        self.seen.update(dict.fromkeys(scores, self.oracle.now))
        self.inserted += len(came)
        self.evicted += len(gone)
        self.refused += len(refused)
        return after

    def _check_report(self, evicted, gone, before):
        keys, values, scores = (self.backend.to_host(part) for part in evicted)
        assert sorted(keys.tolist()) == sorted(gone), "what is gone is not what was reported"
        for key, value, score in zip(keys.tolist(), values, scores.tolist(), strict=True):
            np.testing.assert_array_equal(value, self.oracle.rows[key])
            assert score == before[key].score

    def _check_victims(self, batch, before, after, came, refused, new_score, num_slots):
        index = self.table.index
        reserved = {index.key_dtype.empty_key, index.key_dtype.reclaim_key}
        gone = before.keys() - after.keys()
        if not self.is_hybrid:
            assert not gone and not refused
            return
        assert not reserved & refused
        assert not reserved & gone
        if gone or refused:
            assert index.capacity == index.max_capacity, "evicted or refused before it was full"
        asked = sorted((came | refused) - reserved)
        if not asked:
            return
        firsts, seconds, _ = (
            self.backend.to_host(part).tolist()
            for part in index.homes_of(self.backend.from_host(np.array(asked, np.int64)))
        )
        in_slot = {place.slot: key for key, place in after.items()}
        was_in = {place.slot: key for key, place in before.items()}
        has_grown = index.num_slots != num_slots
        num_victims = 0
        for key, first, second in zip(asked, firsts, seconds, strict=True):
            slots = {first + i for i in range(index.bucket)}
            slots |= {second + i for i in range(index.bucket)}
            held = [in_slot[slot] for slot in slots if slot in in_slot]
            # The scores that it had to choose from, as far as they are still there.
            others = [before[other].score for other in held if other not in batch]
            if key in refused:
                assert len(held) == len(slots), "refused beside a free slot"
                if others:
                    assert new_score is not None, "refused beside a key that it could evict"
                    assert new_score(key) < min(others)
                continue
            slot = after[key].slot
            assert slot in slots, "a key is in neither of its buckets"
            if has_grown or slot not in was_in:
                continue
            num_victims += 1
            victim = was_in[slot]
            assert victim in gone
            assert len(held) == len(slots), "evicted beside a free slot"
            assert before[victim].score <= min(others, default=before[victim].score)
            if new_score is not None:
                assert new_score(key) >= before[victim].score
        assert has_grown or num_victims == len(gone), "a key vanished without a successor"

    def check(self):
        """What must be true between calls."""
        table, oracle = self.table, self.oracle
        keys, rows = table.export()
        expected_keys, expected_rows = oracle.export()
        assert self.backend.to_host(keys).tolist() == expected_keys
        np.testing.assert_array_equal(self.backend.to_host(rows), expected_rows)
        held = self.snapshot()
        assert {key: place.score for key, place in held.items()} == oracle.scores
        numbers = {place.row for place in held.values()}
        assert len(numbers) == len(held), "two keys share a row"
        assert all(row < table.store.num_rows for row in numbers)
        assert table.size == len(held) <= table.capacity + 2
        assert table.num_lookups == oracle.now
        counts = table.statistics()
        if self.is_hybrid:
            most = table.options.max_capacity
            assert table.capacity <= most and table.store.num_rows <= most + 2
            assert counts.longest_probe <= 2
        else:  # searches stay short, erased slots and all
            assert table.load_factor <= 0.7
            assert counts.longest_probe <= max(1, table.capacity // 4) and counts.mean_probe < 4
        free = table.store.allocator.num_free
        assert free == table.store.num_rows - table.size, "a row was lost"
        assert counts.size == table.size and counts.capacity == table.capacity
        names = ("inserted", "evicted", "refused", "erased")
        assert [getattr(counts, f"{name}_total") for name in names] == [
            getattr(self, name) for name in names
        ]
        asked = list(oracle.scores)
        assert self.backend.to_host(table.scores(array(asked))).tolist() == [
            oracle.scores[key] for key in asked
        ]


def array(keys):
    return np.array(keys, np.int64)
