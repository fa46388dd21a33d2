"""When to save: on all ranks after the same step, every so often, and before a job is ended.

What one rank alone knows, that it was told to end, that it is time to save or that its files are
not written yet, travels in the headers of the collectives that a step makes anyway. The last
collective of a step has given all ranks the same notes, so after it all decide alike, with no
communication of their own.
"""

import logging
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from time import monotonic
from typing import Any

from sok_lite.bridge import sigterm
from sok_lite.bridge.job import communicator
from sok_lite.comm.header import BUSY, DUE, ENDS, save_by
from sok_lite.comm.protocol import Communicator
from sok_lite.engine.dtypes import check_integer
from sok_lite.engine.failure import together
from sok_lite.engine.work_done import STEPS

_log = logging.getLogger("sok_lite")
# Failures in a row with which training ends.
_MOST_FAILURES = 3
_TIME = re.compile(r"(\d+(?:\.\d+)?) ?(s|min|h)")
_SECONDS = {"s": 1, "min": 60, "h": 3600}
ON_ERROR = ("warn", "raise")


class Saves:
    """Saves of a training, and the end of one that was told to: `Autosave` and Checkpoint have one.

    Every rank must call what is not said to be its own.

    Args:
      functions, every, on_error: as of `Autosave`.

    Attributes:
      ends: whether the job ends after this save.
      is_open: between `open` and `close`.

    Raises:
      TypeError, ValueError: an argument is not as said there.
    """

    def __init__(
        self,
        functions: Sequence[Callable[[int], Any]],
        every: int | str | None,
        on_error: str,
    ) -> None:
        if on_error not in ON_ERROR:
            raise ValueError(
                f"`on_error` must be one of {', '.join(map(repr, ON_ERROR))}. Received: "
                f"on_error={on_error!r}."
            )
        self._functions, self._on_error = functions, on_error
        self._every, self._seconds = checked_every(every)
        self.ends, self.is_open = False, False
        self._steps: int | None = None  # so far
        self._saved_at: int | None = None  # steps of the last save that succeeded or is under way
        self._under_way: Any = None
        self._failures = 0
        self._since = monotonic()
        self._turn = 0  # of the communicator, when it was looked at last
        self._stack = ExitStack()

    @property
    def has_failed(self) -> bool:
        """Whether the last save has failed."""
        return self._failures > 0

    def open(self, steps: int | None = None, is_saved: bool = False) -> None:
        """Begins to look for SIGTERM.

        Args:
          steps: that are done; None: one less than `after` will say.
          is_saved: whether there is a save of them.
        """
        self.close()
        self._stack.enter_context(sigterm.noted())
        self.is_open = True
        self._since, self._steps = monotonic(), steps
        self._saved_at = steps if is_saved else None
        self._turn = communicator().turn

    def close(self) -> None:
        """Looks for SIGTERM no longer. It may be called again, also while an error is raised."""
        self.is_open = False
        communicator().connection.notes.mine = 0
        stack, self._stack = self._stack, ExitStack()
        stack.__exit__(*sys.exc_info())

    def save(self, steps: int) -> None:
        """Saves now."""
        self.finish()
        self._since, self._steps = monotonic(), steps
        self._save(steps)
        self.look()

    def step(self, steps: int, is_save_due: bool = True) -> None:
        """Notes that steps are done, and saves where it is time to. Every rank must call it.

        Args:
          is_save_due: whether `every` counts; otherwise the program saves in a moment anyway.
        """
        before = steps - 1 if self._steps is None else self._steps
        self._steps = steps
        STEPS.reach(steps)
        comm = communicator()
        notes = self._notes(comm)
        if self._under_way is not None and not notes & BUSY:
            self.finish()
        is_due = bool(notes & DUE)
        if self._every is not None:
            is_due = steps // self._every > before // self._every
        if notes & ENDS:
            self._end(comm, steps)
        elif is_due and is_save_due:
            self.save(steps)
        self._tell(comm)

    def look(self) -> None:
        """Ends the job if it was told to, where no step is. Every rank must call it."""
        comm = communicator()
        if self._notes(comm) & ENDS:
            self._end(comm, self._steps)
        self._tell(comm)

    def leave(self, must_be_saved: bool = False) -> None:
        """Waits for what is saved, and ends a job that was told to. Every rank must call it.

        Args:
          must_be_saved: whether a last save that has failed is made once more, or else raised.
        """
        self.finish()
        if must_be_saved and self.has_failed and self._steps is not None:
            self._failures = _MOST_FAILURES - 1  # no later one makes up for it
            self.save(self._steps)
            self.finish()
        self.look()

    def wait(self) -> None:
        """Waits for a save in the background, on all ranks. Every rank must call it.

        Raises:
          OSError, MemoryError: it has failed, and what was saved before is there still.
        """
        begun, self._under_way = self._under_way, None
        if begun is None:
            return
        try:
            begun.wait()
        except BaseException:
            self._saved_at = None
            raise
        self._failures = 0

    def finish(self) -> None:
        """Waits for a save in the background, and counts it."""
        try:
            self.wait()
        except (OSError, MemoryError) as error:
            self._note_failure(error)

    # ---------------------------------------------------------------- what ranks know together

    def _notes(self, comm: Communicator) -> int:
        """Returns what ranks have noted; the same on all. Every rank must call it."""
        if comm.size == 1:
            self._tell(comm)
            return comm.connection.notes.sent()
        if comm.turn == self._turn:  # so it is on all ranks: the step has sent nothing
            comm.barrier("a step of Autosave")
        return comm.connection.notes.of_all

    def _tell(self, comm: Communicator) -> None:
        """Has the next collectives tell what this rank knows now."""
        sigterm.renew()
        mine = 0
        if self._seconds is not None and comm.rank == 0:
            mine |= DUE if monotonic() - self._since >= self._seconds else 0
        if self._under_way is not None and not self._under_way.done:
            mine |= BUSY
        comm.connection.notes.mine = mine
        self._turn = comm.turn

    # ---------------------------------------------------------------- saving

    def _save(self, steps: int) -> None:
        comm, begun = communicator(), None
        try:
            for function in self._functions:
                begun = together(comm, partial(function, steps), save_by("Autosave"))
        except FileExistsError:
            raise
        except (OSError, MemoryError) as error:
            self._note_failure(error)
            return
        self._saved_at = steps
        if hasattr(begun, "wait") and hasattr(begun, "done"):
            self._under_way = begun
        else:
            self._failures = 0

    def _note_failure(self, error: OSError | MemoryError) -> None:
        """Says that a save has failed on all ranks, or raises."""
        self._failures += 1
        if self._on_error == "raise" or self._failures >= _MOST_FAILURES:
            raise error
        if communicator().rank == 0:
            _log.warning(
                "A save has failed, and training goes on without it; failure %s of the %s in a row "
                "that end it. What was saved before is there still. %s: %s",
                self._failures,
                _MOST_FAILURES,
                type(error).__name__,
                error,
            )

    def _end(self, comm: Communicator, steps: int | None) -> None:
        """Saves what is not saved, and ends the program."""
        self.ends = True
        self.finish()
        if steps is not None and self._saved_at != steps:
            self._save(steps)
            self.finish()
        if comm.rank == 0:
            at = self._saved_at
            what = "no save has succeeded" if at is None else f"saved after step {at:,}"
            _log.warning("A rank was told to end (SIGTERM): %s, and all ranks end.", what)
        # None ends while another writes: the launcher would kill that.
        comm.barrier("the end of Autosave")
        sigterm.end()


def checked_every(every: Any) -> tuple[int | None, float | None]:
    """Returns the steps, or the seconds, after which to save.

    Raises:
      TypeError, ValueError: it is neither a number of steps nor a time.
    """
    if every is None:
        return None, None
    if not isinstance(every, str):
        check_integer("every", every, 1)
        return int(every), None
    found = _TIME.fullmatch(every.strip())
    seconds = float(found[1]) * _SECONDS[found[2]] if found else 0.0
    if not seconds:
        raise ValueError(
            '`every` must be a number of steps, or a time such as "90s", "10min" or "1h". '
            f"Received: every={every!r}."
        )
    return None, seconds
