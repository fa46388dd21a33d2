"""A dump that goes on while the tables are in use again.

Each rank copies its part of the tables to the host under their locks, and a thread writes the copy.
So the host needs memory for the whole content of the tables, which is freed as it is written, and
the tables are locked for as long as the copy takes. The thread makes no collective call, which
could interleave with those of the program: the ranks agree in `wait`, which all of them call.
"""

import os
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sok_lite.comm.protocol import Communicator
from sok_lite.engine.failure import together
from sok_lite.engine.files.dump import Begun, begin, end, finish, with_parts, write_parts
from sok_lite.engine.files.item import Named
from sok_lite.engine.files.manifest_facts import Shard
from sok_lite.engine.files.pending import add_pending, remove_pending
from sok_lite.engine.files.shard import CHUNK_BYTES
from sok_lite.engine.files.shard_content import ShardContent, copied


class BackgroundDump:
    """A dump that is being written. `dump_in_background` makes it.

    The process does not end before this rank's files are written. If the system cannot start a
    thread, the files are written at once.
    """

    def __init__(self, begun: Begun, parts: list[ShardContent], chunk_bytes: int) -> None:
        self._begun, self._is_over, self._process = begun, False, os.getpid()
        self._shards: list[Shard] | None = None
        self._failure: BaseException | None = self._interruption()
        # Not a daemon, whoever makes it: the interpreter waits for it.
        name, arguments = f"dump into {begun.folder}", (parts, chunk_bytes)
        self._thread = threading.Thread(None, self._write, name, arguments, daemon=False)

    def _start(self) -> None:
        add_pending(self._begun.comm, self._begun.folder, self)
        try:
            self._thread.start()
        except RuntimeError:  # the system has no further thread: the caller's own writes
            self._thread.run()

    def _write(self, parts: list[ShardContent], chunk_bytes: int) -> None:
        try:
            self._shards, self._failure = write_parts(self._begun, parts, chunk_bytes), None
        except BaseException as error:
            self._failure = error
            # Else what was not written stays in memory as long as somebody has the error.
            parts.clear()
            traceback.clear_frames(error.__traceback__)
        if self._begun.comm.size == 1:
            self._finish()

    @property
    def done(self) -> bool:
        """Whether this rank's part has ended, successfully or not: `wait` then waits for other
        ranks at most."""
        return not self._thread.is_alive()

    @property
    def path(self) -> str:
        """The path of the folder."""
        return self._begun.folder

    def wait(self) -> None:
        """Waits until the dump is over on all ranks. Every rank must call it; it returns together.

        With one rank the checkpoint is there as soon as it is written, with several when all have
        called this. The next dump into the folder, or load from it, does so first.

        Raises:
          OSError: a rank cannot write its files; the old checkpoint is as it was. All ranks raise
            the same, and so does every further call.
          RuntimeError: this process was forked from the one whose dump it is.
        """
        if os.getpid() != self._process:
            raise RuntimeError(
                f"The dump into {self.path} goes on in the process that this one was forked from. "
                "Wait for it there."
            )
        if self._thread.ident is not None:  # it was started
            self._thread.join()
        if not self._is_over:
            self._finish()
        remove_pending(self._begun.comm, self._begun.folder, self)
        if self._failure is not None:
            raise self._failure

    @property
    def rank(self) -> int:
        """The rank that it is on."""
        return self._begun.comm.rank

    def give_up(self) -> None:
        """Ends it without a checkpoint, where the ranks do not agree any more."""
        if not self._is_over:
            self._is_over = True
            self._failure = RuntimeError(
                f"The dump into {self.path} was given up: other ranks of this process dump there."
            )
            end(self._begun)

    def _finish(self) -> None:
        failure, self._failure = self._failure, self._interruption()
        self._is_over = True
        try:
            finish(self._begun, lambda: self._written(failure))
        except BaseException as error:
            self._failure = error
        else:
            self._failure = None
            remove_pending(self._begun.comm, self._begun.folder, self)

    def _interruption(self) -> RuntimeError:
        return RuntimeError(f"The dump into {self.path} was interrupted.")

    def _written(self, failure: BaseException | None) -> list[Shard]:
        if failure is not None:
            raise failure
        assert self._shards is not None
        return self._shards

    def why_unfinished(self) -> str:
        """Returns why the dump is not complete, for a warning when the process ends."""
        if self._failure is not None:
            return f"{type(self._failure).__name__}: {self._failure}"
        return (
            "its files were written, but the ranks have not agreed. The checkpoint before it is "
            "there still. Call wait() on all ranks."
        )


def dump_in_background(
    path: str | os.PathLike[str],
    tables: Sequence[Named],
    comm: Communicator,
    extra: Mapping[str, Any] | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    incremental: bool = False,
    prepare: Callable[[], None] | None = None,
) -> BackgroundDump:
    """Begins a dump of the present content of tables. Every rank must call it; it returns together.

    The arguments are those of `dump.dump`.

    Raises:
      TypeError: an item is no table with keys of its own.
      ValueError: the path is no local one, a name repeats, a rank has other tables, or a key has
        rows on several ranks.
      RuntimeError: another thread has restored a table meanwhile.
      BlockingIOError: another dump writes into the folder; of several ranks an OSError.
      OSError: the folders cannot be made. The old checkpoint is as it was.
      MemoryError: a rank has no memory for a copy of its part. The old checkpoint is as it was.
      Later failures are raised by `wait`.
    """
    begun = begin(path, tables, comm, extra, incremental, prepare)
    try:
        parts = together(comm, lambda: with_parts(begun, chunk_bytes, _copies))
    except BaseException:
        end(begun)
        raise
    made = BackgroundDump(begun, parts, chunk_bytes)
    made._start()  # from here on it ends itself, whatever interrupts the caller
    return made


def _copies(parts: list[ShardContent]) -> list[ShardContent]:
    return [copied(part) for part in parts]
