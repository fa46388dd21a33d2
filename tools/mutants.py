"""Counts the mutants of the package that the quick tests kill, to compare two states of the tests.

A mutant is the package with one small change, such as `<` for `<=`, made by Cosmic Ray
(`pip install cosmic-ray`). A sample of them is drawn by a seed. For each one the tests run that
cover its line, until one fails; in a copy of HEAD, so the working tree may change meanwhile. A
mutant that survives shows a line that no test holds.

First the tests must say what they cover (`--cover`, with `pip install pytest-cov`). Then:

  python -m tools.mutants --cover /tmp/coverage tests/engine tests/bridge
  python -m tools.mutants --coverage /tmp/coverage --sample 100 sok_lite/engine > before.jsonl
  python -m tools.mutants --coverage /tmp/coverage --again before.jsonl > after.jsonl

`--again` makes the same mutants of the same package and runs the tests of today. A line is a JSON
object: path, line, operator, occurrence, change, outcome ("killed", "survived", "uncovered" or
"slow") and the test that killed it. Kernels and native code have none: Cosmic Ray reads Python.
"""

import argparse
import difflib
import json
import os
import random
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import coverage
from cosmic_ray.ast import get_ast
from cosmic_ray.mutating import MutationVisitor, mutate_code
from cosmic_ray.plugins import get_operator

ROOT = Path(__file__).resolve().parent.parent
PYTEST = [sys.executable, "-m", "pytest", "-q", "--quick", "--unchanged", "--color=no"]
# A line that every lookup passes has thousands of tests.
MOST_TESTS = 200
# Of operators with many variants these are left: the others change types, which anything notices.
OPERATORS = (
    "core/ReplaceBinaryOperator_Add_Sub",
    "core/ReplaceBinaryOperator_Sub_Add",
    "core/ReplaceBinaryOperator_Mul_FloorDiv",
    "core/ReplaceBinaryOperator_FloorDiv_Mul",
    "core/ReplaceComparisonOperator_Eq_NotEq",
    "core/ReplaceComparisonOperator_NotEq_Eq",
    "core/ReplaceComparisonOperator_Lt_LtE",
    "core/ReplaceComparisonOperator_LtE_Lt",
    "core/ReplaceComparisonOperator_Gt_GtE",
    "core/ReplaceComparisonOperator_GtE_Gt",
    "core/ReplaceComparisonOperator_Is_IsNot",
    "core/ReplaceComparisonOperator_IsNot_Is",
    "core/ReplaceUnaryOperator_Delete_Not",
    "core/ReplaceAndWithOr",
    "core/ReplaceOrWithAnd",
    "core/ReplaceTrueWithFalse",
    "core/ReplaceFalseWithTrue",
    "core/ReplaceContinueWithBreak",
    "core/ReplaceBreakWithContinue",
    "core/NumberReplacer",
    "core/AddNot",
    "core/ZeroIterationForLoop",
    "core/RemoveDecorator",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="*", help="modules or folders to mutate; tests of --cover")
    parser.add_argument("--cover", metavar="FILE", help="write what each quick test covers")
    parser.add_argument("--coverage", metavar="FILE", help="what --cover wrote")
    parser.add_argument("--sample", type=int, default=100, help="mutants to draw")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--again", metavar="JSONL", help="make these mutants again")
    parser.add_argument("--limit", type=int, default=300, help="seconds of tests for a mutant")
    options = parser.parse_args()
    if options.cover:
        sys.exit(cover(options.cover, options.paths))
    if not options.coverage:
        parser.error("--coverage FILE is needed. Make it by --cover.")
    tests = CoveringTests(options.coverage)
    if options.again:
        lines = Path(options.again).read_text().splitlines()
        drawn = [{key: json.loads(line)[key] for key in KEYS} for line in lines]
    else:
        drawn = draw(options.paths, options.sample, options.seed)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            f"git -C '{ROOT}' archive HEAD | tar -x -C '{folder}'", shell=True, check=True
        )
        counts = dict.fromkeys(("killed", "survived", "uncovered", "slow"), 0)
        for mutant in drawn:
            result = try_mutant(Path(folder), mutant, tests, options.limit)
            counts[result["outcome"]] += 1
            print(json.dumps(result), flush=True)
    print(*(f"{name} {count}" for name, count in counts.items()), sep=", ", file=sys.stderr)


KEYS = ("path", "operator", "occurrence")


def cover(data_file: str, paths: list[str]) -> int:
    """Runs quick tests and writes the lines that each covers; returns pytest's exit code."""
    options = ["--cov=sok_lite", "--cov-context=test", "--cov-report=", *paths]
    return subprocess.run(
        [*PYTEST, *options], cwd=ROOT, env={**os.environ, "COVERAGE_FILE": data_file}, check=False
    ).returncode


class CoveringTests:
    """Which tests run a line, by what `--cover` wrote."""

    def __init__(self, data_file: str) -> None:
        self._data = coverage.CoverageData(data_file)
        self._data.read()
        self._files = {
            name.partition("/sok_lite/")[2]: name for name in self._data.measured_files()
        }

    def of(self, path: str, line: int) -> list[str]:
        """Returns at most MOST_TESTS tests of a line, those of the file's own test file first."""
        name = self._files.get(path.partition("sok_lite/")[2])
        if name is None:
            return []
        contexts = self._data.contexts_by_lineno(name).get(line, [])
        found = {context.partition("|")[0] for context in contexts if context}
        mirror = f"test_{Path(path).stem}.py"
        # In an order of their hashes: of many tests a few of each kind come soon.
        return sorted(found, key=lambda test: (mirror not in test, zlib.crc32(test.encode())))[
            :MOST_TESTS
        ]


def draw(paths: list[str], count: int, seed: int) -> list[dict[str, Any]]:
    """Returns `count` mutants of modules, each module as likely as it is long."""
    modules = sorted(
        str(module.relative_to(ROOT))
        for path in paths
        for module in ([ROOT / path] if path.endswith(".py") else (ROOT / path).rglob("*.py"))
    )
    every = [mutant for module in modules for mutant in mutants(module)]
    return random.Random(seed).sample(every, min(count, len(every)))


def mutants(path: str) -> Iterator[dict[str, Any]]:
    """Yields every mutant of a module, without its outcome."""
    tree = get_ast((ROOT / path).read_text())
    for name in OPERATORS:
        visitor = _Counter(get_operator(name)())
        visitor.walk(tree)
        for occurrence in range(visitor.found):
            yield {"path": path, "operator": name, "occurrence": occurrence}


class _Counter(MutationVisitor):
    """Counts the places where an operator applies, and changes none."""

    def __init__(self, operator: Any) -> None:
        super().__init__(-1, operator)

    @property
    def found(self) -> int:
        return self._count


def try_mutant(
    folder: Path, mutant: dict[str, Any], tests: CoveringTests, limit: int
) -> dict[str, Any]:
    """Runs the tests of one mutant in a copy of the tree, and returns it with its outcome."""
    path = folder / mutant["path"]
    code = path.read_text()
    mutated = mutate_code(code, get_operator(mutant["operator"])(), mutant["occurrence"])
    if mutated is None:
        raise SystemExit(f"{mutant['path']} is not what it was: {mutant} is no mutant of it.")
    old, new = code.splitlines(), mutated.splitlines()
    blocks = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    first = next(start for tag, start, *_ in blocks if tag != "equal")
    change = list(difflib.unified_diff(old, new, n=0, lineterm=""))[3:]
    result = {**mutant, "line": first + 1, "change": change}
    chosen = tests.of(mutant["path"], first + 1)
    if not chosen:
        return {**result, "outcome": "uncovered", "by": ""}
    path.write_text(mutated)
    # pytest gets them by a file: thousands of names are too long for a command.
    names = folder / "chosen.txt"
    names.write_text("\n".join(chosen))
    try:
        run = subprocess.run(
            [*PYTEST, "-x", "-p", "no:cacheprovider", f"@{names}"],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(folder)},
            capture_output=True,
            text=True,
            timeout=limit,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {**result, "outcome": "slow", "by": ""}
    finally:
        path.write_text(code)
    failed = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    outcome = "survived" if run.returncode in (0, 5) else "killed"
    return {**result, "outcome": outcome, "by": failed[0][:200] if failed else ""}


if __name__ == "__main__":
    main()
