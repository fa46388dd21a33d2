"""The end of a rank's program: no other rank waits for it in vain.

 killed             the transport or the launcher notices, and ends the others
 uncaught exception this rank aborts the job, with the exception as its message; an exception about
                    all ranks is printed as one line, because all ranks have it
 anything else      this rank leaves: ranks that are in a collective, or come to one, raise

"Anything else" is `sys.exit` and the end of the program. If all ranks end like that it is a clean
end; the launcher passes the exit statuses on.
"""

import atexit
import os
import re
import sys
import traceback
from pathlib import Path
from types import TracebackType

from sok_lite.comm.protocol import Communicator, CommunicatorError, RanksDifferError
from sok_lite.comm.rows import TRACE_VARIABLE


def end_together(comm: Communicator) -> None:
    """Makes the end of this process, however it comes, known to all ranks of `comm`."""
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
            failures.append(f"{_place_in_program(trace)}{about_ranks}")

    def end() -> None:
        if os.getpid() != process:
            return  # a forked child that ends like a program
        if failures:
            comm.abort(failures[-1])
        comm.leave()

    sys.excepthook = note
    atexit.register(end)


def _about_ranks(error: BaseException) -> str | None:
    """Returns the message of an error about all ranks; None: the error is of this rank alone.

    Every rank would print a traceback of where it noticed; only the line of the program is useful.
    The message may be within an error of TensorFlow, which quotes the error of a graph's step.
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
