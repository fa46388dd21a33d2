"""tables/sweep.py: each choice is tried, the best is named."""

import os
import subprocess
import sys

from scripts.bench.tables import sweep
from sok_lite.backend.tunables import TUNABLES
from tests.support.benchmarks import ROOT, RUNS_A_BENCHMARK, results_of


@RUNS_A_BENCHMARK
def test_the_sweep_runs_each_choice_and_names_the_best():
    names = ["default", "max_bucket_size=32"]  # those with which the kernels are compiled already
    done = subprocess.run(
        ["bash", ROOT / "scripts" / "gpu_check.sh", "--sweep", "--quick", "--choices", *names],
        capture_output=True,
        text=True,
        env={**os.environ, "SOK_LITE_BACKEND": "cpu", "SOK_LITE_PYTHON": sys.executable},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = results_of(done.stdout)
    assert "random_read" in {r["case"] for r in results}
    best = [r for r in results if r["case"] == "best"]
    measured = [r for r in results if "load_factor" in r and r["case"] != "best"]
    chosen = [choice for choice in sweep.cpu_choices() if choice.name in names]
    for r in best:
        same = [
            other
            for other in measured
            if (other["case"], other["table"], other["dim"], other["load_factor"])
            == (r["op"], r["table"], r["dim"], r["load_factor"])
        ]
        choices = [choice for choice in chosen if r["table"] in choice.tables]
        assert len(same) == r["choices"] == len(choices)
        assert r["keys_per_second"] == max(other["keys_per_second"] for other in same)
        assert r["over_default"] >= 1
        for choice in choices:
            assert any(
                other.get("defines", {}) == choice.defines
                and other.get("table_options", []) == list(choice.options)
                for other in same
            )
    assert {(r["table"], r["dim"], r["load_factor"]) for r in best} == {
        (table, dim, load)
        for dim in (8, 64)
        for table, load in (("hbm", 0.5), ("hybrid", 0.5), ("hybrid", 1.0))
    }


def test_every_tunable_of_the_sweep_is_one_of_the_kernels():
    for choice in (*sweep.gpu_choices(), *sweep.cpu_choices()):
        assert all(value in TUNABLES[name].values for name, value in choice.defines.items())
