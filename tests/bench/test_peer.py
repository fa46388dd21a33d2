"""tables/peer.py: figures of HKV's program are read, and stand beside ours."""

import subprocess

import pytest

from scripts.bench.tables.peer import parse_hkv, peer_of
from tests.support.benchmarks import ROOT, RUNS_A_BENCHMARK, SMALL, command_of, run

PEER = """
Warming up
* GPU: 1 x Some Card: 9.0
* Key-Values per OP = 1048576
### One mode:

* dim = 8, capacity = 1 Million-KV, HBM = 4 GB, HMEM = 0 GB

|    \u03bb | find | find_or_insert* |
|-----:|-----:|----------------:|
| 0.50 | 1.500 | 2.000 |
| 1.00 | 0.250 |  0.125 |

|    \u03bb | contains |
|-----:|---------:|
| 0.50 |    3.000 |

### Another mode:

* dim = 64, capacity = 128 Million-KV, HBM = 16 GB, HMEM = 16 GB

|    \u03bb | find |
|-----:|-----:|
| 0.75 | 0.500 |
"""


def test_the_figures_of_hkv_are_read():
    unit = 1.073741824
    mega = 1 << 20
    expected = [
        (8, mega, 0.5, "find", 1.5 * unit),
        (8, mega, 0.5, "find_or_insert*", 2 * unit),
        (8, mega, 1.0, "find", 0.25 * unit),
        (8, mega, 1.0, "find_or_insert*", 0.125 * unit),
        (8, mega, 0.5, "contains", 3 * unit),
        (64, 128 * mega, 0.75, "find", 0.5 * unit),
    ]
    cases = parse_hkv(PEER)
    assert [tuple(case) for case in cases] == [pytest.approx(case) for case in expected]
    keys = [case.key for case in cases]
    assert peer_of(keys, 8, mega, 0.5, "contains") == (8, mega, 0.5, "contains")
    assert peer_of(keys, 8, 2 * mega, 0.5, "contains") is None
    assert parse_hkv("") == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("| \u03bb | find |\n| 0.5 | 1.0 |\n", "without a configuration"),
        ("dim = 8, capacity = 1 Million\n| \u03bb | find |\n| 0.5 |\n", "A row with 1 cells"),
        ("dim = 8, capacity = 1 Million\n| \u03bb | find |\n| 0.5 | x |\n", "could not convert"),
    ],
)
def test_a_table_that_is_not_understood_is_an_error(text, message):
    with pytest.raises(ValueError, match=message):
        parse_hkv(text)


@RUNS_A_BENCHMARK
def test_a_peer_runs_in_turns_with_our_tables(tmp_path):
    peer = tmp_path / "peer"
    peer.write_text(f'#!/bin/sh\necho turn >> "$0.log"\ncat <<END\n{PEER}\nEND\n')
    peer.chmod(0o755)
    args = "--backends cpu --tables hbm hybrid --dims 8 --loads 0.5 1.0 --batch 32768 --rounds 1"
    results, text = run(
        "tables operations",
        *args.split(),
        *("--hkv-ops", "find", "find_or_insert*", "insert_or_assign", "--capacity", 1 << 20),
        *("--turns", 1, "--peer", "hkv", "--peer-bin", peer),
    )
    assert (tmp_path / "peer.log").read_text() == "turn\n"
    ratios = {(r["table"], r["load_factor"], r["op"]): r for r in results if r["case"] == "ratio"}
    assert set(ratios) == {
        ("hbm", 0.5, "find"),
        ("hbm", 0.5, "find_or_insert*"),
        ("hybrid", 0.5, "find"),
        ("hybrid", 0.5, "find_or_insert*"),
        ("hybrid", 1.0, "find"),
        ("hybrid", 1.0, "find_or_insert*"),
    }
    for (table, load, op), r in ratios.items():
        (own,) = [
            other
            for other in results
            if other.get("keys_are") == "best_of_two"
            and (other["table"], other["load_factor"], other["case"]) == (table, load, op)
        ]
        ours = own["keys_per_second"] / 1e9
        assert r["ours_giga_keys_per_second"] == pytest.approx(ours, rel=2e-3)
        peers = {"find": {0.5: 1.5, 1.0: 0.25}, "find_or_insert*": {0.5: 2, 1.0: 0.125}}
        assert r["ratio"] == pytest.approx(ours / (peers[op][load] * 1.0737), rel=2e-3)
    assert "has no insert_or_assign for dim 8" in text


def test_a_peer_that_fails_is_an_error(tmp_path):
    peer = tmp_path / "peer"
    peer.write_text("#!/bin/sh\necho no memory >&2\nexit 3\n")
    peer.chmod(0o755)
    done = subprocess.run(
        [*command_of("tables operations"), *SMALL, "--peer", "hkv", "--peer-bin", peer],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode != 0
    assert "ended with 3: no memory" in done.stderr
