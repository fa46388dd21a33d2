"""Runs a script with the `sok_lite` that PYTHONPATH names, whatever is installed.

An editable installation finds its own checkout first, so two checkouts could not be compared.

Example:
  PYTHONPATH=../older_checkout python scripts/run_by_path.py scripts/bench_lookup.py --quick
"""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    for finder in list(sys.meta_path):
        if "editable" in getattr(finder, "__module__", ""):
            sys.meta_path.remove(finder)
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
