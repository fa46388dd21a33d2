"""ranks/shares.py: its counts on one rank and on two."""

import json
import re
import subprocess

import pytest

from scripts.bench.common.turns import find_horovodrun
from tests.support.benchmarks import ROOT, RUNS_A_BENCHMARK, command_of, run


@RUNS_A_BENCHMARK
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_work_of_each_rank_is_counted(ranks):
    pytest.importorskip("tensorflow")
    args = "--tables 2 --keys 100 --dim 3 --cases lookup-64 train-64".split()
    if ranks == 1:
        (lookup, train), _ = run("ranks shares", *args)
        assert lookup["items"] == train["items"] == 128  # 64 rows of two tables
        assert "keys_owned" not in lookup
        assert 0 < train["keys_owned"] < 128
        return

    horovodrun = find_horovodrun()
    if horovodrun is None:
        pytest.skip("no horovodrun: scripts/setup.sh installs Horovod")
    done = subprocess.run(
        [horovodrun, "--gloo", "-np", str(ranks), *command_of("ranks shares"), *args],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = [json.loads(line) for line in re.findall(r"RESULT (.*)", done.stdout)]
    lookup, train = results
    assert [each["case"] for each in results] == ["lookup-64", "train-64"]
    for each in results:
        assert each["items"] == 64  # 32 rows of two tables
        # Of a message: a tag, the number of tables, and how many keys each has.
        words = each["keys_for_others"] + 2 + 2
        assert each["send_keys_bytes"] == pytest.approx(8 * words, rel=1e-3)
        assert each["keys_for_others"] < each["distinct_keys"] == each["keys_asked"]
    assert [each["collectives"] for each in results] == [2, 3]
    assert "send_grads_bytes" not in lookup
    assert train["keys_owned"] < train["keys_asked"]
    # A section of 16 bytes begins for each table.
    assert 0 <= train["send_grads_bytes"] - 12 * train["keys_for_others"] <= 2 * 15
