"""scripts/bench: each benchmark runs on tiny sizes, and says what it is asked to measure.

What they measure is not asserted: no test asserts a time.
"""

import re
import subprocess

import pytest

from scripts.bench.dynamic_embedding import lowest
from scripts.bench.tables import OPS
from tests.support.benchmarks import ROOT, RUNS_A_BENCHMARK, command_of, run
from tests.support.own_process import run_program

# Of each benchmark: options that make it small, and a field of its results with what it says.
SMALL = {
    "dynamic_embedding": (
        "--cases accum-eager-uniform train-function-many --runs 1 --rounds 2 --keys 500 --batch 64 "
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
        "--orders random --items 2",
        "rule: SGD; SGD; Adam; Adam; Adam amsgrad; Adam amsgrad",
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


def test_of_several_runs_the_lowest_counts():
    runs = [{"median_ms": {"a": a, "b": b}, "lowest_ms": {"a": a / 2}} for a, b in ((2, 3), (4, 1))]
    assert lowest(runs) == {"median_ms": {"a": 2, "b": 1}, "lowest_ms": {"a": 1}}


def test_what_a_benchmark_does_without_is_not_imported():
    for missing, names in (
        ("tensorflow", "engine tables files optimizers readonly"),  # scripts/gpu_check.sh has none
        ("sok_lite", "lookup many_tables dynamic_embedding"),  # TFRA has a Python of its own
    ):
        modules = ", ".join(f"scripts.bench.{name}" for name in names.split())
        run_program(f"import sys; sys.modules[{missing!r}] = None; import {modules}")
