"""Which processes make up the job: one communicator for all tables of this process."""

from sok_lite.comm import Communicator, make_communicator

_communicator: Communicator | None = None
_tool: str | None = None


def join(comm_tool: str) -> None:
    """Makes the communicator, once. Every rank must call it.

    Args:
      comm_tool: see `make_communicator`.

    Raises:
      ValueError: unknown tool.
      RuntimeError: it was called before with another tool, or several ranks were launched and the
        tool cannot connect them.
    """
    global _communicator, _tool
    if _communicator is not None:
        if comm_tool == _tool:
            return
        raise RuntimeError(
            "[SOK INFO] Communication tool cannot be set more than once. `sok.init` was called "
            f"before in this process with {_tool!r}. Received: {comm_tool!r}. Remove this call."
        )
    _communicator, _tool = make_communicator(comm_tool), comm_tool


def communicator() -> Communicator:
    """Returns the communicator that `join` made.

    Raises:
      RuntimeError: `join` was not called.
    """
    if _communicator is None:
        raise RuntimeError(
            "[SOK INFO] Communication tool is not set. Did you forget to call sok.init()?"
        )
    return _communicator


def num_ranks() -> int:
    """Returns the number of processes."""
    return communicator().size
