"""The ranks on this machine, from the launcher's environment variables."""

import os
from collections.abc import Sequence

# horovodrun with Gloo, Open MPI, MPICH and relatives, MVAPICH2, Slurm.
_RANK = (
    "HOROVOD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "SLURM_LOCALID",
)
_SIZE = (
    "HOROVOD_LOCAL_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "MV2_COMM_WORLD_LOCAL_SIZE",
)


def largest_variable(names: Sequence[str], least: int) -> int:
    """Returns the largest number in these environment variables, at least `least`."""
    values = [os.environ.get(name, "").strip() for name in names]
    return max([least, *(int(value) for value in values if value.isdigit())])


def local_rank() -> int:
    """Returns the number of this process on this machine; 0 without a launcher."""
    return largest_variable(_RANK, 0)


def local_size() -> int:
    """Returns the number of the job's processes on this machine; 1 without a launcher."""
    return largest_variable(_SIZE, 1)
