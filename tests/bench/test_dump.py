"""files/dump.py on tiny sizes."""

from tests.support.benchmarks import RUNS_A_BENCHMARK, run


@RUNS_A_BENCHMARK
def test_dumps_and_what_they_cost_training_are_measured():
    args = "--keys 20000 --batch 400 --dim 4 --rounds 1 --steps 3".split()
    results, _ = run("files dump", *args)
    cases = ["disk", "disk, read", "dump", "load", "background"]
    cases += ["step, no dump", "step, while it is written"]
    assert [fields["case"] for fields in results] == cases
    assert results[4]["copied"] > 20_000 * (8 + 3 * 16)
