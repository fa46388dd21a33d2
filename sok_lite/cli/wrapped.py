"""Sources that modify others."""

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from sok_lite.cli.errors import WrongUse
from sok_lite.engine.dtypes import row_dtype
from sok_lite.engine.files.source import PENDING_COLUMNS, Column, Source, columns_of


class Wrapped(Source):
    """A source that reads another one. Subclasses override what differs."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.name, self.dim, self.dtype = source.name, source.dim, source.dtype
        self.key_type, self.num_keys = source.key_type, source.num_keys
        self.states, self.columns, self.about = source.states, source.columns, source.about

    def read(self, column: str) -> Iterator[np.ndarray]:
        return self._source.read(column)

    def texts(self) -> dict[int, bytes]:
        return self._source.texts()

    def texts_of(self, keys: Collection[int]) -> dict[int, bytes]:
        return self._source.texts_of(keys)


def only_one(sources: Sequence[Source], what: str) -> Source:
    """Returns the only source; `what` holds one table. WrongUse: several, or none."""
    if len(sources) != 1:
        raise WrongUse(f"{what} has one table, and there are {len(sources)}: choose one, --table")
    return sources[0]


class WithColumns(Wrapped):
    """A source with its keys, rows and selected further columns. WrongUse: it lacks one."""

    def __init__(self, source: Source, columns: Sequence[str]) -> None:
        super().__init__(source)
        known = [column.name for column in columns_of(source)]
        for name in columns:
            if name not in known:
                raise WrongUse(
                    f"table {source.name!r} has no column {name!r}; it has: {', '.join(known)}"
                )
        self.states = tuple(state for state in source.states if state.tensor in columns)
        self.columns = tuple(name for name in source.columns if name in columns)
        self.about = source.about._replace(num_pending=0)


class PendingKeys(Wrapped):
    """The keys of a source that were seen and have no row, with the `PENDING_COLUMNS` only."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self.num_keys, self.states, self.columns = source.about.num_pending, (), ()

    def read(self, column: str) -> Iterator[np.ndarray]:
        if self.num_keys:
            yield from self._source.read(PENDING_COLUMNS[0] if column == "keys" else column)


def plain(source: Source, column: str, rows: np.ndarray) -> np.ndarray:
    """Converts what `source.read(column)` yields to numbers."""
    if column == "values" and source.dtype == "bfloat16":
        return row_dtype(source.dtype).to_float32(np, rows)
    return rows


def plain_columns(source: Source) -> list[Column]:
    """Returns all columns with an entry for each key, as `read_plain` yields them; keys first."""
    return [
        each._replace(dtype=plain(source, each.name, np.empty(0, each.dtype)).dtype)
        for each in columns_of(source)
    ]


def read_plain(source: Source, name: str) -> Iterator[np.ndarray]:
    """Yields a column in pieces, as numbers."""
    for piece in source.read(name):
        yield plain(source, name, piece)
