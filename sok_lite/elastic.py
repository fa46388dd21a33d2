"""Elastic jobs: ranks leave and come, and the tables go on from the last commit."""

from sok_lite.bridge.elastic import TableState, run

__all__ = ["TableState", "run"]
