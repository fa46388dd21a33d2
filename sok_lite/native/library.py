"""The library of operations: from the wheel, or compiled here; loaded into TensorFlow.

One library serves all supported TensorFlow versions: it uses only the C API, and needs
libtensorflow_framework.so.2 by name, which TensorFlow has already loaded.
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from sok_lite.backend.build import compile_sources, shipped_file, target_of
from sok_lite.backend.sources import kernel_folder

# Version of the interface of library and Python, also in kernels/ops/ops.cpp.
ABI = 10
# An empty library of this name is linked; at load time TensorFlow's is already there.
NEEDED = "libtensorflow_framework.so.2"
# -ffp-contract=off: a rule's numbers must be bit-identical to those of Python's CPU kernels.
FLAGS = (
    "-std=c++17 -O2 -fPIC -shared -fvisibility=hidden -ffp-contract=off -Wall -Wextra -Werror"
).split()
_NAME = "libsok_lite_ops"


class Operations(NamedTuple):
    """The loaded library: TensorFlow's `module` of operations, and as a `library` of ctypes."""

    module: Any
    library: ctypes.CDLL


def find_library() -> Path:
    """Returns the library of the wheel, or compiles one in about 20 s; raises RuntimeError."""
    return shipped_file(f"{_NAME}.so") or compile_library()


def compile_library(extra_flags: Sequence[str] = ()) -> Path:
    """Compiles the library if needed and returns its path, or raises RuntimeError.

    `extra_flags` are the compiler's, such as a sanitizer's.
    """
    flags, what = [*FLAGS, *extra_flags], "operations of TensorFlow"
    return compile_sources(_target(extra_flags), flags, _sources("cpp"), what, needs=NEEDED)


def _target(extra_flags: Sequence[str] = ()) -> Path:
    shared = [path for place in ("*.h", "update/*.h") for path in kernel_folder().glob(place)]
    files = [*_sources("cpp"), *_sources("h"), *shared]
    return target_of(_NAME, [*FLAGS, *extra_flags], files)


def _sources(ending: str) -> list[Path]:
    return sorted((kernel_folder() / "ops").glob(f"*.{ending}"))


@cache
def load() -> Operations:
    """Returns the library, loaded at the first call, or raises RuntimeError."""
    import tensorflow as tf

    path = find_library()
    try:
        module = tf.load_op_library(str(path))
        library = ctypes.CDLL(str(path))
    except (OSError, tf.errors.OpError) as error:
        raise RuntimeError(
            f"TensorFlow {tf.__version__} cannot load sok_lite's operations, {path}: {error}. "
            "`sok-lite doctor` says what is installed. Install TensorFlow 2.16 to 2.21 and a wheel "
            "of sok_lite for this machine, or remove that file if it was compiled here."
        ) from error
    version = getattr(library, "sok_ops_abi", None)
    if version is not None:
        version.restype = ctypes.c_int64
    found = None if version is None else version()
    if found != ABI:
        raise RuntimeError(
            f"sok_lite's operations must be of its own version, {ABI}. Received: {path} of version "
            f"{found}. Install sok_lite again: its files are of two versions."
        )
    return Operations(module, library)
