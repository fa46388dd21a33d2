"""engine/launch.py on tiny sizes, alone and beside other work."""

import pytest

from tests.support.benchmarks import RUNS_A_BENCHMARK, run


@RUNS_A_BENCHMARK
@pytest.mark.parametrize("beside", [[], ["--beside"]], ids=["alone", "beside"])
def test_launches_are_measured(beside):
    results, _ = run(
        "engine launch",
        *"--threads 1 2 --idle-us 5 20 --parts 3 --items 200 --rows 500 --rounds 2".split(),
        *beside,
        are_positive=not beside,  # there may be no time for other work
    )
    launches = [r for r in results if r["case"] == "launch"]
    assert len(launches) == 4 * len([r for r in results if r["case"] == "joined"]) == 20
    assert {(r["threads"], r["idle_us"]) for r in launches} == {(1, 5), (1, 20), (2, 5), (2, 20)}
    assert all(("turns_beside" in r) == bool(beside) for r in launches)
