"""optimizers/fallback_step.py on tiny sizes."""

import pytest

from tests.support.benchmarks import RUNS_A_BENCHMARK, run


@RUNS_A_BENCHMARK
@pytest.mark.parametrize("mode", [(), ("--function",)], ids=["eager", "tf.function"])
def test_steps_by_a_rule_and_steps_of_its_own_are_measured(mode):
    pytest.importorskip("tf_keras")
    args = ("--tables", 1, 2, "--rows", 50, "--dim", 3, "--rounds", 1, *mode)
    results, _ = run("optimizers fallback_step", *args)
    families = ("Keras 3", "tf_keras", "legacy", "TF1")
    assert {(r["family"], r["tables"]) for r in results} == {
        (f, n) for f in families for n in (1, 2)
    }
