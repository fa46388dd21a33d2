"""The GPU transport "horovod": Horovod's all-to-all of device tensors."""

import sys
from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.backend import Array, Backend
from sok_lite.bridge.tensor import empty, memory_of_call, to_array, to_tensor
from sok_lite.comm import Communicator, CommunicatorError
from sok_lite.comm.gpu_transport import GpuTransport

_NAME = "sok_carried"


class HorovodTransport(GpuTransport):
    """Horovod's all-to-all, called within host calls, which keep TensorFlow's memory alive."""

    name = "horovod"
    what = "Horovod's alltoall of tensors on the GPU"

    def __init__(self, comm: Communicator, backend: Backend) -> None:
        """Raises ImportError without Horovod."""
        super().__init__(comm, backend)
        import horovod.tensorflow as hvd

        self._hvd: Any = hvd

    def _send_rows(self, message: Array, send_splits: np.ndarray, recv_splits: np.ndarray) -> Array:
        return to_array(self.carry(message, send_splits), self._backend)

    def carry(self, message: Array, send_splits: np.ndarray) -> tf.Tensor:
        """Sends a message, (n, 2) int64 of the backend; returns what was received, where it is."""
        try:
            # TensorFlow accepts only device memory of its own.
            sent = empty(message.shape, tf.int64, self._backend)
            sent[...] = message
            tensor = to_tensor(sent, tf.int64, self._backend)
            self._backend.synchronize()  # Horovod does not wait for CuPy's stream
            splits = np.asarray(send_splits, np.int32)
            received, _ = self._hvd.alltoall(tensor, splits=splits, name=_NAME)
            return received
        except (tf.errors.OpError, ValueError) as error:
            raise CommunicatorError(f"Horovod cannot carry tensors of GPUs: {error}") from error


def connect(comm: Communicator, backend: Backend) -> HorovodTransport:
    """Returns a transport after a test message from each rank to each. Every rank must call it.

    Raises CommunicatorError if Horovod has no GPU alltoall or numbers ranks differently.
    """
    transport, ranks = HorovodTransport(comm, backend), np.arange(comm.size)
    sent = np.stack([np.full(comm.size, comm.rank), ranks], axis=1)
    expected = np.stack([ranks, np.full(comm.size, comm.rank)], axis=1)
    try:
        with memory_of_call(backend):
            received = transport.carry(backend.from_host(sent), np.ones(comm.size, np.int32))
    except Exception as error:  # Horovod's own kinds among them
        raise CommunicatorError(f"Horovod cannot carry a word between GPUs: {error}") from error
    if backend.name != "cpu" and "GPU" not in received.backing_device:
        raise CommunicatorError("Horovod carries tensors through the host: it has no GPU alltoall")
    if not np.array_equal(received.numpy(), expected):
        raise CommunicatorError("Horovod carries words to other ranks than it was told to")
    return transport


def horovod_unable(comm: Communicator) -> str | None:
    """Returns why Horovod cannot send tensors between these ranks' GPUs; None if it can."""
    if "horovod.tensorflow" not in sys.modules:  # not started; an import takes time
        return "Horovod does not connect these ranks: give comm_tool='horovod'"
    try:
        import horovod.tensorflow as hvd
    except Exception as error:  # also a library built against another TensorFlow
        return f"Horovod cannot be imported ({type(error).__name__}: {error})"
    if not hvd.is_initialized() or hvd.size() != comm.size:
        return "Horovod does not connect these ranks: give comm_tool='horovod'"
    if not hvd.nccl_built():
        return "Horovod was built without HOROVOD_GPU_OPERATIONS=NCCL"
    return None
