"""many_tables/stages.py on tiny sizes."""

import pytest

from tests.support.benchmarks import RUNS_A_BENCHMARK, run


@RUNS_A_BENCHMARK
def test_the_time_of_a_step_is_divided_among_its_stages():
    pytest.importorskip("tensorflow")
    args = "--cases train-32 demo --tables 2 --keys 50 --dim 3 --calls 3 --demo-rows 20000".split()
    results, _ = run("many_tables stages", *args, are_positive=False)
    assert [each["case"] for each in results] == ["train-32", "demo"]
    for each in results:
        parts = [value for key, value in each.items() if key.endswith(("_kernels", "_python"))]
        assert len(parts) == 6 and all(part > 0 for part in parts)
        assert each["total"] > each["rest"] > 0
