"""The ranks of the job, connected where a program of TFRA has called no more than `hvd.init()`."""

import json
import os
import re
import sys
from collections.abc import Iterable

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


def are_several() -> bool:
    """Whether there are several ranks that are connected, or that Horovod can connect."""
    if job.other_ranks() is not None:
        return True
    hvd = sys.modules.get("horovod.tensorflow")
    return hvd is not None and bool(hvd.is_initialized()) and hvd.size() > 1


def refuse_parameter_servers(name: str, devices: Iterable[str]) -> None:
    """Raises where the shards of a table were to be shared by workers of TensorFlow's own cluster.

    Each worker would have a table of its own, and train it on its part of the data alone.

    Args:
      name: of the table.
      devices: of its shards; those of a job have it in their name, as in "/job:ps/task:0".

    Raises:
      NotImplementedError: they name a job, and by TF_CONFIG there are several workers.
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
    """Returns how many processes of TensorFlow's cluster train, by TF_CONFIG; 0: it has none."""
    try:
        cluster = json.loads(os.environ.get("TF_CONFIG") or "{}").get("cluster", {})
        return sum(len(cluster.get(job, ())) for job in ("chief", "master", "worker"))
    except (ValueError, TypeError, AttributeError):
        return 0  # TensorFlow says what is wrong with it
