"""A table as native code sees it: the same structs in both languages, and one way to tick."""

import ctypes
import re

import numpy as np
import pytest

from sok_lite.backend.build import find_library
from sok_lite.backend.sources import kernel_folder
from sok_lite.backend.table_lock import TableLock
from sok_lite.engine.rows import record as row_records
from sok_lite.engine.table import clock as clock_module
from sok_lite.engine.table import record as records
from sok_lite.engine.table.clock import Clock
from sok_lite.engine.table.counters import Count
from sok_lite.engine.table.det_index import MAX_PROBE_LINES
from sok_lite.engine.table.record import (
    LAST_LOOKUP_NUMBER,
    TableRecord,
    new_record,
    retire,
)
from tests.support.helpers import new_table
from tests.support.table_audit import audit

STRUCTS = {
    "SokTableLock": TableLock,
    "SokIndexRecord": records.IndexRecord,
    "SokColumnRecord": row_records.ColumnRecord,
    "SokAccessRecord": row_records.AccessRecord,
    "SokFillRecord": row_records.FillRecord,
    "SokStoreRecord": row_records.StoreRecord,
    "SokClockRecord": records.ClockRecord,
    "SokCountersRecord": records.CountersRecord,
    "SokGradientRecord": records.GradientRecord,
    "SokTableRecord": TableRecord,
}
TYPES = {
    "uint32_t": ctypes.c_uint32,
    "int64_t": ctypes.c_int64,
    "double": ctypes.c_double,
    **STRUCTS,
}


@pytest.fixture(scope="module")
def library():
    found = ctypes.CDLL(str(find_library()))
    found.sok_clock_now.restype = ctypes.c_double
    found.sok_clock_tick.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_double]
    found.sok_clock_tick.restype = ctypes.c_int64
    return found


# ---------------------------------------------------------------- structs


def test_both_languages_have_the_same_fields():
    text = re.sub("//.*", "", (kernel_folder() / "table_record.h").read_text())
    structs = dict(re.findall(r"struct (\w+) \{([^}]*)\};", text))
    assert structs.keys() == STRUCTS.keys()
    for struct, body in structs.items():
        fields = []
        for statement in body.split(";")[:-1]:
            kind, names = re.fullmatch(r"\s*(?:const )?(\w+\*?)\s+([\w,\s]+)", statement).groups()
            kind = ctypes.c_void_p if kind.endswith("*") else TYPES[kind]
            fields += [(name.strip(), kind) for name in names.split(",")]
        assert tuple(fields) == STRUCTS[struct]._fields_, struct


def test_both_languages_have_the_same_sizes_and_counters(library):
    sizes = (ctypes.c_int64 * 4)()
    library.sok_record_bytes(sizes)
    kinds = ("SokTableRecord", "SokIndexRecord", "SokStoreRecord", "SokColumnRecord")
    assert list(sizes) == [ctypes.sizeof(STRUCTS[kind]) for kind in kinds]
    text = (kernel_folder() / "ops" / "lookup.h").read_text()
    names = {"kCounters": len(Count), "kMissing": Count.MISSING, "kSeen": Count.SEEN}
    names |= {"kWrongSplits": Count.WRONG_SPLITS, "kWithoutRow": Count.NO_ROW}
    told = ", ".join(f"{name} = {number:d}" for name, number in names.items())
    assert f"constexpr int64_t {told};" in text
    text = (kernel_folder() / "ops" / "insertion.cpp").read_text()
    assert f"kRefused = {Count.REFUSED:d}, kUsed = {Count.USED:d};" in text
    assert f"kMostLines = {MAX_PROBE_LINES};" in text


def test_a_record_is_used_again_under_another_generation():
    record = new_record()
    address, generation = ctypes.addressof(record), record.generation
    clock = Clock.of(record)
    clock.tick()
    record.is_settled, record.allows, record.row_version = 1, 1, 7
    record.index, record.store = 16, 32
    record.counters.erased = 3
    retire(record)
    again = new_record()
    assert ctypes.addressof(again) == address
    assert again.generation == generation + 1
    assert (again.is_settled, again.allows, again.row_version) == (0, 0, 0)
    assert (again.index, again.store, again.clock.numbers) == (None, None, None)
    assert set(again.counters.by_name().values()) == {0}
    clock = Clock.of(again)
    assert (clock.now, clock.spans.numbers, again.clock.now) == (0, [], 0)
    clock.tick()
    assert again.clock.now == 1
    other = new_record()
    assert ctypes.addressof(other) != address
    for each in (again, other):
        retire(each)


# ---------------------------------------------------------------- what tables write


def test_what_is_read_of_a_store_that_was_cleared_stays(backend):
    table = new_table(backend, 2, "hbm")
    table.insert_or_assign(np.arange(5), np.arange(10, dtype=np.float32).reshape(5, 2))
    reading, rows = table.store.for_reading(), table.find(np.arange(5))
    column = reading.column("value")
    before = bytes(column.record)
    table.clear()
    audit(table)
    assert reading.record.value == ctypes.addressof(column.record)
    assert bytes(column.record) == before != bytes(table.store.column("value").record)
    assert backend.to_host(reading.read(rows)).tolist() == np.arange(10).reshape(5, 2).tolist()


# ---------------------------------------------------------------- the clock

FIELDS = ("now", "last_time", "span_time", "span_number", "num_spans", "max_spans")


def state_of(clock):
    """All that a clock knows."""
    return [*(getattr(clock, name) for name in FIELDS), clock.spans]


@pytest.mark.parametrize("num_tables", [1, 3])
def test_native_code_ticks_as_python_does(library, time, num_tables):
    """Clocks of records, and others beside them, as of drawn times."""
    rng = np.random.default_rng(num_tables)
    its_records = [new_record() for _ in range(num_tables)]
    clocks = [Clock.of(record) for record in its_records]
    twins = [Clock() for _ in range(num_tables)]
    addresses = (ctypes.c_void_p * num_tables)(*map(ctypes.addressof, its_records))
    seen = set()
    for number in range(1200):
        # In the same second, exactly one later, or far on; from then on also back, little or far.
        steps = [0.0, 0.01, 0.4, 1.0, 30.0, -0.2, -50.0]
        time.now += rng.choice(steps[:5] if number < 400 else steps)
        if number == 800:  # the end of the numbers comes in the middle
            for clock in (clocks[-1], twins[-1]):
                clock.now = LAST_LOOKUP_NUMBER - 3
        if rng.random() < 0.2:  # one is ahead of the others
            i = rng.integers(num_tables)
            for clock in (clocks[i], twins[i]):
                _tick(clock)
        why = {_why_not(clock, time.now) for clock in clocks} - {None}
        before = list(map(state_of, clocks))
        is_native = library.sok_clock_tick(addresses, num_tables, time.now)
        seen |= why
        assert is_native == (not why)
        if not is_native:
            assert list(map(state_of, clocks)) == before
            for clock in clocks:
                _tick(clock)
        for clock in twins:
            _tick(clock)
        assert list(map(state_of, clocks)) == list(map(state_of, twins))
    for record in its_records:
        retire(record)
    assert seen == {"full", "put back", "no room"}


def _tick(clock):
    if clock.is_full:
        clock.halve()
    clock.tick()


def _why_not(clock, at):
    """Why native code must leave a tick to Python, by the spans; None: it need not."""
    numbers, times, ends = clock.spans
    if clock.now == 2**32 - 1:
        return "full"
    if at < max(ends, default=0.0):
        return "put back"
    is_new = not times or at - times[-1] >= 1.0
    return "no room" if is_new and len(numbers) > clock.max_spans else None


def test_native_code_has_the_time_of_pythons_clock(library):
    before = clock_module.time.time()
    now = library.sok_clock_now()
    assert before <= now <= clock_module.time.time()
