"""`TableMetrics`: how tables grow, among the metrics of each epoch."""

from types import new_class
from typing import Any

from sok_lite.bridge import keras_held
from sok_lite.bridge.host_call import on_device
from sok_lite.engine.table import EmbeddingTable


class TableMetricsPart:
    """A callback that puts sizes of tables among the metrics of each epoch, on this rank.

    Of each table "<name>/keys", "<name>/new_keys" in the epoch, "<name>/evicted" in all, and
    "<name>/bytes" of its rows, states and index. Put it before the callbacks that log metrics.
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
        for name, facts in self._facts().items():
            facts["new_keys"] = _made(facts) - self._made.get(name, 0)
            logs.update({f"{name}/{fact}": float(value) for fact, value in facts.items()})

    def _facts(self) -> dict[str, dict[str, int]]:
        tables = keras_held.kept_tables(self.model)  # type: ignore[attr-defined]
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
