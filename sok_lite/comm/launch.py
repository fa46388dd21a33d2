"""How a process joins a job and leaves it: its communicator, and its exit hooks.

The communicator depends on the launcher, the requested tool and the installed packages. When the
program of a rank ends, no other rank waits for it forever:

 killed             the transport or the launcher notices, and ends the others
 uncaught exception this rank aborts the job, with the exception as its message; an exception that
                    all ranks have is printed as one line
 anything else      this rank leaves: ranks that are in a collective, or come to one, raise

"Anything else" is `sys.exit` and the end of the program. If all ranks end like that, the shutdown
is clean, and the launcher passes the exit statuses on.
"""

import atexit
import os
import re
import sys
import traceback
import warnings
from pathlib import Path
from types import TracebackType

from sok_lite.backend.local_ranks import largest_variable
from sok_lite.comm.elastic import ElasticCommunicator
from sok_lite.comm.local import connect_local, is_enabled
from sok_lite.comm.protocol import TRACE_VARIABLE, Communicator, CommunicatorError, RanksDifferError
from sok_lite.comm.single import SingleCommunicator

TOOLS = ("horovod", "mpi", "single")

# Set by horovodrun, Open MPI, MPICH and relatives, MVAPICH2, and srun.
_SIZE_VARIABLES = (
    "HOROVOD_SIZE",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "SLURM_STEP_NUM_TASKS",
)

# Set by horovodrun for a job whose ranks may change.
_ELASTIC_VARIABLE = "HOROVOD_ELASTIC"


def launched_ranks() -> int:
    """Returns the number of ranks in the launcher's environment variables; 1 without them."""
    return largest_variable(_SIZE_VARIABLES, 1)


def is_alone() -> bool:
    """Returns whether this process is the only rank, and stays so."""
    return launched_ranks() == 1 and os.environ.get(_ELASTIC_VARIABLE) != "1"


def make_communicator(tool: str = "horovod") -> Communicator:
    """Makes the communicator of this process. Every rank must call it with the same tool.

    Once the tool has connected them, ranks of one machine exchange rows through shared memory
    (`sok_lite.comm.local`); in a job of several machines large parts only, and only if the tool
    does not do so itself. SOK_LITE_COMM_LOCAL=0 leaves everything to the tool.

    Installs hooks that tell the other ranks when the program of this rank ends, however it ends. An
    elastic Horovod job gets an `ElasticCommunicator`, even with one rank.

    With one rank, "horovod" and "mpi" need nothing installed and return the single communicator.
    "single" is obeyed, with a warning, even if a launcher started several ranks (subprocesses of a
    rank inherit its variables): such ranks share no table.

    ValueError: unknown tool, or SOK_LITE_COMM_LOCAL is neither 0 nor 1. CommunicatorError: several
    ranks were launched and the tool cannot connect them.
    """
    if tool not in TOOLS:
        raise ValueError(
            f"The communication tool must be one of {', '.join(map(repr, TOOLS))}. "
            f"Received: {tool!r}."
        )
    is_enabled()  # rejects bad values before ranks are connected, and with one rank
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
        _install_exit_hooks(elastic)
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
    _install_exit_hooks(comm)
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
    """Returns whether the program has started the tool itself."""
    if tool == "mpi":
        mpi = sys.modules.get("mpi4py.MPI")
        return mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized()
    hvd = sys.modules.get("horovod.tensorflow")
    return hvd is not None and bool(hvd.is_initialized())


def _install_exit_hooks(comm: Communicator) -> None:
    """Tells the ranks of `comm` when this process ends, however it ends."""
    show, process = sys.excepthook, os.getpid()
    failures: list[str] = []

    def record(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        about_ranks = _message_of_all_ranks(error)
        if about_ranks is None or os.environ.get(TRACE_VARIABLE):
            show(kind, error, trace)
        if about_ranks is None:
            text = str(error).strip().split("\n")[0]
            failures.append(f"an exception has ended its program: {kind.__name__}: {text}")
        else:
            failures.append(f"{_place_in_program(trace)}{about_ranks}")

    def end() -> None:
        if os.getpid() != process:
            return  # a forked child inherits this hook
        if failures:
            comm.abort(failures[-1])
        comm.leave()

    sys.excepthook = record
    atexit.register(end)


def _message_of_all_ranks(error: BaseException) -> str | None:
    """Returns the message of an error that all ranks have, or None if it concerns this rank only.

    Tracebacks from every rank would not help; only the program's line does. The message may be
    quoted in an error of TensorFlow.
    """
    if isinstance(error, (CommunicatorError, RanksDifferError)):
        return str(error)
    found = re.search(_WITHIN, str(error), re.MULTILINE)
    return None if found is None else found.group(1)


_WITHIN = r"^(?:[\w.]+\.)?(?:CommunicatorError|RanksDifferError): (.+)$"


def _place_in_program(trace: TracebackType | None) -> str:
    """Returns "train.py:12: ", the line of the program that led to an error."""
    of_others = (sys.prefix, sys.base_prefix, str(Path(__file__).parent.parent), "<frozen")
    for frame in reversed(traceback.extract_tb(trace)):
        if not frame.filename.startswith(of_others):
            return f"{frame.filename.removeprefix(os.getcwd() + os.sep)}:{frame.lineno}: "
    return ""
