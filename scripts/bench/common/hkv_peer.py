"""HierarchicalKV's own benchmark, built from a checkout of it, for this machine's GPU.

python -m scripts.bench.common.hkv_peer FOLDER     builds it alone, which takes minutes
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from sok_lite.backend.build import cache_folder

_SOURCE = Path(__file__).with_suffix(".cu")
_PROGRAM = Path("benchmark", "merlin_hashtable_benchmark.cc.cu")
# It divides by 2^30 keys.
_KEYS = 1 << 30


def build(source: Path, capability: str) -> Path:
    """Builds it into the cache folder, unless it is there, and returns the program's path.

    Args:
      source: a checkout of HierarchicalKV.
      capability: of the GPU, such as "90".

    Raises:
      RuntimeError: there is no such source, or no nvcc, or it failed; its words are shown.
    """
    if not (source / _PROGRAM).is_file():
        raise RuntimeError(
            f"Expected a checkout of HierarchicalKV, with {_PROGRAM}. Received: {str(source)!r}."
        )
    nvcc = _nvcc()
    if nvcc is None:
        raise RuntimeError("HierarchicalKV's benchmark needs nvcc, of CUDA's toolkit. Found none.")
    flags = ["-std=c++17", "-O3", f"-arch=sm_{capability}", "-cudart", "static", "-w"]
    flags += [f"-I{source / folder}" for folder in ("include", "benchmark")]
    parts = [*map(str, flags), _SOURCE.read_text()]
    parts += [path.read_text() for path in sorted(source.glob("include/**/*.cuh"))]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    target = cache_folder() / f"hkv_benchmark_{digest}"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            made = Path(folder) / target.name
            subprocess.run([nvcc, *flags, str(_SOURCE), "-o", str(made)], check=True)
            made.replace(target)
    return target


def _nvcc() -> str | None:
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    return shutil.which("nvcc") or shutil.which(home / "bin" / "nvcc")


def keys_per_second(
    program: Path, dim: int, capacity: int, batch: int, loads: Sequence[float], ops: Sequence[str]
) -> dict[tuple[float, str], float]:
    """Returns what HKV measured of a table, all of whose rows are in the GPU's memory.

    Args:
      program: that `build` returned.
      dim: of rows of float32.
      capacity: slots.
      batch: keys of a call.
      loads: load factors.
      ops: operations, by HKV's names.

    Returns:
      Keys a second of the faster of two calls, by (load factor, operation).

    Raises:
      RuntimeError: it failed, or the GPU has less memory than that.
    """
    gib = -(-capacity * dim * 4 // (1 << 30))
    words = [dim, capacity, gib, batch, ",".join(map(str, loads)), *ops]
    done = subprocess.run([program, *map(str, words)], capture_output=True, text=True)
    numbers = [float(number) for number in re.findall(r"\|\s*([\d.]+)", done.stdout)]
    if done.returncode or len(numbers) != len(loads) * (1 + len(ops)):
        raise RuntimeError(f"HierarchicalKV's benchmark failed: {done.stdout}{done.stderr}")
    found = {}
    for load in loads:
        _, *of_load = numbers[: 1 + len(ops)]
        numbers = numbers[1 + len(ops) :]
        found.update({(load, op): of * _KEYS for op, of in zip(ops, of_load, strict=True)})
    return found


def main() -> None:
    import cupy

    print(build(Path(sys.argv[1]), cupy.cuda.Device(0).compute_capability))


if __name__ == "__main__":
    main()
