"""Statistics of a process that serves checkpoints by `open_readonly`, as OpenMetrics text."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from sok_lite.engine.files.readonly import ReadonlyTables
from sok_lite.engine.work_done import BEGAN
from sok_lite.reports.openmetrics import START, Family, Sample, checked_labels, openmetrics

_KEYS = Family("sok_served_keys", "gauge", "", "Keys with a row in the checkpoint that is open.")
_AGE = Family(
    "sok_served_age_seconds",
    "gauge",
    "seconds",
    "Time since the checkpoint that is open was published.",
)


def served_in(tables: Any) -> list[ReadonlyTables]:
    """Returns the checkpoints in an argument of `sok_lite.metrics`; [] for live tables.

    TypeError: both are mixed.
    """
    items = [tables] if isinstance(tables, ReadonlyTables) else tables
    if not isinstance(items, (list, tuple)):
        return []
    served = [item for item in items if isinstance(item, ReadonlyTables)]
    if served and len(served) < len(items):
        raise TypeError(
            "`tables` must be live tables, or what open_readonly gave. Received: both. Ask for "
            "their metrics one by one."
        )
    return served


def prometheus_of_served(
    served: Sequence[ReadonlyTables], labels: Mapping[str, str] | None = None
) -> str:
    """Returns the numbers of open checkpoints; raises as `sok_lite.metrics.prometheus`."""
    more = checked_labels(labels)
    counts = Counter(name for tables in served for name in tables)
    repeated = [name for name, count in counts.items() if count > 1]
    if repeated:
        raise ValueError(
            "Tables must have different names, by which their metrics are told apart. Received: "
            f"{counts[repeated[0]]} checkpoints with a table {repeated[0]!r}. Ask for their "
            "metrics one by one, with other `labels`."
        )
    of_tables = [
        (name, [Sample(_KEYS, len(table), {}), Sample(_AGE, tables.age, {})])
        for tables in served
        for name, table in tables.items()
    ]
    return openmetrics(0, of_tables, [Sample(START, BEGAN, {})], more)
