"""NCCL, as CuPy has it, where its library is installed."""

import functools
import warnings
from types import ModuleType


@functools.cache
def nccl_unavailable() -> str | None:
    """Returns why NCCL cannot be used here, or None if it can."""
    try:
        nccl = load_nccl()
    except ImportError as error:
        return f"CuPy cannot be imported ({error})"
    if not getattr(nccl, "available", False):
        return "CuPy finds no NCCL library (libnccl.so.2)"
    return None


def load_nccl() -> ModuleType:
    """Returns CuPy's module of NCCL, which `nccl_unavailable` checks.

    Raises:
      ImportError: there is no CuPy.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it has no library is said in our words
        from cupy.cuda import nccl
    return nccl
