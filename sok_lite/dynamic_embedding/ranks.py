"""The ranks of the job, connected on demand: a TFRA program calls only `hvd.init()`."""

import json
import os
import re
import sys
from collections.abc import Iterable

from sok_lite.bridge import job
from sok_lite.comm import Communicator, CommunicatorError
from sok_lite.comm.launch import launched_ranks


def communicator(what: str) -> Communicator:
    """Returns the job's communicator, connecting the ranks if needed. Every rank must call it.

    Horovod connects them if it was initialized or `horovodrun` started them, otherwise MPI.
    ValueError: several ranks were launched that cannot be connected; it names `what`.
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


def are_several() -> bool:
    """Whether several ranks are connected, or Horovod can connect them."""
    if job.other_ranks() is not None:
        return True
    hvd = sys.modules.get("horovod.tensorflow")
    return hvd is not None and bool(hvd.is_initialized()) and hvd.size() > 1


def refuse_parameter_servers(name: str, devices: Iterable[str]) -> None:
    """Raises if workers of a TensorFlow cluster were to share the shards of a table.

    Each worker would have its own table, trained on its part of the data only. A job's device has
    its name, as "/job:ps/task:0". NotImplementedError: a device names a job, and TF_CONFIG lists
    several workers.
    """
    remote = [device for device in devices if re.search(r"/job:(?!localhost\b)", device)]
    if remote and (count := _num_workers()) > 1:
        raise NotImplementedError(
            f"Table {name!r} cannot be on {remote[0]!r}: tables are not on parameter servers, and "
            f"each of the {count} workers that TF_CONFIG names would train one of its own. Start "
            "the workers as ranks, with `horovodrun -np N`, and use "
            "de.keras.layers.HvdAllToAllEmbedding or sok.DynamicVariable: ranks share a table."
        )


def _num_workers() -> int:
    """Returns the number of training processes in TF_CONFIG; 0 without a cluster."""
    try:
        cluster = json.loads(os.environ.get("TF_CONFIG") or "{}").get("cluster", {})
        return sum(len(cluster.get(job, ())) for job in ("chief", "master", "worker"))
    except (ValueError, TypeError, AttributeError):
        return 0  # TensorFlow reports what is wrong with it
