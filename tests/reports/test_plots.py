"""Plots show the numbers of reports."""

import io
import sys

import numpy as np
import pytest

import sok_lite
from sok_lite.backend import get_backend
from sok_lite.reports.report import Report
from sok_lite.reports.tables import report_of
from tests.support.filled_tables import filled
from tests.support.own_process import run_program

CPU = get_backend("cpu")


def report(n=100, time=0.0, names=("user", "item")):
    tables = [filled(CPU, n, name=name, seed=i)[0] for i, name in enumerate(names)]
    return Report(tuple(map(report_of, tables)), 1, time)


@pytest.fixture
def plots():
    pytest.importorskip("matplotlib")
    return sok_lite.plots


def test_the_bars_are_the_counts_of_the_report(plots):
    made = report()
    figure = plots.histograms(made)
    titles = ["user: age", "user: norm", "item: age", "item: norm"]
    assert [axis.get_title() for axis in figure.axes] == titles
    assert figure.axes[0].get_ylabel() == "how long before the last lookup a key was last seen"
    for axis, histogram in zip(
        figure.axes, [h for table in made.tables for h in (table.ages, table.norms)], strict=True
    ):
        shown = histogram.shown()
        assert [bar.get_width() for bar in axis.patches] == [count for _, count in shown]
        assert [label.get_text() for label in axis.get_yticklabels()] == [n for n, _ in shown]
    file = io.BytesIO()
    figure.savefig(file, format="png")
    assert file.getvalue().startswith(b"\x89PNG")


def test_what_has_no_histogram_has_no_plot(plots):
    made = report()
    far = made.tables[0]._replace(ages=None, norms=None)
    some = plots.histograms(Report((far, made.tables[1]._replace(ages=None)), 1, 0.0))
    assert [axis.get_title() for axis in some.axes] == ["item: norm"]
    with pytest.raises(ValueError, match="must have histograms"):
        plots.histograms(Report((far,), 1, 0.0))


UNITS = {"seconds": 1.0, "minutes": 60.0, "hours": 3600.0, "days": 86_400.0}


@pytest.mark.parametrize("unit", UNITS)
def test_growth_goes_from_report_to_report(plots, unit):
    reports = [report(n, UNITS[unit] * i + 5) for i, n in enumerate((40, 50, 90))]
    reports.append(report(99, UNITS[unit] * 4 + 5, names=("user",)))
    keys, sizes = plots.growth(reports).axes
    assert keys.get_xlabel() == sizes.get_xlabel() == f"{unit} since the first report"
    user, item = keys.get_lines()
    assert [line.get_label() for line in (user, item)] == ["user", "item"]
    np.testing.assert_array_equal(
        user.get_data(), [[0, 1, 2, 4], [each["user"].keys for each in reports]]
    )
    np.testing.assert_array_equal(item.get_xdata(), [0, 1, 2])
    most = max(each["user"].num_bytes for each in reports)
    assert sizes.get_ylabel() == "KiB" and 2048 <= most < 2 << 20
    np.testing.assert_allclose(
        sizes.get_lines()[0].get_ydata(), [each["user"].num_bytes / 2**10 for each in reports]
    )
    with pytest.raises(ValueError, match="at least one report"):
        plots.growth([])
    with pytest.raises(TypeError, match="takes a list of reports.* Received: one report"):
        plots.growth(reports[0])


def test_without_matplotlib_an_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for draw in (
        lambda: sok_lite.plots.histograms(report()),
        lambda: sok_lite.plots.growth([report()]),
    ):
        with pytest.raises(ImportError, match=r'pip install "sok_lite\[plots\]"'):
            draw()


@pytest.mark.full_only("starts a process")
def test_neither_tensorflow_nor_matplotlib_is_imported_before_a_plot_is_drawn():
    program = (
        "import sys, sok_lite; sok_lite.plots.growth; "
        "print([m for m in ('tensorflow', 'matplotlib') if m in sys.modules])"
    )
    assert run_program(program).strip() == "[]"
