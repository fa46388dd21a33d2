"""Unfinished background dumps of this process: the next dump or load of their folder waits."""

import atexit
import os
import sys
import weakref
from typing import TYPE_CHECKING

from sok_lite.comm.protocol import Communicator

if TYPE_CHECKING:
    from sok_lite.engine.files.background import BackgroundDump

# By folder, of a connection of ranks. They make and finish them together, so that they have the
# same ones; ranks that were connected anew have none.
_pending: "weakref.WeakKeyDictionary[Communicator, dict[str, BackgroundDump]]" = (
    weakref.WeakKeyDictionary()
)


def add_pending(comm: Communicator, folder: str, dump: "BackgroundDump") -> None:
    """Registers a dump that has begun."""
    _pending.setdefault(comm.connection, {})[os.path.realpath(folder)] = dump


def remove_pending(comm: Communicator, folder: str, dump: "BackgroundDump") -> None:
    """Removes a dump that has ended; another one may be registered by then."""
    dumps, path = _pending.get(comm.connection, {}), os.path.realpath(folder)
    if dumps.get(path) is dump:
        del dumps[path]


def wait_for_pending(comm: Communicator, folder: str) -> None:
    """Waits for the background dump into a folder, if there is one. Every rank must call it.

    One of ranks that were connected before, which nobody can wait for any more, is given up.

    Raises:
      OSError: that dump has failed; or any other error of it.
    """
    path = os.path.realpath(folder)
    for connection, dumps in list(_pending.items()):
        if connection is not comm.connection and path in dumps and dumps[path].done:
            dumps.pop(path).give_up()
    dump = _pending.get(comm.connection, {}).get(path)
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
