"""Progress of long work in bytes, such as a dump, and the bar that rank 0 shows."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

# Called with the bytes of this rank's files that are done, and their total.
Report = Callable[[int, int], None]


class Progress:
    """Counts bytes that are done of a total, and reports both."""

    def __init__(self, report: Report | None = None, total: int = 0) -> None:
        self.total = total
        self._report, self._done = report, 0

    def add(self, num_bytes: int) -> None:
        """Adds bytes that are done."""
        self._done += num_bytes
        if self._report is not None:
            self._report(self._done, self.total)

    def finish(self) -> None:
        """Reports the total as done, even if some bytes were not needed."""
        if self._done < self.total:
            self.add(self.total - self._done)


def checked_progress(progress: Any, rank: int) -> bool:
    """Returns whether this rank shows a bar.

    Args:
      progress: whether rank 0 does; None: if stderr is a terminal and tqdm is installed.

    Raises:
      TypeError: `progress` is no bool. ImportError: it is True, and there is no tqdm.
    """
    if not isinstance(progress, (bool, type(None))):
        raise TypeError(f"`progress` must be True, False or None. Received: {progress!r}.")
    if progress is False:
        return False
    try:
        import tqdm  # noqa: F401
    except ImportError as error:
        if progress is None:
            return False
        raise ImportError(
            "progress=True needs tqdm, which cannot be imported. Install it with `pip install "
            '"sok_lite[progress]"`, or leave `progress` out.'
        ) from error
    return rank == 0 and (progress is True or sys.stderr.isatty())


@contextlib.contextmanager
def progress_bar(is_shown: bool, what: str, num_ranks: int = 1) -> Iterator[Report | None]:
    """Shows a bar in a `with` block, and yields its `Report`; None if there is no bar.

    Args:
      what: the text before the bar.
      num_ranks: with several, the text adds that this is rank 0's part.
    """
    if not is_shown:
        yield None
        return
    import tqdm

    what += f" (rank 0 of {num_ranks})" if num_ranks > 1 else ""
    with tqdm.tqdm(desc=what, unit="B", unit_scale=True, file=sys.stderr) as bar:

        def report(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield report
