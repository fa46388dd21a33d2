"""scripts/bench/__main__.py: it lists every benchmark, and says what there is not."""

import importlib
import re
import subprocess

import pytest

from tests.support.benchmarks import ROOT, command_of
from tests.support.own_process import run_program

main = importlib.import_module("scripts.bench.__main__")
HELPERS = {"tables/peer", "tables/workloads"}


def call(*words):
    return subprocess.run([*command_of(""), *words], capture_output=True, text=True, cwd=ROOT)


def test_every_benchmark_is_listed_with_a_line_of_its_own():
    done = call()
    assert done.returncode == 0, done.stderr
    listed = dict(re.findall(r"(?m)^([a-z_]+(?: [a-z_]+)?)  +(\S.*)$", done.stdout))
    assert list(listed) == main.commands()
    modules = {
        str(path.relative_to(main.FOLDER).with_suffix(""))
        for path in main.FOLDER.rglob("*.py")
        if "common" not in path.parts and not path.name.startswith("__")
    }
    assert {each.replace(" ", "/") for each in listed} == modules - HELPERS


def test_there_are_few_benchmarks():
    assert len(main.BENCHMARKS) <= 16


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["nothing"], "no benchmark 'nothing'. Expected one of: compile, dynamic_embedding, "),
        (["ranks"], "no benchmark 'ranks'. Expected one of: ranks shares, ranks pinned, "),
        (["ranks", "--rounds"], "no benchmark 'ranks --rounds'. Expected one of: ranks shares, "),
    ],
)
def test_a_benchmark_that_there_is_not_is_refused(words, expected):
    done = call(*words)
    assert done.returncode == 1 and expected in done.stderr


@pytest.mark.parametrize("name", main.commands())
def test_every_benchmark_has_a_smoke_test(name):
    assert (ROOT / "tests" / "bench" / f"test_{name.split()[-1]}.py").is_file()


@pytest.mark.parametrize(
    ("missing", "names"),
    [
        # scripts/gpu_check.sh runs where there is no TensorFlow.
        ("tensorflow", "engine.step tables.operations tables.limits tables.sweep tables.tiers"),
        ("tensorflow", "engine.launch files.dump memory.growth memory.index optimizers.rules"),
        # TFRA has an environment of its own.
        ("sok_lite", "lookup many_tables.systems dynamic_embedding"),
    ],
)
def test_what_a_benchmark_does_without_is_not_imported(missing, names):
    modules = ", ".join(f"scripts.bench.{name}" for name in names.split())
    run_program(f"import sys; sys.modules[{missing!r}] = None; import {modules}")
