"""Numbers of tables for Prometheus and what else reads OpenMetrics."""

from collections import Counter
from typing import Any

import tensorflow as tf

from sok_lite.bridge.host_call import on_device
from sok_lite.bridge.job import communicator
from sok_lite.bridge.report import tables_in
from sok_lite.reports.openmetrics import (
    CONTENT_TYPE,
    openmetrics,
    samples_of,
    samples_of_process,
)

__all__ = ["CONTENT_TYPE", "prometheus"]


def prometheus(tables: Any) -> str:
    """Returns the numbers of tables on this rank as OpenMetrics text.

    It does not communicate: each rank has its own numbers, with its number as the label "rank". It
    reads the index of each table, not its rows, so it may be called every few seconds, from any
    thread. What calls took, what this rank has sent to others, and its dumps are those of all
    tables of the process. `CONTENT_TYPE` is the media type of the text. No key is in it. Of a table
    in Redis rank 0 tells the number of keys.

    Args:
      tables: as of `sok_lite.report`.

    Raises:
      TypeError: there are no tables in `tables`. ValueError: two of them have one name.
      RuntimeError: in a tf.function, or `sok_lite.init` has not connected the ranks.
    """
    if tf.inside_function():
        raise RuntimeError("Metrics are of the moment. Ask for them outside of the tf.function.")
    rank, found = communicator().rank, [variable.table for variable in tables_in(tables)]
    counts = Counter(table.name for table in found)
    repeated = [name for name, count in counts.items() if count > 1]
    if repeated:
        raise ValueError(
            f"Tables must have different names, by which their metrics are told apart. Received: "
            f"{counts[repeated[0]]} tables of the name {repeated[0]!r}. Rename them."
        )
    shown = [table for table in found if rank == 0 or table.var_type != "remote"]
    of_tables = [(table.name, on_device(table.backend, samples_of, table)) for table in shown]
    return openmetrics(rank, of_tables, samples_of_process())
