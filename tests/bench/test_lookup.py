"""lookup.py without TFRA, and beside a system that dies."""

import subprocess

import pytest

from tests.support.benchmarks import ROOT, RUNS_A_BENCHMARK, command_of, run, table_of


@RUNS_A_BENCHMARK
def test_one_table_is_measured_through_tensorflow(no_peer):
    args = "--keys 500 --batch 64 --dim 3 --rounds 1 --cases lookup-function-zipf insert".split()
    results, text = run("lookup", *args)
    assert [(r["case"], set(r["median_ms"])) for r in results] == [
        ("lookup-function-zipf", {"sok_lite", "dense"}),
        ("insert", {"sok_lite"}),
    ]
    assert "TFRA is not measured" in text
    assert [row[0] for row in table_of(text, "median ms")] == ["lookup-function-zipf", "insert"]
    assert [row[0] for row in table_of(text, "work")] == ["lookup, zipf, against dense"]


@pytest.mark.full_only("starts a system in each of its processes")
def test_a_system_that_dies_ends_the_benchmark(tmp_path):
    peer = tmp_path / "bin" / "python"
    peer.parent.mkdir()
    peer.write_text("#!/bin/sh\necho no TFRA here >&2\nexit 3\n")
    peer.chmod(0o755)
    done = subprocess.run(
        [*command_of("lookup"), "--threads", "1", "--peers", tmp_path],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
    )
    assert done.returncode == 1
    assert "no TFRA here" in done.stderr
    assert "A process of tfra, 1 thread died; its words are above." in done.stderr
