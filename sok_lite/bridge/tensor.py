"""Conversion of tf.Tensor and backend arrays in host calls.

The engine gets views of the tensors' memory. Results are written where TensorFlow needs them,
without a copy: on a CPU into memory that TensorFlow takes over, on a GPU into memory that
TensorFlow allocated.

On a GPU the two libraries use streams that do not wait for each other. Making a DLPack capsule
waits for TensorFlow's work, including readers of memory that TensorFlow reuses. A call ends by
waiting for the backend's writes (`host_call.on_device`); until then `memory_of_call` keeps
TensorFlow's memory alive. A call whose kernels only read such memory need not wait: the memory is
kept until a later call waits, so there has to be one.
"""

import ctypes
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from sok_lite.backend import Array, Backend
from sok_lite.backend.aligned import ALIGNMENT, aligned_empty
from sok_lite.backend.arguments import address_of
from sok_lite.bridge.gpu import device_name

Result = TypeVar("Result")

# TensorFlow has one object for each dtype.
_STORAGE: list[tuple[tf.DType, np.dtype]] = [
    (tf.int64, np.dtype(np.int64)),
    (tf.float32, np.dtype(np.float32)),
    (tf.bfloat16, np.dtype(np.uint16)),
]
_BFLOAT16 = np.dtype(tf.bfloat16.as_numpy_dtype)

_pointer_of_capsule = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of_capsule.restype = ctypes.c_void_p
_pointer_of_capsule.argtypes = [ctypes.py_object, ctypes.c_char_p]


class _Memory:
    """TensorFlow's GPU memory used by a call.

    Attributes:
      views: tensor id -> (array, tensor, capsule); the last two own the memory.
      results: address -> the tensor that `empty` made there.
      arguments: of the call. The frame of an operation is one, and owns its inputs.
      is_left: whether the call returned before its kernels ran.
    """

    def __init__(self) -> None:
        self.views: dict[int, tuple[Array | None, tf.Tensor, Any]] = {}
        self.results: dict[int, tf.Tensor] = {}
        self.arguments: tuple[Any, ...] = ()
        self.is_left = False


class _OfThread(threading.local):
    # Only the call owns it: an interrupt may come before the reference is reset here.
    memory: "weakref.ref[_Memory] | None" = None


_of_thread = _OfThread()
# By device: memory of calls that may have returned before their kernels ran. A loop of such calls
# never waits, and each may hold the gradients of a whole batch.
_left_behind: dict[int, list[_Memory]] = {}
_MOST_LEFT = 4


@contextmanager
def memory_of_call(backend: Backend, left_behind: bool = False) -> Iterator[_Memory]:
    """Keeps TensorFlow's GPU memory that becomes arrays in the block until its end.

    With `left_behind` and `is_left`, until `wait_for_all`.
    """
    memory = _Memory()
    if left_behind:
        _left_behind.setdefault(backend.device_id, []).append(memory)
    outer, _of_thread.memory = _of_thread.memory, weakref.ref(memory)
    try:
        yield memory
    finally:
        _of_thread.memory = outer


def may_leave(backend: Backend) -> bool:
    """Whether one more call may return before its kernels have run."""
    return sum(memory.is_left for memory in _left_behind.get(backend.device_id, [])) < _MOST_LEFT


def wait_for_all(backend: Backend, ended: _Memory | None = None) -> None:
    """Waits for all launches, and releases memory of `ended` and of calls that returned early."""
    try:
        kept = _left_behind.get(backend.device_id, [])
        # Before the wait, which does not cover what another thread leaves meanwhile.
        done = [memory for memory in kept if memory.is_left or memory is ended]
        backend.synchronize()
    except BaseException:
        backend.synchronize()  # an interrupt may have come before the wait
        raise
    for memory in done:
        with suppress(ValueError):  # another thread has waited too
            kept.remove(memory)


def _memory() -> _Memory:
    reference = _of_thread.memory
    memory = None if reference is None else reference()
    if memory is None:
        raise RuntimeError("GPU memory of TensorFlow's is used outside of `on_device`.")
    return memory


def _storage_dtype(dtype: tf.DType) -> np.dtype:
    """Returns the dtype of the engine's arrays: bfloat16 is passed as its 16 bits."""
    for known, storage in _STORAGE:  # comparing or hashing a TensorFlow dtype takes 1 microsecond
        if dtype is known:
            return storage
    return np.dtype(dtype.as_numpy_dtype)


def _is_on_gpu(tensor: tf.Tensor) -> bool:
    return "GPU" in tensor.backing_device


def _gpu_view(tensor: tf.Tensor, backend: Backend) -> Array | None:
    """Returns an array of the backend over a GPU tensor's memory; None for host memory.

    TensorFlow keeps some int32 tensors of a GPU in host memory. Only the pointer of the capsule is
    read: its device number counts TensorFlow's visible GPUs, which is wrong after
    `tf.config.set_visible_devices`. Raises ValueError if the memory is on another GPU.
    """
    xp = backend.xp
    dtype = _storage_dtype(tensor.dtype)
    shape = tuple(tensor.shape.as_list())
    if math.prod(shape) == 0:
        return xp.empty(shape, dtype)
    views = _memory().views
    if id(tensor) in views:
        return views[id(tensor)][0]
    capsule = tf.experimental.dlpack.to_dlpack(tensor)
    views[id(tensor)] = None, tensor, capsule
    # DLManagedTensor begins with DLTensor, which begins with the data pointer.
    address = ctypes.c_void_p.from_address(_pointer_of_capsule(capsule, b"dltensor")).value or 0
    size = math.prod(shape) * dtype.itemsize
    facts = xp.cuda.runtime.pointerGetAttributes(address)
    if facts.type not in (xp.cuda.runtime.memoryTypeDevice, xp.cuda.runtime.memoryTypeManaged):
        return None
    if facts.device != backend.device_id:
        raise ValueError(
            f"A tensor is on GPU {facts.device} and the tables of this process are on GPU "
            f"{backend.device_id}. Call sok_lite.init() before TensorFlow's first operation and "
            "leave tf.config.set_visible_devices to it; CUDA_VISIBLE_DEVICES chooses another GPU "
            "for both."
        )
    memory = xp.cuda.UnownedMemory(address, size, (tensor, capsule), facts.device)
    array = xp.ndarray(shape, dtype, xp.cuda.MemoryPointer(memory, 0))
    views[id(tensor)] = array, tensor, capsule
    return array


def _gpu_tensor(shape: Sequence[int], dtype: tf.DType, backend: Backend) -> tf.Tensor | None:
    """Allocates a tensor on the backend's GPU, or raises MemoryError; None without that GPU."""
    name = device_name(backend)
    if name is None:
        return None
    try:
        allocate = partial(_allocate, name, shape, dtype)
        tensor = with_all_memory(backend, allocate, tf.errors.ResourceExhaustedError)
    except tf.errors.ResourceExhaustedError as error:
        # A graph would lose the type of TensorFlow's own error.
        size = math.prod(shape) * dtype.size
        raise MemoryError(
            f"TensorFlow has no {size:,} bytes of GPU memory for a result. Take smaller batches, "
            f"or leave it more: tables and TensorFlow share the GPU. ({error.message})"
        ) from error
    except (tf.errors.InvalidArgumentError, tf.errors.NotFoundError):
        # TensorFlow has no GPU kernel for this dtype, and may not use another device.
        return None
    return tensor if _is_on_gpu(tensor) else None


def with_all_memory(
    backend: Backend, allocate: Callable[[], Result], refusal: type[Exception]
) -> Result:
    """Calls TensorFlow's allocation on a GPU; after `refusal`, frees what is unused and retries."""
    try:
        return allocate()
    except refusal:
        # Free memory of calls that did not wait, and blocks that tables have freed and CuPy caches.
        wait_for_all(backend)
        backend.xp.get_default_memory_pool().free_all_blocks()
        return allocate()


def _allocate(device: str, shape: Sequence[int], dtype: tf.DType) -> tf.Tensor:
    # TensorFlow takes 90 microseconds to convert a list.
    on_host = np.array(shape, np.int32)
    with tf.device(device):
        return tf.raw_ops.Empty(shape=on_host, dtype=dtype, init=False)


def to_array(tensor: tf.Tensor, backend: Backend) -> Array:
    """Returns an eager tensor as an array of the backend, without a copy on the same processor.

    The array must not be written: TensorFlow may share the memory with other tensors. bfloat16
    becomes uint16. Raises ValueError if the tensor is on another GPU than the backend.
    """
    if backend.name != "cpu" and _is_on_gpu(tensor):
        view = _gpu_view(tensor, backend)
        if view is not None:
            return view
    # Reading a tensor's dtype or shape takes longer than making the array.
    try:
        array = np.asarray(tensor)
    except ValueError:  # bfloat16 scalars have no array interface
        array = np.asarray(tensor.numpy())
    if array.dtype == _BFLOAT16:
        array = array.view(np.uint16)
    return array if backend.name == "cpu" else backend.from_host(array)


def empty(shape: Sequence[int], dtype: tf.DType, backend: Backend) -> Array:
    """Allocates a C-contiguous result that `to_tensor` can pass to TensorFlow without a copy.

    Not initialized; bfloat16 becomes uint16. Raises MemoryError, and ValueError if TensorFlow uses
    another GPU than the backend.
    """
    storage = _storage_dtype(dtype)
    if backend.name != "cpu":
        tensor = _gpu_tensor(shape, dtype, backend) if math.prod(shape) else None
        array = None if tensor is None else _gpu_view(tensor, backend)
        if array is None:
            return backend.xp.empty(tuple(shape), storage)
        _memory().results[backend.address(array)] = tensor
        return array
    return aligned_empty(tuple(shape), storage)


def to_tensor(array: Array, dtype: tf.DType, backend: Backend | None) -> tf.Tensor:
    """Returns an array as an eager tensor. The array must not be written afterwards.

    Memory from `empty` is not copied. Other GPU arrays are, because CuPy might reuse their memory
    while TensorFlow still reads it, and CPU arrays that TensorFlow cannot take. The array is uint16
    if `dtype` is bfloat16; without a backend it is the host's.
    """
    if backend is not None and backend.name != "cpu":
        return _from_gpu(array, dtype, backend)
    is_taken = array.size and array.flags.c_contiguous and array.flags.writeable
    if not is_taken or address_of(array) % ALIGNMENT:
        return _from_host(array, dtype)
    tensor = tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    if dtype is not tf.bfloat16:
        return tensor
    with tf.device("CPU:0"):
        return tf.bitcast(tensor, dtype)


def _from_gpu(array: Array, dtype: tf.DType, backend: Backend) -> tf.Tensor:
    is_whole = array.size and array.flags.c_contiguous
    result = _memory().results.get(backend.address(array)) if is_whole else None
    # A part of a result, or its bits as another dtype, has the same address.
    if result is not None and (result.dtype, tuple(result.shape)) == (dtype, array.shape):
        return result
    tensor = _gpu_tensor(array.shape, dtype, backend)
    view = None if tensor is None else _gpu_view(tensor, backend)
    if view is None:
        return _from_host(backend.to_host(array), dtype)
    view[...] = array
    return tensor


def _from_host(array: np.ndarray, dtype: tf.DType) -> tf.Tensor:
    if dtype is tf.bfloat16:
        array = np.asarray(array, order="C").view(tf.bfloat16.as_numpy_dtype)
    with tf.device("CPU:0"):
        return tf.constant(array, dtype)


def as_int64(keys: tf.Tensor) -> tf.Tensor:
    """Returns integers as int64, a bit cast for uint64."""
    if keys.dtype is tf.uint64:
        return tf.bitcast(keys, tf.int64)
    return keys if keys.dtype is tf.int64 else tf.cast(keys, tf.int64)


def from_int64(keys: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Returns int64 keys in another dtype, a bit cast for uint64."""
    return tf.bitcast(keys, dtype) if dtype == tf.uint64 else tf.cast(keys, dtype)
