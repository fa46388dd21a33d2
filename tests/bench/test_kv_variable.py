"""kv_variable.py on tiny sizes."""

import pytest

from tests.support.benchmarks import RUNS_A_BENCHMARK, run


@RUNS_A_BENCHMARK
def test_the_calls_of_a_kv_variable_are_timed_beside_a_dense_one():
    pytest.importorskip("tensorflow")
    args = "--keys 500 --batch 40 --dim 3 --rounds 1 --partitions 1 2".split()
    results, _ = run("kv_variable", *args)
    works = ("lookup", "predict", "train-adam", "train-ftrl", "save", "restore")
    assert [(r["case"], r["partitions"]) for r in results] == [
        (w, n) for w in works for n in (1, 2)
    ]
    assert all(("checkpoint_mb" in r) == (r["case"] in ("save", "restore")) for r in results)
