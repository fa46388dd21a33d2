"""However the program of one rank ends, no other rank waits for it in vain.

 killed             the transport or the launcher sees it, and ends the others
 uncaught exception this rank aborts the job, with the exception as its message; one that is about
                    the ranks together ends in one line, for all ranks have it
 anything else      this rank leaves: ranks that are in a collective, or come to one, raise

The last is what `sys.exit` and the end of the program do. Where all ranks end alike it is a clean
end; the launcher gives the exit statuses on.
"""

import atexit
import os
import re
import sys
import traceback
from pathlib import Path
from types import TracebackType

from sok_lite.comm.protocol import (
    TRACE_VARIABLE,
    Communicator,
    CommunicatorError,
    RanksDifferError,
)


def end_together(comm: Communicator) -> None:
    """Lets the end of this process, however it comes, be known to all ranks of `comm`."""
    show, process = sys.excepthook, os.getpid()
    failures: list[str] = []

    def note(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        about_ranks = _about_ranks(error)
        if about_ranks is None or os.environ.get(TRACE_VARIABLE):
            show(kind, error, trace)
        if about_ranks is None:
            text = str(error).strip().split("\n")[0]
            failures.append(f"an exception has ended its program: {kind.__name__}: {text}")
        else:
            failures.append(f"{_place(trace)}{about_ranks}")

    def end() -> None:
        if os.getpid() != process:
            return  # a forked child that ends like a program
        if failures:
            comm.abort(failures[-1])
        if comm.gpu_transport is not None:
            comm.gpu_transport.leave()
        comm.leave()

    sys.excepthook = note
    atexit.register(end)


def _about_ranks(error: BaseException) -> str | None:
    """Returns what an error says of the ranks together, None if it is of this rank alone.

    A traceback would be one of each rank, of where it found out; only the line of the program that
    it comes to tells more. TensorFlow has the text of an error in a graph's step within its own.
    """
    if isinstance(error, (CommunicatorError, RanksDifferError)):
        return str(error)
    found = re.search(_WITHIN, str(error), re.MULTILINE)
    return None if found is None else found.group(1)


_WITHIN = r"^(?:[\w.]+\.)?(?:CommunicatorError|RanksDifferError): (.+)$"


def _place(trace: TracebackType | None) -> str:
    """Returns "train.py:12: ", the line of the program that led to an error."""
    of_others = (sys.prefix, sys.base_prefix, str(Path(__file__).parent.parent), "<frozen")
    for frame in reversed(traceback.extract_tb(trace)):
        if not frame.filename.startswith(of_others):
            return f"{frame.filename.removeprefix(os.getcwd() + os.sep)}:{frame.lineno}: "
    return ""
