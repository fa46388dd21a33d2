"""The ranks of the job, connected where a program of TFRA has called no more than `hvd.init()`."""

import os
import sys

from sok_lite.bridge import job
from sok_lite.comm import Communicator, CommunicatorError
from sok_lite.comm.launch import launched_ranks


def communicator(what: str) -> Communicator:
    """Returns the communicator of the job; connects the ranks where nobody has. All must call it.

    Horovod connects them where it was initialized or `horovodrun` started them, else MPI.

    Args:
      what: needs it, for errors.

    Raises:
      ValueError: several ranks were launched, and they cannot be connected.
    """
    try:
        return job.communicator()
    except job.NotJoinedError:
        pass
    hvd = sys.modules.get("horovod.tensorflow")
    is_horovod = "HOROVOD_SIZE" in os.environ or (hvd is not None and hvd.is_initialized())
    try:
        job.join("horovod" if is_horovod or launched_ranks() == 1 else "mpi")
    except CommunicatorError as error:
        raise ValueError(f"{what} needs Horovod or MPI to connect the ranks. {error}") from error
    return job.communicator()
