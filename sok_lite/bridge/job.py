"""Which processes make up the job: one communicator for all tables of this process."""

from sok_lite.comm import Communicator, ElasticCommunicator, make_communicator

__all__ = [
    "JoinedBeforeError",
    "NotJoinedError",
    "communicator",
    "disconnect",
    "join",
    "num_ranks",
    "other_ranks",
    "reconnect",
]


class NotJoinedError(RuntimeError):
    """The ranks have not been connected yet."""


class JoinedBeforeError(RuntimeError):
    """The ranks have been connected by another tool."""


_communicator: Communicator | None = None
_tool: str | None = None


def join(comm_tool: str) -> None:
    """Makes the communicator, once. Every rank must call it.

    Args:
      comm_tool: see `make_communicator`.

    Raises:
      ValueError: unknown tool.
      JoinedBeforeError: it was called before with another tool.
      RuntimeError: several ranks were launched and the tool cannot connect them.
    """
    global _communicator, _tool
    if _communicator is not None:
        if comm_tool == _tool:
            return
        raise JoinedBeforeError(
            f"The ranks of this process have been connected by {_tool!r} before. "
            f"Received: {comm_tool!r}. Remove this call."
        )
    _communicator, _tool = make_communicator(comm_tool), comm_tool


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
    """Returns the communicator if there are other ranks, or may come; None also before `join`."""
    return None if _communicator is None or _communicator.is_alone else _communicator


def num_ranks() -> int:
    """Returns the number of processes."""
    return communicator().size


def disconnect() -> None:
    """Lets ranks of an elastic job fail that wait for this one, which is to be connected anew."""
    comm = communicator()
    if isinstance(comm, ElasticCommunicator):
        comm.disconnect()


def reconnect() -> None:
    """Connects the ranks of an elastic job that there are now. Every rank must call it.

    Raises:
      CommunicatorError: a rank has died meanwhile.
    """
    comm = communicator()
    if isinstance(comm, ElasticCommunicator):
        comm.reconnect()
