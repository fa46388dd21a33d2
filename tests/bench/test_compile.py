"""compile.py without a GPU."""

from tests.support.benchmarks import RUNS_A_BENCHMARK, run
from tests.support.helpers import need_nvrtc


@RUNS_A_BENCHMARK
def test_compiling_is_measured_without_a_gpu():
    need_nvrtc()
    files = ["slots.cu", "update/sgd.cu"]
    results, text = run("compile", "--files", *files)
    assert [r["file"] for r in results] == files
    assert all(r["cached_s"] < r["compile_s"] for r in results)
    assert "NOTE CuPy" in text
