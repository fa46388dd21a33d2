"""Tensors of a program that travel between ranks, through the communicator that tables use."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.backend import get_backend
from sok_lite.bridge.collective_order import CollectiveCall
from sok_lite.bridge.host_call import host_call
from sok_lite.bridge.job import communicator
from sok_lite.bridge.tensor import to_array, to_tensor
from sok_lite.comm import Communicator, ElasticCommunicator
from sok_lite.engine.agreement import agree_on


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
        run,
        inputs,
        [tensor.dtype, tf.int32],
        get_backend("cpu"),
        "An alltoall",
        CollectiveCall(comm),
    )
    rows.set_shape([None, *tensor.shape[1:]])
    # A traced function of an elastic job meets other numbers of ranks.
    is_elastic = isinstance(comm, ElasticCommunicator)
    received_splits.set_shape([None if is_elastic else comm.size])
    return rows, received_splits


def allreduce(tensor: Any, op: str, call: str = "") -> tf.Tensor:
    """Reduces a tensor elementwise over ranks. Every rank must call it.

    Args:
      tensor: any shape, a scalar too; shape and dtype equal on all ranks.
      op: "sum", "average", "max" or "min".
      call: what it is for, in a few words, for the message where ranks make different calls.

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
        return tf.cast(allreduce(tf.cast(tensor, tf.float32), op, call), tf.bfloat16)

    def run(x: tf.Tensor) -> Sequence[tf.Tensor]:
        backend = get_backend("cpu")
        total = comm.allreduce(to_array(x, backend), "sum" if op == "average" else op, call)
        if op == "average":
            total = total / np.array(comm.size, total.dtype)
        return (to_tensor(np.asarray(total), x.dtype, backend),)

    (result,) = host_call(
        run, [tensor], [tensor.dtype], get_backend("cpu"), "An allreduce", CollectiveCall(comm)
    )
    result.set_shape(tensor.shape)
    return result


def agreed_sum(
    comm: Communicator, tensor: tf.Tensor, description: dict[str, Any], what: str
) -> tf.Tensor:
    """Returns the sum of a tensor over ranks that make the same call. Every rank must call it.

    Args:
      tensor: floats or integers; shape and dtype equal on all ranks.
      description: field -> value, which must be equal on all ranks; compared once.
      what: names what is described, for errors, such as "table 'user'".

    Raises:
      ValueError: a field of the description differs; on every rank.
      CommunicatorError: a rank has died, or is in another call.
    """

    def run(x: tf.Tensor) -> Sequence[tf.Tensor]:
        backend = get_backend("cpu")
        agree_on(comm, description, what)
        total = comm.allreduce(to_array(x, backend), "sum")
        return (to_tensor(np.asarray(total), x.dtype, backend),)

    (result,) = host_call(
        run, [tensor], [tensor.dtype], get_backend("cpu"), what, CollectiveCall(comm)
    )
    return tf.ensure_shape(result, tensor.shape)


def allgather(tensor: Any) -> tf.Tensor:
    """Returns the rows of all ranks, in rank order. Every rank must call it."""
    comm = communicator()
    tensor = tf.convert_to_tensor(tensor)

    def run(rows: tf.Tensor) -> Sequence[tf.Tensor]:
        backend = get_backend("cpu")
        return (to_tensor(comm.allgatherv(to_array(rows, backend)).rows, rows.dtype, backend),)

    (result,) = host_call(
        run, [tensor], [tensor.dtype], get_backend("cpu"), "An allgather", CollectiveCall(comm)
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
        run, [tensor], [tensor.dtype], get_backend("cpu"), "A broadcast", CollectiveCall(comm)
    )
    result.set_shape(tensor.shape)
    return result
