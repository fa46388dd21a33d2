"""The tables of a checkpoint as streams of columns."""

import os
from collections.abc import Callable, Iterator
from functools import lru_cache, partial

import numpy as np

from sok_lite.engine.files import manifest
from sok_lite.engine.files.manifest_facts import Shard, TableFacts
from sok_lite.engine.files.saved_file import SavedFile
from sok_lite.engine.files.source import PENDING_COLUMNS, About, JoinedSource, Source
from sok_lite.engine.files.table_file import open_shard
from sok_lite.engine.files.text_file import read_texts
from sok_lite.engine.table.joined import without_slots

NewestRows = Callable[[SavedFile], list[tuple[np.ndarray, np.ndarray]]]


class _ShardSource(Source):
    """The part of a table that one rank wrote.

    Where it is made of increments, its keys come in the order of the files that have their rows,
    the newest first, and are in memory while it is read.

    Args:
      facts: the manifest's entry of the table.
      shard: the file of the rank.
      folder: of the checkpoint.
      newest_rows: `SavedFile.newest_rows`, or what keeps some results of it.

    Raises:
      OSError: a file cannot be read. ValueError: it is corrupt.
    """

    def __init__(
        self, facts: TableFacts, shard: Shard, folder: str, newest_rows: NewestRows
    ) -> None:
        self.name, self.dim, self.dtype = facts.name, facts.dim, facts.dtype
        self.key_type, self.num_keys, self.states = facts.key_type, shard.rows, shard.states
        self.columns = ("stamps", *["scores"] * shard.scores)
        about = without_slots(shard.facts)
        self.about = About(facts.var_type, facts.owner, facts.options, about, shard.sighted)
        self._file = SavedFile(shard, partial(open_shard, facts, folder=folder))
        self._texts, self._folder, self._newest_rows = shard.texts, folder, newest_rows

    def texts(self) -> dict[int, bytes]:
        file = self._texts
        return {} if file is None else read_texts(file, self.name, self._folder).as_dict()

    def read(self, column: str) -> Iterator[np.ndarray]:
        name = "value" if column == "values" else column
        if column in PENDING_COLUMNS or not self._file.older:
            return self._file.read(name)
        return self._read_increments(name)

    def _read_increments(self, name: str) -> Iterator[np.ndarray]:
        is_of_keys = name == "keys" or name in self.columns
        whole = self._file.whole(name) if is_of_keys else None
        state = next((state for state in self.states if state.tensor == name), None)
        for file, (at, places) in zip(self._file.files, self._newest_rows(self._file), strict=True):
            cuts = [np.searchsorted(at, span).tolist() for span in file.spans]
            cuts = [(a, b) for a, b in cuts if a < b]
            if whole is not None:
                yield from (whole[places[a:b]] for a, b in cuts)
            elif file.has(name):
                ranges = [(int(at[a]), int(at[b - 1]) + 1) for a, b in cuts]
                for (a, b), rows in zip(cuts, file.ranges(name, ranges), strict=True):
                    yield rows[at[a:b] - at[a]]
            else:
                assert state is not None
                for a, b in cuts:
                    yield np.full((b - a, state.dim), state.initial, np.float32)


def checkpoint_sources(folder: str | os.PathLike[str]) -> list[Source]:
    """Returns the tables of a checkpoint. The keys of the first rank come first, and so on.

    Raises:
      OSError: there is none, or a file of it cannot be read. ValueError: a file is corrupt. Reading
        a source may raise the same.
    """
    found, path = manifest.read(folder), os.path.abspath(folder)
    # Where the rows are is known of one file at a time: 16 bytes a key.
    newest_rows = lru_cache(maxsize=1)(SavedFile.newest_rows)
    return [
        JoinedSource([_ShardSource(facts, shard, path, newest_rows) for shard in facts.shards])
        for facts in found.tables.values()
    ]
