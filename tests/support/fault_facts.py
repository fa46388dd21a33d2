"""What must be true of tables whose operation something interrupted, and all ways to interrupt it.

(a) keys, rows and optimizer states are as before the operation or as after it (table_state.py), of
    each table by itself where the operation says so;
(b) nothing inside of the table contradicts anything else (table_audit.py);
(c) its lock is free for another thread;
(d) the next lookup, write and removal, and the same operation again, do what they do to a dict.

All four follow from what the tables are made of (insides.py). Most faults leave one of a few
outcomes, while the operation was being prepared most often none: each outcome is checked once, and
tables that are as they were built are used for the next fault.
"""

import functools
import itertools
import zlib
from typing import NamedTuple

import numpy as np

from sok_lite.engine.table.hkv import RefusedError
from tests.conftest import QUICK
from tests.support.fault_bench import DIM
from tests.support.fault_cases import CASES, OTHER
from tests.support.helpers import first_row
from tests.support.insides import insides
from tests.support.reference import DictTable
from tests.support.simt import device
from tests.support.table_audit import audit, some
from tests.support.table_state import State, what_is_wrong
from tests.support.tripwire import CtrlC

# -------------------------------------------------------------------- it goes on


def same_as_oracle(table, oracle, may_drop):
    """Asserts that a table holds what a dict does; keys that it may drop are dropped there too."""
    host = table.backend.to_host
    keys, rows = (host(part) for part in table.export())
    held = dict(zip(keys.tolist(), rows, strict=True))
    strange = held.keys() - oracle.rows.keys()
    assert not strange, f"keys came from nowhere: {some(strange)}"
    wrong = [key for key, row in held.items() if not np.array_equal(row, oracle.rows[key])]
    assert not wrong, "rows are wrong: " + some(
        f"{key}: {held[key].tolist()} for {oracle.rows[key].tolist()}" for key in wrong
    )
    gone = oracle.rows.keys() - held.keys()
    assert may_drop or not gone, f"keys are lost: {some(gone)}"
    for key in gone:
        del oracle.rows[key]


def goes_on(bench, case, tables):
    """Asserts that the next operations, and then the same one again, do what they do to a dict."""
    host, given = bench.backend.to_host, bench.backend.from_host
    may_drop = [each.may_drop for each in benches(bench, case)]
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
        same_as_oracle(table, oracle, may_drop[number])
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
        same_as_oracle(table, oracle, may_drop[number])
        audit(table)


# -------------------------------------------------------------------- one operation, every fault


def built(bench, case):
    """The tables of an operation, all that comes before it done."""
    tables = [each.build() for each in benches(bench, case)]
    case.prepare(bench, tables)
    return tables


def ready(bench, case, spare):
    """The same; those that are spare, if there are any."""
    if spare:
        tables = spare.pop()
    else:
        # Lanes of a simulated GPU take turns as ever, so that equal faults leave equal tables.
        device.restart()
        tables = built(bench, case)
    device.restart()
    return tables


def benches(bench, case):
    """Those of all tables of an operation."""
    return [bench, *(other_bench(bench, kind) for kind in case.others)]


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
    """What the tables of an operation are before it and after it.

    Attributes:
      before, after: a State of each.
      built: what they are made of before it.
      passed: what tables were made of that were checked.
      spare: tables of it, if there are any, that are still as they were built.
    """

    before: list
    after: list
    built: tuple
    passed: set
    spare: list


def expected(bench, name):
    """Runs an operation undisturbed; asserts that it does what its case is about."""
    case = CASES[name]
    tables = built(bench, case)
    before = [State.of(table) for table in tables]
    tables = built(bench, case)
    again = [State.of(table) for table in tables]
    # On a GPU it depends on the threads which keys share a bucket, and so when it is full.
    assert [state._replace(capacity=0) for state in before] == [
        state._replace(capacity=0) for state in again
    ], "builds are not equal"
    run_clean(bench, case, tables)
    after = [State.of(table) for table in tables]
    assert case.happens(before[0], after[0]), f"{name} of {bench.kind} does not do what it should"
    for table in tables:
        audit(table)
    tables = ready(bench, case, [])
    return Expected(before, after, insides(tables), set(), [tables])


def check_after_fault(bench, name, tables, expected):
    """Asserts (a) to (d) of tables that a fault befell, unless they were asserted of equal ones.

    In full one operation goes without that shortcut: what is equal inside does the same.
    """
    if name == "lookup_mixed" and not QUICK:
        return _check(bench, name, tables, expected)
    found = insides(tables)
    if found not in expected.passed:
        _check(bench, name, tables, expected)
        expected.passed.add(found)
    elif found == expected.built:
        expected.spare.append(tables)


def _check(bench, name, tables, expected):
    case = CASES[name]
    sides = set()
    for table in tables:
        audit(table)
    for table, before, after in zip(tables, expected.before, expected.after, strict=True):
        strategy = getattr(table.index, "strategy", "kLru")
        now = State.of(table)
        reason, side = what_is_wrong(case, strategy, now, before, after)
        assert reason is None, reason
        if now.rows != after.rows or now.rows != before.rows:
            sides.add(side)
    # A step of several tables is one: half of it done, nobody could repeat or leave it.
    assert case.apart or len(sides) < 2, "one table is as before and another as after"
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
            f"  {error}\n    at {some(dict.fromkeys(places))}"
            for error, places in list(by_outcome.items())[:12]
        ]
        text = "\n".join(lines)
        # From None: where a trace function raises, CPython may take old exceptions for handled now.
        raise AssertionError(f"{what}: {len(self)} of {tried} faults broke it.\n{text}") from None


def first_line(error):
    text = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {text[0][:300]}"


def attempt(bench, name, expected, wire):
    """Builds the tables, runs the operation until Ctrl-C is pressed and checks everything.

    Returns:
      (whether it was pressed, what is wrong or None).
    """
    case = CASES[name]
    tables = ready(bench, case, expected.spare)
    # Not the exception itself: its traceback would keep the tables and their files.
    raised, text = type(None), ""
    try:
        wire.run(lambda: case.work(bench, tables))
    except BaseException as error:
        raised, text = type(error), str(error)
    if wire.place is None:
        return False, None
    try:
        assert raised is KeyboardInterrupt, f"Ctrl-C became {raised.__name__}: {text}"
        check_after_fault(bench, name, tables, expected)
    except Exception as error:
        return True, first_line(error)
    return True, None


def every_place(bench, name, step):
    """Presses Ctrl-C in every `step`-th function of an operation; raises all findings.

    What operations have in common is interrupted at other places in each: the first depends on
    their names.
    """
    facts = expected(bench, name)
    findings = Findings()
    tried = 0
    # However many are left out, one of a short operation is not.
    first = 1 + zlib.crc32(f"{name} {bench.kind}".encode()) % min(step, 5)
    for at in itertools.count(first, step):
        wire = CtrlC(at)
        was_reached, wrong = attempt(bench, name, facts, wire)
        if not was_reached:
            break
        tried += 1
        if wrong is not None:
            findings.append((wire.place, wrong))
    assert tried, "no place was found"
    findings.report(f"{name} of {bench.kind}", tried)
