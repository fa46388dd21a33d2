"""How the counts of Python's calls grow with the tables."""

import pytest

from tests.support.benchmarks import run

# Calls of a lookup and of a step, beside those of each table, by Python and TensorFlow. Python
# 3.11 calls a function for each comprehension.
LIMITS = {("3.11", "2.21"): (0, 440)}


def test_a_table_more_costs_few_calls():
    """How many calls there are depends on the versions."""
    pytest.importorskip("tensorflow")
    works = "--tables 1 26 --works lookup step".split()
    found = {each["work"]: each for each in run("tools.count_calls", *works, are_positive=False)[0]}
    assert found["lookup"]["each_table"] == 0
    assert found["step"]["each_table"] <= 18
    versions = [found["step"][name].split(".")[:2] for name in ("python", "tensorflow")]
    pair = tuple(map(".".join, versions))
    if pair not in LIMITS:
        pytest.skip(f"nobody has said how many calls Python {pair[0]} makes beside {pair[1]}")
    lookup, step = LIMITS[pair]
    for tables in (1, 26):
        assert found["lookup"][f"tables_{tables}"] <= lookup
        assert found["step"][f"tables_{tables}"] <= step + 18 * tables
