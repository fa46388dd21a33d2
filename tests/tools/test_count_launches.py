"""tools/count_launches.py: launches do not grow with the tables, trips not with the ranks."""

import pytest

from tests.support.benchmarks import RUNS_A_BENCHMARK, run
from tests.support.simt import backend as simt


@RUNS_A_BENCHMARK
def test_the_launches_of_the_main_calls_are_counted():
    reason = simt.unavailable()
    if reason is not None:
        pytest.skip(f"no simulated GPU: {reason}")
    args = "--keys 16 --dim 3 --ranks 2 4".split()
    results, text = run("tools.count_launches", *args, are_positive=False)
    counts = {r["case"]: r for r in results}
    steps = [f"training step of {what}" for what in ("1 hbm", "26 hbm")]
    on_ranks = [f"{steps[1]}, {size} ranks" for size in (2, 4)]
    assert {case.partition(":")[0] for case in counts} == {"hbm", "hybrid", *steps, *on_ranks}
    one, many = (counts[step] for step in steps)
    # One launch serves all tables of a call.
    assert one["kernels"] > 3 and many["kernels"] == one["kernels"]
    assert text.count("\n| ") == 1 + len(results) - len(on_ranks)
    # A trip of keys, rows and gradients, however many ranks there are.
    for case in on_ranks:
        assert counts[case]["collectives"] == 3
        assert one["kernels"] < counts[case]["kernels"] < 3 * one["kernels"]
    two, four = (counts[case] for case in on_ranks)
    assert 0 < two["waits"] == four["waits"]
