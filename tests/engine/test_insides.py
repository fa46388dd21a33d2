"""Tables that are made of the same count as equal, and no others (tests/support/insides.py)."""

import ctypes
import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from sok_lite.backend import Backend
from sok_lite.engine.table import clock as clock_module
from sok_lite.engine.table.clock import Clock, Spans
from sok_lite.engine.table.locking import mutate
from tests.support.fault_bench import KINDS
from tests.support.insides import insides
from tests.support.simt import device
from tests.support.simt.backend import is_simulated

# Spans of a clock count by what they say, and a file by its length.
_OTHERWISE = ("_room", "_fd", "num_changes")
# Fields of records: those that are records, and which tables had it before.
_NO_FIELDS = ("lock", "generation", "clock", "counters", "gradient")


@pytest.fixture(params=KINDS)
def build(request, new_bench, monkeypatch):
    """Returns a function that builds equal tables, each at another time, a lookup a millisecond."""
    bench, begins = new_bench(request.param), itertools.count(1_000_000_000, 1000)

    def built():
        device.restart()
        milliseconds = itertools.count(1000 * next(begins))
        stub = SimpleNamespace(time=lambda: next(milliseconds) / 1000)
        monkeypatch.setattr(clock_module, "time", stub)
        table = bench.build()
        return table

    return built


def parts_of(table):
    """What can be reached from a table: its arrays, and its objects that have attributes."""
    arrays, objects, seen, left = [], [], set(), [table]
    while left:
        item = left.pop()
        if id(item) in seen or isinstance(item, Backend):
            continue
        seen.add(id(item))
        if hasattr(item, "nbytes") and hasattr(item, "strides"):
            arrays.append(item)
        elif isinstance(item, dict):
            left += item.values()
        elif isinstance(item, (list, tuple)):
            left += item
        elif type(item).__module__.startswith("sok_lite."):
            objects.append(item)
            attributes = getattr(item, "__dict__", {})
            left += [attributes[name] for name in attributes if name not in _OTHERWISE]
    return arrays, objects


def test_tables_that_were_built_alike_are_equal(backend, build):
    if backend.name == "cuda" and not is_simulated(backend):
        pytest.skip("the threads of a GPU take turns as they like")
    one = build()
    other = build()
    assert insides([one]) == insides([other])
    assert hash(insides([one])) == hash(insides([other]))
    assert insides([one, other]) != insides([one, one])


def test_every_array_counts(build):
    table = build()
    before, changed = insides([table]), 0
    for array in parts_of(table)[0]:
        if not array.nbytes or not array.flags.c_contiguous:
            continue
        content = array.reshape(-1).view(np.uint8)
        for at in {0, content.size // 2, content.size - 1}:
            content[at : at + 1] ^= np.uint8(4)
            assert insides([table]) != before, (array.dtype, array.shape, at)
            content[at : at + 1] ^= np.uint8(4)
            changed += 1
    assert changed > 20 and insides([table]) == before


def test_every_attribute_counts(build):
    table = build()
    before, changed = insides([table]), 0
    for owner in parts_of(table)[1]:
        for name, value in list(getattr(owner, "__dict__", {}).items()):
            if name in _OTHERWISE:
                continue
            vars(owner)[name] = "another"
            assert insides([table]) != before, (type(owner), name)
            vars(owner)[name] = value
            changed += 1
    assert changed > 60 and insides([table]) == before


def test_every_field_of_a_record_counts(build):
    table = build()
    before, changed = insides([table]), 0
    for record in parts_of(table)[1]:
        if not isinstance(record, ctypes.Structure) or isinstance(record, Clock):
            continue
        for name, _ in record._fields_:
            if name in _NO_FIELDS:
                continue
            value = getattr(record, name)
            setattr(record, name, (value or 0) + 1)
            assert insides([table]) != before, (type(record), name)
            setattr(record, name, value)
            changed += 1
    assert changed > 30 and insides([table]) == before


@pytest.mark.parametrize("field", ["now", "span_number"])
def test_numbers_of_a_clock_count(build, field):
    table = build()
    before = insides([table])
    setattr(table.clock, field, getattr(table.clock, field) + 1)
    assert insides([table]) != before


def test_an_array_of_the_same_content_elsewhere_is_another(build):
    table = build()
    before = insides([table])
    table.index.side = table.index.side.copy()  # the record has the old one
    assert insides([table]) != before


def test_the_order_of_times_counts_and_not_the_times(build):
    table = build()

    def insides_at(times, ends):
        table.clock.prepare_restart(7, Spans([1, 3, 5], times, ends))()
        return insides([table])

    before = insides_at([3.0, 5.0, 9.0], [4.0, 6.0, 9.5])
    assert insides_at([1.0, 50.0, 900.0], [2.0, 60.0, 1000.0]) == before
    assert insides_at([1.0, 50.0, 900.0], [2.0, 60.0, 900.0]) != before


def test_a_lock_that_is_held_counts(build):
    table = build()
    before = insides([table])
    with table.lock:
        assert insides([table]) != before
    assert mutate(table, lambda: insides([table])) != before
    assert insides([table]) == before


def test_what_is_not_known_is_refused(build):
    table = build()
    table.name = memoryview(b"name")
    with pytest.raises(TypeError, match=r"does not know what a builtins\.memoryview is"):
        insides([table])
