"""A progress bar of bytes while a command reads, and a line about what it wrote."""

import contextlib
import sys
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np

from sok_lite.cli.wrapped import Wrapped
from sok_lite.engine.files import progress
from sok_lite.engine.files.progress import Progress
from sok_lite.engine.files.source import Source, columns_of
from sok_lite.reports.text import counted

# Called with the number of further bytes read.
Add = Callable[[int], object]


@contextlib.contextmanager
def progress_bar(what: str, total: int, is_wanted: bool) -> Iterator[Add]:
    """Yields a function to count bytes read; shows a bar if wanted, and stderr is a terminal."""
    is_shown = progress.checked_progress(None if is_wanted else False, rank=0)
    with progress.progress_bar(is_shown, what) as report:
        yield Progress(report, total).add


@contextlib.contextmanager
def with_progress(
    sources: Sequence[Source], what: str, is_wanted: bool, only: Collection[str] | None = None
) -> Iterator[list[Source]]:
    """Yields sources that show a bar while the columns `only` are read, by default no keys."""
    total = sum(
        source.num_keys * column.row_bytes
        for source in sources
        for column in columns_of(source)
        if (column.name != "keys" if only is None else column.name in only)
    )
    with progress_bar(what, total, is_wanted) as add:
        yield [_Counted(source, add) for source in sources]


def show_written(path: str, sources: Sequence[Source], is_wanted: bool) -> None:
    """Prints what was written, if a bar would be shown: scripts read no line."""
    if is_wanted and sys.stderr.isatty():
        num_keys = sum(source.num_keys for source in sources)
        counts = f"{counted(len(sources), 'table')}, {counted(num_keys, 'key')}"
        print(f"{path}: {counts}", file=sys.stderr)


class _Counted(Wrapped):
    """Counts the bytes read of a source. Keys, which are read repeatedly, do not count."""

    def __init__(self, source: Source, add: Add) -> None:
        super().__init__(source)
        self._add = add
        self._counted = {column.name for column in columns_of(source)} - {"keys"}

    def read(self, column: str) -> Iterator[np.ndarray]:
        for piece in super().read(column):
            if column in self._counted:
                self._add(piece.nbytes)
            yield piece
