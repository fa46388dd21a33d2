"""tf.Tensor <-> array of a backend: the only place where one becomes the other.

Towards the engine an array is a view of the tensor's memory. Towards TensorFlow the engine writes
into memory that TensorFlow then takes over, so on a CPU nothing is copied either way.

On a GPU the two libraries use streams that do not wait for each other. Making a DLPack capsule
waits for TensorFlow's work on the tensor; `host_call` waits for the backend before it gives a
result to TensorFlow.
"""

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import ops
from tensorflow.python.ops import control_flow_util

from sok_lite.backend import Array, Backend

__all__ = [
    "empty",
    "graph_of_function",
    "host_call",
    "make_turn",
    "refuse_replicas",
    "to_array",
    "to_tensor",
]

# What TensorFlow's CPU kernels take for granted of the memory of a tensor.
_ALIGNMENT = 64

_pointer_of_capsule = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of_capsule.restype = ctypes.c_void_p
_pointer_of_capsule.argtypes = [ctypes.py_object, ctypes.c_char_p]


def _storage_dtype(dtype: tf.DType) -> np.dtype:
    """Returns the dtype of the engine's arrays: bfloat16 travels as its 16 bits."""
    return np.dtype(np.uint16) if dtype == tf.bfloat16 else np.dtype(dtype.as_numpy_dtype)


def _is_on_gpu(tensor: tf.Tensor) -> bool:
    return "GPU" in tensor.backing_device


def _gpu_view(tensor: tf.Tensor, backend: Backend) -> Array:
    """Returns a CuPy array over a GPU tensor's memory.

    Only the pointer is read from the capsule: its device number counts TensorFlow's visible GPUs,
    which is wrong after `tf.config.set_visible_devices`.
    """
    cupy = backend.xp
    dtype = _storage_dtype(tensor.dtype)
    shape = tuple(tensor.shape)
    if math.prod(shape) == 0:
        return cupy.empty(shape, dtype)
    capsule = tf.experimental.dlpack.to_dlpack(tensor)
    # DLManagedTensor begins with DLTensor, which begins with the data pointer.
    address = ctypes.c_void_p.from_address(_pointer_of_capsule(capsule, b"dltensor")).value
    size = math.prod(shape) * dtype.itemsize
    # The capsule keeps the tensor's memory for as long as the array lives.
    memory = cupy.cuda.UnownedMemory(address, size, (tensor, capsule))
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))


def to_array(tensor: tf.Tensor, backend: Backend) -> Array:
    """Returns an eager tensor as an array of the backend, without a copy on the same processor.

    The array is read only by agreement: TensorFlow may share the memory with other tensors.

    Args:
      tensor: an eager tensor of numbers; bfloat16 comes out as uint16.
      backend: whose arrays are wanted.
    """
    if backend.name == "cpu" or not _is_on_gpu(tensor):
        # Of a bfloat16 scalar TensorFlow gives NumPy no array.
        array = np.asarray(tensor if tensor.shape.rank else tensor.numpy())
        if tensor.dtype == tf.bfloat16:
            array = array.view(np.uint16)
        return array if backend.name == "cpu" else backend.from_host(array)
    return _gpu_view(tensor, backend)


def empty(shape: Sequence[int], dtype: tf.DType, backend: Backend) -> Array:
    """Returns memory for a result that `to_tensor` can hand to TensorFlow without a copy.

    Args:
      shape: of the result.
      dtype: a float or integer dtype; bfloat16 gives a uint16 array.
      backend: whose arrays are wanted.

    Returns:
      A C-contiguous array of that shape, not initialised.
    """
    storage = _storage_dtype(dtype)
    if backend.name != "cpu":
        return backend.xp.empty(tuple(shape), storage)
    size = math.prod(shape) * storage.itemsize
    # NumPy's own large arrays lie on huge pages, which TensorFlow's do not: rows scattered over
    # 4 KB pages cost a third more to write.
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(storage).reshape(tuple(shape))


def to_tensor(array: Array, dtype: tf.DType, backend: Backend) -> tf.Tensor:
    """Returns an array as an eager tensor. The array must not be written afterwards.

    Not copied where TensorFlow can take the memory: what `empty` gave on a CPU. On a GPU it is
    copied into memory of TensorFlow's, as CuPy might hand out memory of its own again while
    TensorFlow still reads it.

    Args:
      array: an array of the backend; uint16 where `dtype` is bfloat16.
      dtype: the tensor's dtype, of the same storage as the array's.
      backend: whose array it is.
    """
    if backend.name != "cpu":
        # Bits are all that counts here, and DLPack has no unsigned types for some dtypes.
        tensor = tf.raw_ops.Empty(shape=array.shape, dtype=dtype, init=False)
        if not _is_on_gpu(tensor):
            return _from_host(backend.to_host(array), dtype)
        _gpu_view(tensor, backend)[...] = array
        return tensor
    if array.size == 0 or array.ctypes.data % _ALIGNMENT or not array.flags.c_contiguous:
        return _from_host(array, dtype)
    if not array.flags.writeable:
        return _from_host(array, dtype)
    tensor = tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    return tf.bitcast(tensor, dtype) if dtype == tf.bfloat16 else tensor


def _from_host(array: np.ndarray, dtype: tf.DType) -> tf.Tensor:
    if dtype == tf.bfloat16:
        array = np.asarray(array, order="C").view(tf.bfloat16.as_numpy_dtype)
    with tf.device("CPU:0"):
        return tf.constant(array, dtype)


def host_call(
    function: Callable[..., Sequence[tf.Tensor]],
    inputs: Sequence[Any],
    output_dtypes: Sequence[tf.DType],
    backend: Backend,
    what: str,
) -> Any:
    """Calls Python with eager tensors: at once in eager mode, as one py_function in a graph.

    Args:
      function: takes eager tensors, gives a sequence of eager tensors. It raises only ValueError,
        TypeError and MemoryError: TensorFlow keeps the kind of no other.
      inputs: tensors.
      output_dtypes: one per output.
      backend: what `function` computes with; waited for before the outputs go to TensorFlow.
      what: what the call does, for the error text ("A lookup in 'user'").

    Returns:
      A list of tensors in the order of `output_dtypes`; in a TF1 or function graph without
      outputs, the operation.

    Raises:
      NotImplementedError: under `jit_compile=True`, or in one of several replicas.
    """
    refuse_replicas(what)

    def run(*tensors: tf.Tensor) -> Sequence[tf.Tensor]:
        backend.activate()
        outputs = function(*tensors)
        backend.synchronize()
        return outputs

    if tf.executing_eagerly():
        return list(run(*inputs))
    if control_flow_util.GraphOrParentsInXlaContext(ops.get_default_graph()):
        raise NotImplementedError(
            f"{what} cannot be compiled by XLA: the table is outside the graph. Remove "
            "`jit_compile=True` from the tf.function around it, or compile only the dense part of "
            "the model in a function of its own."
        )
    result = _in_order(lambda: tf.py_function(run, list(inputs), list(output_dtypes)))
    if not output_dtypes:
        return result
    return result if isinstance(result, (list, tuple)) else [result]


def refuse_replicas(what: str) -> None:
    """Raises where a tf.distribute strategy runs the caller once for each of several replicas.

    A table is no mirrored variable: every replica would act on the one table there is.
    """
    if not tf.distribute.has_strategy() or tf.distribute.in_cross_replica_context():
        return
    count = tf.distribute.get_strategy().num_replicas_in_sync
    if count > 1:
        raise NotImplementedError(
            f"{what} does not work in a tf.distribute strategy with several replicas: each of the "
            f"{count} would read and update the one table there is. Start one process per GPU "
            "with horovodrun and use sok.init()."
        )


def _in_order(call: Callable[[], Any]) -> Any:
    """Returns what `call` gives, in a tf.function as the successor of all host calls before it.

    TensorFlow orders host calls within one function. One in a function called from there, or in a
    branch or a loop, it orders by the variables alone that this function reads or writes: so each
    writes one of its own, else a lookup could pass an update, and ranks each other's collectives.
    """
    turn = _turn() if tf.inside_function() else None
    if turn is None:
        return call()
    with tf.control_dependencies([tf.raw_ops.ReadVariableOp(resource=turn, dtype=tf.int64)]):
        result = call()
    with tf.control_dependencies(tf.nest.flatten(result)):
        tf.raw_ops.AssignAddVariableOp(resource=turn, value=tf.constant(0, tf.int64))
    return result


# TensorFlow's classes of graphs that are a part of a function.
_BRANCHES_AND_LOOPS = ("CondBranchFuncGraph", "WhileBodyFuncGraph", "WhileCondFuncGraph")
_turn_variable: tf.Variable | None = None


def make_turn() -> None:
    """Makes the variable that host calls are ordered by, unless a TF1 graph is outside.

    Called where a table is made: a variable that is made while a tf.function is traced has it
    traced twice, and what goes once only, such as a gradient of a tape, is None the second time.
    """
    global _turn_variable
    with tf.init_scope():
        if tf.executing_eagerly() and _turn_variable is None:
            with tf.device("CPU:0"):
                _turn_variable = tf.Variable(0, dtype=tf.int64, trainable=False, name="sok_turn")


def _turn() -> tf.Tensor | None:
    """Returns the variable that host calls are ordered by; None where a TF1 graph is outside."""
    with tf.init_scope():
        if not tf.executing_eagerly():
            return None
    make_turn()  # of a table that was made in a TF1 graph
    assert _turn_variable is not None
    # The gradient of a branch can take a resource from the function around it only.
    return graph_of_function().capture(_turn_variable.handle)


def graph_of_function() -> Any:
    """Returns the default graph or, within branches and loops, that of the function around them."""
    graph: Any = ops.get_default_graph()
    while any(base.__name__ in _BRANCHES_AND_LOOPS for base in type(graph).__mro__):
        graph = graph.outer_graph
    return graph
