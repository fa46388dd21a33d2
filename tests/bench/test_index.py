"""memory/index.py on tiny sizes."""

from tests.support.benchmarks import RUNS_A_BENCHMARK, run


@RUNS_A_BENCHMARK
def test_the_bytes_of_an_index_are_measured():
    results, _ = run("memory index", *"--dim 3 --sizes 1000 3000".split(), are_positive=False)
    assert [each["keys"] for each in results] == [1000, 3000]
    # A slot has 16 bytes, and some are free.
    assert all(16 <= each["index_bytes_per_key"] < 200 for each in results)
