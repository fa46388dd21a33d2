"""Numbers of tables for Prometheus and what else reads OpenMetrics."""

from sok_lite.bridge.metrics import CONTENT_TYPE, prometheus

__all__ = ["CONTENT_TYPE", "prometheus"]
