"""Chooses where arrays live and kernels run: "cpu" or "cuda"."""

import functools
import os

from sok_lite.backend.base import Array, Backend

__all__ = ["Array", "Backend", "cuda_unavailable", "default_backend", "get_backend"]


@functools.cache
def cuda_unavailable() -> str | None:
    """Returns why the cuda backend cannot run here, or None if it can."""
    try:
        import cupy
    except ImportError as error:
        return f"CuPy cannot be imported ({error})"
    try:
        if cupy.cuda.runtime.getDeviceCount() > 0:
            return None
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"CuPy sees no GPU ({error})"
    return "CuPy sees no GPU"


@functools.cache
def _cpu() -> Backend:
    from sok_lite.backend.cpu import CpuBackend

    return CpuBackend()


@functools.cache
def _cuda() -> Backend:
    from sok_lite.backend.cuda import CudaBackend

    return CudaBackend()


def default_backend() -> str:
    """Returns SOK_LITE_BACKEND, else "cuda" if CuPy sees a GPU, else "cpu".

    ValueError: SOK_LITE_BACKEND is neither of them.
    """
    name = os.environ.get("SOK_LITE_BACKEND", "").strip()
    if name not in ("", "cpu", "cuda"):
        raise ValueError(
            f"SOK_LITE_BACKEND must be 'cpu' or 'cuda'. Received: {name!r}. Leave it out for "
            "'cuda' where CuPy sees a GPU, else 'cpu'."
        )
    return name or ("cpu" if cuda_unavailable() else "cuda")


def get_backend(name: str | None = None) -> Backend:
    """Returns the shared backend of a name, None: of `default_backend`.

    ValueError: no such backend. RuntimeError: "cuda" without CuPy or a GPU.
    """
    source = "backend" if name else "SOK_LITE_BACKEND"
    name = name or default_backend()
    if name == "cpu":
        return _cpu()
    if name == "cuda":
        reason = cuda_unavailable()
        if reason is not None:
            raise RuntimeError(f"{source} 'cuda' cannot be used: {reason}. Use 'cpu'.")
        return _cuda()
    raise ValueError(f"backend must be 'cpu' or 'cuda'. Received: {name!r}.")
