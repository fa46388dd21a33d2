"""The demo of examples/, for benchmarks: its own programs find its package `ctr` beside them."""

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def demo_module(name: str) -> Any:
    """Returns a module of the demo.

    Args:
      name: as its programs import it, `train_ctr` or `ctr.model`.
    """
    for known, path in (("ctr", "ctr/__init__.py"), ("train_ctr", "train_ctr.py")):
        if known not in sys.modules and name.partition(".")[0] in (known, "train_ctr"):
            spec = importlib.util.spec_from_file_location(known, EXAMPLES / path)
            assert spec is not None and spec.loader is not None
            sys.modules[known] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[known])
    return importlib.import_module(name)
