"""`Expire`: removes keys that were not seen recently while a model trains."""

from collections.abc import Sequence
from typing import Any

from sok_lite.bridge import table_ops
from sok_lite.bridge.keras import held
from sok_lite.engine.dtypes import check_integer
from sok_lite.engine.table.remove import check_limits
from sok_lite.keras.checkpoint import is_skipping


class ExpirePart:
    """A callback that removes keys that no recent lookup asked for, as `Table.expire` does.

    Pass exactly one of `num_lookups` and `seconds`; days and the like raise. It runs at the end of
    each epoch, or with `every` after that many batches. It acts on this rank's keys without
    communication; give it to every rank.

    Args:
      num_lookups: removes keys that none of a table's last `num_lookups` lookups asked for.
      seconds: removes keys that no lookup asked for within that time.
      every: batches of an epoch between runs; None: at the end of each epoch. Batches that a
        `Checkpoint` skips do not count; put it after this callback.
      tables: `Table` layers of the model; None: all of them.

    Attributes:
      removed: number of keys removed on this rank so far, by table.
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
        """Resets the batch counter."""
        self._done = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Removes keys if it is time to; one call may cover several batches."""
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
