"""The report of a table: of this rank's part in memory, or of a file. It changes nothing."""

from functools import partial
from typing import Any

import numpy as np

from sok_lite.backend import Array
from sok_lite.engine.dtypes import RowDtype, row_dtype
from sok_lite.engine.files.source import Source, columns_of
from sok_lite.engine.table import EmbeddingTable
from sok_lite.engine.table.clock import Clock, Spans
from sok_lite.engine.table.content import pieces
from sok_lite.engine.table.locking import with_lock
from sok_lite.reports.histogram import CountingAges, CountingNorms, Histogram
from sok_lite.reports.report import COUNTERS, TableReport

# Bytes of all arrays of a piece; temporary arrays of NumPy and CuPy take less.
_PIECE_BYTES = 16 << 20
_SLOT_BYTES = 64  # a key, its row number and facts

# The columns a report reads; bytes of others are known without reading.
READ_COLUMNS = ("values", "stamps")


def report_of(table: EmbeddingTable) -> TableReport:
    """Returns the report of a table.

    It reads every row, in pieces of some megabytes; other threads wait for the table meanwhile. For
    a table whose rows are in another process, only the size is known.
    """
    if table.var_type == "remote":
        return _bare(table, table.size)
    return with_lock(table, partial(_report_of, table))


def memory_of(table: EmbeddingTable) -> dict[str, int]:
    """Returns bytes in use by part: "index", "rows near" and so on by tier, "texts" if kept."""
    store, tiers = table.store, table.store.tier_bytes()
    memory = {"index": table.index_bytes}
    far = "file" if store.has_far_file else "far"
    for tier, used in (("near", tiers.near_used), (far, tiers.far_used)):
        if used or tier == "near":
            # Each row has all columns.
            of_rows = used // store.row_bytes * store.column("value").row_bytes
            memory[f"rows {tier}"] = of_rows
            if used > of_rows:
                memory[f"states {tier}"] = used - of_rows
    if table.texts is not None:
        memory["texts"] = table.text_bytes
    return memory


def _squares_of(xp: Any, rows: Array, kind: RowDtype) -> Array:
    """Returns squared L2 norms (n,) float64 of rows (n, dim) of a storage dtype."""
    if kind.name == "bfloat16":
        rows = kind.to_float32(xp, rows)
    wide = rows.astype(np.float64)
    wide *= wide
    return wide.sum(axis=1)


def _bare(table: EmbeddingTable, keys: int) -> TableReport:
    return TableReport(
        name=table.name,
        dim=table.dim,
        dtype=table.row_dtype.name,
        key_type=table.key_dtype.name,
        var_type=table.var_type,
        keys=keys,
        pending=0,
        capacity=None,
        counts=None,
        near_seen=None,
        seen=None,
        memory=None,
        reserved_bytes=None,
        ages=None,
        norms=None,
        keys_of_ranks=(keys,),
        bytes_of_ranks=(0,),
    )


def _report_of(table: EmbeddingTable) -> TableReport:
    numbers, store, to_host = table.statistics(), table.store, table.backend.to_host
    spans = table.clock.spans
    ages, norms = CountingAges(spans.ends[-1] if spans.ends else 0.0), CountingNorms()
    # A row as stored, as float32 and as float64.
    row_bytes = store.column("value").row_bytes + 12 * table.dim
    num_slots = max(1, _PIECE_BYTES // (row_bytes + _SLOT_BYTES))
    for entries in pieces(table, num_slots):
        ages.add_times(table.clock.times_of(to_host(entries.last_seen)))
        rows = store.read(table.backend.xp.ascontiguousarray(entries.rows))
        squares = to_host(_squares_of(table.backend.xp, rows, table.row_dtype))
        norms.add_norms(np.sqrt(squares))
    memory, seen = memory_of(table), table.seen_lately()
    return _bare(table, numbers.size)._replace(
        pending=0 if table.pending is None else table.pending.size,
        capacity=numbers.capacity,
        counts={name: getattr(numbers, f"{name}_total") for name in COUNTERS},
        near_seen=None if seen is None else seen[0],
        seen=None if seen is None else seen[1],
        memory=memory,
        reserved_bytes=numbers.near_reserved_bytes + numbers.far_reserved_bytes,
        ages=ages.histogram(),
        norms=norms.histogram(),
        bytes_of_ranks=(sum(memory.values()),),
    )


def report_of_source(source: Source, keys_of_ranks: tuple[int, ...]) -> TableReport:
    """Returns the report of a table in a file, reading each row once.

    `keys_of_ranks` may be () if unknown. OSError, ValueError: it cannot be read, or is corrupt.
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
            norms.add_norms(np.sqrt(_squares_of(np, rows[first : first + step], kind)))
    return norms.histogram()


def clock_of(source: Source) -> Clock | None:
    """Returns the clock of a table in a file, or None if it has no times."""
    facts: dict[str, Any] = dict(source.about.facts)
    if not facts.get("spans", {}).get("numbers"):
        return None
    spans, clock = Spans.of(facts["spans"], facts["num_lookups"]), Clock()
    clock.prepare_restart(facts["num_lookups"], spans)()
    return clock


def _ages(source: Source) -> Histogram | None:
    """Returns the ages of keys, or None if unknown."""
    clock = clock_of(source)
    if "stamps" not in source.columns or clock is None:
        return None
    ages = CountingAges(clock.last_time)
    for last_seen in source.read("stamps"):
        ages.add_times(clock.times_of(last_seen))
    return ages.histogram()
