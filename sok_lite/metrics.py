"""Numbers of tables for Prometheus and what else reads OpenMetrics."""

from sok_lite.bridge.report import prometheus, serve, timed_input
from sok_lite.reports.openmetrics import CONTENT_TYPE

__all__ = ["CONTENT_TYPE", "prometheus", "serve", "timed_input"]
