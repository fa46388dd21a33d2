"""One step of an optimizer on the rows of several tables, in two halves: prepare, then commit.

A step may have other parts, such as that of dense variables. Its rows are prepared first: errors
in them raise then, before anything has changed anywhere. The other parts follow, and then the
change of the rows, which cannot be rejected any more.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, NamedTuple, Protocol, TypeVar

from sok_lite.backend import Array
from sok_lite.backend.uninterrupted import uninterrupted
from sok_lite.engine.foreign_keys import RankInfo
from sok_lite.engine.table import EmbeddingTable
from sok_lite.engine.table.exclusive import holding, holding_since, last_change
from sok_lite.engine.update_rows import Update

Ready = TypeVar("Ready")


class StepOptions(NamedTuple):
    """The options of a step, beside its tables and gradients.

    Attributes:
      learning_rate: of this step, after any schedule.
      number: of the step, 1 for the first.
      on_nonfinite: "allow" or "error": whether a gradient with a NaN or an infinity raises.
      stochastic_rounding: of float16 and bfloat16 rows, in place of rounding to nearest even. The
        random bits depend on the table's seed and name, key, column and number alone.
      num_nonfinite: (1,) int64, grows by the rows that had a gradient with a NaN or an infinity;
        None: they are not reported.
      rank_info: this rank among several: keys of the others are rejected; None: there are none.
    """

    learning_rate: float
    number: int
    on_nonfinite: str = "allow"
    stochastic_rounding: bool = False
    num_nonfinite: Array | None = None
    rank_info: RankInfo | None = None


class Step(Protocol):
    """A step that is taken once. Either half raises the errors of the step."""

    def prepare(self) -> None:
        """Checks the step: raises its errors, and changes no row. It need not be called."""

    def commit(self, note: Callable[[], None] | None = None) -> None:
        """Takes the step.

        Args:
          note: called with the change of the rows: also where an error follows that says of a step
            that it was taken, such as RefusedError.
        """


class HeldStep(ABC, Generic[Ready]):
    """A step that has the locks of its tables in each half, from the first read to the last write.

    Between the halves it has none: a thread may hold a table that another rank waits for. What was
    prepared is used if no table has changed meanwhile, and is prepared again otherwise.

    Args:
      updates: one per gradient. A table that comes several times is updated once.
      options: of the step.

    Attributes:
      updates, options: the arguments.

    Raises:
      ValueError: `on_nonfinite` is neither "allow" nor "error".
    """

    def __init__(self, updates: Sequence[Update], options: StepOptions) -> None:
        if options.on_nonfinite not in ("allow", "error"):
            raise ValueError(
                f"`on_nonfinite` must be 'allow' or 'error'. Received: {options.on_nonfinite!r}."
            )
        self.updates, self.options = updates, options
        self._prepared: tuple[object, Ready] | None = None

    def prepare(self) -> None:
        """Checks the step: raises its errors, and changes no row."""
        holding(self._tables(), self._prepare)

    def commit(self, note: Callable[[], None] | None = None) -> None:
        """Takes the step.

        Args:
          note: called with the change of the rows.
        """
        tables, prepared = self._tables(), self._prepared
        if prepared is None:
            holding(tables, lambda: self._take(self.get_ready(is_whole=True), note))
        else:
            change, ready = prepared
            holding_since(tables, change, partial(self._take_prepared, ready, note))

    def _prepare(self) -> None:
        ready = self.get_ready(is_whole=False)
        if self.updates:
            self._prepared = last_change(self._tables()), ready

    def _tables(self) -> list[EmbeddingTable]:
        return [update.table for update in self.updates]

    def _take_prepared(
        self, ready: Ready, note: Callable[[], None] | None, is_unchanged: bool
    ) -> None:
        self._take(ready if is_unchanged else self.get_ready(is_whole=True), note)

    def _take(self, ready: Ready, note: Callable[[], None] | None) -> None:
        with uninterrupted():
            self.take(ready)
            if note is not None:
                note()
        self.report(ready)

    @abstractmethod
    def get_ready(self, is_whole: bool) -> Ready:
        """Returns all that the step needs, under the locks of the tables.

        Args:
          is_whole: whether the step is taken at once, so that keys may count as seen already.
        """

    @abstractmethod
    def take(self, ready: Ready) -> None:
        """Changes the rows, under the locks of the tables."""

    @abstractmethod
    def report(self, ready: Ready) -> None:
        """Says which keys were refused, where the program asked for it."""
