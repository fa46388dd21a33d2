"""tables/limits.py: its kernels do what they should, and what they measure is printed."""

import numpy as np
import pytest

from scripts.bench.tables.limits import READS, SOURCE, limits_of
from tests.support.benchmarks import RUNS_A_BENCHMARK, run
from tests.support.helpers import need_nvrtc


@pytest.mark.parametrize("n", [1, 31, 33, 1000])
def test_the_kernels_that_measure_the_limits_copy_what_they_should(backend, n):
    limits, xp = limits_of(backend), backend.xp
    memory = backend.from_host(np.random.default_rng(0).integers(0, 1 << 60, (50, 6)).astype("u8"))
    rows = np.random.default_rng(1).integers(0, 50, n).astype(np.uint32)
    out = xp.zeros((n, 6), np.uint64)
    lane_bits = 0 if backend.name == "cpu" else 2
    limits.launch("limit_gather", 4 * n, memory, 3, lane_bits, backend.from_host(rows), out, n)
    np.testing.assert_array_equal(backend.to_host(out), backend.to_host(memory)[rows])
    copied = xp.zeros_like(out)
    limits.launch("limit_copy", 3 * n, out, copied, 3 * n)
    np.testing.assert_array_equal(backend.to_host(copied), backend.to_host(out))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_the_kernels_that_measure_the_limits_compile_for_a_gpu(arch):
    need_nvrtc()
    from sok_lite.backend import sources
    from tools.kernel_registers import compile_source

    compiled = compile_source(sources.inlined(SOURCE), arch)
    assert compiled.error is None
    wanted = {f"limit_read_{width}_{lanes}" for width in READS for lanes in READS[width]}
    assert set(compiled.kernels) == {*wanted, "limit_copy", "limit_gather"}
    assert not any(usage.spill_bytes for usage in compiled.kernels.values())


@RUNS_A_BENCHMARK
def test_the_limits_are_measured():
    args = "--backends cpu --footprints-gb 0.001 0.002 --reads 1000 --rounds 1".split()
    results, _ = run("tables limits", *args)
    assert [r["case"] for r in results] == ["copy"] + ["random_read"] * 8 + ["gather"] * 5
    assert {r["footprint_bytes"] for r in results if r["case"] == "random_read"} == {
        1048 << 10,
        2097 << 10,
    }
