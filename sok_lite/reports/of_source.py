"""The report of a table in a file: what `Source` reads, in pieces."""

from typing import Any

import numpy as np

from sok_lite.backend.publish import publish
from sok_lite.engine.dtypes import row_dtype
from sok_lite.engine.files.source import Source, columns_of
from sok_lite.engine.table.clock import Clock, Spans
from sok_lite.reports.histogram import CountingAges, CountingNorms, Histogram
from sok_lite.reports.of_table import squares_of
from sok_lite.reports.report import TableReport

# What a report reads; how many bytes the others have is known without.
READ_COLUMNS = ("values", "stamps")
_PIECE_BYTES = 16 << 20


def report_of_source(source: Source, keys_of_ranks: tuple[int, ...]) -> TableReport:
    """Returns the report of a table in a file. It reads each of its rows once.

    Args:
      keys_of_ranks: of each rank that wrote it; (): nobody knows.

    Raises:
      OSError, ValueError: it cannot be read, or is corrupt.
    """
    columns = {column.name: source.num_keys * column.row_bytes for column in columns_of(source)}
    key_bytes = sum(column.row_bytes for column in columns_of(source))
    ranks = keys_of_ranks or (source.num_keys,)
    return TableReport(
        name=source.name,
        dim=source.dim,
        dtype=source.dtype,
        key_type=source.key_type,
        var_type=source.about.var_type,
        keys=source.num_keys,
        pending=source.about.num_pending,
        capacity=None,
        counts=None,
        near_seen=None,
        seen=None,
        memory=columns,
        reserved_bytes=None,
        ages=_ages(source),
        norms=_norms(source),
        keys_of_ranks=ranks,
        bytes_of_ranks=tuple(keys * key_bytes for keys in ranks),
    )


def _norms(source: Source) -> Histogram:
    norms, kind = CountingNorms(), row_dtype(source.dtype)
    step = max(1, _PIECE_BYTES // (kind.storage.itemsize + 12) // source.dim)
    for rows in source.read("values"):
        for first in range(0, len(rows), step):
            norms.add_norms(np.sqrt(squares_of(np, rows[first : first + step], kind)))
    return norms.histogram()


def _ages(source: Source) -> Histogram | None:
    """Returns the ages of keys; None: the file does not say when they were seen."""
    facts: dict[str, Any] = dict(source.about.facts)
    if "stamps" not in source.columns or not facts.get("spans", {}).get("numbers"):
        return None
    spans, clock = Spans.of(facts["spans"], facts["num_lookups"]), Clock()
    publish(clock.plan_restart(facts["num_lookups"], spans))
    ages = CountingAges(spans.ends[-1])
    for last_seen in source.read("stamps"):
        ages.add_times(clock.times_of(last_seen))
    return ages.histogram()
