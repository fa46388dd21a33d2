"""Dumps of this process that are not finished: what comes next in their folder waits for them."""

import atexit
import os
import sys
import weakref
from typing import Protocol

from sok_lite.comm.protocol import Communicator


class Pending(Protocol):
    """A dump that goes on in the background."""

    def wait(self) -> None:
        """Waits until it is finished, on all ranks."""

    def why_unfinished(self) -> str:
        """Says what it lacks, where the process ends."""


# By folder, of a connection of ranks. They make and finish them together, so that they have the
# same ones; ranks that were connected anew have none.
_pending: "weakref.WeakKeyDictionary[Communicator, dict[str, Pending]]" = (
    weakref.WeakKeyDictionary()
)


def add_pending(comm: Communicator, folder: str, dump: Pending) -> None:
    """Notes that a dump is under way."""
    _pending.setdefault(comm.connection, {})[os.path.realpath(folder)] = dump


def remove_pending(comm: Communicator, folder: str, dump: Pending) -> None:
    """Notes that it is over; there may be another one by now."""
    dumps, path = _pending.get(comm.connection, {}), os.path.realpath(folder)
    if dumps.get(path) is dump:
        del dumps[path]


def wait_for_pending(comm: Communicator, folder: str) -> None:
    """Waits for a dump into a folder if one is under way. Every rank must call it.

    Raises:
      What that dump has failed with.
    """
    dump = _pending.get(comm.connection, {}).get(os.path.realpath(folder))
    if dump is not None:
        dump.wait()


def _at_exit() -> None:
    for dumps in list(_pending.values()):
        for folder, dump in dumps.items():
            text = f"The background dump into {folder} was not finished: {dump.why_unfinished()}"
            print(text, file=sys.stderr, flush=True)


atexit.register(_at_exit)
# A forked child has no thread that writes.
os.register_at_fork(after_in_child=_pending.clear)
