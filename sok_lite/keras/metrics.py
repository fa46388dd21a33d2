"""`TableMetrics`: reports table growth each epoch and every few steps, in total and per table."""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.bridge.collectives import allreduce
from sok_lite.bridge.host_call import on_device
from sok_lite.bridge.job import other_ranks
from sok_lite.bridge.keras import held
from sok_lite.engine.agreement import check_equal_on_all_ranks
from sok_lite.engine.dtypes import is_integer
from sok_lite.engine.table import EmbeddingTable
from sok_lite.engine.work_counters import (
    GRADIENTS,
    LOOKUPS,
    SENT_GRADIENTS,
    SENT_KEYS,
    SENT_ROWS,
    UPDATES,
)

_log = logging.getLogger("sok_lite")
# Per table at the end of an epoch, and summed over tables in the logs.
_FACTS = ("keys", "new_keys", "evicted", "bytes")


class TableMetricsPart:
    """A callback that reports how tables grow.

    It adds four totals over all tables to the logs of each epoch, which the progress line,
    `History.history` and other callbacks read: "tables/keys", "tables/new_keys" of the epoch,
    "tables/evicted" so far, and "tables/bytes" of all memory. Numbers per table are in `history`
    and, with `log_dir`, in TensorBoard. All numbers are sums over ranks, and every rank must have
    the callback. Put it before callbacks that read logs.

    Args:
      every: steps between reports within an epoch: per table keys, hit rate, and new and evicted
        keys per step since the last; over all tables "seconds_per_step" of lookups, gradients and
        updates, averaged over ranks, and "sent_bytes_per_step" between ranks. None: once an epoch
        only.
      log_dir: where rank 0 writes each table's numbers for TensorBoard: "epoch_sok/<name>/keys"
        etc. by epoch, and with `every` "sok/<name>/keys" etc. by step, with the keys of the fullest
        rank. None: with `every` the logger "sok_lite" gets them at level INFO.

    Attributes:
      history: "<name>/keys", "<name>/new_keys", "<name>/evicted" and "<name>/bytes" of each table:
        one number per epoch of the last `fit`; the same on all ranks.

    Raises:
      TypeError, ValueError: `every` is no integer above 0. In `fit`, on all ranks: `every` differs
        between ranks.
    """

    _of_every_rank = True

    def __init__(self, every: int | None = None, log_dir: Any = None) -> None:
        super().__init__()
        if every is not None and not is_integer(every):
            raise TypeError(f"`every` must be a number of steps. Received: every={every!r}.")
        if every is not None and every < 1:
            raise ValueError(f"`every` must be at least 1. Received: every={every}.")
        self.history: dict[str, list[float]] = {}
        self._made: dict[str, int] = {}
        self._every, self._log_dir = None if every is None else int(every), log_dir
        self._writer: Any = None
        # Steps so far, steps of finished epochs, and steps at the last report.
        self._steps = self._before = self._told = 0
        self._last: dict[str, dict[str, int]] = {}
        self._work = self._tested = np.zeros(2)
        if every is not None:
            # Set per object: a callback with this method makes Keras synchronize at every step.
            self.on_train_batch_end = self._after_step

    def on_train_begin(self, logs: Any = None) -> None:
        """Records the initial counters."""
        comm = other_ranks()
        if comm is not None:
            check_equal_on_all_ranks(comm, {"every": self._every}, "`every` of TableMetrics")
        self.history = {}
        self._before = self._told = self._steps = 0
        if self._every is not None:
            self._last, self._work = self._apply(_totals_of), _work()
        if self._log_dir is not None and (comm is None or comm.rank == 0):
            self._writer = tf.summary.create_file_writer(str(self._log_dir))

    def on_test_begin(self, logs: Any = None) -> None:
        """Records the work before a validation, whose lookups belong to no step."""
        self._tested = _work()

    def on_test_end(self, logs: Any = None) -> None:
        """Excludes the work of a validation."""
        self._work = self._work + (_work() - self._tested)

    def on_train_end(self, logs: Any = None) -> None:
        """Closes the TensorBoard file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _after_step(self, batch: int, logs: Any = None) -> None:
        """Reports if enough steps have passed; one call may cover several steps."""
        assert self._every is not None
        self._steps = self._before + batch + 1
        since = self._steps - self._told
        if self._steps // self._every > self._told // self._every:
            self._told = self._steps
            self._report(self._steps, since)

    def _report(self, step: int, since: int) -> None:
        now = self._apply(_totals_of)
        told: dict[str, float] = {}
        flat = np.array([list(facts.values()) for facts in now.values()], np.float64)
        last = np.array([list(self._last.get(name, now[name]).values()) for name in now])
        self._last = now
        sums, most = flat - last, flat[:, :1]
        sums[:, :1] = most  # keys are totals, the rest is since the last report
        comm, work = other_ranks(), _work()
        self._work, done = work, work - self._work
        if comm is not None and now:
            done = allreduce(tf.constant(done), "sum", "TableMetrics").numpy()
            sums = allreduce(tf.constant(sums), "sum", "TableMetrics").numpy()
            most = allreduce(tf.constant(most), "max", "TableMetrics").numpy()
        for name, (keys, found, missed, inserted, evicted), (busiest,) in zip(
            now, sums.tolist(), most.tolist(), strict=True
        ):
            facts = {"keys": keys}
            if comm is not None:
                facts["keys_of_busiest_rank"] = busiest
            if found + missed:
                facts["hit_rate"] = found / (found + missed)
            facts["new_keys_per_step"] = inserted / since
            facts["evicted_per_step"] = evicted / since
            told |= {f"{name}/{fact}": value for fact, value in facts.items()}
        if now:
            seconds, num_bytes = done.tolist()
            told["seconds_per_step"] = seconds / since / (1 if comm is None else comm.size)
            if comm is not None:
                told["sent_bytes_per_step"] = num_bytes / since
        self._write(step, "sok", told)
        if self._log_dir is None and (comm is None or comm.rank == 0):
            _log.info("step %d: %s", step, ", ".join(f"{n} {v:,.6g}" for n, v in told.items()))

    def _write(self, step: int, group: str, told: dict[str, float]) -> None:
        """Writes numbers for TensorBoard, on the rank with a writer."""
        if self._writer is None:
            return
        # Keras' TensorBoard callback limits recording to some steps.
        with tf.summary.record_if(True), self._writer.as_default(step):
            for name, value in told.items():
                tf.summary.scalar(f"{group}/{name}", value)

    def _apply(
        self, function: Callable[[EmbeddingTable], dict[str, int]]
    ) -> dict[str, dict[str, int]]:
        """Applies a function to each table of the model; returns results by name."""
        tables = [each.table for each in held.kept_tables(self.model)]  # type: ignore[attr-defined]
        return {table.name: on_device(table.backend, function, table) for table in tables}

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Records the counters at the start of the epoch."""
        self._made = {name: facts["made"] for name, facts in self._apply(_facts_of).items()}

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Adds totals to the logs, and per-table numbers to `history` and TensorBoard."""
        self._before = self._steps
        found = self._apply(_facts_of)
        if not found:
            return
        for name, facts in found.items():
            facts["new_keys"] = facts.pop("made") - self._made.get(name, 0)
        names = sorted(found)
        numbers = np.array([[found[name][fact] for fact in _FACTS] for name in names], np.float64)
        if other_ranks() is not None:
            numbers = allreduce(tf.constant(numbers), "sum").numpy()
        told = {
            f"{name}/{fact}": value
            for name, values in zip(names, numbers.tolist(), strict=True)
            for fact, value in zip(_FACTS, values, strict=True)
        }
        for name, value in told.items():
            self.history.setdefault(name, []).append(value)
        self._write(epoch, "epoch_sok", told)
        if self._writer is not None:
            self._writer.flush()
        if logs is not None:
            totals = numbers.sum(axis=0).tolist()
            logs.update({f"tables/{fact}": v for fact, v in zip(_FACTS, totals, strict=True)})


def _facts_of(table: EmbeddingTable) -> dict[str, int]:
    """Returns the reported facts of a table, and "made": how many keys ever got a row."""
    evicted = 0 if table.keeps_every_key else table.num_evicted
    return {
        "keys": table.size,
        "evicted": evicted,
        "bytes": table.store.used_bytes + table.index_bytes + table.text_bytes,
        "made": table.size + evicted + table.totals()["erased_total"],
    }


def _work() -> np.ndarray:
    """Returns the seconds of calls so far, and the bytes that this rank has sent."""
    calls, sent = (LOOKUPS, GRADIENTS, UPDATES), (SENT_KEYS, SENT_ROWS, SENT_GRADIENTS)
    return np.array([sum(each.seconds for each in calls), sum(each.num_bytes for each in sent)])


def _totals_of(table: EmbeddingTable) -> dict[str, int]:
    totals = table.totals()
    names = ("found_total", "missed_total", "inserted_total", "evicted_total")
    return {"keys": table.size, **{name: totals[name] for name in names}}
