"""memory/slabs.py counts allocations as a GPU makes them."""

import pytest

from scripts.bench.memory import slabs
from tests.support.benchmarks import RUNS_A_BENCHMARK, run


@RUNS_A_BENCHMARK
def test_allocations_of_rows_are_counted_as_a_gpu_makes_them():
    pytest.importorskip("cupy", reason="CuPy is not installed")
    from sok_lite.backend.cuda import CudaBackend

    assert slabs.CountingBackend.chunk_bytes == CudaBackend.chunk_bytes
    results, _ = run("memory slabs", "--rows", 20_000, "--dim", 8, "--batches", 100, 7_000)
    assert [r["batch"] for r in results] == [100, 7_000]
    assert all(r["rows"] == 20_000 and r["row_bytes"] == 3 * 8 * 4 for r in results)
    assert results[0]["allocations"] >= results[1]["allocations"] == 3 * 3
