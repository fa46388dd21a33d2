"""What a table must be after an operation that something interrupted: as before or as after.

"After" is what a clean run of the same operation makes of an equal table. What may differ all the
same: capacities and memory set aside; and a lookup that was interrupted may count, with its keys
that were found as seen by it and its keys without a row as sighted, but with none of the others.
"""

import functools
from typing import NamedTuple

import numpy as np

from sok_lite.engine.table import snapshot
from sok_lite.engine.table.hkv import RefusedError
from tests.engine.helpers import first_row
from tests.fault_cases import CASES, DIM, OTHER
from tests.reference import DictTable
from tests.table_audit import audit, sighting_index
from tests.tripwire import Interrupt, Tripwire

# What counts keys. `found` and `missed` say what was asked, the others go with what was done.
_DONE = ("inserted", "evicted", "refused", "erased")


class State(NamedTuple):
    """What a table holds, on the host.

    Attributes:
      rows: {key: (bits of its row, ((state, bits), ...))}. A state at its initial value is left
        out: a column that was made and never written changes nothing.
      numbers: {key: row number}.
      seen: {key: (stamp, score)}.
      sightings: {key without a row: (count, stamp)}.
      counts: those of `statistics`.
      now, epoch, generation, capacity: of the table.
    """

    rows: dict
    numbers: dict
    seen: dict
    sightings: dict
    counts: dict
    now: int
    epoch: int
    generation: int
    capacity: int

    @classmethod
    def of(cls, table):
        host = table.backend.to_host
        with table.lock:
            counts = table.statistics()._asdict()
            saved = snapshot.take(table)
            keys = host(saved.keys).tolist()
            columns = {"value": [row.tobytes() for row in host(table.store.read(saved.rows))]}
            for name in sorted(table.store.state_names):
                initial = np.float32(table.store.column(name).initial)
                rows = host(table.store.read(saved.rows, name))
                touched = (rows != initial).any(axis=1)
                columns[name] = [
                    row.tobytes() if is_touched else None
                    for row, is_touched in zip(rows, touched, strict=True)
                ]
            values, *states = columns.values()
            _, *names = columns
            rows = {}
            for i, key in enumerate(keys):
                parts = ((name, state[i]) for name, state in zip(names, states, strict=True))
                rows[key] = (values[i], tuple(part for part in parts if part[1] is not None))
            stamps = host(saved.stamps).tolist()
            scores = host(saved.scores).tolist() or stamps
            sightings = {}
            if saved.sighted_keys.size:
                sighted = sighting_index(table).entries()
                parts = (host(part).tolist() for part in sighted[:3])
                sightings = {key: place for key, *place in zip(*parts, strict=True)}
            return cls(
                rows,
                dict(zip(keys, host(saved.rows).tolist(), strict=True)),
                dict(zip(keys, zip(stamps, scores, strict=True), strict=True)),
                {key: tuple(place) for key, place in sightings.items()},
                {name: counts[name] for name in (*_DONE, "found", "missed", "not_admitted")},
                table.num_lookups,
                getattr(table, "epoch", 0),
                table.generation,
                table.capacity,
            )

    def values(self):
        """{key: row} for an oracle."""
        return {key: np.frombuffer(row, np.float32) for key, (row, _) in self.rows.items()}


def aged(state, strategy):
    """The same with the number of every lookup halved."""

    def score(stamp, score):
        if strategy == "kLru":
            return stamp >> 1
        low = score & 0xFFFFFFFF
        return score - low + (low >> 1) if strategy == "kEpochLru" else score

    return state._replace(
        now=state.now >> 1,
        seen={key: (stamp >> 1, score(stamp, s)) for key, (stamp, s) in state.seen.items()},
        sightings={key: (count, stamp >> 1) for key, (count, stamp) in state.sightings.items()},
    )


# -------------------------------------------------------------------- before or after


def what_is_wrong(case, strategy, now, before, after):
    """Returns why `now` is neither `before` nor `after`, or None; and which of them it is."""
    reasons = []
    not_after = _not_after(case, now, after)
    if not_after is None:
        reason, side = stale_rows(now, before), "after"
    else:
        bases = [before, aged(before, strategy)] if case.ages else [before]
        for base in bases:
            # A lookup of the old numbering cannot be followed by one of the new.
            late = after if base.now <= after.now else base
            reasons.append(_not_before(case, now, base, late, after))
        reason, side = None, "before"
        if None in reasons:
            reason = stale_rows(now, before)
        else:
            reason = f"not as before: {reasons[-1]}; not as after: {not_after}"
    return reason, side


def _not_after(case, now, after):
    if case.rows_come_later:
        if now.rows.keys() != after.rows.keys():
            return _difference("keys", dict.fromkeys(now.rows), dict.fromkeys(after.rows))
    elif now.rows != after.rows:
        return _difference("rows", now.rows, after.rows)
    for name in ("seen", "sightings", "counts"):
        if getattr(now, name) != getattr(after, name):
            return _difference(name, getattr(now, name), getattr(after, name))
    if (now.now, now.epoch) != (after.now, after.epoch):
        return f"lookup {now.now}, epoch {now.epoch} and not {after.now}, {after.epoch}"
    return None


def _not_before(case, now, before, late, after):
    """Why it is not as before; the lookup of `late` may have counted, and seen what it found."""
    if now.rows != before.rows:
        return _difference("rows", now.rows, before.rows)
    if now.epoch != before.epoch:
        return f"epoch {now.epoch} and not {before.epoch}"
    for name, count in now.counts.items():
        allowed = {before.counts[name]}
        if name not in _DONE:
            allowed.add(after.counts[name])
        if count not in allowed:
            return f"{name} is {count} and not {before.counts[name]}"
    if now.now == before.now:
        for name in ("seen", "sightings"):
            if getattr(now, name) != getattr(before, name):
                return _difference(name, getattr(now, name), getattr(before, name))
        return None
    if now.now != late.now:
        return f"lookup {now.now} and not {before.now} or {late.now}"
    for key, seen in now.seen.items():
        refreshed = late.seen.get(key)
        if case.scores_are_content:
            # Of what is written the scores are a part: only the stamp may say that it was seen.
            refreshed = refreshed and (refreshed[0], before.seen[key][1])
            if strategy_is_lru(before):
                refreshed = (late.now, late.now)
        if key not in late.seen:
            continue  # the operation removes it: how it was seen on the way says nothing
        if seen not in (before.seen[key], refreshed):
            return f"key {key} was seen {seen} and not {before.seen[key]} or {refreshed}"
    for key in now.sightings.keys() | before.sightings.keys():
        count, stamp = before.sightings.get(key, (0, 0))
        allowed = [(count, stamp), (count, late.now)] if count else [None]
        allowed.append((count + 1, late.now))
        if now.sightings.get(key) not in allowed:
            return f"key {key} has sightings {now.sightings.get(key)} and not one of {allowed}"
    return None


def strategy_is_lru(state):
    return all(stamp == score for stamp, score in state.seen.values())


def stale_rows(now, before):
    """Why row numbers from before are not what the generation says, or None."""
    if now.generation != before.generation:
        return None
    stale = {key for key, row in before.numbers.items() if now.numbers.get(key) != row}
    if stale:
        return f"the rows of keys changed and the generation did not: {_some(sorted(stale))}"
    return None


def _difference(what, one, other):
    missing, strange = other.keys() - one.keys(), one.keys() - other.keys()
    differ = [key for key in one.keys() & other.keys() if one[key] != other[key]]
    parts = [
        f"{len(keys)} {text} ({_some(sorted(keys))})"
        for keys, text in ((missing, "missing"), (strange, "too many"), (differ, "differ"))
        if keys
    ]
    if what in ("counts", "seen", "sightings") and differ:
        key = differ[0]
        parts.append(f"{key}: {one[key]} for {other[key]}")
    return f"{what}: " + ", ".join(parts)


def _some(things):
    things = [str(thing) for thing in things]
    return ", ".join(things[:4]) + (", ..." if len(things) > 4 else "")


# -------------------------------------------------------------------- it goes on


def same_as_oracle(table, oracle, may_drop):
    """Asserts that a table holds what a dict does; keys that it may drop are dropped there too."""
    host = table.backend.to_host
    keys, rows = (host(part) for part in table.export())
    held = dict(zip(keys.tolist(), rows, strict=True))
    strange = held.keys() - oracle.rows.keys()
    assert not strange, f"keys came from nowhere: {_some(strange)}"
    wrong = [key for key, row in held.items() if not np.array_equal(row, oracle.rows[key])]
    assert not wrong, "rows are wrong: " + _some(
        f"{key}: {held[key].tolist()} for {oracle.rows[key].tolist()}" for key in wrong
    )
    gone = oracle.rows.keys() - held.keys()
    assert may_drop or not gone, f"keys are lost: {_some(gone)}"
    for key in gone:
        del oracle.rows[key]


def goes_on(bench, case, tables):
    """Asserts that the next operations, and then the same one again, do what they do to a dict."""
    host, given = bench.backend.to_host, bench.backend.from_host
    for number, table in enumerate(tables):
        oracle = DictTable(DIM, first_row(DIM))
        oracle.rows = State.of(table).values()
        known = list(oracle.rows)[:6]
        batch = np.array([*known, OTHER, OTHER + 1, OTHER, *known[:1]])
        expected = oracle.find_or_insert(batch)
        np.testing.assert_array_equal(host(table.lookup(batch).values), expected)
        batch = np.array([*known[1:3], OTHER + 2, OTHER + 3])
        values = np.full((batch.size, DIM), 77, np.float32)
        table.insert_or_assign(batch, given(values))
        oracle.insert_or_assign(batch, values)
        same_as_oracle(table, oracle, number == 0 and bench.may_drop)
        batch = np.array([*known[2:4], OTHER, OTHER + 3])
        held = sum(key in oracle.rows for key in batch.tolist())
        assert table.erase(batch) == held, "erase counts other keys than there are"
        oracle.erase(batch)
        same_as_oracle(table, oracle, False)
    states = [State.of(table) for table in tables]
    run_clean(bench, case, tables)
    for number, (table, state) in enumerate(zip(tables, states, strict=True)):
        oracle = DictTable(DIM, first_row(DIM))
        oracle.rows = state.values()
        case.model(bench, oracle, state, table)
        same_as_oracle(table, oracle, number == 0 and bench.may_drop)
        audit(table)


# -------------------------------------------------------------------- one operation, every fault


def built(bench, case):
    """The tables of an operation, all that comes before it done."""
    tables = [bench.build(), *(other_bench(bench, kind).build() for kind in case.others)]
    case.prepare(bench, tables)
    return tables


@functools.lru_cache(maxsize=64)
def other_bench(bench, kind):
    return type(bench)(bench.backend, kind, bench.n)


def run_clean(bench, case, tables):
    try:
        case.work(bench, tables)
    except RefusedError:
        if case.raises is not RefusedError:
            raise


class Expected(NamedTuple):
    """What the tables of an operation are before it and after it."""

    before: list
    after: list


def expected(bench, name):
    """Runs an operation undisturbed; asserts that it does what its case is about."""
    case = CASES[name]
    tables = built(bench, case)
    before = [State.of(table) for table in tables]
    assert before == [State.of(table) for table in built(bench, case)], "builds are not equal"
    run_clean(bench, case, tables)
    after = [State.of(table) for table in tables]
    assert case.happens(before[0], after[0]), f"{name} of {bench.kind} does not do what it should"
    for table in tables:
        audit(table)
    return Expected(before, after)


def check_after_fault(bench, name, tables, expected, *, may_be_empty=False):
    """Asserts (a) to (d) of tables that a fault befell: see tests/engine/test_interrupts.py.

    Args:
      may_be_empty: whether the table may have lost everything, and know it.
    """
    case = CASES[name]
    sides = set()
    for table in tables:
        audit(table)
    for table, before, after in zip(tables, expected.before, expected.after, strict=True):
        strategy = getattr(table.index, "strategy", "kLru")
        now = State.of(table)
        if may_be_empty and not now.rows and now.generation != before.generation:
            continue
        reason, side = what_is_wrong(case, strategy, now, before, after)
        assert reason is None, reason
        if now.rows != after.rows or now.rows != before.rows:
            sides.add(side)
    # A step of several tables is one: half of it done, nobody could repeat or leave it.
    assert len(sides) < 2, "one table is as before and another as after"
    goes_on(bench, case, tables)


class Findings(list):
    """(place, what went wrong): all of it is said at the end, places with one outcome together."""

    def report(self, what, tried):
        if not self:
            return
        by_outcome = {}
        for place, error in self:
            by_outcome.setdefault(error, []).append(place)
        lines = [
            f"  {error}\n    at {_some(dict.fromkeys(places))}"
            for error, places in list(by_outcome.items())[:12]
        ]
        text = "\n".join(lines)
        # From None: where a trace function raises, CPython may take old exceptions for handled now.
        raise AssertionError(f"{what}: {len(self)} of {tried} faults broke it.\n{text}") from None


def first_line(error):
    text = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {text[0][:300]}"


def attempt(bench, name, expected, wire):
    """Builds the tables, runs the operation over a tripwire and checks everything.

    Returns:
      (whether the tripwire was reached, what is wrong or None).
    """
    case = CASES[name]
    tables = built(bench, case)
    # Not the exception itself: its traceback would keep the tables and their files.
    raised, text = type(None), ""
    try:
        wire.run(lambda: case.work(bench, tables))
    except BaseException as error:
        raised, text = type(error), str(error)
    if wire.place is None:
        return False, None
    try:
        # MemoryError: where an index that cannot be written anew goes on as it is.
        passed = wire.error is MemoryError and raised in (type(None), case.raises)
        assert raised is wire.error or passed, (
            f"{wire.error.__name__} became {raised.__name__}: {text}"
        )
        check_after_fault(
            *(bench, name, tables, expected),
            may_be_empty=case.rows_come_later and wire.error is MemoryError,
        )
    except Exception as error:
        return True, first_line(error)
    return True, None


def every_place(bench, name, errors=(Interrupt, KeyboardInterrupt, MemoryError), **options):
    """Interrupts an operation at every place, with one of `errors` in turn; raises all findings."""
    facts = expected(bench, name)
    findings = Findings()
    at = 0
    while True:
        at += 1
        wire = Tripwire(at, errors[at % len(errors)], **options)
        was_reached, wrong = attempt(bench, name, facts, wire)
        if not was_reached:
            break
        if wrong is not None:
            findings.append((wire.place, wrong))
    assert at > 3, "no place was found"
    findings.report(f"{name} of {bench.kind}", at - 1)


def every_pair(bench, name, step=1, errors=(Interrupt, KeyboardInterrupt), **options):
    """Interrupts an operation at every `step`-th place, and what unwinds it at every place."""
    facts = expected(bench, name)
    findings = Findings()
    tried = 0
    at, is_left = 1, True
    while is_left:
        second = 0
        while True:
            second += 1
            wire = Tripwire(at, errors[second % len(errors)], second, **options)
            is_left, wrong = attempt(bench, name, facts, wire)
            if wire.second_place is None:
                break
            tried += 1
            if wrong is not None:
                findings.append((f"{wire.place}, then {wire.second_place}", wrong))
        at += step
    findings.report(f"{name} of {bench.kind}, twice", tried)
