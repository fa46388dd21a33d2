"""`report`: tables of all ranks; `prometheus`, `serve`: metrics of this rank."""

import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from http.server import ThreadingHTTPServer
from itertools import chain
from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.bridge.host_call import on_device
from sok_lite.bridge.job import communicator
from sok_lite.bridge.keras import held
from sok_lite.bridge.variable import TableVariable
from sok_lite.comm import Communicator
from sok_lite.engine.agreement import check_equal_on_all_ranks
from sok_lite.engine.failure import together
from sok_lite.reports.openmetrics import (
    checked_labels,
    openmetrics,
    samples_of,
    samples_of_process,
)
from sok_lite.reports.report import Report, TableReport
from sok_lite.reports.server import serve_text
from sok_lite.reports.tables import report_of

# Must be equal on all ranks, so that their numbers can be added.
_COMMON = ("name", "dim", "dtype", "key_type", "var_type")


def report(tables: Any) -> Report:
    """Reports the content of tables and what happened to their keys. Every rank must call it.

    It changes nothing. It reads every row, a few megabytes at a time; meanwhile lookups of other
    threads wait. Print it, or end a notebook cell with it; `as_dict()` and `to_json()` return the
    numbers. It contains no keys.

    Args:
      tables: a variable of a table, a Keras layer or model with tables, or a list, tuple or dict of
        these. A table in Redis reports only its size.

    Returns:
      A Report of all ranks together, with keys and bytes per rank; equal on every rank.

    Raises:
      TypeError: there are no tables in `tables`. ValueError: it differs between ranks. All ranks
        raise the same error, before any has sent data.
      RuntimeError: in a tf.function, or `sok_lite.init` has not connected the ranks.
    """
    if tf.inside_function():
        raise RuntimeError("A report is of the moment. Make it outside of the tf.function.")
    comm = communicator()
    mine = together(comm, lambda: list(map(_report_of_rank, tables_in(tables))))
    what = [{name: getattr(table, name) for name in _COMMON} for table in mine]
    check_equal_on_all_ranks(comm, {"tables": what}, "What a report is of")
    by_rank = _gather_reports(comm, mine)
    merged = [TableReport.sum_of(parts) for parts in zip(*by_rank, strict=True)]
    return Report(tuple(merged), comm.size, time.time())


def tables_in(value: Any) -> list[TableVariable]:
    """Returns the variables of the tables in an argument, each table once.

    Raises TypeError without tables, and for static ones.
    """
    found: dict[int, TableVariable] = {}
    # A layer or model yields its own tables last.
    tables_of_each = (list(held.tables_in(item))[::-1] for item in _items(value))
    for _, variable in chain.from_iterable(tables_of_each):
        if not isinstance(variable, TableVariable):
            raise TypeError(
                "Expected tables that know their rows by key. Received: "
                f"{variable.name!r}, a static variable, whose rows are all there from the start. "
                "Leave it out."
            )
        found.setdefault(id(variable.table), variable)
    if not found:
        raise TypeError(
            "Expected tables: a variable such as sok_lite.DynamicVariable, a layer or model with "
            f"tables, or a list of those. Received: {type(value).__name__} without a table."
        )
    return list(found.values())


def _items(value: Any) -> Iterator[Any]:
    """Yields the items of nested lists and dicts, in order."""
    if isinstance(value, Mapping):  # `tables` of an Embeddings layer is not a dict
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _items(item)
    else:
        yield value


def _report_of_rank(variable: TableVariable) -> TableReport:
    return on_device(variable.table.backend, report_of, variable.table)


def _gather_reports(comm: Communicator, mine: Sequence[TableReport]) -> list[list[TableReport]]:
    """Returns the reports of each rank. Every rank must call it."""
    if comm.size == 1:
        return [list(mine)]
    text = json.dumps([table.as_dict() for table in mine]).encode()
    gathered = comm.allgatherv(np.frombuffer(text, np.uint8), call="report")
    parts = (json.loads(part.tobytes()) for part in gathered.by_rank())
    return [[TableReport.of_dict(table) for table in tables] for tables in parts]


def prometheus(tables: Any, labels: Mapping[str, str] | None = None) -> str:
    """Implements `sok_lite.metrics.prometheus` for live tables."""
    if tf.inside_function():
        raise RuntimeError("Metrics are of the moment. Ask for them outside of the tf.function.")
    more = checked_labels(labels)
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
    return openmetrics(rank, of_tables, samples_of_process(), more)


def serve(
    tables: Any, port: int = 9400, host: str = "", labels: Mapping[str, str] | None = None
) -> ThreadingHTTPServer:
    """Implements `sok_lite.metrics.serve` for live tables."""
    text = partial(prometheus, tables, labels)
    text()  # raises errors of the arguments here
    comm = communicator()
    first = min(port + comm.local_rank, 65_535) if port else 0
    return serve_text(text, host, first, f"Rank {comm.rank}")
