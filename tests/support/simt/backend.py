"""The `cuda` backend on the simulated GPU."""

import functools
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import sok_lite.backend
from sok_lite.backend import Backend
from tests.support.simt import compiler

# Its classes are others than those that everybody else imports under the package's name.
_NAME = "tests.support.simt.backend.cuda"


def unavailable() -> str | None:
    """Returns why there is no simulated GPU here, or None."""
    return compiler.unavailable()


@functools.cache
def simt_module() -> ModuleType:
    """Returns sok_lite/backend/cuda.py, executed once more with the stand-in in place of CuPy."""
    from tests.support.simt.cupy_stand_in import cupy

    path = Path(sok_lite.backend.__file__).with_name("cuda.py")
    spec = importlib.util.spec_from_file_location(_NAME, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get("cupy")
    sys.modules["cupy"] = cupy
    try:
        spec.loader.exec_module(module)
    finally:
        if before is None:
            del sys.modules["cupy"]
        else:
            sys.modules["cupy"] = before
    return module


def is_simulated(backend: Backend) -> bool:
    """Whether a backend runs on the simulated GPU."""
    return type(backend).__module__ == _NAME


@functools.cache
def simt_backend() -> Backend:
    """Returns the one backend that runs on the simulated GPU. Its name is "cuda": that it is."""
    # Every thread of a block costs time here, and most launches of the tests have a few items: two
    # warps are the fewest that are several.
    backend: Backend = simt_module().CudaBackend().for_table(block_size=64)
    return backend
