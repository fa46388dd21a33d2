"""Which ranks share this machine, by the launcher's environment variables."""

import os

# horovodrun with Gloo, Open MPI, MPICH and its kin, Slurm.
_RANK = (
    "HOROVOD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "SLURM_LOCALID",
)
_SIZE = ("HOROVOD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


def _largest(names: tuple[str, ...], least: int) -> int:
    values = [os.environ.get(name, "") for name in names]
    return max([least, *(int(value) for value in values if value.isdigit())])


def local_rank() -> int:
    """Returns the number of this process among those of this machine; 0 without a launcher."""
    return _largest(_RANK, 0)


def local_size() -> int:
    """Returns how many processes of the job run on this machine; 1 without a launcher."""
    return _largest(_SIZE, 1)
