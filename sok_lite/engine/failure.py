"""Failures of one rank in a lookup, its gradient or other work of all ranks: all ranks raise."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TypeVar

import numpy as np

from sok_lite.comm.gpu_transport import LONGEST_REASON_BYTES
from sok_lite.comm.header import LONGEST_CALL
from sok_lite.comm.protocol import Communicator, CommunicatorError

T = TypeVar("T")

# An attribute of an error that `together` has raised on all ranks, with a rank in its message.
_OF_ALL = "_sok_lite_of_all_ranks"

# First word of a message with a reason in place of keys: the tag of a lookup is never negative.
_FAILED = -1

# A failure of another rank is raised as the first of these types that it is an instance of.
_KINDS: tuple[type[Exception], ...] = (
    *(MemoryError, FileExistsError, OSError, TypeError, ValueError, RuntimeError),
)

# The call of the collective that sends keys, or the reason why there are none.
SEND_KEYS = "send_keys"

_ONE_RANK = nullcontext()


def shared_failure(comm: Communicator) -> AbstractContextManager[None]:
    """Returns a context manager in which a failure of this rank fails all ranks in `send_keys`.

    For work before `exchange.send_keys` that may fail on one rank alone, for example at a key that
    does not fit. The other ranks raise a CommunicatorError with the reason in `send_keys` instead
    of waiting, and no table has changed.
    """
    return _ONE_RANK if comm.size == 1 else _reporting(comm, _send_reason)


def failure_known_to_all(comm: Communicator) -> AbstractContextManager[None]:
    """Returns a context manager in which a failure of this rank fails the next call of the others.

    For work between the exchanges of a lookup or of a gradient: the name of the call, which all
    ranks compare, is then this rank's failure.
    """
    return _ONE_RANK if comm.size == 1 else _reporting(comm, _meet_with_reason)


@contextmanager
def _reporting(comm: Communicator, report: Callable[[Communicator, str], None]) -> Iterator[None]:
    """Reports a failure of this rank alone to the others, and raises it."""
    try:
        yield
    except CommunicatorError:
        raise
    except Exception as error:
        # If another rank has died, this error is still the one to raise here.
        with suppress(CommunicatorError):
            report(comm, f"{type(error).__name__}: {error}")
        raise


def together(comm: Communicator, function: Callable[[], T], call: str = "together") -> T:
    """Calls a function on every rank; if it fails on one, all ranks raise that error.

    Every rank must call it. It returns when the function has returned on every rank.

    Args:
      function: its collective calls, if any, fail on all ranks if they fail on one.
      call: its name, in errors if ranks make different calls.

    Raises:
      MemoryError, FileExistsError, OSError, TypeError, ValueError, RuntimeError: with the number of
        the first rank that failed and its reason; with one rank, the error of the function itself.
    """
    if comm.size == 1:
        return function()
    failure: Exception | None = None
    try:
        result = function()
    except CommunicatorError:
        raise
    except Exception as error:
        failure = error
    try:
        gathered = comm.allgatherv(_reason(failure), call=call)
    except CommunicatorError as error:
        if failure is None:
            raise
        told = f"{error} Before it rank {comm.rank} had {type(failure).__name__}: {failure}"
        raise CommunicatorError(told) from failure
    for rank, part in enumerate(gathered.by_rank()):
        if part.size:
            if failure is not None and hasattr(failure, _OF_ALL):
                raise failure
            text = part[1:].tobytes().decode(errors="replace")
            known = _KINDS[part[0]](f"Rank {rank}: {text}")
            setattr(known, _OF_ALL, True)
            raise known from failure
    return result


def _reason(failure: Exception | None) -> np.ndarray:
    """Returns the index of a failure's type in `_KINDS` and its text, as bytes; none: empty."""
    if failure is None:
        return np.empty(0, np.uint8)
    kinds = [i for i, kind in enumerate(_KINDS) if isinstance(failure, kind)]
    name = "" if kinds else f"{type(failure).__name__}: "
    text = f"{name}{failure}".encode(errors="replace")[:LONGEST_REASON_BYTES]
    return np.frombuffer(bytes([*kinds, len(_KINDS) - 1][:1]) + text, np.uint8)


def reason_in(part: np.ndarray) -> str | None:
    """Returns the reason in the message of a rank, (n,) int64, or None if it sent keys."""
    if part[0] != _FAILED:
        return None
    return part[2:].tobytes()[: int(part[1])].decode(errors="replace")


def _send_reason(comm: Communicator, reason: str) -> None:
    """Sends a reason in place of keys to the ranks in `send_keys`."""
    if comm.gpu_transport is not None:
        comm.gpu_transport.refuse(SEND_KEYS, reason)
        return
    text = reason.encode()[:LONGEST_REASON_BYTES]
    words = np.frombuffer(text.ljust(-(-len(text) // 8) * 8), np.int64)
    message = np.concatenate([np.array([_FAILED, len(text)], np.int64), words])
    splits = np.full(comm.size, len(message), np.int32)
    comm.alltoallv(np.tile(message, comm.size), splits, call=SEND_KEYS)


def _meet_with_reason(comm: Communicator, reason: str) -> None:
    """Joins the next call of the other ranks with a reason in place of its name."""
    call = f"no call, after {reason}".encode("ascii", "replace")[:LONGEST_CALL].decode()
    comm.barrier(call)
