"""The report of a table against what NumPy makes of the rows that were written."""

import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest

from sok_lite.backend import get_backend
from sok_lite.engine.table import clock as clock_module
from sok_lite.reports import tables
from sok_lite.reports.histogram import NORMS
from sok_lite.reports.openmetrics import samples_of
from sok_lite.reports.report import TableReport, facts_of
from sok_lite.reports.tables import report_of
from tests.support.filled_tables import KINDS, filled, rows_of
from tests.support.helpers import new_table
from tests.support.table_state import State

LITTLE_NEAR = {"var_type": "hybrid", "init_capacity": 16, "max_capacity": 256}
LITTLE_NEAR |= {"max_hbm_for_vectors": 60 * 12 / 2**30}


def as_floats(rows, dtype):
    """Rows as float64, of bfloat16 the upper half of float32's bits."""
    if dtype == "bfloat16":
        return (rows.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return rows.astype(np.float64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64", "int8", "int64"])
@pytest.mark.pairs
def test_the_norms_are_those_of_the_rows(backend, kind, dtype, monkeypatch):
    monkeypatch.setattr(tables, "_PIECE_BYTES", 4000)  # so there are several pieces
    n = 100
    table, held = filled(backend, n, dtype, **KINDS[kind])
    rows = as_floats(rows_of(n, 3, dtype), dtype)[-len(held) :]
    report = report_of(table)
    norms = np.linalg.norm(rows, axis=1)
    expected = np.histogram(norms[np.isfinite(norms)], [-np.inf, *NORMS, np.inf])[0]
    expected[0] -= (norms == 0).sum()
    np.testing.assert_array_equal(report.norms.counts, expected)
    assert report.norms.num_keys == report.ages.num_keys == report.keys == table.size


def test_a_table_without_keys_has_a_report(backend):
    report = report_of(new_table(backend))
    assert (report.keys, report.hit_rate, report.near_share) == (0, None, None)
    assert report.norms.num_keys == report.ages.num_keys == 0


def test_keys_that_wait_for_a_row_are_told(backend):
    table = new_table(backend, var_type="hybrid", enter_threshold=3)
    for keys in (range(10), range(7), range(4)):
        table.lookup(list(keys))
    report = report_of(table)
    assert (report.keys, report.pending) == (4, 6) and ("6 keys were seen" in str(facts_of(report)))
    assert TableReport.of_dict(report.as_dict()).pending == 6
    assert TableReport.sum_of([report, report]).pending == 12
    pending = [each.value for each in samples_of(table) if each.family.name == "sok_keys_pending"]
    assert pending == [6]


def test_ages_are_those_of_the_lookups(backend, monkeypatch):
    time = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(clock_module, "time", SimpleNamespace(time=lambda: time.now))
    table = new_table(backend)
    for hours, keys in ((0, range(10)), (2, range(3)), (30, range(8, 12))):
        time.now = 1000.0 + 3600 * hours
        table.lookup(list(keys))
    # Since the last lookup, at 30 h: 0 to 2 were seen 28 h before, 3 to 7 30 h, 8 to 11 then.
    assert [each for each in report_of(table).ages.shown() if each[1]] == [
        ("below 1 s", 4),
        ("1 d to 7 d", 8),
    ]
    time.now += 1e6  # and not since now
    assert report_of(table).ages.counts[0] == 4


def test_counts_are_those_of_the_calls(backend):
    table = new_table(backend, 3, **LITTLE_NEAR)
    for first in range(0, 2000, 100):
        table.lookup(np.arange(first, first + 100))
    table.erase(np.arange(1990, 1995))
    report = report_of(table)
    counts = report.counts
    assert counts["found"] + counts["missed"] == 2000 and counts["erased"] == 5
    assert counts["inserted"] - counts["evicted"] - 5 == report.keys == table.size <= 256
    assert report.hit_rate == counts["found"] / 2000


def test_the_share_near_is_that_of_the_next_lookup(backend):
    """All keys are looked up alike: then it is the share of the keys whose row is near."""
    table = new_table(backend, 3, **LITTLE_NEAR)
    keys = np.arange(200)
    for _ in range(5):
        table.lookup(keys)
    report, rows = report_of(table), backend.to_host(table.find(keys))
    is_near = rows[rows != 0xFFFFFFFF] < table.store.near_rows
    assert 0 < is_near.mean() < 1
    assert report.near_share == pytest.approx(is_near.mean(), abs=0.05)


def test_the_memory_is_what_the_table_says_by_part(backend):
    table, _ = filled(backend, 100, **LITTLE_NEAR)
    memory, numbers = report_of(table).memory, table.statistics()
    assert memory["index"] == numbers.index_bytes
    assert memory["rows near"] + memory["states near"] == numbers.near_bytes
    assert memory["rows far"] + memory["states far"] == numbers.far_bytes > 0
    assert memory["rows near"] == memory["states near"]  # both 3 float32


def test_rows_in_a_file_are_told_apart(tmp_path):
    table, _ = filled(get_backend("cpu"), 100, **LITTLE_NEAR, far_path=tmp_path / "far")
    memory = report_of(table).memory
    assert memory["rows file"] > 0 and "rows far" not in memory


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_in_the_table_changes(backend, kind):
    table, _ = filled(backend, 100, **KINDS[kind])
    table.lookup(np.arange(50))
    before, statistics = State.of(table), table.statistics()
    report_of(table)
    assert State.of(table) == before and table.statistics() == statistics


def test_it_takes_little_memory_beside_the_table():
    """Of 256 MB of rows a copy would be seen: NumPy tells tracemalloc what it allocates."""
    table = new_table(get_backend("cpu"), 1024)
    rows = np.ones((8192, 1024), np.float32)
    for first in range(0, 8 * len(rows), len(rows)):
        table.insert_or_assign(np.arange(first, first + len(rows)), rows)
    tracemalloc.start()
    try:
        report = report_of(table)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert report.keys == 65_536 and report.memory["rows near"] == 65_536 * 4096
    assert peak < 64 << 20
