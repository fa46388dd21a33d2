"""engine/step.py on tiny sizes."""

from tests.support.benchmarks import RUNS_A_BENCHMARK, run


@RUNS_A_BENCHMARK
def test_the_engine_around_the_tables_is_measured():
    results, _ = run(
        "engine step", *"--backends cpu --keys 2000 --batch 400 --dim 4 --rounds 1".split()
    )
    assert {"unique", "group", "combine_grad", "update_adam"} <= {r["case"] for r in results}
