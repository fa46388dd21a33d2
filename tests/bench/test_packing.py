"""engine/packing.py on tiny sizes."""

import pytest

from tests.support.benchmarks import RUNS_A_BENCHMARK, run


@RUNS_A_BENCHMARK
def test_what_is_packed_for_a_gpu_is_timed_without_one():
    pytest.importorskip("cupy", reason="CuPy is not installed")
    results, _ = run("engine packing", *"--tables 1 3 --ids 20 --rounds 2".split())
    assert [r["tables"] for r in results] == [1, 3]
    assert results[0]["launches"] == results[1]["launches"]
    assert all(r["packing_us"] < r["step_us"] for r in results)
