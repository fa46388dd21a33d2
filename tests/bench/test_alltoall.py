"""ranks/alltoall.py on one rank."""

import pytest

from tests.support.benchmarks import RUNS_A_BENCHMARK, run


@RUNS_A_BENCHMARK
def test_an_exchange_is_timed():
    pytest.importorskip("horovod")
    args = "--bytes 1024 65536 --rounds 1 --calls 2".split()
    results, _ = run("ranks alltoall", *args, are_positive=False)  # nothing leaves the machine
    assert [(each["bytes"], each["ranks"]) for each in results] == [(1024, 1), (65536, 1)]
