"""Numbers of tables for Prometheus and what else reads OpenMetrics."""

from sok_lite.bridge.report import prometheus, serve
from sok_lite.reports.openmetrics import CONTENT_TYPE

__all__ = ["CONTENT_TYPE", "prometheus", "serve"]
