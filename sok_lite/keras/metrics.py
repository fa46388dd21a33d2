"""`TableMetrics`: how tables grow, among the metrics of each epoch."""

from types import new_class
from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.bridge.collectives import allreduce
from sok_lite.bridge.host_call import on_device
from sok_lite.bridge.job import other_ranks
from sok_lite.bridge.keras import held
from sok_lite.engine.table import EmbeddingTable


class TableMetricsPart:
    """A callback that puts sizes of tables among the metrics of each epoch.

    Of each table "<name>/keys", "<name>/new_keys" in the epoch, "<name>/evicted" in all, and
    "<name>/bytes" of its rows, states and index: of all ranks together, and every rank must have
    it. Put it before the callbacks that log metrics.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[str, int] = {}

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Notes the sizes to begin with."""
        self._made = {name: _made(facts) for name, facts in self._facts().items()}

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Adds the metrics."""
        if logs is None:
            return
        found: dict[str, float] = {}
        for name, facts in self._facts().items():
            facts["new_keys"] = _made(facts) - self._made.get(name, 0)
            found |= {f"{name}/{fact}": float(value) for fact, value in facts.items()}
        if found and other_ranks() is not None:
            names = sorted(found)
            numbers = np.array([found[name] for name in names])
            of_all = allreduce(tf.constant(numbers), "sum").numpy().tolist()
            found = dict(zip(names, of_all, strict=True))
        logs.update(found)

    def _facts(self) -> dict[str, dict[str, int]]:
        tables = held.kept_tables(self.model)  # type: ignore[attr-defined]
        return {
            each.table.name: on_device(each.table.backend, _facts_of, each.table) for each in tables
        }


def _made(facts: dict[str, int]) -> int:
    """Returns how many keys a table has got so far."""
    return facts["keys"] + facts["evicted"]


def _facts_of(table: EmbeddingTable) -> dict[str, int]:
    return {
        "keys": table.size,
        "evicted": 0 if table.keeps_every_key else table.num_evicted,
        "bytes": table.store.used_bytes + table.index_bytes,
    }


def metrics_class(package: Any) -> Any:
    """Returns `TableMetricsPart` as a callback of a Keras."""

    def fill(namespace: dict[str, Any]) -> None:
        namespace |= {"__module__": __name__, "__doc__": TableMetricsPart.__doc__}

    return new_class("TableMetrics", (TableMetricsPart, package.callbacks.Callback), {}, fill)
