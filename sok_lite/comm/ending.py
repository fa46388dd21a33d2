"""However the program of one rank ends, no other rank waits for it in vain.

 killed             the transport or the launcher sees it, and ends the others
 uncaught exception this rank aborts the job, with the exception as its message
 anything else      this rank leaves: ranks that are in a collective, or come to one, raise

The last is what `sys.exit` and the end of the program do. Where all ranks end alike it is a clean
end; the launcher gives the exit statuses on.
"""

import atexit
import os
import sys
from types import TracebackType

from sok_lite.comm.protocol import Communicator


def end_together(comm: Communicator) -> None:
    """Lets the end of this process, however it comes, be known to all ranks of `comm`."""
    show, process = sys.excepthook, os.getpid()
    failures: list[str] = []

    def note(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        failures.append(f"{kind.__name__}: {error}")
        show(kind, error, trace)

    def end() -> None:
        if os.getpid() != process:
            return  # a forked child that ends like a program
        if failures:
            comm.abort(f"an exception has ended its program: {failures[-1]}")
        if comm.carrier is not None:
            comm.carrier.leave()
        comm.leave()

    sys.excepthook = note
    atexit.register(end)
