"""When to save: after the same step on all ranks, at intervals, and before the job ends.

Facts that only one rank knows (SIGTERM, a save due, files still being written) are sent in the
headers of the step's collectives. After a step's last collective all ranks have the same notes, so
all decide alike without further communication.
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
from sok_lite.engine.work_counters import STEPS

_log = logging.getLogger("sok_lite")
# Consecutive failures after which training ends.
_MOST_FAILURES = 3
_TIME = re.compile(r"(\d+(?:\.\d+)?) ?(s|min|h)")
_SECONDS = {"s": 1, "min": 60, "h": 3600}
ON_ERROR = ("warn", "raise")


class Saves:
    """Schedules saves of a training run and ends it on SIGTERM; arguments as in `Autosave`.

    Every rank must call its methods. `ends`: the job ends after this save; `is_open`: between
    `open` and `close`.
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
        self._saved_at: int | None = None  # steps of the last save that succeeded or is in progress
        self._under_way: Any = None
        self._failures = 0
        self._since = monotonic()
        self._turn = 0  # of the communicator, when last checked
        self._stack = ExitStack()

    @property
    def has_failed(self) -> bool:
        """Whether the last save has failed."""
        return self._failures > 0

    def open(self, steps: int | None = None, is_saved: bool = False) -> None:
        """Starts to listen for SIGTERM.

        `steps` are done, and saved if `is_saved`; None: one less than the next `step` reports.
        """
        self.close()
        self._stack.enter_context(sigterm.noted())
        self.is_open = True
        self._since, self._steps = monotonic(), steps
        self._saved_at = steps if is_saved else None
        self._turn = communicator().turn

    def close(self) -> None:
        """Stops listening for SIGTERM. May be called again, also while an error is raised."""
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
        """Counts steps, and saves if due; without `is_save_due` the program saves right after."""
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
        """Ends the job if SIGTERM came, outside of a step."""
        comm = communicator()
        if self._notes(comm) & ENDS:
            self._end(comm, self._steps)
        self._tell(comm)

    def leave(self, must_be_saved: bool = False) -> None:
        """Waits for a background save, and ends the job if SIGTERM came.

        `must_be_saved`: repeat a failed last save, and raise if it fails again.
        """
        self.finish()
        if must_be_saved and self.has_failed and self._steps is not None:
            self._failures = _MOST_FAILURES - 1  # no later save can make up for it
            self.save(self._steps)
            self.finish()
        self.look()

    def wait(self) -> None:
        """Waits for a background save on all ranks; raises OSError or MemoryError if it failed."""
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
        """Waits for a background save, and counts a failure."""
        try:
            self.wait()
        except (OSError, MemoryError) as error:
            self._note_failure(error)

    # ---------------------------------------------------------------- notes of all ranks

    def _notes(self, comm: Communicator) -> int:
        """Returns the notes of all ranks, equal on all."""
        if comm.size == 1:
            self._tell(comm)
            return comm.connection.notes.sent()
        if comm.turn == self._turn:  # equal on all ranks: the step has sent nothing
            comm.barrier("a step of Autosave")
        return comm.connection.notes.of_all

    def _tell(self, comm: Communicator) -> None:
        """Sets this rank's notes for the next collectives."""
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
        """Logs a failure of all ranks, or raises it."""
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
        # No rank exits while another writes: the launcher would kill that one.
        comm.barrier("the end of Autosave")
        sigterm.end()


def checked_every(every: Any) -> tuple[int | None, float | None]:
    """Returns the steps, or the seconds, between saves; raises TypeError or ValueError."""
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
