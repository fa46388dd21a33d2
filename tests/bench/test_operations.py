"""tables/operations.py: every operation has its line; its keys are what they are said to be."""

import argparse

import numpy as np
import pytest

from scripts.bench.tables.operations import MARKS, NEW_SHARE, OPS, TRAFFIC, Bench, distinct_keys
from tests.support.benchmarks import RUNS_A_BENCHMARK, SMALL, run


def test_every_operation_of_both_tables_is_measured():
    results, text = run("tables operations", *SMALL, "--dims", 3, 8, "--loads", 0.5, 1.0)
    cases = {(r["case"], r.get("table"), r.get("dim"), r.get("load_factor")) for r in results}
    for table, loads in (("hbm", [0.5]), ("hybrid", [0.5, 1.0])):
        ops = set(TRAFFIC) - ({"insert_and_evict"} if table == "hbm" else set())
        expected = {(op, table, dim, load) for op in ops for dim in (3, 8) for load in loads}
        expected |= {(op, table, 64, None) for op in MARKS}
        assert {case for case in cases if case[1] == table} == expected
    assert {case[0] for case in cases} == {*OPS, "copy", "random_read", "gather"}
    assert "hbm cannot hold load factor 1.0" in text
    for r in results:
        if r["case"] in TRAFFIC:
            # Compulsory bytes cannot be read faster than the caches of this machine give them.
            assert r["share_of_limit"] < 100
            assert r["keys_in_table"] >= 0.98 * r["load_factor"] * r["capacity"]


@RUNS_A_BENCHMARK
def test_a_subset_can_be_chosen():
    args = "--tables hbm --dims 8 --loads 0.5 --ops find".split()
    results, text = run("tables operations", *SMALL, *args)
    assert [r["case"] for r in results] == ["copy", "random_read", "find"]
    assert "hybrid" not in text
    find = results[-1]
    # 8 bytes of key, 4 of row number, a line of 64.
    assert find["bytes_per_second"] == pytest.approx(76 * find["keys_per_second"], rel=1e-3)


@pytest.mark.parametrize("count", [0, 1, 31, 1000])
def test_the_keys_of_the_benchmarks_are_distinct(backend, count):
    first = backend.to_host(distinct_keys(backend, 0, count))
    second = backend.to_host(distinct_keys(backend, count, 1000))
    assert np.unique(np.concatenate([first, second])).size == count + 1000
    np.testing.assert_array_equal(second[:1], backend.to_host(distinct_keys(backend, count, 1)))


def test_a_filled_table_gives_known_and_new_keys(backend):

    args = argparse.Namespace(batch=100, near_share=1.0, table_options=[])
    bench = Bench(backend, "hbm", 4, 4096, 0.5, args)
    assert (bench.table.capacity, bench.table.size) == (4096, 2048)
    seen = set()
    for _ in range(15):
        keys = bench.known(100)
        assert bool(bench.table.contains(keys).all())
        seen |= set(backend.to_host(keys).tolist())
    assert len(seen) == 1500
    for _ in range(3):
        keys = bench.mixed(100)
        assert np.unique(backend.to_host(keys)).size == 100
        held = backend.to_host(bench.table.contains(keys))
        assert held.sum() == 100 - int(100 * NEW_SHARE)
        bench.table.find_or_insert(keys)
        bench.remove_new(keys, 2048)
        np.testing.assert_array_equal(backend.to_host(bench.table.contains(keys)), held)
