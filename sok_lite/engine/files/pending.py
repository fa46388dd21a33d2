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

    Raises:
      OSError: that dump has failed; or any other error of it.
    """
    dump = _pending.get(comm.connection, {}).get(os.path.realpath(folder))
    if dump is not None:
        dump.wait()


def give_up_others(comm: Communicator, folder: str) -> None:
    """Gives up a dump into a folder that this rank has written when it was connected before.

    The ranks of then cannot agree any more, and it would keep the folder locked.
    """
    path = os.path.realpath(folder)
    for connection, dumps in list(_pending.items()):
        dump = None if connection is comm.connection else dumps.get(path)
        if dump is not None and dump.done and dump.rank == comm.rank:  # ranks may be threads
            del dumps[path]
            dump.give_up()


def _at_exit() -> None:
    for dumps in list(_pending.values()):
        for folder, dump in dumps.items():
            text = f"The background dump into {folder} was not finished: {dump.why_unfinished()}"
            print(text, file=sys.stderr, flush=True)


atexit.register(_at_exit)
# A forked child has no thread that writes.
os.register_at_fork(after_in_child=_pending.clear)
