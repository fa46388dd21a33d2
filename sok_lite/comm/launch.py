"""Makes the communicator of a process, by launcher, requested tool and installed packages."""

import os
import sys
import warnings

from sok_lite.backend.local_ranks import largest_variable
from sok_lite.comm.elastic import ElasticCommunicator
from sok_lite.comm.ending import end_together
from sok_lite.comm.local import connect_local, is_wanted
from sok_lite.comm.protocol import Communicator, CommunicatorError
from sok_lite.comm.single import SingleCommunicator

TOOLS = ("horovod", "mpi", "single")

# Set by horovodrun, Open MPI, MPICH and its kin, MVAPICH2, and srun.
_SIZE_VARIABLES = (
    "HOROVOD_SIZE",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "SLURM_STEP_NUM_TASKS",
)


# Set by horovodrun for a job whose ranks may come and go.
_ELASTIC_VARIABLE = "HOROVOD_ELASTIC"


def launched_ranks() -> int:
    """Returns how many ranks the launcher started, by its environment variables; 1 if none."""
    return largest_variable(_SIZE_VARIABLES, 1)


def is_alone() -> bool:
    """Returns whether this process is the only rank and can get no others."""
    return launched_ranks() == 1 and os.environ.get(_ELASTIC_VARIABLE) != "1"


def make_communicator(tool: str = "horovod") -> Communicator:
    """Makes the communicator of this process. Every rank must call it with the same tool.

    Ranks that are all on one machine exchange rows through shared memory (`sok_lite.comm.local`);
    the tool brings them together. On several, ranks of one do so with large parts where the tool
    does not itself (`sok_lite.comm.hosts`). SOK_LITE_COMM_LOCAL=0 leaves everything to the tool.

    From then on the other ranks are told when the program of a rank ends, however it ends
    (`sok_lite.comm.ending`).

    In an elastic job of Horovod's it is an `ElasticCommunicator`, also with one rank.

    With one rank, "horovod" and "mpi" need nothing installed and return the single communicator.
    "single" is obeyed even where a launcher started several ranks (a process that a rank starts
    inherits the launcher's variables), with a warning: such ranks share no table.

    Args:
      tool: "horovod", "mpi" or "single".

    Raises:
      ValueError: unknown tool, or SOK_LITE_COMM_LOCAL is neither 0 nor 1.
      CommunicatorError: several ranks were launched and the tool cannot connect them.
    """
    if tool not in TOOLS:
        raise ValueError(
            f"The communication tool must be one of {', '.join(map(repr, TOOLS))}. "
            f"Received: {tool!r}."
        )
    is_wanted()  # what it refuses is refused before ranks are connected, and where there is one
    launched = launched_ranks()
    if tool == "single":
        if launched > 1:
            warnings.warn(
                f"{launched} ranks were launched, but comm_tool='single': each keeps tables of its "
                "own and learns from its own data only.",
                RuntimeWarning,
                stacklevel=2,
            )
        return SingleCommunicator()
    if tool == "horovod" and os.environ.get(_ELASTIC_VARIABLE) == "1":
        elastic = ElasticCommunicator(_connect_elastic)
        end_together(elastic)
        return elastic
    if launched == 1 and not _is_started(tool):
        return SingleCommunicator()
    try:
        comm = _connect(tool)
    except CommunicatorError as error:
        if launched == 1:
            return SingleCommunicator()
        raise CommunicatorError(
            f"{launched} ranks were launched, but comm_tool={tool!r} cannot connect them. {error}"
        ) from error
    if comm.size < launched:
        raise CommunicatorError(
            f"{launched} ranks were launched, but comm_tool={tool!r} sees {comm.size}: {tool} does "
            "not belong to this launcher. Start Horovod programs with `horovodrun`, or with the "
            "mpirun of the MPI it was built with."
        )
    if comm.size == 1:
        return SingleCommunicator()
    comm = connect_local(comm)
    end_together(comm)
    return comm


def _connect(tool: str) -> Communicator:
    if tool == "mpi":
        from sok_lite.comm.mpi import MpiCommunicator

        return MpiCommunicator()
    from sok_lite.comm.horovod import HorovodCommunicator

    return HorovodCommunicator()


def _connect_elastic() -> Communicator:
    comm = _connect("horovod")
    if comm.size > 1:
        return connect_local(comm)
    comm.disconnect()
    return SingleCommunicator()


def _is_started(tool: str) -> bool:
    """Returns whether the program itself runs the tool, whatever launched it."""
    if tool == "mpi":
        mpi = sys.modules.get("mpi4py.MPI")
        return mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized()
    hvd = sys.modules.get("horovod.tensorflow")
    return hvd is not None and bool(hvd.is_initialized())
