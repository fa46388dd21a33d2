"""serving/request.py on tiny sizes."""

from tests.support.benchmarks import RUNS_A_BENCHMARK, run


@RUNS_A_BENCHMARK
def test_a_request_is_measured():
    results, _ = run("serving request", "--tables", 3, "--keys", 50, "--rounds", 3)
    assert [r["case"] for r in results] == ["dense", "known", "any", "ragged", "engine"]
