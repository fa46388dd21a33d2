"""ranks/pinned.py: three jobs in turns, and their ratios."""

import json
import re
import subprocess
from itertools import product

import pytest

from tests.support.benchmarks import ROOT, command_of


@pytest.mark.full_only("starts three jobs")
def test_two_pinned_ranks_are_timed_beside_one():
    pytest.importorskip("tensorflow")
    cases = ["step", "dense, cpu", "waits"]
    args = ["--batches", 64, "--rounds", 1, "--calls", 1, "--cases", *cases]
    done = subprocess.run(
        [*command_of("ranks pinned"), *map(str, args)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
    )
    if "no horovodrun" in done.stderr:
        pytest.skip("no horovodrun: scripts/setup.sh installs Horovod")
    assert done.returncode == 0, done.stdout + done.stderr
    *results, of_one, of_both = [
        json.loads(line) for line in re.findall(r"RESULT (.*)", done.stdout)
    ]
    assert [each["case"] for each in results] == cases
    one, both, two = results[0]["median_ms"]
    assert results[2]["median_ms"][one] == 0 < results[2]["median_ms"][two]
    for each, (ratio, beside) in product(results[:2], [(of_one, one), (of_both, both)]):
        assert ratio["beside"] == beside
        assert ratio[each["case"]] == pytest.approx(
            each["median_ms"][beside] / each["median_ms"][two], abs=1e-3
        )
