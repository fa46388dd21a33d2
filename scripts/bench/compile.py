"""Measures what the first use of the kernels costs on a GPU: each file compiled, and found again.

Compiles every file of kernels/ by NVRTC, then takes it from the disk cache, as the cuda backend
does. With a GPU for its architecture, and its driver loads it; without one for sm_90. One line
`RESULT {json}` a file, and one for what a table that grows and Adam use.

Example:
  python -m scripts.bench compile --files det/det.cu update/adam.cu
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cupy

from scripts.bench.common.measuring import note, result
from sok_lite.backend import cuda_unavailable
from sok_lite.backend.disk_cache import DiskCache
from sok_lite.backend.nvrtc import FLAGS, Nvrtc
from sok_lite.backend.sources import inlined, kernel_files, kernel_folder
from sok_lite.backend.tunables import kernel_defines

_ONE_TABLE = "combine.cu det/det.cu initializer.cu rows.cu segments.cu update/adam.cu".split()


def main(parser: argparse.ArgumentParser) -> None:
    names = [path.relative_to(kernel_folder()).as_posix() for path in kernel_files()]
    parser.add_argument("--files", nargs="+", metavar="FILE", default=names, choices=names)
    args = parser.parse_args()
    reason = cuda_unavailable()
    nvrtc = Nvrtc(cupy.cuda.nvrtc)
    capability = "90" if reason else cupy.cuda.Device().compute_capability
    flags = [*FLAGS, nvrtc.architecture(capability)]
    flags += [f"-D{name}={value}" for name, value in kernel_defines().items()]
    note(f"CuPy {cupy.__version__}, NVRTC {nvrtc.version}, {' '.join(flags)}")
    if reason:
        note(f"Nothing is loaded: {reason}.")
    start_s, _ = _timed(lambda: nvrtc.build)

    measured = {}
    with tempfile.TemporaryDirectory() as folder:
        cache = DiskCache(Path(folder))
        for name in args.files:
            measured[name] = _measured(
                nvrtc, cache, kernel_folder() / name, flags, is_loaded=not reason
            )
            result(case="compile", file=name, **measured[name])
    if set(_ONE_TABLE) <= set(measured):
        sums = {key: sum(measured[name][key] for name in _ONE_TABLE) for key in measured["rows.cu"]}
        result(case="one_table", files=_ONE_TABLE, start_s=start_s, **sums)


def _measured(
    nvrtc: Nvrtc, cache: DiskCache, path: Path, flags: list[str], is_loaded: bool
) -> dict[str, float | int]:
    """Returns the seconds to compile a file, to read it from the cache, and to load it."""
    source = inlined(path)
    facts = [source, *flags, nvrtc.build]

    def missing() -> bytes:
        raise AssertionError(f"the cache has lost {path.name}")

    compile_s, binary = _timed(
        lambda: cache.get(facts, lambda: nvrtc.compiled(source, flags).binary)
    )
    cached_s, again = _timed(lambda: cache.get(facts, missing))
    assert again == binary
    fields = {"compile_s": compile_s, "cached_s": cached_s, "bytes": len(binary)}
    if is_loaded:
        fields["load_s"], _ = _timed(lambda: cupy.cuda.Module().load(binary))
    return fields


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    value = work()
    return time.perf_counter() - start, value
