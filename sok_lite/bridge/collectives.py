"""Collectives for a program's own tensors, through the communicator of the tables."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.backend import Array, get_backend
from sok_lite.bridge.collective_order import CollectiveCall
from sok_lite.bridge.job import communicator
from sok_lite.bridge.operation import Outputs, operation
from sok_lite.comm import Communicator, ElasticCommunicator
from sok_lite.engine.agreement import agree_on


def alltoall(tensor: Any, splits: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """Sends some rows to each rank. Every rank must call it.

    Args:
      tensor: (n, ...), the rows for rank 0 first, then those for rank 1, and so on.
      splits: (num_ranks,) integers, rows for each rank.

    Returns:
      (tensor (m, ...), received_splits (num_ranks,) int32).
    """
    comm = communicator()
    tensor = tf.convert_to_tensor(tensor)

    def run(rows: Array, send_splits: Array) -> Sequence[Array]:
        received = comm.alltoallv(rows, send_splits)
        return received.rows, received.recv_splits

    inputs, dtypes = [tensor, tf.convert_to_tensor(splits)], [tensor.dtype, tf.int32]
    rows, received_splits = _of_all_ranks(comm, "An alltoall", run, inputs, dtypes)
    rows.set_shape([None, *tensor.shape[1:]])
    # In an elastic job a traced function may later run with another number of ranks.
    is_elastic = isinstance(comm, ElasticCommunicator)
    received_splits.set_shape([None if is_elastic else comm.size])
    return rows, received_splits


def allreduce(tensor: Any, op: str, call: str = "") -> tf.Tensor:
    """Reduces a tensor elementwise over ranks. Every rank must call it.

    Args:
      tensor: any shape, also a scalar; shape and dtype equal on all ranks.
      op: "sum", "average", "max" or "min".
      call: purpose in a few words, for the error if ranks make different calls.

    Returns:
      A tensor of the shape and dtype of `tensor`.

    Raises:
      ValueError: unknown op.
      TypeError: "average" of integers; booleans with "sum" or "average".
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
        # bfloat16 is sent as raw bits, which cannot be added or compared.
        return tf.cast(allreduce(tf.cast(tensor, tf.float32), op, call), tf.bfloat16)

    def run(x: Array) -> Sequence[Array]:
        total = comm.allreduce(x, "sum" if op == "average" else op, call)
        return (total / np.array(comm.size, total.dtype) if op == "average" else total,)

    (result,) = _of_all_ranks(comm, "An allreduce", run, [tensor], [tensor.dtype])
    result.set_shape(tensor.shape)
    return result


def agreed_sum(
    comm: Communicator, tensor: tf.Tensor, description: dict[str, Any], what: str
) -> tf.Tensor:
    """Sums a tensor over ranks that make the same call. Every rank must call it.

    Args:
      description: field -> value, which must be equal on all ranks; compared once.
      what: names what is described, for errors, such as "table 'user'".

    Raises:
      ValueError: a field of the description differs; on every rank.
      CommunicatorError: a rank has died, or is in another call.
    """

    def run(x: Array) -> Sequence[Array]:
        agree_on(comm, description, what)
        return (comm.allreduce(x, "sum"),)

    (result,) = _of_all_ranks(comm, what, run, [tensor], [tensor.dtype])
    return tf.ensure_shape(result, tensor.shape)


def allgather(tensor: Any, call: str = "allgatherv") -> tf.Tensor:
    """Returns the rows of all ranks, in rank order; `call` is its purpose, for errors.

    Every rank must call it.
    """
    comm = communicator()
    tensor = tf.convert_to_tensor(tensor)

    def run(rows: Array) -> Sequence[Array]:
        return (comm.allgatherv(rows, call).rows,)

    (result,) = _of_all_ranks(comm, "An allgather", run, [tensor], [tensor.dtype])
    result.set_shape([None, *tensor.shape[1:]])
    return result


def broadcast(tensor: Any, root: int) -> tf.Tensor:
    """Returns rank `root`'s tensor on every rank. Every rank must call it."""
    comm = communicator()
    tensor = tf.convert_to_tensor(tensor)

    def run(x: Array) -> Sequence[Array]:
        return (comm.broadcast(x, root),)

    (result,) = _of_all_ranks(comm, "A broadcast", run, [tensor], [tensor.dtype])
    result.set_shape(tensor.shape)
    return result


def _of_all_ranks(
    comm: Communicator,
    what: str,
    function: Callable[..., Sequence[Array]],
    inputs: Sequence[tf.Tensor],
    dtypes: Sequence[tf.DType],
) -> Any:
    """Adds an operation in which every rank calls a function of host arrays."""
    backend, collective = get_backend("cpu"), CollectiveCall(comm)

    def run(outputs: Outputs, arrays: list[Array]) -> None:
        for number, result in enumerate(function(*arrays)):
            outputs.give(number, np.asarray(result))

    given = (None, run, inputs, dtypes, backend, what)
    with tf.device("CPU:0"):
        return operation("sok_collective", *given, collective=collective)


tf.no_gradient("SokCollective")
tf.no_gradient("SokCollectiveInOrder")
