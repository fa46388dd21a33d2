"""The interface of a backend: arrays, memory, and launches of kernels."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from sok_lite.backend.launches import Launch, launch_all

# The letters of SokCode in kernels/parts.cuh: what an argument of a kernel must be.
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

# The same by name.
I64, I32, U32, U64, F32 = (ARGUMENT_DTYPES[code] for code in "qiIQf")

Array = Any  # numpy.ndarray or cupy.ndarray: CuPy is imported only where it is used


class Work(NamedTuple):
    """A kernel's work on one table, or on anything else that has arguments of its own.

    Attributes:
      num_items: items (rows for a row kernel) of the kernel's main loop; a part of none is left
        out.
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
      device_id: the number of its GPU, as CUDA counts; -1 without one.
      num_devices: GPUs that this process sees.
      num_threads: the most worker threads of one launch; 1 on a GPU.
      chunk_bytes: about how many bytes of near rows a row store allocates at first.
      far_chunk_bytes: the same of far rows.
      gives_back: whether `give_back` does anything.
      segment_slots: the fewest slots of a segment of an index that has more than one, a power of
        two. 8 MB, that is 4 large pages, move in a few milliseconds.
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
        """Makes the calling thread use this backend's device. A GPU is chosen per thread."""
        return None

    def for_table(
        self, block_size: int = 0, device_id: int = -1, io_by_cpu: bool = False
    ) -> "Backend":
        """Returns the backend that a table with these options launches its kernels by.

        Without a GPU they have no effect.

        Args:
          block_size: threads per block; 0: as this backend.
          device_id: the GPU that the table is to be on; -1: this backend's.
          io_by_cpu: whether the CPU is to copy rows that are outside the GPU.

        Raises:
          ValueError: the backend is on another GPU.
          NotImplementedError: the CPU is to copy rows of a table on a GPU.
        """
        return self

    def new_lock(self, record: Any) -> Any:
        """Returns the lock of a table: an RLock, or what is used like one and is in its record.

        Args:
          record: of the table, a ctypes structure whose first field is `lock`, a `TableLock`.
        """
        return threading.RLock()

    def load_kernels(self) -> None:
        """Has all kernels compiled and loaded, where that is not so from the start.

        Loading a kernel may wait for all that the GPU does: CUDA loads each when it is first used
        ("Lazy Loading" in its programming guide). Kernels of NCCL wait for other ranks there.
        """
        return None

    def launch(self, kernel: str, num_items: int, *args: Any) -> None:
        """Runs a kernel over `num_items` items. On the GPU it returns before the kernel ends.

        Args:
          kernel: the kernel's name in `kernels/`.
          num_items: items of its main loop; 0: nothing is launched.
          args: in the kernel's order: C-contiguous arrays of the backend, None for a null pointer,
            int for i64, float for f32.

        Raises:
          TypeError: the arguments do not fit the kernel's signature, or an array is not contiguous.
        """
        self.prepared(kernel, num_items, *args)()

    def prepared(self, kernel: str, num_items: int, *args: Any) -> Launch:
        """Returns a launch that is not made yet; `launch_all` makes those of several tables as one.

        Args:
          kernel: the kernel's name in `kernels/`.
          num_items: items of its main loop; 0: nothing is launched.
          args: in the kernel's order: C-contiguous arrays of the backend, None for a null pointer,
            int for i64, float for f32.

        Raises:
          TypeError: when it is made: the arguments do not fit the kernel's signature, or an array
            is not contiguous.
        """
        return Launch(self, kernel, Work(num_items, args))

    def launch_parts(self, kernel: str, parts: Sequence[Work]) -> None:
        """Runs a kernel for several parts, in no order that counts.

        That is one launch, or none where no part has items; on a GPU one for each 30,000 bytes of
        arguments, which is that of some 180 tables.

        Raises:
          TypeError: as of `prepared`.
        """
        launch_all(*([Launch(self, kernel, part)] for part in parts))

    @abstractmethod
    def packed(self, kernel: str, parts: Sequence[Work]) -> "list[Callable[[], Any]]":
        """Returns the launches for parts that have items, at least one, with their arguments
        packed: to make them allocates next to nothing."""

    @abstractmethod
    def set_bits(self, n: int, dtype: np.dtype) -> Array:
        """Returns (n,) integers with all bits set, -1 or the largest. A GPU needs no kernel."""

    @abstractmethod
    def zeros_chunk(self, num_bytes: int) -> Array:
        """Returns zeroed memory, (num_bytes,) uint8.

        On a CPU it costs nothing until it is touched; a GPU writes its zeros at once.

        Raises:
          MemoryError: there is not that much.
        """

    def first_chunk(self, num_bytes: int) -> Array:
        """Returns zeroed memory, (num_bytes,) uint8, for a store that may stay small.

        Raises:
          MemoryError: there is not that much.
        """
        return self.zeros_chunk(num_bytes)

    @abstractmethod
    def far_chunk(self, num_bytes: int) -> np.ndarray:
        """Returns zeroed memory, (num_bytes,) uint8, outside the device, that kernels can use.

        Raises:
          MemoryError: there is not that much.
        """

    def give_back(self, memory: Array) -> None:
        """Returns the memory of part of a chunk to the system until it is touched again.

        It then has zeros or its old content. Not for memory of a file.
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
        """Waits for all that anybody has put on the device, on any stream."""
        self.synchronize()


def as_words(array: Array) -> tuple[str, Array]:
    """Returns an array as unsigned integers of its width, for kernels that only copy elements.

    Returns:
      (what ends the kernel's name, "u8", "u16", "u32" or "u64"; the view).
    """
    bits = 8 * array.dtype.itemsize
    return f"u{bits}", array.view(f"uint{bits}")
