"""A report as text, for terminals, and the facts of a table in words."""

from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from sok_lite.engine.table.summary import as_bytes
from sok_lite.reports.histogram import Histogram

if TYPE_CHECKING:
    from sok_lite.reports.report import Report, TableReport

_BAR = 30  # letters of the longest bar


def report_text(report: "Report") -> str:
    """Returns all that a report says."""
    lines = [heading(report)]
    for table in report.tables:
        lines += ["", f"table {table.name!r}"]
        lines += [f"  {name:<10} {text}" for name, text in facts_of(table)]
        for name, histogram in histograms_of(table):
            lines += [f"  {name}", *_bars(histogram)]
    return "\n".join(lines)


def heading(report: "Report") -> str:
    """Returns the first line: what it is of, when it was made, how much there is."""
    made = datetime.fromtimestamp(report.time, timezone.utc)
    counts = [counted(len(report.tables), "table"), counted(report.ranks, "rank")]
    total = sum(table.num_bytes for table in report.tables)
    where = report.source or "Tables in memory"
    return f"{where} at {made:%Y-%m-%d %H:%M:%S} UTC: {', '.join(counts)}, {as_bytes(total)}"


def facts_of(table: "TableReport") -> list[tuple[str, str]]:
    """Returns (name, text) of what is known of a table, but for its histograms."""
    kind = f"{table.key_type}, rows of {table.dim} x {table.dtype}, {table.var_type}"
    facts = [("keys", f"{table.keys:,} of {kind}")]
    if table.pending:
        facts.append(("pending", f"{table.pending:,} keys were seen and have no row yet"))
    if table.capacity is not None:
        fill = table.keys / max(1, table.capacity)
        facts.append(("fill", f"{fill:.0%} of {table.capacity:,} slots"))
    if table.counts is not None:
        counts = table.counts
        facts += [
            ("new", f"{counts['inserted']:,}"),
            ("lost", f"{counts['evicted']:,} evicted, {counts['erased']:,} expired or erased"),
            (
                "rejected",
                f"{counts['refused']:,} without room, {counts['not_admitted']:,} not admitted",
            ),
        ]
        if table.hit_rate is not None:
            looked_up = counts["found"] + counts["missed"]
            facts.append(("hit rate", f"{table.hit_rate:.3f} of {looked_up:,} looked up keys"))
    if table.near_share is not None:
        facts.append(("near", f"{table.near_share:.3f} of the keys that were looked up lately"))
    if table.memory is not None:
        parts = [f"{name} {as_bytes(size)}" for name, size in table.memory.items()]
        facts.append(("memory", f"{as_bytes(table.num_bytes)}: {', '.join(parts)}"))
    if table.reserved_bytes is not None:
        facts.append(("reserved", f"{as_bytes(table.reserved_bytes)} for rows and states"))
    if table.balance is not None:
        ranks = table.keys_of_ranks
        most = ranks.index(max(ranks))
        spread = f"{min(ranks):,} to {max(ranks):,} keys on a rank"
        facts.append(("balance", f"{spread}; rank {most} has {table.balance:.2f} of the mean"))
    return facts


def histograms_of(table: "TableReport") -> Iterator[tuple[str, Histogram]]:
    """Yields (what it counts, histogram) of those that a table has."""
    if table.ages is not None:
        yield "age: how long before the last lookup a key was last seen", table.ages
    if table.norms is not None:
        yield "norm: L2 length of a row", table.norms


def counted(count: int, what: str, several: str = "") -> str:
    """Returns a number and what it is of, such as "1 key" and "1,000 keys"."""
    return f"{count:,} {what if count == 1 else several or what + 's'}"


def listed(examples: Sequence[object], count: int) -> str:
    """Returns examples of so many things, with dots where there are more."""
    return ", ".join(map(str, examples)) + (", ..." if count > len(examples) else "")


def _bars(histogram: Histogram) -> list[str]:
    shown = histogram.shown()
    most = max((count for _, count in shown), default=1)
    width = max((len(_words(name)) for name, _ in shown), default=0)
    # Plain letters: not every terminal and no log has blocks.
    return [
        f"    {_words(name):<{width}}  {'#' * -(-_BAR * count // most):<{_BAR}} {count:,}"
        for name, count in shown
    ] or ["    no keys"]


def _words(name: str) -> str:
    return name.replace("_", " ")
