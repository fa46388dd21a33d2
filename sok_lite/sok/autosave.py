"""`Autosave`: saves in a training loop of the program's own."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from sok_lite.bridge.job import communicator
from sok_lite.bridge.saves import Saves
from sok_lite.engine.agreement import check_equal_on_all_ranks
from sok_lite.engine.dtypes import is_integer


class Autosave:
    """Saves in a training loop of the program's own: every so often, and when a job is ended.

    It is a `with` block around the loop, which calls `after` behind each step. All ranks save after
    the same step, whoever of them has the reason:

    * `every` so many steps, or so much time, by the clock of rank 0.
    * SIGTERM on any rank, as where a machine is taken away: all ranks save and then end with exit
      status 143. A second SIGTERM changes nothing. A handler that the program has for it is called
      as well. In another thread than the main one SIGTERM is as it was.

    A rank tells the others by what its steps send anyway, so they save after the step in which they
    learn of it, mostly the next one. A step that sends nothing costs a message for it. With one
    rank nothing is sent.

    Every rank must make it with equal arguments, enter and leave the block, and call `after` as
    often.

    Args:
      save: called on every rank with the number of steps, to save. It may be several functions,
        each called when the one before is through on all ranks, as that of dense weights on rank 0
        and then `sok_lite.dump`. What one does that is not by all ranks may fail on one rank alone:
        the failure is that of all. It may return what `sok_lite.dump(background=True)` does: that
        save counts as soon as all ranks have written their part, at the end of a step.
      every: steps after which to save, or a time: "90s", "10min", "1h". None: for SIGTERM alone.
      on_error: of a save that has failed for want of disk or memory (OSError, MemoryError). "warn":
        the logger "sok_lite" says so, and training goes on; the third failure in a row is raised.
        "raise": the first one is. FileExistsError is raised in any case.

    Raises:
      TypeError, ValueError: an argument is not as said here.

    Examples:
      >>> saved = []
      >>> with sok.Autosave(saved.append, every=2) as saves:
      ...     for steps in range(1, 6):
      ...         saves.after(steps)
      >>> saved
      [2, 4]
    """

    def __init__(
        self,
        save: Callable[[int], Any] | Sequence[Callable[[int], Any]],
        every: int | str | None = None,
        *,
        on_error: str = "warn",
    ) -> None:
        given: Any = save
        functions = list(given) if isinstance(given, (list, tuple)) else [given]
        if not functions or not all(map(callable, functions)):
            raise TypeError(
                f"`save` must be a function of the number of steps, or several. Received: {save!r}."
            )
        self._saves = Saves(functions, every, on_error)
        self._arguments = {"every": every, "on_error": on_error, "save": len(functions)}

    @property
    def ends(self) -> bool:
        """Whether the job ends after this save. One in the background gains nothing then."""
        return self._saves.ends

    def __enter__(self) -> "Autosave":
        """Begins. Every rank must call it.

        Raises:
          RanksDifferError: ranks have other arguments.
        """
        check_equal_on_all_ranks(communicator(), self._arguments, "An Autosave")
        self._saves.open()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Waits for a save in the background, and ends a job that was told to."""
        try:
            if kind is None:
                self._saves.leave()
        finally:
            self._saves.close()

    def after(self, steps: int) -> None:
        """Saves where it is time to; call it after each step. Every rank must call it.

        Args:
          steps: that are done, over all runs of the program; it rises from call to call.

        Raises:
          OSError, MemoryError: a save has failed; see `on_error`.
          RuntimeError: in a tf.function.
          SystemExit: with 143, after the save of a job that was told to end.
        """
        if tf.inside_function():
            raise RuntimeError("Call Autosave.after() outside of the tf.function, after each step.")
        if not is_integer(steps):
            raise TypeError(f"`steps` must be an integer. Received: steps={steps!r}.")
        self._saves.step(int(steps))

    def save(self, steps: int) -> None:
        """Saves now, as at the end of an epoch. Every rank must call it; see `after`."""
        self._saves.save(steps)

    def wait(self) -> None:
        """Waits for a save in the background, on all ranks. Every rank must call it.

        Raises:
          OSError, MemoryError: it has failed, and what was saved before is there still.
        """
        self._saves.wait()
