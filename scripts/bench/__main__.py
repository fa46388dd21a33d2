"""Runs a benchmark, from the root of a checkout.

  python -m scripts.bench                    lists them
  python -m scripts.bench lookup --help      says what one does, and its options
  python -m scripts.bench ranks pinned       runs a part of one that has several

Each prints lines `RESULT {json}`. Nothing is imported but what the benchmark itself needs: those of
the engine run without TensorFlow. Its `main(parser)` adds its options to a parser that shows its
docstring, and parses them.
"""

import argparse
import ast
import importlib
import sys
from pathlib import Path

# By name: its parts, each a module; without parts it is a module itself.
BENCHMARKS: dict[str, tuple[str, ...]] = {
    "compile": (),
    "dynamic_embedding": (),
    "engine": ("step", "launch", "packing"),
    "files": ("dump", "formats"),
    "keras": (),
    "kv_variable": (),
    "lookup": (),
    "many_tables": ("systems", "stages"),
    "memory": ("growth", "index", "slabs"),
    "optimizers": ("rules", "fallback_step"),
    "ranks": ("shares", "pinned", "alltoall", "gradient_dtype"),
    "serving": ("exports", "request"),
    "tables": ("operations", "limits", "sweep", "tiers"),
}
FOLDER = Path(__file__).resolve().parent


def first_sentence(name: str) -> str:
    """Returns what a benchmark measures; `name` is as in `commands`."""
    path = FOLDER / f"{name.replace(' ', '/')}.py"
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(text.split("\n\n")[0].split()).partition(". ")[0].removesuffix(".")


def commands() -> list[str]:
    """Returns what to tell `python -m scripts.bench`: names, with parts where there are several."""
    return [
        f"{name} {part}".rstrip() for name, parts in BENCHMARKS.items() for part in parts or [""]
    ]


def main() -> None:
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help"):
        print(__doc__)
        width = max(map(len, commands()))
        for command in commands():
            print(f"{command:{width}}  {first_sentence(command)}")
        return
    count = 2 if BENCHMARKS.get(words[0]) else 1
    command = " ".join(words[:count])
    if command not in commands():
        near = [each for each in commands() if each.split()[0] == words[0]] or list(BENCHMARKS)
        sys.exit(f"error: no benchmark {command!r}. Expected one of: {', '.join(near)}.")
    sys.argv = [f"python -m scripts.bench {command}", *words[count:]]
    benchmark = importlib.import_module(f"scripts.bench.{command.replace(' ', '.')}")
    parser = argparse.ArgumentParser(
        description=benchmark.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    benchmark.main(parser)


if __name__ == "__main__":
    main()
