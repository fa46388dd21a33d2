"""Plots of reports with matplotlib: `pip install "sok_lite[plots]"`."""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from sok_lite.reports.histogram import Histogram
from sok_lite.reports.report import Report, histograms_of

__all__ = ["growth", "histograms"]

_WIDTH, _HEIGHT = 6.0, 3.2  # inches per plot
# Axis units, the largest first.
_TIMES = (("days", 86_400.0), ("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))
_SIZES = (("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10), ("bytes", 1.0))
_LABELS = {
    "age": "how long before the last lookup a key was last seen",
    "norm": "L2 length of a row",
}


def histograms(report: Report) -> Any:
    """Plots the histograms of a report: ages of keys and norms of rows, one line per table.

    Args:
      report: from `sok_lite.report`.

    Returns:
      A matplotlib Figure. A notebook shows it as the last line of a cell; `savefig` writes it.

    Raises:
      ImportError: matplotlib is not installed. ValueError: the report has no histograms.
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
            _draw(axis, name, title.split(":")[0], histogram)
    return figure


def growth(reports: Sequence[Report]) -> Any:
    """Plots how keys and bytes of tables grow from report to report.

    Args:
      reports: from `sok_lite.report`, in order of time; at least one.

    Returns:
      A matplotlib Figure with units from seconds to days since the first report, and bytes to TiB.
      A notebook shows it as the last line of a cell; `savefig` writes it.

    Raises:
      ImportError: matplotlib is not installed. TypeError: a single report. ValueError: no reports.
    """
    if isinstance(reports, Report):
        raise TypeError(
            "growth() takes a list of reports, in the order in which they were made. Received: one "
            "report. Give [report], and more of them to see growth."
        )
    if not reports:
        raise ValueError("Give at least one report. Received: none.")
    figure, ((of_keys, of_bytes),) = _figure(1, 2)
    ages = [report.time - reports[0].time for report in reports]
    tables = [table for report in reports for table in report.tables]
    time_unit, seconds = _unit(_TIMES, max(ages) - min(ages))
    size_unit, num_bytes = _unit(_SIZES, max((table.num_bytes for table in tables), default=0))
    for name in dict.fromkeys(table.name for table in tables):
        found = [
            (age / seconds, table)
            for age, report in zip(ages, reports, strict=True)
            for table in report.tables
            if table.name == name
        ]
        times = [time for time, _ in found]
        of_keys.plot(times, [table.keys for _, table in found], marker="o", label=name)
        sizes = [table.num_bytes / num_bytes for _, table in found]
        of_bytes.plot(times, sizes, marker="o", label=name)
    for axis, title, unit in ((of_keys, "keys", "keys"), (of_bytes, "memory", size_unit)):
        axis.set(title=title, ylabel=unit, xlabel=f"{time_unit} since the first report")
        axis.set_ylim(bottom=0)
        axis.legend()
    return figure


def _unit(units: Sequence[tuple[str, float]], most: float) -> tuple[str, float]:
    """Returns the largest unit with a value of at least 2, else the smallest."""
    return next((unit for unit in units if most >= 2 * unit[1]), units[-1])


def _draw(axis: Any, table: str, title: str, histogram: Histogram) -> None:
    shown = histogram.shown()
    names = [name.replace("_", " ") for name, _ in shown]
    axis.barh(range(len(shown)), [count for _, count in shown], tick_label=names)
    axis.invert_yaxis()
    axis.set(title=f"{table}: {title}", xlabel="keys", ylabel=_LABELS.get(title, title))


def _figure(num_lines: int, num_columns: int) -> tuple[Any, Any]:
    """Returns a figure and its axes (num_lines, num_columns)."""
    pyplot = _pyplot()
    size = (_WIDTH * num_columns, _HEIGHT * num_lines)
    figure, axes = pyplot.subplots(
        num_lines, num_columns, figsize=size, squeeze=False, layout="constrained"
    )
    pyplot.close(figure)  # otherwise a notebook shows it twice: by itself, and as a cell's result
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
