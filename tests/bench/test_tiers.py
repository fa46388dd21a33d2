"""tables/tiers.py on tiny sizes."""

from tests.support.benchmarks import RUNS_A_BENCHMARK, run


@RUNS_A_BENCHMARK
def test_the_share_of_near_lookups_is_measured():
    args = "--keys 3000 --batch 300 --batches 12 --dim 3".split()
    results, _ = run("tables tiers", *args, are_positive=False)
    assert [each["case"] for each in results] == ["zipf", "shift", "uniform"]
    for each in results[:2]:
        assert 0 <= each["share"] <= 1 and 0 < each["best"] < 1
        assert each["near_rows"] <= 3000
