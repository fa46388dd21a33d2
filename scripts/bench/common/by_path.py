"""Runs a benchmark of this checkout with the `sok_lite` that PYTHONPATH names.

An editable installation finds its own checkout first, and `python -m` the folder where it is run,
so two checkouts could not be compared.

Examples:
  PYTHONPATH=../older_checkout python scripts/bench/common/by_path.py lookup --rounds 3
"""

import importlib.util
import runpy
import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[2]


def main() -> None:
    for finder in list(sys.meta_path):
        if "editable" in getattr(finder, "__module__", ""):
            sys.meta_path.remove(finder)
    spec = importlib.util.spec_from_file_location("scripts", SCRIPTS / "__init__.py")
    assert spec is not None
    sys.modules["scripts"] = importlib.util.module_from_spec(spec)
    runpy.run_module("scripts.bench", run_name="__main__")


if __name__ == "__main__":
    main()
