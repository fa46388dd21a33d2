"""What must be true of tables whose operation something struck, and all ways to strike it.

(a) keys, rows and optimizer states are as before the operation or as after it (table_state.py), of
    each table by itself where the operation says so;
(b) nothing inside of the table contradicts anything else (table_audit.py);
(c) its lock is free for another thread;
(d) the next lookup, write and removal do what they do to a dict, and the same operation is done
    again and leaves nothing that contradicts anything else.

Most faults leave one of a few outcomes, and while the operation was being prepared mostly none. So
(d) is asserted once of each outcome; tables that a fault left as they were are struck again, until
(d) is asserted of them at the end.
"""

import functools
import itertools
import zlib
from typing import NamedTuple

import numpy as np

from sok_lite.engine.table.hkv import RefusedError
from tests.support.fault_bench import DIM
from tests.support.fault_cases import CASES, OTHER
from tests.support.helpers import first_row, sized
from tests.support.reference import DictTable
from tests.support.simt import device
from tests.support.table_audit import audit, memory_of, some
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
    """Asserts that the next operations do what they do to a dict, and does the same one again."""
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
    run_clean(bench, case, tables)
    for table in tables:
        audit(table)


# -------------------------------------------------------------------- one operation, every fault


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


class Facts(NamedTuple):
    """What is known of an operation before anything strikes it.

    `history` comes before it on the first table. `passed` are the outcomes of which (d) was
    asserted, `spare` are tables that are as before it.
    """

    bench: object
    name: str
    case: object
    history: tuple
    before: list
    after: list
    memory: list
    passed: list
    spare: list

    @classmethod
    def of(cls, bench, name, history=None):
        """Runs an operation undisturbed; without a history it must do what its case is about."""
        case = CASES[name]
        facts = cls(bench, name, case, history or (), [], [], [], [], [])
        first, tables = facts.built(), facts.built()
        facts.before.extend(State.of(table) for table in first)
        again = [State.of(table) for table in tables]
        # On a GPU it depends on the threads which keys share a bucket, and so when it is full.
        assert [state._replace(capacity=0) for state in facts.before] == [
            state._replace(capacity=0) for state in again
        ], "builds are not equal"
        facts.memory.extend(memory_of(table) for table in first)
        facts.spare.append(first)
        run_clean(bench, case, tables)
        facts.after.extend(State.of(table) for table in tables)
        happens = case.happens(facts.before[0], facts.after[0])
        assert happens or history is not None, f"{name} of {bench.kind} does not do what it should"
        for table in tables:
            audit(table)
        return facts

    def built(self):
        """The tables of an operation, all that comes before it done."""
        # Lanes of a simulated GPU take turns as ever, so that equal faults leave equal tables.
        device.restart()
        tables = [each.build() for each in benches(self.bench, self.case)]
        for name in self.history:
            run_clean(self.bench, CASES[name], tables[:1])
        self.case.prepare(self.bench, tables)
        return tables

    def check(self, tables):
        """Asserts (a) to (d) of tables that a fault befell."""
        sides, states = set(), []
        for table, before, after in zip(tables, self.before, self.after, strict=True):
            audit(table)
            strategy = getattr(table.index, "strategy", "kLru")
            now = State.of(table)
            states.append(now)
            reason, side = what_is_wrong(self.case, strategy, now, before, after)
            assert reason is None, reason
            if now.rows != after.rows or now.rows != before.rows:
                sides.add(side)
        # A step of several tables is one: half of it done, nobody could repeat or leave it.
        assert self.case.apart or len(sides) < 2, "one table is as before and another as after"
        outcome = states, [memory_of(table) for table in tables]
        if outcome == (self.before, self.memory):
            self.spare.append(tables)
        elif outcome not in self.passed:
            goes_on(self.bench, self.case, tables)
            self.passed.append(outcome)

    def check_spare(self):
        """Asserts (d) of the tables that all faults have left as they were."""
        for tables in self.spare:
            goes_on(self.bench, self.case, tables)

    def attempt(self, fault):
        """Runs the operation until a fault strikes it, checks everything, and returns what is
        wrong.

        `fault.run(work)` runs it; then `place` says where it has struck, None: nowhere, and
        `is_its(error, text)` whether an exception is what comes of it.
        """
        tables = self.spare.pop() if self.spare else self.built()
        device.restart()
        # Not the exception itself: its traceback would keep the tables and their files.
        raised, text = type(None), ""
        try:
            fault.run(lambda: self.case.work(self.bench, tables))
        except BaseException as error:
            raised, text = type(error), str(error)
        if fault.place is None:
            return None
        try:
            fits = fault.is_its(raised, text) or raised is self.case.raises
            assert fits, f"{type(fault).__name__} became {raised.__name__}: {text}"
            self.check(tables)
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            return f"{type(error).__name__}: {lines[0][:300]}"
        return None


def strike(facts, faults):
    """Strikes an operation by one fault after another, until one finds no place; returns how many.

    Raises:
      AssertionError: all that went wrong; places with one outcome together.
    """
    by_outcome, tried = {}, 0
    for fault in faults:
        wrong = facts.attempt(fault)
        if fault.place is None:
            break
        tried += 1
        if wrong is not None:
            by_outcome.setdefault(wrong, []).append(fault.place)
    assert tried, "no place was found"
    facts.check_spare()
    if by_outcome:
        lines = [
            f"  {wrong}\n    at {some(dict.fromkeys(places))}"
            for wrong, places in list(by_outcome.items())[:12]
        ]
        broken, text = sum(map(len, by_outcome.values())), "\n".join(lines)
        what = f"{facts.name} of {facts.bench.kind}: {broken} of {tried} faults broke it."
        # From None: where a trace function raises, CPython may take old exceptions for handled now.
        raise AssertionError(f"{what}\n{text}") from None
    return tried


def every_place(bench, name, step):
    """Presses Ctrl-C in every `step`-th function of an operation; raises all findings.

    What operations have in common is interrupted at other places in each: the first depends on
    their names.
    """
    # However many are left out, one of a short operation is not.
    first = 1 + zlib.crc32(f"{name} {bench.kind}".encode()) % min(step, 5)
    strike(Facts.of(bench, name), map(CtrlC, itertools.count(first, step)))


def every_shortage(bench, name, new_shortage):
    """Runs an operation without the memory of each allocation, on a simulated GPU of every eighth:
    in turn without that of it alone, and without any from it on. Which comes first depends on
    names, so that what operations and kinds of tables have in common is struck in both ways."""
    facts, step = Facts.of(bench, name), sized(bench.backend, 1, 8)
    turn = zlib.crc32(f"{name} {bench.kind}".encode())
    places = enumerate(itertools.count(1, step), turn)
    return strike(facts, (new_shortage(at, bool(number % 2)) for number, at in places))
