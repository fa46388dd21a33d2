"""Dynamic embeddings for TensorFlow: SparseOperationKit's names, on one GPU, many, or none.

The names of `__init__.pyi` are imported on first use, so that `import sok_lite` works, and gives
the engine (`sok_lite.engine`, `sok_lite.comm`, `sok_lite.backend`), where there is no TensorFlow.
"""

import ast
import importlib
import re
from pathlib import Path
from typing import Any

from sok_lite._version import __version__

# What needs no TensorFlow.
_WITHOUT_TENSORFLOW = {"Report", "hash_strings", "open_readonly", "plots"}

# Names that were removed, and why: for one version.
_GONE = {
    "prefetch": "To send the keys of the next batch ahead gained less than a tenth of a step "
    "between machines. Give the ids to sok.lookup_sparse.",
}


# By name the module that has it; of a module the package.
_MODULE_OF = {
    alias.name: str(node.module)
    for node in ast.parse(Path(__file__).with_suffix(".pyi").read_text("utf-8")).body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
_NAMES = [name for name, module in _MODULE_OF.items() if module != __name__]

__all__ = ["__version__", "communication", "tf_version", *_NAMES]


def _tensorflow() -> Any:
    try:
        return importlib.import_module("tensorflow")
    except ImportError as error:
        raise ImportError(
            f"This part of sok_lite needs TensorFlow, which cannot be imported ({error}). "
            'Install it with `pip install "sok_lite[cpu]"`, or `pip install "sok_lite[gpu]"` on a '
            "machine with an NVIDIA GPU. The engine (sok_lite.engine) works without it."
        ) from error


def _tf_version() -> list[int]:
    # "2.21.0-rc1" is [2, 21, 0]: only the leading digits of each part count.
    parts = _tensorflow().__version__.split(".")[:3]
    return [int(digits[0]) for part in parts if (digits := re.match(r"\d+", part))]


def __getattr__(name: str) -> Any:
    if name == "tf_version":
        value: Any = _tf_version()
    elif name in _MODULE_OF:
        if name not in _WITHOUT_TENSORFLOW:
            _tensorflow()
        module = _MODULE_OF[name]
        if module == __name__:
            value = importlib.import_module(f"{module}.{name}")
        else:
            value = getattr(importlib.import_module(module), name)
    elif name in _GONE:
        raise AttributeError(f"sok_lite.{name} is gone. {_GONE[name]}")
    else:
        raise AttributeError(f"module 'sok_lite' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULE_OF})
