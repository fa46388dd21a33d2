"""Plots of reports, by matplotlib: `pip install "sok_lite[plots]"`."""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from sok_lite.reports.histogram import Histogram
from sok_lite.reports.report import Report, histograms_of

__all__ = ["growth", "histograms"]

_HOUR = 3600.0
_WIDTH, _HEIGHT = 6.0, 3.2  # inches, of one plot


def histograms(report: Report) -> Any:
    """Draws the histograms of a report: ages of keys and norms of rows, a line of plots a table.

    Args:
      report: of `sok_lite.report`.

    Returns:
      A matplotlib Figure. The last line of a notebook's cell shows it, and `savefig` writes it.

    Raises:
      ImportError: there is no matplotlib. ValueError: the report has no histograms.
    """
    of_tables = {table.name: list(histograms_of(table)) for table in report.tables}
    drawn = {name: found for name, found in of_tables.items() if found}
    if not drawn:
        raise ValueError(
            "A report must have histograms to be drawn. Received: one of "
            f"{len(report.tables)} tables, whose rows are not in this process."
        )
    num_columns = max(map(len, drawn.values()))
    figure, axes = _figure(len(drawn), num_columns)
    for line, (name, found) in zip(axes, drawn.items(), strict=True):
        for axis in line[len(found) :]:
            axis.set_axis_off()
        for axis, (title, histogram) in zip(line, found, strict=False):
            _draw(axis, f"{name}: {title.split(':')[0]}", histogram)
    return figure


def growth(reports: Sequence[Report]) -> Any:
    """Draws how keys and bytes of tables have grown from report to report.

    Args:
      reports: of `sok_lite.report`, in the order in which they were made; at least one.

    Returns:
      A matplotlib Figure, whose x axis is hours since the first report. The last line of a
      notebook's cell shows it, and `savefig` writes it.

    Raises:
      ImportError: there is no matplotlib. ValueError: there are no reports.
    """
    if not reports:
        raise ValueError("Give at least one report. Received: none.")
    figure, ((of_keys, of_bytes),) = _figure(1, 2)
    names = dict.fromkeys(table.name for report in reports for table in report.tables)
    for name in names:
        found = [
            ((report.time - reports[0].time) / _HOUR, table)
            for report in reports
            for table in report.tables
            if table.name == name
        ]
        hours = [hour for hour, _ in found]
        of_keys.plot(hours, [table.keys for _, table in found], marker="o", label=name)
        mebibytes = [table.num_bytes / 2**20 for _, table in found]
        of_bytes.plot(hours, mebibytes, marker="o", label=name)
    for axis, title in ((of_keys, "keys"), (of_bytes, "MiB")):
        axis.set(title=title, xlabel="hours since the first report")
        axis.set_ylim(bottom=0)
        axis.legend()
    return figure


def _draw(axis: Any, title: str, histogram: Histogram) -> None:
    shown = histogram.shown()
    names = [name.replace("_", " ") for name, _ in shown]
    axis.barh(range(len(shown)), [count for _, count in shown], tick_label=names)
    axis.invert_yaxis()
    axis.set(title=title, xlabel="keys")


def _figure(num_lines: int, num_columns: int) -> tuple[Any, Any]:
    """Returns a figure and its axes (num_lines, num_columns)."""
    pyplot = _pyplot()
    size = (_WIDTH * num_columns, _HEIGHT * num_lines)
    figure, axes = pyplot.subplots(
        num_lines, num_columns, figsize=size, squeeze=False, layout="constrained"
    )
    pyplot.close(figure)  # else a notebook shows it twice: by itself, and as what a cell returns
    return figure, axes


def _pyplot() -> ModuleType:
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError(
            f"Plots need matplotlib, which cannot be imported ({error}). Install it: "
            'pip install "sok_lite[plots]".'
        ) from error
    return pyplot
