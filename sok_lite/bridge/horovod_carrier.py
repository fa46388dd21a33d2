"""Arrays of GPUs by Horovod's all-to-all of tensors on the device."""

from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.backend import Array, Backend
from sok_lite.bridge.tensor import empty, to_array, to_tensor
from sok_lite.comm import Communicator, CommunicatorError
from sok_lite.comm.host_controlled import HostControlledCarrier

_NAME = "sok_carried"


class HorovodCarrier(HostControlledCarrier):
    """Horovod's all-to-all. It is called in host calls, which keep memory of TensorFlow's."""

    name = "horovod"
    what = "Horovod's alltoall of tensors on the GPU"

    def __init__(self, comm: Communicator, backend: Backend) -> None:
        """Takes a communicator; raises ImportError where there is no Horovod."""
        super().__init__(comm, backend)
        import horovod.tensorflow as hvd

        self._hvd: Any = hvd

    def _carried(self, message: Array, send_splits: np.ndarray, recv_splits: np.ndarray) -> Array:
        try:
            # TensorFlow takes no memory of the device that is not its own.
            sent = empty(message.shape, tf.int64, self._backend)
            sent[...] = message
            tensor = to_tensor(sent, tf.int64, self._backend)
            self._backend.synchronize()  # Horovod does not wait for CuPy's stream
            splits = np.asarray(send_splits, np.int32)
            received, _ = self._hvd.alltoall(tensor, splits=splits, name=_NAME)
            return to_array(received, self._backend)
        except (tf.errors.OpError, ValueError) as error:
            raise CommunicatorError(f"Horovod cannot carry tensors of GPUs: {error}") from error


def horovod_unable(comm: Communicator) -> str | None:
    """Returns why Horovod cannot carry tensors between these ranks' GPUs, or None if it can."""
    try:
        import horovod.tensorflow as hvd
    except Exception as error:  # also a library built against another TensorFlow
        return f"Horovod cannot be imported ({type(error).__name__}: {error})"
    if not hvd.is_initialized() or hvd.size() != comm.size:
        return "Horovod does not connect these ranks: give comm_tool='horovod'"
    if not hvd.nccl_built():
        return "Horovod was built without HOROVOD_GPU_OPERATIONS=NCCL"
    return None
