"""A report as HTML, for notebooks and files: no script, no other file, colors of the page."""

from collections.abc import Callable
from html import escape
from typing import TYPE_CHECKING

from sok_lite.engine.table.summary import as_bytes
from sok_lite.reports.histogram import Histogram
from sok_lite.reports.text import facts_of, heading, histograms_of

if TYPE_CHECKING:
    from sok_lite.reports.report import Report

_ROW, _LABEL, _BAR = 18, 130, 200  # pixels: height of a row, width of its name and of its bar


def report_html(report: "Report") -> str:
    """Returns a part of a page."""
    parts = [f"<p>{escape(heading(report))}</p>"]
    for table in report.tables:
        cells = [_cells(name, text) for name, text in facts_of(table)]
        parts.append(f"<table><caption>{escape(table.name)}</caption>{''.join(cells)}</table>")
        if table.memory and table.num_bytes:
            parts.append(_chart("bytes by part", list(table.memory.items()), as_bytes))
        parts += [_chart(name, _shown(each), "{:,}".format) for name, each in histograms_of(table)]
    return f'<div class="sok-report">{"".join(parts)}</div>'


def report_page(report: "Report") -> str:
    """Returns a whole page, for a file."""
    title = f"sok_lite: {report.source or 'tables'}"
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        "<style>:root { color-scheme: light dark; font-family: sans-serif } "
        "th { text-align: left; padding-right: 1em }</style></head>"
        f"<body>{report_html(report)}</body></html>\n"
    )


def _cells(name: str, text: str) -> str:
    return f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>"


def _shown(histogram: Histogram) -> list[tuple[str, int]]:
    return [(name.replace("_", " "), count) for name, count in histogram.shown()]


def _chart(title: str, rows: list[tuple[str, int]], as_text: Callable[[int], str]) -> str:
    """Returns bars, one below the other, as SVG.

    Args:
      rows: (name, number) of each.
      as_text: a number -> text.
    """
    most = max((number for _, number in rows), default=0)
    drawn = []
    for i, (name, number) in enumerate(rows):
        y, width = i * _ROW, _BAR * number / max(1, most)
        drawn.append(
            f'<text x="{_LABEL - 6}" y="{y + 13}" text-anchor="end">{escape(name)}</text>'
            f'<rect x="{_LABEL}" y="{y + 3}" width="{width:.1f}" height="{_ROW - 6}"/>'
            f'<text x="{_LABEL + width + 6:.1f}" y="{y + 13}">{escape(as_text(number))}</text>'
        )
    size = f'width="{_LABEL + _BAR + 100}" height="{max(1, len(rows)) * _ROW}"'
    label = escape(title)
    return (
        f'<figure><figcaption>{label}</figcaption><svg {size} role="img" aria-label="{label}" '
        f'fill="currentColor" font-size="11">{"".join(drawn)}</svg></figure>'
    )
