"""tables/workloads.py: the keys of a power law, and a step on them."""

import numpy as np
import pytest

from scripts.bench.lookup import zipf_positions
from scripts.bench.tables.workloads import keys_for_unique
from tests.support.benchmarks import RUNS_A_BENCHMARK, SMALL, run


def test_a_power_law_has_the_distinct_keys_that_were_asked_for():
    num_keys = keys_for_unique(20_000, 7_000, 1.05)
    keys = zipf_positions(np.random.default_rng(0), num_keys, 1.05, 20_000)
    # The standard deviation of the number of distinct keys is below sqrt(7,000), 84.
    assert abs(np.unique(keys).size - 7_000) < 420


@RUNS_A_BENCHMARK
def test_the_dynamicemb_workload_runs_on_both_tables():
    results, _ = run(
        "tables operations",
        *SMALL,
        *"--workload dynamicemb --lookups 3000 --unique 1000".split(),
    )
    assert [r["table"] for r in results] == ["hbm", "hybrid"]
    for r in results:
        assert abs(r["unique"] - 1000) < 150
        assert r["step_ms"] == pytest.approx(r["forward_ms"] + r["backward_ms"], rel=1e-2)
