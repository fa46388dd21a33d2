"""many_tables/systems.py: tables, ranks, the demo."""

import numpy as np
import pytest

from scripts.bench.lookup import zipf_positions
from scripts.bench.many_tables.systems import make_lengths
from tests.support.benchmarks import RUNS_A_BENCHMARK, run, table_of


@RUNS_A_BENCHMARK
def test_many_tables_are_measured_by_themselves_and_over_ranks(no_peer):
    results, text = run("many_tables systems", "--quick", "--threads", 1)
    cases = ["lookup-32", "train-32", "train-32x4"]
    assert [r["case"] for r in results] == cases
    contenders = {"sok_lite, 1 thread", "dense, 1 thread"}
    if "2 ranks are not measured" not in text:
        contenders.add("sok_lite, 2 ranks, 1 thread")
    assert all(set(r["median_ms"]) == contenders for r in results)
    assert [row[0] for row in table_of(text, "median ms")] == cases


@RUNS_A_BENCHMARK
def test_the_demo_is_measured():
    args = "--cases demo --demo-rows 3000 --demo-rounds 1".split()
    ((fields,), _) = run("many_tables systems", *args)
    rate = 1024e3 / fields["median_ms"]["sok_lite"]
    assert fields["samples_per_second"] == {"sok_lite": pytest.approx(rate, rel=1e-3)}


def test_the_rows_of_many_tables_have_the_mean_that_was_asked_for():
    rng = np.random.default_rng(0)
    for count in (2, 1024):
        lengths = make_lengths(rng, count, 10)
        assert lengths.size == count and lengths.sum() == 10 * count
        assert lengths.min() >= 1 and lengths.max() <= 19
    assert make_lengths(rng, 7, 1).tolist() == [1] * 7
    positions = zipf_positions(rng, 50, 1.3, (200, 500))
    counts = np.bincount(positions.ravel(), minlength=50)
    assert positions.shape == (200, 500) and counts.size == 50
    # The k-th comes k^1.3 times as seldom as the first.
    expected = 1e5 * np.arange(1, 51) ** -1.3 / (np.arange(1, 51) ** -1.3).sum()
    np.testing.assert_allclose(counts, expected, atol=6 * np.sqrt(expected.max()))
