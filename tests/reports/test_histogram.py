"""Histograms against NumPy's, whatever the pieces that they are counted in."""

import numpy as np
import pytest

from sok_lite.reports.histogram import AGES, NORMS, CountingAges, CountingNorms, Histogram


def counted(numbers, num_pieces=3):
    norms = CountingNorms()
    for piece in np.array_split(numbers, num_pieces):
        norms.add_norms(piece)
    return norms.histogram()


@pytest.mark.parametrize("n", [0, 1, 33, 1000])
def test_the_counts_are_those_of_numpy(n):
    rng = np.random.default_rng(n)
    numbers = np.concatenate([10.0 ** rng.uniform(-8, 8, n), NORMS])
    edges = np.array([-np.inf, *NORMS, np.inf])
    found = counted(numbers)
    np.testing.assert_array_equal(found.counts, np.histogram(numbers, edges)[0])
    assert found.num_keys == n + len(NORMS)


def test_zero_nan_and_infinity_have_no_range():
    found = counted(np.array([0.0, np.nan, np.inf, 1.0, 0.0]))
    assert found.others == {"zero": 2, "not_finite": 2} and sum(found.counts) == 1
    assert found.shown() == [("zero", 2), ("not_finite", 2), ("1 to 1.25", 1)]


def test_ages_count_back_from_the_last_lookup():
    ages = CountingAges(1_000_000.0)
    ages.add_times(np.array([1_000_000.0, 1_000_001.0, 999_980.0, 0.0, 1_000_000 - 86_400.0]))
    found = ages.histogram()
    assert found.others == {"never_seen": 1} and found.edges == AGES
    assert [shown for shown in found.shown() if shown[1]] == [
        ("never_seen", 1),
        ("below 1 s", 2),
        ("5 s to 30 s", 1),
        ("1 d to 7 d", 1),
    ]
    some = CountingAges(1_000_000.0)
    some.add_times(1_000_000 - np.array([0.0, 1.5, 7.0, 20.0]))
    names = ["below 1 s", "1 s to 2 s", "2 s to 5 s", "5 s to 10 s", "10 s to 30 s"]
    assert some.histogram().shown() == list(zip(names, [1, 1, 0, 1, 1], strict=True))


@pytest.mark.parametrize("powers", [0.5, 2, 6, 16])
def test_what_is_wide_is_shown_in_fewer_ranges(powers):
    numbers = 10.0 ** np.random.default_rng(0).uniform(-powers / 2, powers / 2, 3000)
    shown = counted(numbers).shown()
    assert 5 < len(shown) <= 15 and sum(count for _, count in shown) == numbers.size
    for name, count in shown:
        low, _, high = name.removeprefix("from ").removesuffix(" on").partition(" to ")
        if name.startswith("below"):
            low, high = "0", name.removeprefix("below ")
        assert count == ((numbers >= float(low)) & (numbers < float(high or "inf"))).sum(), name


def test_histograms_of_ranks_add_up():
    numbers = np.random.default_rng(0).uniform(0, 3, 100)
    parts = [counted(part) for part in np.split(numbers, [10, 10, 70])]
    assert Histogram.sum_of(parts) == counted(numbers)
    assert Histogram.of_dict(parts[0].as_dict()) == parts[0]
    # Of a report that was kept, whose edges were others.
    kept = {"unit": "s", "edges": [10.0, 60.0], "counts": [3, 0, 1], "others": {}}
    shown = [("below 10 s", 3), ("10 s to 1 min", 0), ("from 1 min on", 1)]
    assert Histogram.of_dict(kept).shown() == shown
