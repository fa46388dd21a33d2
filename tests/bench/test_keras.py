"""keras.py on tiny sizes."""

import pytest

from tests.support.benchmarks import RUNS_A_BENCHMARK, run


@RUNS_A_BENCHMARK
def test_fit_of_tables_is_timed_beside_dense_layers():
    pytest.importorskip("tensorflow")
    args = "--features 2 --keys 50 --dim 2 --batch 16 --steps 2 --rounds 1 --calls 2".split()
    results, _ = run("keras", *args)
    layers = ["tables", "a layer for each table", "keras.layers.Embedding"]
    assert [each["layer"] for each in results[:3]] == layers
    served = [(each["way"], each["batch"]) for each in results[3:]]
    assert served == [("model", 1), ("served", 1), ("model", 16), ("served", 16)]
