"""scripts/bench: each benchmark runs on tiny sizes, and says what it is asked to measure.

What they measure is not asserted: no test asserts a time.
"""

import argparse
import re
import subprocess

import numpy as np
import pytest

from scripts.bench.tables import NEW_SHARE, OPS, Bench, distinct_keys
from tests.support.benchmarks import ROOT, RUNS_A_BENCHMARK, command_of, run
from tests.support.own_process import run_program

# Of each benchmark: options that make it small, and a field of its results with what it says.
SMALL = {
    "dynamic_embedding": (
        "--cases accum-eager-uniform train-function-many --runs 2 --rounds 2 --keys 500 --batch 64 "
        "--dim 3 --tables 2 --many-keys 50 --many-batch 8",
        "case: accum-eager-uniform; train-function-many",
    ),
    "engine": ("--backends cpu --tables 1 3 --keys 500 --batch 40 --rounds 1", "tables: 1; 3"),
    "files": (
        "--keys 20000 --batch 400 --dim 4 --rounds 1 --steps 3",
        "case: disk; disk, read; dump; load; background; step, no dump; step, while it is written",
    ),
    "keras": (
        "--features 2 --keys 50 --dim 2 --batch 16 --steps 2 --rounds 1",
        "layer: tables; a layer for each table; keras.layers.Embedding",
    ),
    "lookup": (
        "--keys 500 --batch 64 --dim 3 --rounds 1 --cases lookup-function-zipf insert",
        "case: lookup-function-zipf; insert",
    ),
    "many_tables": ("--quick --threads 1", "case: lookup-32; train-32; train-32x4; new-32"),
    "optimizers": (
        "--backends cpu --rows 300 --dims 3 --dtypes bfloat16 --rounds 1 --rules Adam SGD "
        "--orders random",
        "rule: SGD; Adam; Adam amsgrad",
    ),
    "readonly": (
        "--keys 500 --dim 3 --batches 5 --threads 2 --rounds 1 --seconds 0.01",
        "case: prepare; lookup; refresh; anew",
    ),
    "serving": ("--tables 3 --keys 50 --rounds 3", "case: dense; known; any; ragged; engine"),
    "tables": (
        "--backends cpu --tables hybrid --dims 3 --loads 1.0 --capacity 4096 --batch 200 "
        "--rounds 1 --mark-keys 2000",
        f"case: {'; '.join(['lookup_over_gather', *OPS[:-1]])}",
    ),
}


def call(*words):
    return subprocess.run([*command_of(""), *words], capture_output=True, text=True, cwd=ROOT)


def test_every_benchmark_is_listed_with_a_line_of_its_own_and_no_other_is_taken():
    done = call()
    assert done.returncode == 0, done.stderr
    assert [name for name, _ in re.findall(r"(?m)^([a-z_]+)  +(\S.*)$", done.stdout)] == list(SMALL)
    done = call("nothing", "--rounds")
    assert done.returncode == 1
    assert "no benchmark 'nothing'. Expected one of: dynamic_embedding, engine, " in done.stderr


@RUNS_A_BENCHMARK
@pytest.mark.parametrize("name", SMALL)
def test_a_benchmark_prints_a_line_for_each_case(name, monkeypatch, tmp_path):
    monkeypatch.setenv("SOK_LITE_PEERS", str(tmp_path))  # no environment of TFRA is found
    options, expected = SMALL[name]
    field = expected.partition(":")[0]
    results, _ = run(name, *options.split(), are_positive=name != "optimizers")
    assert f"{field}: {'; '.join(str(fields[field]) for fields in results)}" == expected


@RUNS_A_BENCHMARK
def test_the_workload_of_hkv_runs_on_both_tables():
    args = "--backends cpu --capacity 4096 --batch 200 --dims 3 --loads 0.5 --workload hkv"
    results, text = run("tables", *args.split())
    assert [r["table"] for r in results] == 9 * ["hbm"] + 10 * ["hybrid"]
    assert "hbm has no insert_and_evict" in text


@pytest.mark.full_only("starts a system in each of its processes")
def test_a_system_that_dies_ends_the_benchmark(tmp_path):
    peer = tmp_path / "bin" / "python"
    peer.parent.mkdir()
    peer.write_text("#!/bin/sh\necho no TFRA here >&2\nexit 3\n")
    peer.chmod(0o755)
    done = call("lookup", "--threads", "1", "--peers", str(tmp_path))
    assert done.returncode == 1
    assert "no TFRA here" in done.stderr
    assert "A process of tfra, 1 thread died; its words are above." in done.stderr


def test_what_a_benchmark_does_without_is_not_imported():
    for missing, names in (
        ("tensorflow", "engine tables files optimizers readonly"),  # scripts/gpu_check.sh has none
        ("sok_lite", "lookup many_tables dynamic_embedding"),  # TFRA has a Python of its own
    ):
        modules = ", ".join(f"scripts.bench.{name}" for name in names.split())
        run_program(f"import sys; sys.modules[{missing!r}] = None; import {modules}")


def test_a_filled_table_gives_known_and_new_keys(backend):
    args = argparse.Namespace(batch=100, near_share=1.0, table_options=[])
    bench = Bench(backend, "hbm", 4, 4096, 0.5, args)
    assert (bench.table.capacity, bench.table.size) == (4096, 2048)
    known = [bench.known(100) for _ in range(15)]
    assert all(bool(bench.table.contains(keys).all()) for keys in known)
    assert len({key for keys in known for key in backend.to_host(keys).tolist()}) == 1500
    keys = bench.mixed(100)
    assert np.unique(backend.to_host(keys)).size == 100
    held = backend.to_host(bench.table.contains(keys))
    assert held.sum() == 100 - int(100 * NEW_SHARE)
    bench.table.find_or_insert(keys)
    bench.remove_new(keys, 2048)
    np.testing.assert_array_equal(backend.to_host(bench.table.contains(keys)), held)
    assert np.unique(backend.to_host(distinct_keys(backend, 0, 1000))).size == 1000
