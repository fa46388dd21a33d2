"""The GPU backend: CuPy arrays, and the same kernel sources, compiled by NVRTC at first use."""

import copy
import ctypes
import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import cupy
import numpy as np

from sok_lite.backend.arguments import check_array, pack_arguments
from sok_lite.backend.base import Array, Backend, LaunchArgs
from sok_lite.backend.gpu_binaries import LAUNCH_WORDS, WIDE_LAUNCH_WORDS, GpuBinaries, kernel_names
from sok_lite.backend.local_ranks import local_rank
from sok_lite.backend.sources import KernelSource, all_kernels, find_kernel, kernel_files
from sok_lite.backend.table_lock import has_functions
from sok_lite.backend.tunables import THREADS_PER_BLOCK

# Defaults of the tunables that a launch depends on; SOK_LITE_KERNEL_DEFINES overrides them.
_TUNABLES = {
    "SOK_THREADS_PER_BLOCK": THREADS_PER_BLOCK,
    # As in kernels/platform.cuh; SOK_TILE is SOK_LINE where it has no value of its own.
    "SOK_ROW_LANES": 32,
    "SOK_LINE": 4,
}


# SokArguments of kernels/parts.cuh for narrow and wide launches: CuPy passes one such record by
# value.
ARGUMENTS = np.dtype([("word", np.int64, LAUNCH_WORDS)])
_WIDE_ARGUMENTS = np.dtype([("word", np.int64, WIDE_LAUNCH_WORDS)])


class _Kernel(NamedTuple):
    run: Any
    lanes: int
    max_threads: int  # of a block, by the kernel's registers


class _KernelRecord(ctypes.Structure):
    """GpuKernel of kernels/ops/gpu.h: a kernel that native code launches."""

    _fields_ = tuple(
        (name, ctypes.c_int64) for name in ("narrow", "wide", "lanes", "max_threads", "max_wide")
    )


class CudaBackend(Backend):
    """CuPy arrays on this rank's GPU and the kernels compiled for it."""

    name = "cuda"
    xp = cupy
    chunk_bytes = 1 << 16  # every column of every table has one, however few its rows
    far_chunk_bytes = 1 << 26  # to pin memory is a slow call, about a millisecond

    def __init__(self) -> None:
        # The bool: for wide launches.
        self._modules: dict[tuple[Path, bool], Any] = {}
        self._kernels: dict[tuple[str, bool], _Kernel] = {}
        # Native code keeps addresses of the records, which hold handles of the CuPy functions.
        self._records: dict[str, tuple[_KernelRecord, Any, Any]] = {}
        self._has_native_locks = False
        self._binaries = GpuBinaries(cupy.cuda.nvrtc, cupy.cuda.runtime)
        self._sources = all_kernels()
        self._source_of: dict[str, KernelSource] = {}
        tunables = {**_TUNABLES, **self._binaries.defines}
        self._threads_per_block = tunables["SOK_THREADS_PER_BLOCK"]
        self._tuned: dict[int, CudaBackend] = {}  # by threads per block
        # GPU threads per item of the main loop, by kind of kernel; 0: a whole block.
        self._lanes = {
            "": 1,
            "row": tunables["SOK_ROW_LANES"],
            "tile": tunables.get("SOK_TILE", tunables["SOK_LINE"]),
            "team": 0,
        }
        # One GPU per rank; some launchers show each rank only its own.
        self.num_devices = cupy.cuda.runtime.getDeviceCount()
        self.device_id = local_rank() % self.num_devices
        self._device = cupy.cuda.Device(self.device_id)
        self.activate()
        self._max_blocks = 32 * self._device.attributes["MultiProcessorCount"]

    def _source(self, name: str) -> KernelSource:
        source = self._source_of.get(name)
        if source is None:
            source = self._source_of[name] = find_kernel(name, self._sources)
        return source

    def _kernel(self, name: str, is_wide: bool) -> _Kernel:
        kernel = self._kernels.get((name, is_wide))
        if kernel is None:
            source = self._source(name)
            module = self._modules.get((source.path, is_wide))
            if module is None:
                module = self._compile(source.path, is_wide)
                self._modules[source.path, is_wide] = module
            run = module.get_function(name)
            driver = cupy.cuda.driver
            most = driver.funcGetAttribute(driver.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, run.ptr)
            kernel = self._kernels[name, is_wide] = _Kernel(run, self._lanes[source.kind], most)
        return kernel

    def kernel(self, name: str) -> tuple[int, int]:
        """Returns the address of a kernel's record and the number of its arguments, for native
        code."""
        known = self._records.get(name)
        if known is None:
            narrow = wide = self._kernel(name, False)
            if self._binaries.has_wide:
                wide = self._kernel(name, True)
            limits = (narrow.lanes, narrow.max_threads, wide.max_threads)
            record = _KernelRecord(narrow.run.ptr, wide.run.ptr, *limits)
            # Another thread may have made one. A kernel lives as long as a reference to it.
            known = self._records.setdefault(name, (record, narrow.run, wide.run))
        return ctypes.addressof(known[0]), len(self._source(name).signature)

    def words_of(self, kernel: str, arguments: Sequence[Any]) -> list[int]:
        """Returns a kernel's arguments as words, arrays as addresses, for native code."""
        signature = self._source(kernel).signature
        words = np.empty(len(signature), np.int64)
        pack_arguments(kernel, signature, [arguments], _addresses, words)
        return list(map(int, words))

    def launching(self) -> tuple[int, int, int, int]:
        """Returns the limits of launches for native code: (threads per block, blocks, words of a
        narrow launch, words of a wide one or 0)."""
        wide_words = WIDE_LAUNCH_WORDS if self._binaries.has_wide else 0
        return self._threads_per_block, self._max_blocks, LAUNCH_WORDS, wide_words

    def use_native_locks(self) -> None:
        """Gives tables made from now on locks that native code can take."""
        assert has_functions()
        for backend in (self, *self._tuned.values()):
            backend._has_native_locks = True

    def new_lock(self, record: Any) -> Any:
        return record.lock if self._has_native_locks else super().new_lock(record)

    def load_kernels(self) -> None:
        capability = self._device.compute_capability
        forms = [(path, is_wide) for path in kernel_files() for is_wide in self._binaries.forms]
        # Ranks of one machine begin with different files: each finds on disk what others compiled.
        begin = 7 * local_rank() % len(forms)
        forms = forms[begin:] + forms[:begin]
        # NVRTC releases the GIL. All files take one core a minute or two.
        with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // self.num_devices)) as pool:
            binaries = pool.map(
                lambda form: self._binaries.get(form[0], capability, form[1]), forms
            )
            for (_, is_wide), binary in zip(forms, binaries, strict=True):
                for name in kernel_names(binary):
                    self._kernel(name, is_wide)

    def _compile(self, path: Path, is_wide: bool) -> Any:
        binary = self._binaries.get(path, self._device.compute_capability, is_wide)
        module = cupy.cuda.Module()
        with self._device:  # loading is for the current device
            module.load(binary)
        return module

    def activate(self) -> None:
        self._device.use()

    def for_table(
        self, block_size: int = 0, device_id: int = -1, io_by_cpu: bool = False
    ) -> "CudaBackend":
        if device_id not in (-1, self.device_id):
            raise ValueError(
                f"`device_id` must be -1 or {self.device_id}, the GPU of this process. Received: "
                f"device_id={device_id}. Start one process per GPU, or choose the GPU with "
                "CUDA_VISIBLE_DEVICES."
            )
        if io_by_cpu:
            raise NotImplementedError(
                "io_by_cpu=True is not available on a GPU: its kernels read and write far rows in "
                "place. Leave it out."
            )
        if block_size in (0, self._threads_per_block):
            return self
        # Tables of one block size share a backend, so that their launches can be merged.
        tuned = self._tuned.get(block_size)
        if tuned is None:
            tuned = copy.copy(self)  # the compiled kernels are shared
            tuned._threads_per_block = block_size
            self._tuned[block_size] = tuned
        return tuned

    def packed(self, kernel: str, tables: Sequence[LaunchArgs]) -> list[Callable[[], Any]]:
        signature = self._source(kernel).signature
        arguments = np.empty((len(tables), len(signature)), np.int64)
        pack_arguments(
            kernel, signature, [each.arguments for each in tables], _addresses, arguments
        )
        num_items = [each.num_items for each in tables]
        most_words = WIDE_LAUNCH_WORDS if self._binaries.has_wide else LAUNCH_WORDS
        most = (most_words - 1) // (1 + len(signature))
        return [
            self._plan_launch(kernel, num_items[i : i + most], arguments[i : i + most], tables)
            for i in range(0, len(tables), most)
        ]

    def _plan_launch(
        self,
        kernel: str,
        num_items: Sequence[int],
        arguments: np.ndarray,
        tables: Sequence[LaunchArgs],
    ) -> Callable[[], Any]:
        """Returns a launch; `arguments` has a row of words for each of its tables."""
        num_parts = len(num_items)
        num_words = 1 + num_parts + arguments.size
        is_wide = num_words > LAUNCH_WORDS
        run, lanes, max_threads = self._kernel(kernel, is_wide)
        threads = min(self._threads_per_block, max_threads // 32 * 32)
        blocks = [-(-count * (lanes or threads) // threads) for count in num_items]
        if sum(blocks) > self._max_blocks:
            share = self._max_blocks / sum(blocks)
            blocks = [max(1, int(share * count)) for count in blocks]
        place = np.empty(1, _WIDE_ARGUMENTS if is_wide else ARGUMENTS)
        words = place["word"][0]  # what is behind `num_words` is not read
        words[: num_parts + 1] = [0, *itertools.accumulate(blocks)]
        words[num_parts + 1 : num_words] = arguments.reshape(-1)
        shape = (int(words[num_parts]),), (threads,)
        action = partial(run, *shape, (place, np.int64(num_parts)))
        action.tables = tables  # type: ignore[attr-defined]  # keeps their arrays alive
        return action

    def set_bits(self, n: int, dtype: np.dtype) -> Array:
        array = cupy.empty(n, dtype)
        array.data.memset_async(0xFF, array.nbytes)
        return array

    def zeros_chunk(self, num_bytes: int) -> Array:
        # CuPy's pool, not cudaMalloc: rows reuse the memory that a grown index has freed, freeing
        # waits for no kernel, and on shortage the pool returns its free blocks to the driver.
        try:
            return cupy.zeros(num_bytes, dtype=cupy.uint8)
        except cupy.cuda.memory.OutOfMemoryError as error:
            raise MemoryError(f"No {num_bytes:,} bytes of GPU memory for rows: {error}") from error

    def far_chunk(self, num_bytes: int) -> np.ndarray:
        try:
            # Not from CuPy's pool, which reuses freed memory while a kernel may still write it;
            # freeing pinned memory itself waits for the GPU.
            memory = cupy.cuda.PinnedMemoryPointer(cupy.cuda.PinnedMemory(num_bytes), 0)
        except (cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.memory.OutOfMemoryError) as error:
            raise MemoryError(f"No {num_bytes:,} bytes of pinned memory: {error}") from error
        chunk = np.frombuffer(memory, np.uint8, num_bytes)
        chunk.fill(0)
        return chunk

    def address(self, array: Array) -> int:
        return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)

    def to_host(self, array: Array) -> np.ndarray:
        return cupy.asnumpy(array)

    def from_host(self, array: Any) -> Array:
        return cupy.ascontiguousarray(cupy.asarray(array))

    def synchronize(self) -> None:
        cupy.cuda.get_current_stream().synchronize()

    def synchronize_device(self) -> None:
        cupy.cuda.runtime.deviceSynchronize()


def _addresses(
    arrays: Sequence[Any], dtype: np.dtype | None, kernel: str, argument: int
) -> list[int]:
    """Implements `Addresses` of arguments.py for CuPy arrays."""
    words = []
    for array in arrays:
        if array is None:
            words.append(0)
            continue
        # A kernel would take the content of a NumPy array for an address.
        if not isinstance(array, cupy.ndarray):
            raise TypeError(
                f"Argument {argument} of {kernel} must be a CuPy array. "
                f"Received: {type(array).__name__}."
            )
        check_array(array, dtype, kernel, argument)
        words.append(array.data.ptr)
    return words
