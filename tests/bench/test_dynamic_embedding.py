"""dynamic_embedding.py without TFRA."""

from scripts.bench.dynamic_embedding import lowest
from tests.support.benchmarks import RUNS_A_BENCHMARK, run, table_of


@RUNS_A_BENCHMARK
def test_the_lines_of_a_program_are_measured_with_our_dynamic_embedding(no_peer):
    cases = ["accum-eager-uniform", "train-function-many"]
    args = "--keys 500 --batch 64 --dim 3 --tables 2 --many-keys 50 --many-batch 8 --rounds 2"
    results, text = run("dynamic_embedding", *args.split(), "--runs", 2, "--cases", *cases)
    assert [r["case"] for r in results] == cases
    assert [(r["tables"], r["keys"], r["batch"]) for r in results] == [(1, 500, 64), (2, 50, 8)]
    assert all(set(r["median_ms"]) == {"sok_lite"} for r in results)
    assert "TFRA is not measured" in text
    assert [row[0] for row in table_of(text, "median ms")] == cases


def test_of_several_runs_the_lowest_median_counts():
    runs = [{"median_ms": {"a": 3.0, "b": 1.0}}, {"median_ms": {"a": 2.0, "b": 4.0}}]
    assert lowest(runs) == {"median_ms": {"a": 2.0, "b": 1.0}}
