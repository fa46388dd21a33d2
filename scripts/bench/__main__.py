"""Runs a benchmark, from the root of a checkout.

  python -m scripts.bench                    lists them
  python -m scripts.bench lookup --help      says what one does, and its options

Each prints lines `RESULT {json}`. Nothing is imported but what the benchmark itself needs: those of
the engine run without TensorFlow. Its `main(parser)` adds its options to a parser that shows its
docstring, and parses them.
"""

import argparse
import ast
import importlib
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def benchmarks() -> list[str]:
    """Returns their names: each is a module of this folder."""
    return sorted(path.stem for path in FOLDER.glob("[!_]*.py"))


def first_sentence(name: str) -> str:
    """Returns what a benchmark measures."""
    text = ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text())) or ""
    return " ".join(text.split("\n\n")[0].split()).partition(". ")[0].removesuffix(".")


def main() -> None:
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help"):
        print(__doc__)
        width = max(map(len, benchmarks()))
        for name in benchmarks():
            print(f"{name:{width}}  {first_sentence(name)}")
        return
    name, *options = words
    if name not in benchmarks():
        sys.exit(f"error: no benchmark {name!r}. Expected one of: {', '.join(benchmarks())}.")
    sys.argv = [f"python -m scripts.bench {name}", *options]
    benchmark = importlib.import_module(f"scripts.bench.{name}")
    parser = argparse.ArgumentParser(
        description=benchmark.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    benchmark.main(parser)


if __name__ == "__main__":
    main()
