"""`Autosave`: saves in a custom training loop."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from sok_lite.bridge.job import communicator
from sok_lite.bridge.saves import Saves
from sok_lite.engine.agreement import check_equal_on_all_ranks
from sok_lite.engine.dtypes import is_integer


class Autosave:
    """Saves in a custom training loop, at intervals and when the job is terminated.

    Use it as a context around the loop, which calls `after` after each step. All ranks save after
    the same step, whichever of them has the reason:

    * `every`: a number of steps, or a time by the clock of rank 0.
    * SIGTERM on any rank, as when a machine is preempted: all ranks save, then exit with status
      143. A second SIGTERM has no effect. The program's own handler is also called. Outside the
      main thread SIGTERM is not handled.

    A rank tells the others with the messages of its steps, so they save after the step in which
    they learn of it, usually the next. A step without messages costs one more; one rank sends none.

    Every rank must make it with equal arguments, enter and leave the context, and call `after`
    equally often.

    Args:
      save: called with the number of steps on every rank. Or several functions, each called when
        the previous one is done on all ranks, such as dense weights on rank 0, then
        `sok_lite.dump`. A failure on one rank fails on all. A function may return the result of
        `sok_lite.dump(background=True)`: that save counts once all ranks have written, at the end
        of a step.
      every: steps between saves, or a time: "90s", "10min", "1h". None: on SIGTERM only.
      on_error: what a save does that runs out of disk or memory (OSError, MemoryError). "warn": the
        logger "sok_lite" reports it and training continues; the third failure in a row raises.
        "raise": the first raises. FileExistsError is always raised.

    Raises:
      TypeError, ValueError: an invalid argument.

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
        """Whether the job ends after this save; a background save has no advantage then."""
        return self._saves.ends

    def __enter__(self) -> "Autosave":
        """Begins. Every rank must call it. RanksDifferError: ranks have different arguments."""
        check_equal_on_all_ranks(communicator(), self._arguments, "An Autosave")
        self._saves.open()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Waits for a background save, and terminates a job that received SIGTERM."""
        try:
            if kind is None:
                self._saves.leave()
        finally:
            self._saves.close()

    def after(self, steps: int) -> None:
        """Saves if it is time to; call it after each step. Every rank must call it.

        Args:
          steps: finished steps over all runs of the program; it must rise between calls.

        Raises:
          OSError, MemoryError: a save failed; see `on_error`.
          RuntimeError: in a tf.function.
          SystemExit: with 143, after the save of a terminated job.
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
        """Waits for a background save, on all ranks. Every rank must call it.

        Raises:
          OSError, MemoryError: it failed; the previous save is still there.
        """
        self._saves.wait()
