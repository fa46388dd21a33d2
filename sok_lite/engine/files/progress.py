"""How far this rank's part of a dump or a load has come, for whoever shows it."""

from collections.abc import Callable

# Takes the bytes of this rank's files that are done, and how many there are.
Report = Callable[[int, int], None]


class Progress:
    """Counts bytes and reports them.

    Args:
      report: called whenever bytes are done; None: nobody wants to know.
      total: how many there are to do.
    """

    def __init__(self, report: Report | None = None, total: int = 0) -> None:
        self._report, self._total, self._done = report, total, 0

    def add(self, num_bytes: int) -> None:
        """Says that some more are done."""
        self._done += num_bytes
        if self._report is not None:
            self._report(self._done, self._total)

    def finish(self) -> None:
        """Says that all is done, also where files had bytes that nobody needed."""
        if self._done < self._total:
            self.add(self._total - self._done)
