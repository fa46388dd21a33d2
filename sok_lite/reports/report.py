"""Reports: the content of tables, the history of their keys, and the balance of ranks.

A report has numbers, for programs; text, for terminals; and HTML, for notebooks and files: no
script, no other file, in the page's colors.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from html import escape
from typing import Any, NamedTuple

from sok_lite.engine.files.atomic_write import write_file
from sok_lite.engine.json_text import parsed
from sok_lite.engine.table.summary import format_bytes
from sok_lite.reports.histogram import Histogram
from sok_lite.reports.text import counted

# Summed counters of a table, named as in `Statistics` without "_total".
COUNTERS = ("found", "missed", "inserted", "evicted", "erased", "refused", "not_admitted")

_LETTERS = 30  # of the longest bar of a text

# For a part of any page, such as a notebook: no color of its own. The prefix "sok-" keeps names
# from clashing with the page's.
_STYLE = """
.sok-report { max-width: 56rem }
.sok-report table { border-collapse: collapse; margin: .5rem 0 1rem }
.sok-report caption { text-align: left; caption-side: top; padding: .25rem 0 }
.sok-report th, .sok-report td { text-align: left; vertical-align: top; font-weight: normal;
  padding: .15rem 1rem .15rem 0; overflow-wrap: anywhere }
.sok-report th { white-space: nowrap }
.sok-report .sok-name { font-weight: bold; font-size: 1.15em; margin: 1.25rem 0 0 }
.sok-report .sok-number { text-align: right; white-space: nowrap;
  font-variant-numeric: tabular-nums }
.sok-report .sok-bars { width: 100%; max-width: 36rem }
.sok-report .sok-bars th { width: 1% }
.sok-report .sok-bars .sok-number { width: 1%; padding-right: 0 }
.sok-report .sok-bars div { height: .8em; margin-top: .35em; background: currentColor;
  opacity: .75; min-width: 1px; print-color-adjust: exact; -webkit-print-color-adjust: exact }
"""
# For a page of its own: colors and measures of the documentation's site, light or dark.
_PAGE_STYLE = """
:root { color-scheme: light dark; --ground: #fff; --text: rgba(0, 0, 0, .87);
  --soft: rgba(0, 0, 0, .54); --line: rgba(0, 0, 0, .12); --head: #4051b5; --link: #4051b5 }
@media (prefers-color-scheme: dark) { :root { --ground: #1e2129; --text: rgba(226, 228, 233, .87);
  --soft: rgba(226, 228, 233, .62); --line: rgba(226, 228, 233, .12); --link: #7b9bea } }
body { margin: 0; background: var(--ground); color: var(--text); line-height: 1.6;
  font-family: -apple-system, BlinkMacSystemFont, "Segoe UI", Roboto, Helvetica, Arial, sans-serif }
header { background: var(--head); color: #fff; font-weight: bold; padding: .75rem 1rem;
  box-shadow: 0 0 .2rem rgba(0, 0, 0, .1), 0 .2rem .4rem rgba(0, 0, 0, .2) }
header, main { padding-left: max(1rem, calc(50% - 28rem)) }
main { padding-right: 1rem; padding-bottom: 3rem }
h1, h2 { font-weight: 300; line-height: 1.3; letter-spacing: -.01em; overflow-wrap: anywhere }
h1 { color: var(--soft); font-size: 2rem; margin: 1.5rem 0 .5rem }
h2 { font-size: 1.5rem; margin: 2.5rem 0 .5rem }
a { color: var(--link) }
.sok-report table { font-size: .875rem; border: 1px solid var(--line); border-radius: 2px }
.sok-report th, .sok-report td { padding: .5rem .75rem; border-top: 1px solid var(--line) }
.sok-report th { color: var(--soft) }
.sok-report thead th { color: inherit; font-weight: bold }
.sok-scroll { overflow-x: auto }
.sok-report .sok-scroll td:first-child { min-width: 10rem }
.sok-report .sok-bars, .sok-report .sok-bars th, .sok-report .sok-bars td { border: 0 }
.sok-report .sok-bars th, .sok-report .sok-bars td { padding: .1rem .75rem .1rem 0 }
.sok-report .sok-bars div { background: var(--link); border-radius: 1px; opacity: 1 }
"""


class TableReport(NamedTuple):
    """The report of one table, of a rank or of all ranks. None: not known.

    Attributes:
      name, dim, dtype, key_type, var_type: of the table.
      keys: number of keys with a row.
      pending: number of keys that were not seen often enough to have a row.
      capacity: slots of the index.
      counts: by name in COUNTERS, since the table was made, cleared or fully loaded.
      near_seen, seen: recent lookups of keys whose row is in the fast tier now, and of all keys;
        older ones count less. None: one tier.
      memory: bytes by part: "index", and rows and optimizer states by tier, such as "rows near",
        "states far" and "rows file"; "texts" if kept. For a checkpoint: bytes by column.
      reserved_bytes: allocated for rows and states, used or not.
      ages: from when keys were last seen to the last lookup of the table.
      norms: L2 norms of the rows.
      keys_of_ranks, bytes_of_ranks: by rank.
    """

    name: str
    dim: int
    dtype: str
    key_type: str
    var_type: str
    keys: int
    pending: int
    capacity: int | None
    counts: dict[str, int] | None
    near_seen: int | None
    seen: int | None
    memory: dict[str, int] | None
    reserved_bytes: int | None
    ages: Histogram | None
    norms: Histogram | None
    keys_of_ranks: tuple[int, ...]
    bytes_of_ranks: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts."""
        return sum((self.memory or {}).values())

    @property
    def hit_rate(self) -> float | None:
        """The share of looked-up keys that had a row; None without lookups.

        Compare it only between jobs of equally many ranks: repeated keys of a call count on one
        rank only, see `Statistics.found_total`.
        """
        counts = self.counts or {}
        return _share(counts.get("found"), counts.get("found", 0) + counts.get("missed", 0))

    @property
    def near_share(self) -> float | None:
        """Hit rate of the fast tier: the share of recent lookups of keys whose row is there now."""
        return _share(self.near_seen, self.seen)

    @property
    def balance(self) -> float | None:
        """Keys of the fullest rank over the mean of all ranks; None for one rank."""
        if len(self.keys_of_ranks) < 2:
            return None
        mean = sum(self.keys_of_ranks) / len(self.keys_of_ranks)
        return _share(max(self.keys_of_ranks), mean)

    def as_dict(self) -> dict[str, Any]:
        """Returns all numbers, derived ones too, as JSON values."""
        found = {
            name: value.as_dict() if isinstance(value, Histogram) else value
            for name, value in self._asdict().items()
        }
        found |= {name: list(found[name]) for name in ("keys_of_ranks", "bytes_of_ranks")}
        names = ("num_bytes", "hit_rate", "near_share", "balance")
        return found | {name: getattr(self, name) for name in names}

    @classmethod
    def of_dict(cls, given: dict[str, Any]) -> "TableReport":
        """Inverts `as_dict`."""
        fields = {name: given[name] for name in cls._fields}
        for name in ("ages", "norms"):
            if fields[name] is not None:
                fields[name] = Histogram.of_dict(fields[name])
        for name in ("keys_of_ranks", "bytes_of_ranks"):
            fields[name] = tuple(fields[name])
        return cls(**fields)

    @classmethod
    def sum_of(cls, parts: "Sequence[TableReport]") -> "TableReport":
        """Combines the reports of all ranks, in order."""
        first, *others = parts
        if not others or first.var_type == "remote":  # its rows belong to all ranks
            return first
        return first._replace(
            keys=sum(part.keys for part in parts),
            pending=sum(part.pending for part in parts),
            capacity=_sum([part.capacity for part in parts]),
            counts=_sum_by_name([part.counts for part in parts]),
            near_seen=_sum([part.near_seen for part in parts]),
            seen=_sum([part.seen for part in parts]),
            memory=_sum_by_name([part.memory for part in parts]),
            reserved_bytes=_sum([part.reserved_bytes for part in parts]),
            ages=_sum_of_histograms([part.ages for part in parts]),
            norms=_sum_of_histograms([part.norms for part in parts]),
            keys_of_ranks=tuple(part.keys for part in parts),
            bytes_of_ranks=tuple(part.num_bytes for part in parts),
        )


@dataclass(frozen=True, repr=False)
class Report:
    """A report of tables: text in a terminal, HTML in a notebook, numbers for programs.

    It contains no keys.

    Attributes:
      tables: a TableReport per table, over all ranks.
      ranks: number of ranks with the tables.
      time: creation time, in seconds since 1970.
      source: path of the checkpoint; "" for tables in memory.
    """

    tables: tuple[TableReport, ...]
    ranks: int
    time: float
    source: str = ""

    def __getitem__(self, name: str) -> TableReport:
        """Returns the report of a table. KeyError: there is no such table."""
        for table in self.tables:
            if table.name == name:
                return table
        names = ", ".join(repr(table.name) for table in self.tables)
        raise KeyError(f"There is no table {name!r} in the report. It has: {names}.")

    def as_dict(self) -> dict[str, Any]:
        """Returns all numbers as JSON values: dicts, lists, strings and numbers."""
        tables = [table.as_dict() for table in self.tables]
        return {"source": self.source, "time": self.time, "ranks": self.ranks, "tables": tables}

    def to_json(self) -> str:
        """Returns `as_dict` as JSON."""
        return json.dumps(self.as_dict(), indent=1)

    @classmethod
    def from_json(cls, text: str | bytes) -> "Report":
        """Returns a report from the text of `to_json` or `sok-lite report --json`.

        Use it to compare reports over time, and for plots.

        Raises:
          ValueError: not such a text, or it lacks a number of this version's reports.
        """
        try:
            given = parsed(text)
            tables = tuple(TableReport.of_dict(table) for table in given["tables"])
            return cls(tables, int(given["ranks"]), float(given["time"]), str(given["source"]))
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise ValueError(
                "This is no report as `to_json` gives it, or one of another version of sok_lite "
                f"({type(error).__name__}: {error}). Received: {text!s:.60}."
            ) from error

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Writes an HTML page without further files or scripts.

        On several ranks the report is the same: let one rank write it.

        Args:
          path: of the file, which is replaced.

        Raises:
          ValueError: the path is not local. OSError: it cannot be written.
        """
        write_file(path, report_page(self).encode())

    def __str__(self) -> str:
        return _report_text(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return _report_html(self)


def _share(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _sum(numbers: Sequence[int | None]) -> int | None:
    return None if None in numbers else sum(number or 0 for number in numbers)


def _sum_by_name(parts: Sequence[dict[str, int] | None]) -> dict[str, int] | None:
    known = [part for part in parts if part is not None]
    names = dict.fromkeys(name for part in known for name in part)
    return {name: sum(part.get(name, 0) for part in known) for name in names} if known else None


def _sum_of_histograms(parts: Sequence[Histogram | None]) -> Histogram | None:
    known = [part for part in parts if part is not None]
    return Histogram.sum_of(known) if known else None


def _report_text(report: Report) -> str:
    lines = [_heading(report)]
    for table in report.tables:
        lines += ["", f"table {table.name!r}"]
        lines += [f"  {name:<10} {text}" for name, text in facts_of(table)]
        for name, histogram in histograms_of(table):
            lines += [f"  {name}", *_bars(histogram)]
    return "\n".join(lines)


def _heading(report: Report) -> str:
    """Returns the first line: source, time and size."""
    made = datetime.fromtimestamp(report.time, timezone.utc)
    counts = [counted(len(report.tables), "table"), counted(report.ranks, "rank")]
    total = sum(table.num_bytes for table in report.tables)
    where = report.source or "Tables in memory"
    return f"{where} at {made:%Y-%m-%d %H:%M:%S} UTC: {', '.join(counts)}, {format_bytes(total)}"


def facts_of(table: TableReport) -> list[tuple[str, str]]:
    """Returns (name, text) of everything known about a table except histograms."""
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
        parts = [f"{name} {format_bytes(size)}" for name, size in table.memory.items()]
        facts.append(("memory", f"{format_bytes(table.num_bytes)}: {', '.join(parts)}"))
    if table.reserved_bytes is not None:
        facts.append(("reserved", f"{format_bytes(table.reserved_bytes)} for rows and states"))
    if table.balance is not None:
        ranks = table.keys_of_ranks
        most = ranks.index(max(ranks))
        spread = f"{min(ranks):,} to {max(ranks):,} keys on a rank"
        facts.append(("balance", f"{spread}; rank {most} has {table.balance:.2f} of the mean"))
    return facts


def histograms_of(table: TableReport) -> Iterator[tuple[str, Histogram]]:
    """Yields (what it counts, histogram) of a table's histograms."""
    if table.ages is not None:
        yield "age: how long before the last lookup a key was last seen", table.ages
    if table.norms is not None:
        yield "norm: L2 length of a row", table.norms


def _bars(histogram: Histogram) -> list[str]:
    shown = _shown(histogram)
    most = max((count for _, count in shown), default=1)
    width = max((len(name) for name, _ in shown), default=0)
    # ASCII: not every terminal and log has block characters.
    return [
        f"    {name:<{width}}  {'#' * -(-_LETTERS * count // most):<{_LETTERS}} {count:,}"
        for name, count in shown
    ] or ["    no keys"]


def _report_html(report: Report) -> str:
    """Returns a part of a page."""
    parts = [f"<p>{escape(_heading(report))}</p>"]
    for table in report.tables:
        parts += [f'<div class="sok-name">{escape(table.name)}</div>', _table_html(table)]
    return f'<div class="sok-report"><style>{_STYLE}</style>{"".join(parts)}</div>'


def report_page(report: Report) -> str:
    """Returns a complete page, without scripts and external files."""
    what, _, facts = _heading(report).rpartition(" at ")
    parts = [f"<h1>{escape(what)}</h1><p>{escape(facts)}</p>"]
    if len(report.tables) > 1:
        parts.append(_overview(report.tables))
    for i, table in enumerate(report.tables):
        parts += [f'<h2 id="table-{i}">{escape(table.name)}</h2>', _table_html(table)]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(what)} - sok_lite</title><style>{_STYLE}{_PAGE_STYLE}</style></head>"
        f'<body><header>sok_lite</header><main class="sok-report">{"".join(parts)}</main>'
        "</body></html>\n"
    )


def _overview(tables: Sequence[TableReport]) -> str:
    """Returns a table with a line for each table, linked by name."""
    names = ("keys", "memory", "hit rate", "evicted")
    heads = "".join(f'<th class="sok-number">{name}</th>' for name in names)
    lines = []
    for i, table in enumerate(tables):
        numbers = (
            f"{table.keys:,}",
            "" if table.memory is None else format_bytes(table.num_bytes),
            "" if table.hit_rate is None else f"{table.hit_rate:.3f}",
            "" if table.counts is None else f"{table.counts['evicted']:,}",
        )
        cells = "".join(f'<td class="sok-number">{number}</td>' for number in numbers)
        link = f'<a href="#table-{i}">{escape(table.name)}</a>'
        lines.append(f"<tr><td>{link}</td>{cells}</tr>")
    return (
        f'<div class="sok-scroll"><table><thead><tr><th>table</th>{heads}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _table_html(table: TableReport) -> str:
    """Returns the facts of a table, and bars."""
    cells = [
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(text)}</td></tr>'
        for name, text in facts_of(table)
    ]
    parts = [f"<table>{''.join(cells)}</table>"]
    if table.memory and table.num_bytes:
        parts.append(_bars_html("bytes by part", list(table.memory.items()), format_bytes))
    parts += [_bars_html(name, _shown(each), "{:,}".format) for name, each in histograms_of(table)]
    return "".join(parts)


def _shown(histogram: Histogram) -> list[tuple[str, int]]:
    return [(name.replace("_", " "), count) for name, count in histogram.shown()]


def _bar(share: float) -> str:
    return f'<div style="width:{share:.1%}"></div>'


def _bars_html(title: str, rows: list[tuple[str, int]], as_text: Callable[[int], str]) -> str:
    """Returns named bars with numbers, one below the other, readable without style."""
    most = max((number for _, number in rows), default=0)
    drawn = [
        f'<tr><th scope="row">{escape(name)}</th>'
        f"<td>{_bar(number / max(1, most)) if number else ''}</td>"
        f'<td class="sok-number">{escape(as_text(number))}</td></tr>'
        for name, number in rows
    ]
    return f'<table class="sok-bars"><caption>{escape(title)}</caption>{"".join(drawn)}</table>'
