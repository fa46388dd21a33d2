"""What a table knows of its last gradient."""

import contextlib
import ctypes
from functools import partial

import numpy as np
import pytest

from sok_lite.backend import get_backend
from sok_lite.engine.table.locking import with_lock
from sok_lite.engine.table.row_cache import cache_rows
from tests.support.helpers import new_table
from tests.support.table_audit import audit
from tests.support.tripwire import CtrlC


def noted(table):
    """Returns (keys, rows, what else is known)."""
    known = table.row_cache.read()
    kinds = (known.keys, ctypes.c_int64), (known.rows, ctypes.c_uint32)
    keys, rows = ((kind * known.size).from_address(at)[:] if at else [] for at, kind in kinds)
    return keys, rows, known[2:]


def note(tables, keys, num_items=None, is_complete=True):
    """Notes a gradient of keys of each table, which have their rows."""
    backend = tables[0].backend
    rows = [table.find_or_insert(its) for table, its in zip(tables, keys, strict=True)]
    told = [[table.row_version for table in tables], [int(not is_complete)] * len(tables)]
    told.append([table.clock.now for table in tables])
    return partial(cache_rows, backend, tables, keys, rows, np.array(told), num_items), rows


def test_keys_and_rows_are_those_that_were_noted():
    tables = [new_table(get_backend("cpu"), name=name) for name in "ab"]
    for table in tables:
        assert noted(table) == ([], [], (-1, 0, 0, 0))
    keys = [np.arange(5), np.arange(100, 103), np.arange(3, 9)]
    noting, rows = note([*tables, tables[0]], keys, is_complete=False)
    noting()
    for table, number in zip(tables, (2, 1), strict=True):  # of one that comes twice the last
        expected = (keys[number].size, table.row_version, 0, table.clock.now)
        assert noted(table) == (keys[number].tolist(), rows[number].tolist(), expected)
        assert table.record.gradient.room == 0
        audit(table)


@pytest.mark.parametrize("room", [0, 5])
@pytest.mark.parametrize("size", [0, 3])
def test_its_arrays_are_those_that_were_noted_wherever_they_are(backend, size, room):
    table, keys = new_table(backend), backend.from_host(np.arange(7, 7 + size))
    noting, (rows,) = note([table], [keys], [room])
    noting()
    gradient = table.record.gradient
    for _ in range(2):
        arrays = table.row_cache.arrays(table.row_cache.read())
        for array, expected in zip(arrays, (keys, rows), strict=True):
            assert backend.to_host(array).tolist() == backend.to_host(expected).tolist()
        if room == 0:
            break
        for array, its in zip(table.row_cache._room, (keys, rows), strict=True):
            array[:size] = its  # as native code would
        gradient.keys, gradient.rows = gradient.room_keys, gradient.room_rows
        table.row_cache._kept = None


def test_room_is_made_where_there_is_too_little_and_stays():
    table = new_table(get_backend("cpu"))
    rooms = []
    for size in (1, 1024, 1025, 5000, 3):
        note([table], [np.arange(10)], [size])[0]()
        rooms.append(table.record.gradient.room)
        audit(table)
    assert rooms == [1024, 1024, 2048, 8192, 8192]


def test_within_a_call_of_the_table_nothing_is_noted():
    table = new_table(get_backend("cpu"))
    note([table], [np.arange(5)])[0]()
    known, noting = noted(table), note([table], [np.arange(9)], [5000])[0]
    with_lock(table, noting)
    assert noted(table) == known
    assert table.record.gradient.room == 0
    noting()
    assert noted(table)[0] == [*range(9)]


def test_ctrl_c_anywhere_leaves_the_one_or_the_other():
    for at in range(1, 1000):
        table = new_table(get_backend("cpu"))
        note([table], [np.arange(5)], [10])[0]()
        before = noted(table)
        noting, rows = note([table], [np.arange(9)], [5000])
        after = [*range(9)], rows[0].tolist(), (9, table.row_version, 1, table.clock.now)
        wire = CtrlC(at)
        with contextlib.suppress(KeyboardInterrupt):
            wire.run(noting)
        assert noted(table) in (before, after), wire.place
        audit(table)
        if wire.place is None:
            break
    assert at > 3
    assert noted(table) == after
