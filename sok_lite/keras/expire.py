"""`Expire`: keys that were not seen lately go while a model is trained."""

from collections.abc import Sequence
from typing import Any

from sok_lite.bridge import table_ops
from sok_lite.bridge.keras import held
from sok_lite.engine.dtypes import check_integer
from sok_lite.engine.table.remove import check_limits
from sok_lite.keras.checkpoint import is_skipping


class ExpirePart:
    """A callback that removes the keys that no lookup asked for lately, as `Table.expire` does.

    It does so at the end of each epoch, and with `every` after so many batches instead. It acts on
    the keys of this rank and needs no other; give it to every rank.

    Args:
      num_lookups: removes those that none of the last `num_lookups` lookups of a table asked for.
      seconds: removes those that no lookup asked for within that time.
      every: batches of an epoch after which to do so; None: at the end of each epoch. Batches that
        a `Checkpoint` leaves out do not count; put it after this callback.
      tables: layers `Table` of the model; None: all tables of the model.
      others: there are none; days and the like raise.

    Attributes:
      removed: by table, how many keys were removed on this rank so far.

    Raises:
      TypeError, ValueError: not exactly one of `num_lookups` and `seconds` is passed, or an
        argument is not as said here.
    """

    model: Any

    def __init__(
        self,
        *,
        num_lookups: int | None = None,
        seconds: float | None = None,
        every: int | None = None,
        tables: Any = None,
        **others: Any,
    ) -> None:
        super().__init__()
        check_limits(num_lookups, seconds, others)
        if every is not None:
            check_integer("every", every, 1)
        self.removed: dict[str, int] = {}
        self._num_lookups, self._seconds = num_lookups, seconds
        self._every, self._done = every, 0  # batches of the epoch
        listed = tables if tables is None or isinstance(tables, Sequence) else [tables]
        self._tables = None if listed is None else [table.variable for table in listed]

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Counts batches anew."""
        self._done = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Removes keys where it is time to; a call may be of several batches."""
        before, self._done = self._done, batch + 1
        if self._every is None or is_skipping(self.model):
            return
        if self._done // self._every > before // self._every:
            self._expire()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Removes keys."""
        if self._every is None:
            self._expire()

    def _expire(self) -> None:
        tables = held.kept_tables(self.model) if self._tables is None else self._tables
        for variable in tables:
            name = variable.table.name
            removed = table_ops.expire(
                variable, num_lookups=self._num_lookups, seconds=self._seconds
            )
            self.removed[name] = self.removed.get(name, 0) + int(removed)
