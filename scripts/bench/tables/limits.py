"""Measures what the memory of this machine can do at best: the yardstick of the tables.

* `copy`: streaming, bytes read and written a second.
* `random_read`: random aligned reads of 32 to 256 bytes over a growing footprint, by the number of
  threads that share a read (lanes).
* `gather`: random rows by known row numbers into a dense array.
* `host_gather` (cuda): the same from pinned host memory that the GPU reads directly, by row size,
  footprint, page size and number of thread blocks.

One line `RESULT {json}` a case. `bytes_per_second` counts every byte of the places that are read
and of what is written, not the row numbers. The kernels are limits.cu, built
like the engine's and run with as many threads.

Example:
  python -m scripts.bench tables limits --backends cuda --footprints-gb 1 4 16 64 100
"""

import argparse
import functools
import hashlib
import mmap
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scripts.bench.common.measuring import backends, fastest, note, num_threads, result, timed
from sok_lite.backend import Array, Backend, build, sources
from sok_lite.backend.nvrtc import FLAGS
from sok_lite.backend.tunables import kernel_defines

SOURCE = Path(__file__).resolve().with_name("limits.cu")
# Lanes that have a kernel, by the bytes of a read.
READS = {32: (1, 2), 64: (1, 4), 128: (1, 4, 8), 256: (1, 4, 8, 16)}
_PIECE = 16  # bytes of a thread's load
_THREADS_PER_BLOCK = 256


def _build_for_cpu() -> Path:
    """Returns the library of the benchmark's kernels, compiled as the engine's are."""
    folder = sources.kernel_folder()
    inputs = [SOURCE, *sources.runtime_files()]
    flags = [*build.FLAGS, *(["-march=x86-64-v3"] if build.has_x86_64_v3() else [])]
    flags += [f"-D{name}={value}" for name, value in kernel_defines().items()]
    text = " ".join(flags) + "".join(sources.inlined(path) for path in inputs)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    target = build.cache_folder() / "bench" / f"limits-{digest}.so"
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        built = target.with_suffix(f".{os.getpid()}")
        command = [os.environ.get("CXX", "g++"), *flags, "-I", str(folder), "-o", str(built)]
        subprocess.run(
            [*command, *(word for path in inputs for word in ("-x", "c++", path))], check=True
        )
        built.rename(target)
    return target


class Limits:
    """The kernels of limits.cu on a backend.

    Attributes:
      backend: the engine's backend of that kind; arrays are its own.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._sink = backend.xp.zeros(1, np.uint64)
        if backend.name == "cpu":
            from sok_lite.backend.cpu import CpuBackend

            self._cpu = CpuBackend(_build_for_cpu(), num_threads(backend))
        else:
            from sok_lite.backend.cuda import ARGUMENTS

            cupy = backend.xp
            self._arguments = ARGUMENTS
            self._module = cupy.RawModule(code=sources.inlined(SOURCE), options=FLAGS)
            self.num_sms = int(cupy.cuda.Device().attributes["MultiProcessorCount"])

    def launch(self, kernel: str, num_threads: int, *args: Any, blocks: int | None = None) -> None:
        """Runs a kernel.

        Args:
          num_threads: threads of the GPU that have work.
          args: arrays and ints; for a null pointer and a raw address an int too.
          blocks: the most thread blocks; None: 32 for each SM.
        """
        if self.backend.name == "cpu":
            self._cpu.launch(kernel, num_threads, *args)
            return
        # As backend/cuda.py packs one part.
        arguments = [
            int(arg) if isinstance(arg, (int, np.integer)) else arg.data.ptr for arg in args
        ]
        needed = -(-num_threads // _THREADS_PER_BLOCK)
        grid = (min(needed, blocks or 32 * self.num_sms),)
        words = np.zeros(1, self._arguments)
        words["word"][0, : 2 + len(args)] = [0, *grid, *arguments]
        values = (words, np.int64(1))
        self._module.get_function(kernel)(grid, (_THREADS_PER_BLOCK,), values)

    def memory(self, num_bytes: int) -> Array:
        """Returns touched memory, (num_bytes / 8,) uint64, laid out as the engine's rows are."""
        words = self.backend.zeros_chunk(num_bytes).view(np.uint64)
        words.fill(1)
        return words

    def copy(self, num_bytes: int, rounds: int) -> float:
        """Returns bytes read and written a second when `num_bytes` are copied."""
        source, target = self.memory(num_bytes), self.memory(num_bytes)
        n = num_bytes // _PIECE
        seconds = least_seconds(
            self.backend, lambda: self.launch("limit_copy", n, source, target, n), rounds
        )
        return 2 * num_bytes / seconds

    def random_read(
        self, memory: Array, width: int, lanes: int, num_reads: int, rounds: int
    ) -> float:
        """Returns random reads a second.

        Args:
          memory: what `memory` gave, at most 2**32 - 1 places.
          width: bytes of a read.
          lanes: threads that share it.
        """
        num_places = memory.nbytes // width
        seeds = iter(range(0, 1 << 62, num_reads))
        seconds = least_seconds(
            self.backend,
            lambda: self.launch(
                f"limit_read_{width}_{lanes}",
                num_reads * lanes,
                memory,
                num_places,
                next(seeds),
                self._sink,
                num_reads,
            ),
            rounds,
        )
        return num_reads / seconds

    def gather(
        self,
        memory: Any,
        row_bytes: int,
        num_rows: int,
        num_reads: int,
        rounds: int,
        blocks: int | None = None,
    ) -> float:
        """Returns rows a second that are gathered by random row numbers, new ones every time.

        Args:
          memory: what `memory` gave, or the address of pinned host memory.
          row_bytes: a multiple of 16.
          num_rows: rows in it.
          blocks: the most thread blocks.
        """
        backend, pieces = self.backend, row_bytes // _PIECE
        # A thread of the CPU copies a row alone; on the GPU a row is read by up to a warp.
        lane_bits = 0 if backend.name == "cpu" else (min(32, pieces) - 1).bit_length()
        out = self.memory(num_reads * row_bytes)
        rng = np.random.default_rng(0)

        def rows() -> Array:
            return backend.from_host(rng.integers(0, num_rows, num_reads).astype(np.uint32))

        seconds = least_seconds(
            backend,
            lambda rows: self.launch(
                "limit_gather",
                num_reads << lane_bits,
                memory,
                pieces,
                lane_bits,
                rows,
                out,
                num_reads,
                blocks=blocks,
            ),
            rounds,
            rows,
        )
        return num_reads / seconds


def least_seconds(backend: Backend, call: Any, rounds: int, prepare: Any = None) -> float:
    """Returns the fastest call, by the GPU's clock where there is one: a limit is a best."""
    timing = timed(backend, call, rounds, prepare, choose=fastest)
    return timing.host if timing.device is None else timing.device


@functools.cache
def limits_of(backend: Backend) -> Limits:
    """Returns the limits' kernels of a backend, built once."""
    return Limits(backend)


def free_bytes(backend: Backend) -> int:
    """Returns the memory that can be had: the GPU's, or what Linux says is available."""
    if backend.name == "cuda":
        import cupy

        cupy.get_default_memory_pool().free_all_blocks()
        return int(cupy.cuda.runtime.memGetInfo()[0])
    return host_free_bytes()


def host_free_bytes() -> int:
    """Returns the memory of the host that Linux says is available."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return 1024 * int(line.split()[1])
    raise SystemExit("No MemAvailable in /proc/meminfo.")


class HostMemory:
    """Pinned host memory that a GPU reads by its address, on small or on large pages."""

    def __init__(self, num_bytes: int, large_pages: bool) -> None:
        import cupy

        # 2 MB more: large pages begin at a multiple of their size.
        self._map = mmap.mmap(-1, num_bytes + (1 << 21), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._map.madvise(mmap.MADV_HUGEPAGE if large_pages else mmap.MADV_NOHUGEPAGE)
        whole = np.frombuffer(self._map, np.uint8)
        start = -whole.ctypes.data % (1 << 21)
        self._bytes = whole[start : start + num_bytes]
        self._bytes[::4096] = 1  # every page is there before it is pinned
        self.address = int(self._bytes.ctypes.data)
        self._runtime = cupy.cuda.runtime
        self._runtime.hostRegister(self.address, num_bytes, 3)  # portable and mapped

    def close(self) -> None:
        """Gives the memory back."""
        self._runtime.hostUnregister(self.address)
        del self._bytes
        self._map.close()


def measure_copy(limits: Limits, num_bytes: int, rounds: int) -> None:
    rate = limits.copy(num_bytes, rounds)
    result(
        case="copy",
        backend=limits.backend.name,
        threads=num_threads(limits.backend),
        footprint_bytes=2 * num_bytes,
        bytes_per_second=rate,
    )


def measure_random_reads(
    limits: Limits, footprint: int, num_reads: int, rounds: int, widths: Sequence[int]
) -> None:
    memory = limits.memory(footprint)
    for width in widths:
        for lanes in READS[width]:
            if limits.backend.name == "cpu" and lanes > 1:
                continue  # a CPU thread reads alone
            rate = limits.random_read(memory, width, lanes, num_reads, rounds)
            result(
                case="random_read",
                backend=limits.backend.name,
                threads=num_threads(limits.backend),
                footprint_bytes=footprint,
                width=width,
                lanes=lanes,
                reads_per_second=rate,
                bytes_per_second=rate * width,
            )


def measure_gather(
    limits: Limits, footprint: int, num_reads: int, rounds: int, row_sizes: Sequence[int]
) -> None:
    memory = limits.memory(footprint)
    for row_bytes in row_sizes:
        count = max(1, min(num_reads, footprint // 4 // row_bytes))
        rate = limits.gather(memory, row_bytes, footprint // row_bytes, count, rounds)
        result(
            case="gather",
            backend=limits.backend.name,
            threads=num_threads(limits.backend),
            footprint_bytes=footprint,
            row_bytes=row_bytes,
            rows_per_second=rate,
            bytes_per_second=2 * rate * row_bytes,
        )


def measure_host_gather(
    limits: Limits, footprint: int, num_reads: int, rounds: int, row_sizes: Sequence[int]
) -> None:
    for large_pages in (True, False):
        host = HostMemory(footprint, large_pages)
        try:
            cases: list[tuple[int, int | None]] = [(row_bytes, None) for row_bytes in row_sizes]
            # How few SMs keep the link busy: the others are then free for near rows.
            cases += [(256, blocks) for blocks in (1, 4, 16, 32, 64) if large_pages]
            for row_bytes, blocks in cases:
                count = min(num_reads, footprint // 4 // row_bytes)
                rate = limits.gather(
                    host.address, row_bytes, footprint // row_bytes, count, rounds, blocks
                )
                result(
                    case="host_gather",
                    backend="cuda",
                    footprint_bytes=footprint,
                    page_bytes=1 << 21 if large_pages else 1 << 12,
                    row_bytes=row_bytes,
                    blocks=blocks,
                    rows_per_second=rate,
                    bytes_per_second=rate * row_bytes,
                )
        finally:
            host.close()


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backends", nargs="*", default=["cpu", "cuda"])
    parser.add_argument("--footprints-gb", type=float, nargs="*", help="GiB")
    parser.add_argument(
        "--host-footprints-gb", type=float, nargs="*", default=[1, 16, 64], help="GiB"
    )
    parser.add_argument("--widths", type=int, nargs="*", default=sorted(READS))
    parser.add_argument("--row-bytes", type=int, nargs="*", default=[32, 64, 128, 256, 512])
    parser.add_argument("--reads", type=int, help="random reads of a call")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit-s", type=float, default=200, help="no new footprint after that")
    args = parser.parse_args()
    start = time.monotonic()
    for backend in backends(args.backends):
        on_gpu = backend.name == "cuda"
        limits = limits_of(backend)
        default = [1, 4, 16, 64, 100] if on_gpu else [1 / 16, 1 / 4, 1, 2]
        footprints = [int(gib * (1 << 20)) << 10 for gib in args.footprints_gb or default]
        reads = args.reads or (1 << 24 if on_gpu else 1 << 20)
        measure_copy(limits, min(1 << 30 if on_gpu else 1 << 28, max(footprints)), args.rounds)
        host_footprints = [int(gib * (1 << 20)) << 10 for gib in args.host_footprints_gb]
        for what, sizes, free in (
            ("random_read", footprints, free_bytes(backend)),
            ("gather", footprints[-2:-1] or footprints, free_bytes(backend)),
            ("host_gather", host_footprints if on_gpu else [], host_free_bytes()),
        ):
            for footprint in sizes:
                if footprint > 0.8 * free:
                    note(f"{what} over {footprint:,} bytes is left out: {free:,} are free.")
                elif time.monotonic() - start > args.limit_s:
                    note(f"{what} over {footprint:,} bytes is left out: no time left.")
                elif what == "random_read":
                    measure_random_reads(limits, footprint, reads, args.rounds, args.widths)
                elif what == "gather":
                    measure_gather(limits, footprint, reads, args.rounds, args.row_bytes)
                else:
                    measure_host_gather(limits, footprint, reads, args.rounds, args.row_bytes)
