"""tf.Tensor <-> array of a backend: where one becomes the other in host calls.

Towards the engine an array is a view of the tensor's memory. Towards TensorFlow results are written
where TensorFlow needs them, without a copy: on a CPU into memory that TensorFlow takes over, on a
GPU into memory that TensorFlow gave.

On a GPU the two libraries use streams that do not wait for each other. Making a DLPack capsule
waits for TensorFlow's work, also for what may still read memory that TensorFlow gives out again.
What the backend writes is waited for at the end of a call (`host_call.on_device`), and until then
no memory of TensorFlow's may be freed: `memory_of_call` keeps it. A call whose kernels only read
such memory does not wait: it is kept until a later one does, of which there has to be one.
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
    """TensorFlow's GPU memory that a call works in.

    Attributes:
      views: array, tensor and capsule by the id of the tensor; the last two own the memory.
      results: address -> the tensor that `empty` made there.
      arguments: of the call. The frame of an operation is one, and owns its inputs.
      is_left: whether the call has returned before its kernels have run.
    """

    def __init__(self) -> None:
        self.views: dict[int, tuple[Array | None, tf.Tensor, Any]] = {}
        self.results: dict[int, tf.Tensor] = {}
        self.arguments: tuple[Any, ...] = ()
        self.is_left = False


class _OfThread(threading.local):
    # Only the call itself owns it: an interrupt may come before it is taken away here.
    memory: "weakref.ref[_Memory] | None" = None


_of_thread = _OfThread()
# By device: memory of calls that may have returned before their kernels have run. In a loop of them
# nothing else would wait, and each may have the gradients of a whole batch.
_left_behind: dict[int, list[_Memory]] = {}
_MOST_LEFT = 4


@contextmanager
def memory_of_call(backend: Backend, left_behind: bool = False) -> Iterator[_Memory]:
    """Keeps the GPU memory of TensorFlow's that becomes arrays inside, until the end.

    Args:
      left_behind: whether it is kept longer where `is_left` was set: until `wait_for_all`.
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
    """Whether few enough calls are left behind that one more may be."""
    return sum(memory.is_left for memory in _left_behind.get(backend.device_id, [])) < _MOST_LEFT


def wait_for_all(backend: Backend, ended: _Memory | None = None) -> None:
    """Waits for all that was launched, and lets go of memory of calls that have returned before.

    Args:
      ended: of a call that ends here.
    """
    try:
        kept = _left_behind.get(backend.device_id, [])
        # Before the wait: what another thread leaves meanwhile is not waited for.
        done = [memory for memory in kept if memory.is_left or memory is ended]
        backend.synchronize()
    except BaseException:
        backend.synchronize()  # an interrupt may have come before the wait
        raise
    for memory in done:
        with suppress(ValueError):  # another thread has waited as well
            kept.remove(memory)


def _memory() -> _Memory:
    reference = _of_thread.memory
    memory = None if reference is None else reference()
    if memory is None:
        raise RuntimeError("GPU memory of TensorFlow's is used outside of `on_device`.")
    return memory


def _storage_dtype(dtype: tf.DType) -> np.dtype:
    """Returns the dtype of the engine's arrays: bfloat16 travels as its 16 bits."""
    for known, storage in _STORAGE:  # TensorFlow takes 1 microsecond to compare or to hash one
        if dtype is known:
            return storage
    return np.dtype(dtype.as_numpy_dtype)


def _is_on_gpu(tensor: tf.Tensor) -> bool:
    return "GPU" in tensor.backing_device


def _gpu_view(tensor: tf.Tensor, backend: Backend) -> Array | None:
    """Returns an array of the backend over a GPU tensor's memory; None where that is the host's.

    TensorFlow keeps some int32 tensors of a GPU in the host's memory. Only the pointer is read from
    the capsule: its device number counts TensorFlow's visible GPUs, which is wrong after
    `tf.config.set_visible_devices`.

    Raises:
      ValueError: the memory is on another GPU than the backend.
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
    """Returns memory of TensorFlow's on the backend's GPU; None where TensorFlow does not use it.

    Raises:
      MemoryError: there is not that much.
    """
    name = device_name(backend)
    if name is None:
        return None
    try:
        allocate = partial(_allocate, name, shape, dtype)
        tensor = with_all_memory(backend, allocate, tf.errors.ResourceExhaustedError)
    except tf.errors.ResourceExhaustedError as error:
        # In a graph TensorFlow would forget the kind of its own error.
        size = math.prod(shape) * dtype.size
        raise MemoryError(
            f"TensorFlow has no {size:,} bytes of GPU memory for a result. Take smaller batches, "
            f"or leave it more: tables and TensorFlow share the GPU. ({error.message})"
        ) from error
    except (tf.errors.InvalidArgumentError, tf.errors.NotFoundError):
        # It has no such kernel for this dtype on a GPU, and was told not to look elsewhere.
        return None
    return tensor if _is_on_gpu(tensor) else None


def with_all_memory(
    backend: Backend, allocate: Callable[[], Result], refusal: type[Exception]
) -> Result:
    """Returns what TensorFlow allocates on a GPU, at the second try with all memory that there is.

    Args:
      refusal: what `allocate` raises where there is not as much.
    """
    try:
        return allocate()
    except refusal:
        # TensorFlow cannot have what calls keep that did not wait, and what tables have given back,
        # which CuPy keeps.
        wait_for_all(backend)
        backend.xp.get_default_memory_pool().free_all_blocks()
        return allocate()


def _allocate(device: str, shape: Sequence[int], dtype: tf.DType) -> tf.Tensor:
    # Of a list TensorFlow would make a tensor in 90 microseconds.
    on_host = np.array(shape, np.int32)
    with tf.device(device):
        return tf.raw_ops.Empty(shape=on_host, dtype=dtype, init=False)


def to_array(tensor: tf.Tensor, backend: Backend) -> Array:
    """Returns an eager tensor as an array of the backend, without a copy on the same processor.

    The array is read only by agreement: TensorFlow may share the memory with other tensors.

    Args:
      tensor: an eager tensor of numbers; bfloat16 comes out as uint16.
      backend: whose arrays are wanted.

    Raises:
      ValueError: the tensor is on another GPU than the backend.
    """
    if backend.name != "cpu" and _is_on_gpu(tensor):
        view = _gpu_view(tensor, backend)
        if view is not None:
            return view
    # To ask a tensor for its dtype or its shape takes longer than to make the array.
    try:
        array = np.asarray(tensor)
    except ValueError:  # of a bfloat16 scalar TensorFlow gives NumPy no array
        array = np.asarray(tensor.numpy())
    if array.dtype == _BFLOAT16:
        array = array.view(np.uint16)
    return array if backend.name == "cpu" else backend.from_host(array)


def empty(shape: Sequence[int], dtype: tf.DType, backend: Backend) -> Array:
    """Returns memory for a result that `to_tensor` can hand to TensorFlow without a copy.

    Args:
      shape: of the result.
      dtype: a float or integer dtype; bfloat16 gives a uint16 array.
      backend: whose arrays are wanted.

    Returns:
      A C-contiguous array of that shape, not initialised.

    Raises:
      MemoryError: there is not that much.
      ValueError: TensorFlow's GPU is another than the backend's.
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

    What `empty` gave is not copied. Anything else on a GPU is, as CuPy might hand out memory of its
    own again while TensorFlow still reads it, and on a CPU what TensorFlow cannot take.

    Args:
      array: an array of the backend; uint16 where `dtype` is bfloat16.
      dtype: the tensor's dtype, of the same storage as the array's.
      backend: whose array it is; None: the host's.
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
    # A part of a result, or its bits as another dtype, begins where it does.
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
    """Returns integers as int64; of uint64 the bits."""
    if keys.dtype is tf.uint64:
        return tf.bitcast(keys, tf.int64)
    return keys if keys.dtype is tf.int64 else tf.cast(keys, tf.int64)


def from_int64(keys: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Returns int64 keys as those of another type; as uint64 their bits."""
    return tf.bitcast(keys, dtype) if dtype == tf.uint64 else tf.cast(keys, dtype)
