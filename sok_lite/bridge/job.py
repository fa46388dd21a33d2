"""The job: one communicator for all tables of this process."""

from sok_lite.backend import get_backend
from sok_lite.bridge import horovod_transport
from sok_lite.comm import (
    Communicator,
    ElasticCommunicator,
    SingleCommunicator,
    TransportKind,
    checked_transport,
    choose_transport,
    make_communicator,
)
from sok_lite.comm.launch import is_alone, launched_ranks


class NotJoinedError(RuntimeError):
    """The ranks are not connected yet."""


class JoinedBeforeError(RuntimeError):
    """Another tool has connected the ranks."""


_alone = SingleCommunicator()
_communicator: Communicator | None = None
_tool: str | None = None
_wanted = "auto"  # the GPU transport that was requested
_transport = ""  # the transport in use, for people


def join(comm_tool: str, gpu_transport: str | None = None) -> None:
    """Connects the ranks, once. Every rank must call it.

    Args:
      comm_tool: "horovod", "mpi" or "single".
      gpu_transport: transport of GPU arrays: "horovod", "host" or "auto"; None:
        SOK_LITE_GPU_TRANSPORT decides. Not used with one process.

    Raises:
      ValueError: unknown tool or transport.
      JoinedBeforeError: another tool has connected the ranks.
      RuntimeError: several ranks were launched and the tool cannot connect them, or the transport
        is not possible.
    """
    global _communicator, _tool, _wanted
    wanted = checked_transport(gpu_transport)
    if _communicator is not None:
        if comm_tool == _tool:
            return
        raise JoinedBeforeError(
            f"The ranks of this process have been connected by {_tool!r} before. "
            f"Received: {comm_tool!r}. Remove this call."
        )
    comm = make_communicator(comm_tool)
    _choose_transport(comm, wanted)
    _communicator, _tool, _wanted = comm, comm_tool, wanted


def _choose_transport(comm: Communicator, wanted: str) -> None:
    global _transport
    comm.gpu_transport, _transport = None, ""
    if comm.size > 1:
        of_horovod = TransportKind(horovod_transport.horovod_unable, horovod_transport.connect)
        kinds = {"horovod": of_horovod}
        backend = get_backend()
        said = choose_transport(comm, backend, wanted, kinds)
        _transport = "" if backend.name == "cpu" else said


def transport() -> str:
    """Returns the transport between GPUs, for people; "" without several GPUs."""
    return _transport


def communicator() -> Communicator:
    """Returns the communicator of `join`; before `join`, that of a single process.

    Raises NotJoinedError if a launcher started several ranks, and `join` was not called.
    """
    if _communicator is not None:
        return _communicator
    if not is_alone():
        raise NotJoinedError(
            f"{launched_ranks()} ranks were launched, and they are not connected yet. Call "
            "sok_lite.init() at the start of the program, on every rank."
        )
    return _alone


def other_ranks() -> Communicator | None:
    """Returns the communicator if other ranks exist or may join; None also before `join`."""
    return None if _communicator is None or _communicator.is_alone else _communicator


def num_ranks() -> int:
    """Returns the number of processes."""
    return communicator().size


def disconnect() -> None:
    """Fails calls of other ranks that wait for this one, before an elastic job reconnects."""
    comm = communicator()
    if isinstance(comm, ElasticCommunicator):
        comm.disconnect()


def reconnect() -> None:
    """Connects the current ranks of an elastic job. Every rank must call it.

    Raises CommunicatorError if a rank has died, or the requested GPU transport is not possible.
    """
    comm = communicator()
    if isinstance(comm, ElasticCommunicator):
        comm.reconnect()
        _choose_transport(comm, _wanted)
