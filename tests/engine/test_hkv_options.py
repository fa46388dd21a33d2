"""The options of the hybrid table: what is taken, and what every wrong one is told."""

import warnings

import numpy as np
import pytest

from sok_lite.engine.table import hkv_options
from sok_lite.engine.table.hkv_options import HkvOptions, round_up_capacities
from tests.support.helpers import new_table


def test_defaults_are_as_documented_and_none_means_the_default():
    options = HkvOptions.checked({})
    assert options == HkvOptions() == HkvOptions.checked(dict.fromkeys(HkvOptions.names()))
    assert (options.init_capacity, options.max_capacity) == (1 << 10, 1 << 26)
    assert (options.evict_strategy, options.on_refused) == ("kLru", "warn")


def test_one_capacity_bounds_the_other_where_that_is_not_given():
    assert HkvOptions.checked({"max_capacity": 64}).init_capacity == 64
    assert HkvOptions.checked({"init_capacity": 1 << 28}).max_capacity == 1 << 28
    # A bucket is no larger than the table.
    assert HkvOptions.checked({"max_capacity": 8, "max_bucket_size": 128}).bucket == 8
    assert HkvOptions.checked({"max_bucket_size": 128}).bucket == 128


@pytest.mark.cases("value")
@pytest.mark.parametrize("value", [64, 64.0, np.int64(64), np.int32(64), np.float32(64)])
def test_numbers_of_any_type_are_taken(value):
    options = HkvOptions.checked({"max_capacity": value, "io_by_cpu": np.bool_(False)})
    assert options.max_capacity == 64 and type(options.max_capacity) is int
    assert not options.io_by_cpu


def test_a_small_beginning_does_not_make_small_buckets(backend):
    table = new_table(backend, 2, "hybrid", init_capacity=4, max_capacity=4096)
    assert (table.capacity, table.index.bucket) == (16, 16)
    table.find_or_insert(np.arange(3000))
    assert table.statistics().evicted_total == 0


REFUSED = [
    ({"enter_threshold": 2**40}, ValueError, "at most 1073741824. Received: enter_threshold="),
    ({"enter_threshold": -1}, ValueError, "at least 0. Received: enter_threshold=-1"),
    ({"enter_threshold": 1.5}, TypeError, "an integer. Received: enter_threshold=1.5"),
    ({"far_path": 5}, TypeError, "name of a folder or of a new file. Received: far_path=5"),
    ({"io_by_cpu": 7}, TypeError, "True or False. Received: io_by_cpu=7"),
    ({"count_repeats": "no"}, TypeError, "True or False. Received: count_repeats='no'"),
    ({"count_repeats": True}, ValueError, "use evict_strategy='kLfu'. Received: .*'kLru'"),
    ({"max_capacity": 3 * 10**9}, ValueError, "a power of two from 4 to 2147483648"),
    ({"max_load_factor": 0}, ValueError, "above 0. Received: max_load_factor=0"),
    ({"max_load_factor": 1.5}, ValueError, "from 0 to 1. Received: max_load_factor=1.5"),
    ({"max_load_factor": float("nan")}, ValueError, "Received: max_load_factor=nan"),
    ({"filter_ratio": -0.1}, ValueError, "from 0 to 1. Received: filter_ratio=-0.1"),
    ({"filter_ratio": "half"}, TypeError, "a number. Received: filter_ratio='half'"),
    ({"max_hbm_for_vectors": -1}, ValueError, "from 0 to inf. Received: max_hbm_for_vec"),
    ({"device_id": -2}, ValueError, "at least -1. Received: device_id=-2"),
    ({"block_size": 100}, ValueError, "a multiple of 32 up to 1024. Received: block_size=100"),
    ({"block_size": 2048}, ValueError, "a multiple of 32 up to 1024"),
    ({"evict_strategy": "kLRU"}, ValueError, "kLru, .*kCustomized. Received: .*'kLRU'"),
    ({"evict_strategy": 0}, ValueError, "must be one of kLru"),
    ({"on_refused": "raise"}, ValueError, "ignore, warn, error. Received: on_refused='raise'"),
    ({"init_capacity": 128, "max_capacity": 64}, ValueError, "=128, max_capacity=64"),
    ({"max_capcity": 64}, TypeError, "unexpected option 'max_capcity'.*max_capacity"),
    *(
        ({name: value}, error, f"`{name}` must be .*{text.format(name)}")
        for name in ("init_capacity", "max_capacity", "max_bucket_size")
        for value, error, text in (
            (100, ValueError, "a power of two. Received: {}=100. The next one is 128"),
            (3, ValueError, "a power of two. Received: {}=3. The next one is 4"),
            (2, ValueError, "from 4 to 2147483648. Received: {}=2"),
            (1 << 32, ValueError, "from 4 to 2147483648. Received: {}=4294967296"),
            (0, ValueError, "at least 1. Received: {}=0"),
            (-8, ValueError, "at least 1. Received: {}=-8"),
            (8.5, TypeError, "an integer. Received: {}=8.5"),
            ("8", TypeError, "an integer. Received: {}='8'"),
            (True, TypeError, "an integer. Received: {}=True"),
            (float("inf"), TypeError, "an integer. Received: {}=inf"),
            (float("nan"), TypeError, "an integer. Received: {}=nan"),
        )
    ),
]


def test_wrong_options_are_refused():
    for given, error, text in REFUSED:
        with pytest.raises(error, match=text):
            HkvOptions.checked(given)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"max_capacity": 1_000_000}, {"max_capacity": 1 << 20}),
        ({"max_capacity": 1e6, "other": 3}, {"max_capacity": 1 << 20, "other": 3}),
        ({"init_capacity": np.int64(1)}, {"init_capacity": 4}),
        ({"max_capacity": (1 << 31) - 1}, {"max_capacity": 1 << 31}),
    ],
    ids=str,
)
def test_capacities_are_rounded_up_with_a_warning_for_each(monkeypatch, given, expected):
    monkeypatch.setattr(hkv_options, "_rounded", set())
    with pytest.warns(UserWarning, match="=.* is rounded up to .* a power of two") as warned:
        assert round_up_capacities(given) == expected
    assert [each.filename for each in warned] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        assert round_up_capacities(given) == expected


def test_what_is_a_capacity_or_none_at_all_stays(monkeypatch):
    monkeypatch.setattr(hkv_options, "_rounded", set())
    others = (4, 64, 64.0, 1 << 31, (1 << 31) + 1, 0, -8, 8.5, "8", True, None, float("nan"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for value in others:
            assert round_up_capacities({"max_capacity": value})["max_capacity"] is value


def test_a_table_checks_its_options(backend):
    with pytest.raises(TypeError, match="unexpected option 'capacity'"):
        new_table(backend, 4, "hybrid", capacity=64)
    with pytest.raises(TypeError):
        new_table(backend, 4, "hbm", max_capacity=64)
    table = new_table(backend, 4, "hybrid", init_capacity=32, max_capacity=64, max_bucket_size=8)
    assert (table.capacity, table.index.bucket, table.index.max_capacity) == (32, 8, 64)
