"""Which processes make up the job: `sok.init` and the questions a program asks about ranks.

The names and their meaning are those of SOK's `sok.communication`; one process uses one GPU, so
"gpu" in a name here is what the rest of this package calls a rank.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.backend import get_backend
from sok_lite.comm import Communicator, make_communicator
from sok_lite.gpu import check_local_rank, share_gpu_of_rank
from sok_lite.host_call import host_call
from sok_lite.tensor import to_array, to_tensor

_communicator: Communicator | None = None
_tool: str | None = None


def init(comm_tool: str = "horovod", use_legacy_optimizer: bool = True) -> None:
    """Chooses how ranks talk to each other, and the GPU of each. Every rank must call it.

    Call it before TensorFlow's first operation. Where tables live on a GPU, TensorFlow then uses
    that of the rank's number on its machine alone, and takes memory there as it needs it. A second
    call with the same tool changes nothing, so a notebook's cell may run again.

    Args:
      comm_tool: "horovod", "mpi", or "single" for one process. One process needs neither
        installed, whatever is named here.
      use_legacy_optimizer: makes `tf.keras.optimizers` the legacy optimizers where TensorFlow runs
        with tf_keras (`TF_USE_LEGACY_KERAS=1`), as SOK does. Nothing changes under Keras 3.

    Raises:
      ValueError: unknown tool.
      RuntimeError: it was called before with another tool, or several ranks were launched and the
        tool cannot connect them; TensorFlow uses another GPU than the rank's.
    """
    share_gpu_of_rank()
    set_comm_tool(comm_tool)
    if num_ranks() > 1:
        check_local_rank(local_rank())
    if use_legacy_optimizer:
        _use_legacy_optimizers()
    if rank() == 0:
        print(f"[SOK INFO] Initialize finished, communication tool: {comm_tool}")


def _use_legacy_optimizers() -> None:
    keras = tf.keras
    legacy = getattr(keras.optimizers, "legacy", None)
    # Keras 3 keeps a stub under this name, whose Optimizer is called LegacyOptimizerWarning.
    if getattr(getattr(legacy, "Optimizer", None), "__name__", "") == "OptimizerV2":
        keras.optimizers = legacy
        tf.optimizers = legacy


def set_comm_tool(comm_tool: str) -> None:
    """Stores the communication tool; `init` calls it. Raises as `init` does."""
    global _communicator, _tool
    if _communicator is not None:
        if comm_tool == _tool:
            return
        raise RuntimeError(
            "[SOK INFO] Communication tool cannot be set more than once. `sok.init` was called "
            f"before in this process with {_tool!r}. Received: {comm_tool!r}. Remove this call."
        )
    _communicator, _tool = make_communicator(comm_tool), comm_tool


def check_comm_tool() -> None:
    """Raises RuntimeError if `sok.init` was not called."""
    communicator()


def communicator() -> Communicator:
    """Returns the communicator that `sok.init` made.

    Raises:
      RuntimeError: `sok.init` was not called.
    """
    if _communicator is None:
        raise RuntimeError(
            "[SOK INFO] Communication tool is not set. Did you forget to call sok.init()?"
        )
    return _communicator


def rank() -> int:
    """Returns the number of this process, 0 to `num_ranks() - 1`."""
    return communicator().rank


def num_ranks() -> int:
    """Returns the number of processes."""
    return communicator().size


def local_rank() -> int:
    """Returns the number of this process among those of its machine."""
    return communicator().local_rank


def id_in_rank() -> int:
    """Returns 0: a process uses one GPU."""
    return 0


def num_gpu_per_rank() -> int:
    """Returns 1: a process uses one GPU."""
    return 1


def global_gpu_id() -> int:
    """Returns `rank()`."""
    return rank()


def num_gpus() -> int:
    """Returns `num_ranks()`."""
    return num_ranks()


def alltoall(tensor: Any, splits: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """Sends a part of the rows to each rank. Every rank must call it.

    Args:
      tensor: (n, ...), the rows for rank 0 first, then those for rank 1, and so on.
      splits: (num_ranks,) integers, rows for each rank.

    Returns:
      (tensor (m, ...), received_splits (num_ranks,) int32).
    """
    comm = communicator()
    tensor = tf.convert_to_tensor(tensor)

    def run(rows: tf.Tensor, send_splits: tf.Tensor) -> Sequence[tf.Tensor]:
        backend = get_backend("cpu")
        received = comm.alltoallv(to_array(rows, backend), to_array(send_splits, backend))
        return (
            to_tensor(received.rows, rows.dtype, backend),
            to_tensor(received.recv_splits, tf.int32, backend),
        )

    inputs = [tensor, tf.convert_to_tensor(splits)]
    rows, received_splits = host_call(
        run, inputs, [tensor.dtype, tf.int32], get_backend("cpu"), "sok.communication.alltoall"
    )
    rows.set_shape([None, *tensor.shape[1:]])
    received_splits.set_shape([comm.size])
    return rows, received_splits


def allreduce(tensor: Any, op: str) -> tf.Tensor:
    """Reduces a tensor elementwise over ranks. Every rank must call it.

    Args:
      tensor: any shape, a scalar too; shape and dtype equal on all ranks.
      op: "sum", "average", "max" or "min".

    Returns:
      A tensor of the shape and dtype of `tensor`.

    Raises:
      ValueError: unknown op.
      TypeError: "average" of integers, which are seldom whole; booleans with "sum" or "average".
    """
    if op not in ("sum", "average", "max", "min"):
        raise ValueError(f"`op` must be 'sum', 'average', 'max' or 'min'. Received: op={op!r}.")
    comm = communicator()
    tensor = tf.convert_to_tensor(tensor)
    if op == "average" and not tensor.dtype.is_floating:
        raise TypeError(
            "`allreduce` averages floats: an average of integers is seldom one. Received: dtype="
            f"{tensor.dtype.name}. Give tf.cast(x, tf.float32), or op='sum'."
        )
    if op == "sum" and tensor.dtype.is_bool:
        raise TypeError(
            "`allreduce` cannot sum booleans. Received: dtype=bool. Cast them to integers to count "
            "them, or use 'max' for any and 'min' for all."
        )
    if tensor.dtype == tf.bfloat16:
        # It travels as its bits, which cannot be added or compared.
        return tf.cast(allreduce(tf.cast(tensor, tf.float32), op), tf.bfloat16)

    def run(x: tf.Tensor) -> Sequence[tf.Tensor]:
        backend = get_backend("cpu")
        total = comm.allreduce(to_array(x, backend), "sum" if op == "average" else op)
        if op == "average":
            total = total / np.array(comm.size, total.dtype)
        return (to_tensor(np.asarray(total), x.dtype, backend),)

    (result,) = host_call(
        run, [tensor], [tensor.dtype], get_backend("cpu"), "sok.communication.allreduce"
    )
    result.set_shape(tensor.shape)
    return result


def allgather(tensor: Any) -> tf.Tensor:
    """Returns the rows of all ranks, in rank order. Every rank must call it."""
    comm = communicator()
    tensor = tf.convert_to_tensor(tensor)

    def run(rows: tf.Tensor) -> Sequence[tf.Tensor]:
        backend = get_backend("cpu")
        return (to_tensor(comm.allgatherv(to_array(rows, backend)).rows, rows.dtype, backend),)

    (result,) = host_call(
        run, [tensor], [tensor.dtype], get_backend("cpu"), "sok.communication.allgather"
    )
    result.set_shape([None, *tensor.shape[1:]])
    return result


def broadcast(tensor: Any, root: int) -> tf.Tensor:
    """Returns rank `root`'s tensor on every rank. Every rank must call it."""
    comm = communicator()
    tensor = tf.convert_to_tensor(tensor)

    def run(x: tf.Tensor) -> Sequence[tf.Tensor]:
        backend = get_backend("cpu")
        return (to_tensor(comm.broadcast(to_array(x, backend), root), x.dtype, backend),)

    (result,) = host_call(
        run, [tensor], [tensor.dtype], get_backend("cpu"), "sok.communication.broadcast"
    )
    result.set_shape(tensor.shape)
    return result
