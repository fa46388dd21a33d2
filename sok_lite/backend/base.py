"""The interface of a backend: arrays, memory, kernel launches."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from sok_lite.backend.launches import Launch, launch_all

# dtypes of kernel arguments, by the letters of SokCode in kernels/parts.cuh.
ARGUMENT_DTYPES: dict[str, np.dtype] = {
    "q": np.dtype(np.int64),
    "Q": np.dtype(np.uint64),
    "i": np.dtype(np.int32),
    "I": np.dtype(np.uint32),
    "H": np.dtype(np.uint16),
    "B": np.dtype(np.uint8),
    "f": np.dtype(np.float32),
    "d": np.dtype(np.float64),
}

I64, I32, U32, U64, F32 = (ARGUMENT_DTYPES[code] for code in "qiIQf")

Array = Any  # numpy.ndarray or cupy.ndarray: CuPy is imported only where it is used


class LaunchArgs(NamedTuple):
    """The arguments of a kernel launch for one table; one launch takes those of many tables.

    Attributes:
      num_items: items (rows for a row kernel) of the kernel's main loop; 0: nothing is launched.
      arguments: in the kernel's order: C-contiguous arrays of the backend, None for a null pointer,
        int for i64, float for f32.
    """

    num_items: int
    arguments: Sequence[Any]


class Backend(ABC):
    """The device of arrays and kernels.

    Attributes:
      name: "cpu" or "cuda".
      xp: NumPy or CuPy.
      device_id: CUDA's number of the GPU; -1 on a CPU.
      num_devices: GPUs that this process sees.
      num_threads: the most worker threads of one launch; 1 on a GPU.
      chunk_bytes, far_chunk_bytes: about how many bytes a row store allocates at first, of near and
        of far rows.
      gives_back: whether `give_back` does anything.
      segment_slots: the fewest slots of an index segment if there are several, a power of two: 8 MB
        (4 large pages) move in a few milliseconds.
    """

    name: str
    xp: ModuleType
    device_id: int = -1
    num_devices: int = 0
    num_threads: int = 1
    chunk_bytes: int
    far_chunk_bytes: int
    gives_back: bool = False
    segment_slots = 1 << 19

    def activate(self) -> None:
        """Makes the calling thread use this backend's device."""
        return None

    def for_table(
        self, block_size: int = 0, device_id: int = -1, io_by_cpu: bool = False
    ) -> "Backend":
        """Returns the backend for a table with these options, which a CPU ignores.

        Args:
          block_size: threads per block; 0: as this backend.
          device_id: the table's GPU; -1: this backend's.
          io_by_cpu: whether the CPU copies rows that are outside the GPU.

        Raises:
          ValueError: the backend is on another GPU.
          NotImplementedError: `io_by_cpu` on a GPU.
        """
        return self

    def new_lock(self, record: Any) -> Any:
        """Returns the lock of a table: an RLock, or the `TableLock` in its record, used like one.

        Args:
          record: a ctypes structure whose first field is `lock`, a `TableLock`.
        """
        return threading.RLock()

    def load_kernels(self) -> None:
        """Compiles and loads all kernels that would otherwise be loaded at their first launch.

        CUDA may wait for the whole GPU when it loads a kernel ("Lazy Loading" in its programming
        guide), where kernels of NCCL may be waiting for other ranks.
        """
        return None

    def launch(self, kernel: str, num_items: int, *args: Any) -> None:
        """Runs a kernel, see `LaunchArgs` for its arguments. A GPU runs it asynchronously.

        Raises:
          TypeError: the arguments do not fit the kernel's signature, or an array is not contiguous.
        """
        self.prepared(kernel, num_items, *args)()

    def prepared(self, kernel: str, num_items: int, *args: Any) -> Launch:
        """Returns a `launch` that is yet to be made; `launch_all` makes several as one."""
        return Launch(self, kernel, LaunchArgs(num_items, args))

    def launch_tables(self, kernel: str, tables: Sequence[LaunchArgs]) -> None:
        """Runs a kernel for several tables in one launch, which may run them in any order.

        On a GPU it is one launch per 30,000 bytes of arguments, those of some 180 tables.
        """
        launch_all(*([Launch(self, kernel, args)] for args in tables))

    @abstractmethod
    def packed(self, kernel: str, tables: Sequence[LaunchArgs]) -> "list[Callable[[], Any]]":
        """Returns launches with packed arguments: calling them allocates next to nothing.

        Args:
          tables: at least one, each with items.
        """

    @abstractmethod
    def set_bits(self, n: int, dtype: np.dtype) -> Array:
        """Returns (n,) integers with all bits set, -1 or the largest; without a kernel."""

    @abstractmethod
    def zeros_chunk(self, num_bytes: int) -> Array:
        """Returns zeroed memory, (num_bytes,) uint8, or raises MemoryError.

        A CPU provides its pages when they are touched; a GPU writes zeros at once.
        """

    def first_chunk(self, num_bytes: int) -> Array:
        """Returns a `zeros_chunk` for a store that may stay small."""
        return self.zeros_chunk(num_bytes)

    @abstractmethod
    def far_chunk(self, num_bytes: int) -> np.ndarray:
        """Returns zeroed host memory that kernels can use, (num_bytes,) uint8, or MemoryError."""

    def give_back(self, memory: Array) -> None:
        """Releases the pages of part of a chunk, not of a file's memory, until they are touched.

        They then have zeros or their old content.
        """
        return None

    @abstractmethod
    def address(self, array: Array) -> int:
        """Returns the address of the first byte of an array of this backend or of a far chunk."""

    @abstractmethod
    def to_host(self, array: Array) -> np.ndarray:
        """Returns the array as a NumPy array; waits for kernels that write it."""

    @abstractmethod
    def from_host(self, array: Any) -> Array:
        """Returns an array-like as a C-contiguous array of this backend."""

    @abstractmethod
    def synchronize(self) -> None:
        """Waits for every kernel launched so far."""

    def synchronize_device(self) -> None:
        """Waits for all work on the device, on any stream and of any library."""
        self.synchronize()


def as_words(array: Array) -> tuple[str, Array]:
    """Returns an array as unsigned integers, for kernels that only copy: (name suffix such as
    "u32", view)."""
    bits = 8 * array.dtype.itemsize
    return f"u{bits}", array.view(f"uint{bits}")
