"""The counts of Python's calls: they repeat, and grow with the tables."""

import pytest

from tests.support.benchmarks import run


def counted(*arguments):
    return {each["work"]: each for each in run("tools.count_calls", *arguments)[0]}


@pytest.mark.full_only("counts twice in processes; budgets below are the smoke")
def test_calls_are_counted_and_repeat():
    pytest.importorskip("tensorflow")
    first, second = counted("--tables", "1", "3"), counted("--tables", "1", "3")
    assert first == second
    assert set(first) == {"lookup", "step", "eager step", "eager step, dense"}
    for found in first.values():
        assert 0 < found["tables_1"] < found["tables_3"]
        each = (found["tables_3"] - found["tables_1"]) / 2
        assert found["each_table"] == pytest.approx(each, rel=1e-3)
    assert first["lookup"]["tables_1"] < first["step"]["tables_1"]
    assert first["step"]["tables_1"] < first["eager step"]["tables_1"]


# Calls of a lookup and of a step, beside those of each table, by Python and TensorFlow. Python
# 3.11 calls a function for each comprehension.
LIMITS = {("3.11", "2.21"): (230, 715), ("3.12", "2.21"): (200, 600)}


def test_a_table_more_costs_next_to_nothing():
    """docs/measurements.md says how many calls; they hold for the versions that it names."""
    pytest.importorskip("tensorflow")
    found = counted("--tables", "1", "26", "--works", "lookup", "step")
    assert found["lookup"]["each_table"] <= 3
    assert found["step"]["each_table"] <= 10
    versions = [found["step"][name].split(".")[:2] for name in ("python", "tensorflow")]
    pair = tuple(map(".".join, versions))
    if pair not in LIMITS:
        pytest.skip(f"nobody has said how many calls Python {pair[0]} makes beside {pair[1]}")
    lookup, step = LIMITS[pair]
    for tables in (1, 26):
        assert found["lookup"][f"tables_{tables}"] <= lookup + 3 * tables
        assert found["step"][f"tables_{tables}"] <= step + 10 * tables
