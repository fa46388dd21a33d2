"""Which processes make up the job: one communicator for all tables of this process."""

from sok_lite.backend import get_backend
from sok_lite.bridge.horovod_carrier import HorovodCarrier, horovod_unable
from sok_lite.comm import (
    Communicator,
    Way,
    checked_transport,
    choose_carrier,
    make_communicator,
)

__all__ = [
    "JoinedBeforeError",
    "NotJoinedError",
    "communicator",
    "join",
    "num_ranks",
    "other_ranks",
    "transport",
]


class NotJoinedError(RuntimeError):
    """The ranks have not been connected yet."""


class JoinedBeforeError(RuntimeError):
    """The ranks have been connected by another tool."""


_communicator: Communicator | None = None
_tool: str | None = None
_transport = ""  # what carries arrays of GPUs, for people


def join(comm_tool: str, gpu_transport: str | None = None) -> None:
    """Makes the communicator, once. Every rank must call it.

    Args:
      comm_tool: see `make_communicator`.
      gpu_transport: see `choose_carrier`; None: as SOK_LITE_GPU_TRANSPORT says. One process has no
        use for it.

    Raises:
      ValueError: unknown tool or transport.
      JoinedBeforeError: it was called before with another tool.
      RuntimeError: several ranks were launched and the tool cannot connect them, or the transport
        is not possible.
    """
    global _communicator, _tool, _transport
    wanted = checked_transport(gpu_transport)
    if _communicator is not None:
        if comm_tool == _tool:
            return
        raise JoinedBeforeError(
            f"The ranks of this process have been connected by {_tool!r} before. "
            f"Received: {comm_tool!r}. Remove this call."
        )
    comm = make_communicator(comm_tool)
    if comm.size > 1:
        ways = {"horovod": Way(horovod_unable, HorovodCarrier)}
        backend = get_backend()
        said = choose_carrier(comm, backend, wanted, ways)
        _transport = "" if backend.name == "cpu" else said
    _communicator, _tool = comm, comm_tool


def transport() -> str:
    """Returns by which way arrays travel between GPUs, for people; "" without several GPUs."""
    return _transport


def communicator() -> Communicator:
    """Returns the communicator that `join` made.

    Raises:
      NotJoinedError: `join` was not called.
    """
    if _communicator is None:
        raise NotJoinedError(
            "The ranks of the job are not connected yet. Call sok_lite.init() first."
        )
    return _communicator


def other_ranks() -> Communicator | None:
    """Returns the communicator if there are other ranks; None also before `join`."""
    return _communicator if _communicator is not None and _communicator.size > 1 else None


def num_ranks() -> int:
    """Returns the number of processes."""
    return communicator().size
