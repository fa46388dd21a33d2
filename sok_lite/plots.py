"""Plots of reports, by matplotlib: `pip install "sok_lite[plots]"`."""

from sok_lite.reports.plots import growth, histograms

__all__ = ["growth", "histograms"]
