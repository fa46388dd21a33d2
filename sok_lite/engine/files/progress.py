"""The progress of this rank's part of a dump or a load."""

from collections.abc import Callable

# Takes the bytes of this rank's files that are done, and how many there are.
Report = Callable[[int, int], None]


class Progress:
    """Counts bytes and reports them.

    Args:
      report: called with the bytes done and the total whenever some are done; None: no report.
      total: bytes to do.
    """

    def __init__(self, report: Report | None = None, total: int = 0) -> None:
        self._report, self._total, self._done = report, total, 0

    def add(self, num_bytes: int) -> None:
        """Adds bytes that are done, and reports."""
        self._done += num_bytes
        if self._report is not None:
            self._report(self._done, self._total)

    def finish(self) -> None:
        """Reports that all is done, also if files had bytes that were not needed."""
        if self._done < self._total:
            self.add(self._total - self._done)
